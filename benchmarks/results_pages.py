"""Write the pages of results from the JSON files: tables, pictures and the report page.

    python benchmarks/results_pages.py --check-mathematics     # what `make results` does
    python benchmarks/results_pages.py --check                 # what `make lint` does

`--check-mathematics` rehearses every result with the code of today, in seconds for each algorithm,
and stores in benchmarks/results/learning_mathematics.json which ones are stale. Otherwise that file
is used. `--check` writes nothing, and fails if a page does not show the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import learning_picture
import results_report
import results_studies
import results_tables
from learning_rows import MeasuredCurve, main_curves, read_curves
from page_tables import with_tables
from published_rows import METHODS
from reporting import RESULTS, write_json

from rl_training.algorithms.spec import list_algorithm_summaries
from rl_training.errors import UserError
from rl_training.report.page import render

ROOT = Path(__file__).parents[1]
COMMAND = "make results"
CURVES, MATHEMATICS = RESULTS / "learning", RESULTS / "learning_mathematics.json"
DOCS = ROOT / "docs"
PICTURES, REPORT = DOCS / "images", DOCS / "_static/learning.html"
OVERVIEW = PICTURES / "learning_curves.png"
"""The picture of the README"""
OVERVIEW_TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")

Write = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--check", action="store_true", help="list what is old; write nothing")
    options.add_argument("--check-mathematics", action="store_true", help="find stale results")
    given = parser.parse_args(arguments)
    try:
        if given.check_mathematics:
            write_json(MATHEMATICS, checked_mathematics(CURVES))
        curves = read_curves(CURVES, known_stale(CURVES, MATHEMATICS))
    except UserError as error:
        sys.exit(str(error))
    old = outdated(curves)
    for path, write in old.items():
        shown = path.relative_to(ROOT)
        if given.check:
            print(f"{shown}: stale; run `{COMMAND}`", file=sys.stderr)
        else:
            print(shown)
            write()
    return 1 if old and given.check else 0


def checked_mathematics(folder: Path) -> dict[str, dict[str, str | None]]:
    """By file: why its result is not one of this code, and which content was checked."""
    from curves.stored import why_stale  # imports PyTorch

    reason = why_stale()
    return {
        path.name: {"content": content_of(path), "stale": reason(json.loads(path.read_text()))}
        for path in sorted(folder.glob("*.json"))
    }


def content_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def known_stale(folder: Path, checked: Path) -> dict[str, str | None]:
    """By file: why its result is stale, as `checked_mathematics` found it."""
    known: Mapping[str, Mapping[str, str | None]] = (
        json.loads(checked.read_text()) if checked.exists() else {}
    )
    files = {path.name: content_of(path) for path in folder.glob("*.json")}
    new = [name for name in files if known.get(name, {}).get("content") != files[name]]
    if new:
        raise UserError(f"{', '.join(sorted(new))}: not checked yet; run `{COMMAND}`")
    return {name: known[name]["stale"] for name in files}


def outdated(curves: Sequence[MeasuredCurve]) -> dict[Path, Write]:
    """The files that do not show these curves, each with a function that writes it."""
    drawn = [curve for curve in main_curves(curves) if curve.is_drawn]
    found: dict[Path, Write] = {}
    for page, text in pages(curves).items():
        if text != page.read_text("utf-8"):
            found[page] = write_later(page, text)
    colors = learning_picture.colors_of(drawn)
    pictures = {
        PICTURES / results_tables.picture_name(task): [c for c in drawn if c.task == task]
        for task in dict.fromkeys(curve.task for curve in drawn)
    }
    for path, own in pictures.items():
        if not learning_picture.is_current(path, own, colors):
            found[path] = draw_later(own, path, colors, by_time=True)
    overview = [curve for curve in drawn if curve.task in OVERVIEW_TASKS]
    if overview and not learning_picture.is_current(OVERVIEW, overview, colors):
        found[OVERVIEW] = draw_later(overview, OVERVIEW, colors, by_time=False)
    # Of tasks that have no current result any more.
    for path in set(PICTURES.glob(results_tables.picture_name("*"))) - set(pictures):
        found[path] = path.unlink
    data = results_report.report_data(main_curves(curves))
    if not results_report.is_current(REPORT, data):
        found[REPORT] = write_later(REPORT, render(data))
    return found


def write_later(path: Path, text: str) -> Write:
    return lambda: path.write_text(text, encoding="utf-8")


def draw_later(
    curves: Sequence[MeasuredCurve], path: Path, colors: Mapping[str, str], *, by_time: bool
) -> Write:
    return lambda: learning_picture.draw(curves, path, colors, by_time=by_time)


def pages(curves: Sequence[MeasuredCurve]) -> dict[Path, str]:
    """The current text of every page with results."""
    titles = {summary.name: summary.title for summary in list_algorithm_summaries()}
    everything, curves = curves, [curve for curve in curves if curve.peer is None]
    algorithms = {
        *(key.partition("/")[0] for key in METHODS),
        *(curve.algorithm for curve in curves),
    }
    tables = {
        DOCS / "results.md": {
            "summary": results_tables.summary_text(curves),
            "tasks": results_tables.tasks_text(curves),
            "settings": results_studies.variants_text(curves),
            "peers": results_studies.peers_text(everything),
            "precision": results_studies.precision_text(curves),
            "worlds": results_studies.worlds_text(),
            **{name: results_studies.single_run_text(name) for name in results_studies.SINGLE_RUNS},
        },
        DOCS / "algorithms/index.md": {"measured": results_tables.guide_text(curves, titles)},
        ROOT / "README.md": {"rates": results_tables.rates_text(curves)},
        **{
            DOCS / f"algorithms/{name}.md": {"measured": results_tables.measured_text(curves, name)}
            for name in sorted(algorithms)
        },
    }
    return {
        page: with_tables(page.relative_to(ROOT), page.read_text("utf-8"), parts, COMMAND)
        for page, parts in tables.items()
    }


if __name__ == "__main__":
    sys.exit(main())
