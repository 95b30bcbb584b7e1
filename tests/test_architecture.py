"""The package obeys the rules of `tools/architecture.py`, and its diagrams are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import architecture
import pytest
from package_imports import import_cycle, mutual_imports, read_imports, transitive_reduction

ROOT = Path(__file__).parent.parent


def test_there_are_no_static_architecture_problems() -> None:
    assert architecture.static_problems() == []


def test_a_room_imports_only_rooms_below_it_in_the_table() -> None:
    order = [room for room in architecture.ROOMS if "/" not in room]
    upward = [
        (file, imported)
        for file, all_imported in read_imports().items()
        for imported in all_imported
        if "__init__.py" not in (file, imported)
        and order.index(architecture.main_room(file))
        > order.index(architecture.main_room(imported))
    ]
    assert upward == []


def test_the_package_diagram_is_current() -> None:
    drawn = (ROOT / "docs/images/rooms.svg").read_text(encoding="utf-8")
    assert drawn == architecture.rooms_drawing(), "run `make architecture`"


@pytest.mark.thorough
def test_architecture_check_passes_and_generated_files_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/architecture.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.splitlines() == []
    assert done.returncode == 0


def test_mutual_imports_and_cycles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"a", "c"}, "c": set()}
    assert mutual_imports(imports) == [("a", "b")]
    assert set(import_cycle(imports)) == {"a", "b"}
    assert import_cycle({"a": {"b"}, "b": set()}) == []


def test_transitive_edges_are_removed() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert transitive_reduction(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_a_file_without_a_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attic/old\.py is in no room"):
        architecture.room_of("attic/old.py")
