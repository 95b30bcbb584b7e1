"""Read from the source code which file of the package imports which.

Imports inside functions and under `TYPE_CHECKING` count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/rl_training"
Imports = dict[str, set[str]]


def package_files() -> list[str]:
    """Every Python file of the package, as a path relative to the package."""
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def read_imports() -> Imports:
    """Map each file to the files of the package that it imports."""
    files = package_files()
    by_module = {module_name(file): file for file in files}
    return {file: _imports_of(file, by_module) for file in files}


def module_name(file: str) -> str:
    return ".".join(["rl_training", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def _imports_of(file: str, by_module: Mapping[str, str]) -> set[str]:
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # An imported name is a module of its own, or it is defined in the module named before.
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [each if each in by_module else node.module for each in members]
    return {by_module[name] for name in names if name in by_module} - {file}


def mutual_imports(imports: Imports) -> list[tuple[str, str]]:
    """Pairs of files that import each other."""
    pairs = combinations(sorted(imports), 2)
    return [(one, other) for one, other in pairs if other in imports[one] and one in imports[other]]


def import_cycle(imports: Imports) -> list[str]:
    """The files of one import cycle of any length, or an empty list if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def transitive_reduction(graph: Imports) -> Imports:
    """Drop each edge of an acyclic graph that a longer path implies."""
    reachable: Imports = {}
    for node in TopologicalSorter(graph).static_order():
        reachable[node] = set().union(graph[node], *(reachable[each] for each in graph[node]))
    return {
        node: targets - _union(reachable[each] for each in targets)
        for node, targets in graph.items()
    }


def _union(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)
