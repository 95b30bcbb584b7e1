"""The page of the measured curves, by the package's own report: scores, charts, provenance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning_rows import MeasuredCurve

from rl_training.experiment.curves import make_curve
from rl_training.report.data import assemble
from rl_training.report.health import Health
from rl_training.report.page import render
from rl_training.report.runs import RunDetails
from rl_training.types import Json

TITLE = "Results of rl_training"
SUBTITLE = (
    "Seeds of one method were trained together as one program: training time is that of all of them"
)
TOLERANCE = 1e-4
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def report_data(curves: Sequence[MeasuredCurve]) -> Json:
    """The data of the page, which has no date, so that equal results give an equal page."""
    current = [curve for curve in curves if curve.stale is None]
    runs = [run for curve in current for run in _runs(curve)]
    commands = [
        source["command"] for curve in current for source in curve.sources for _ in source["seeds"]
    ]
    data = assemble(runs, title=TITLE)
    for run, command in zip(data["runs"], commands, strict=True):
        run |= {"repeat": command, "resume": None}
    notes = [
        f"{curve.task}, {_plain(curve.label)}: stopped after {curve.reached:,} of "
        f"{curve.planned:,} steps"
        for curve in current
        if not curve.is_complete
    ]
    notes += [
        f"{curve.task}, {_plain(curve.label)} is left out as stale: {curve.stale}"
        for curve in curves
        if curve.stale is not None
    ]
    return {**data, "created": "", "subtitle": SUBTITLE, "notes": [*data["notes"], *notes]}


def _runs(curve: MeasuredCurve) -> list[RunDetails]:
    """One run for each seed, as if it had been read from a run folder."""
    found: list[RunDetails] = []
    for place, (file, source) in enumerate(zip(curve.files, curve.sources, strict=True)):
        for seed in source["seeds"]:
            seconds, returns = curve.seconds[:, place], curve.returns[:, len(found)]
            points = {
                int(step): (float(second), float(value))
                for step, second, value in zip(curve.steps, seconds, returns, strict=True)
            }
            config = {"algo": _plain(curve.label), "env_id": curve.task, "seed": seed}
            path = Path("benchmarks/results/learning") / file / f"seed {seed}"
            state = "finished" if curve.is_complete else "stopped"
            machine = source["machine"]
            found.append(
                RunDetails(
                    curve=make_curve(path, state, config, points),
                    step=curve.reached,
                    total=curve.planned,
                    speed=None,
                    health=Health(),
                    seconds={},
                    metadata={
                        "git_commit": source.get("commit") or "not recorded",
                        "versions": source.get("versions") or {"torch": machine["torch"]},
                        "hardware": {key: machine.get(key) for key in ("processor", "gpu")},
                    },
                    videos=(),
                )
            )
    return found


def _plain(label: str) -> str:
    return label.replace("`", "")


def is_current(page: Path, data: Json) -> bool:
    """Whether a page shows these data with the package's own styles and scripts. The version of
    the package that wrote it may differ, and so may the last digits of intervals, which depend on
    the processor."""
    if not page.exists():
        return False
    shown, wanted = page.read_text("utf-8"), render(data)
    if DATA.sub("", shown) != DATA.sub("", wanted):
        return False
    return _equal(*({**_data(text), "version": None} for text in (shown, wanted)))


def _data(page: str) -> Json:
    found = DATA.search(page)
    return {} if found is None else json.loads(found[1])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return None not in (one, other) and math.isclose(one, other, rel_tol=TOLERANCE)
    return bool(one == other)
