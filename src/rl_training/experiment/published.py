"""Published learning curves, to draw behind one's own.

The numbers are means over the files with one curve per seed that the authors released; every row of
`assets/published/online.csv` names its source. There is one curve per method: SAC, REDQ with 20
updates per step, CrossQ, SimbaV2 with 2 updates per step, XQC as released by its authors, FlashSAC.
"""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from importlib import resources

import numpy as np

from rl_training.types import Json

VARIANTS = {"REDQ20": "20 updates per step", "SimbaV2_2": "2 updates per step"}
"""What the names of two methods mean in the released files"""
DIFFERENCES = {
    "ant": "observations differ",
    "humanoid": "observations differ",
    "hopper": "the healthy reward of the first steps differs",
    "walker2d": "the healthy reward of the first steps differs",
}
"""How version 5 of a task differs from the published version 4"""


@dataclass(frozen=True)
class PublishedCurve:
    """The published results of one method in one task."""

    method: str
    task: str
    """Name of the task in the publication, such as `hopper-v4`"""
    version_note: str
    """How the published task differs from the requested one"""
    steps: np.ndarray
    """Environment steps"""
    mean: np.ndarray
    """Mean return over seeds"""
    deviation: np.ndarray
    """Standard deviation over seeds"""
    seeds: int
    source: str
    """Where the authors released the results"""
    variant: str = ""
    """Which variant of the method this is, if there are several"""

    def to_json(self) -> Json:
        return {
            "method": self.method,
            "variant": self.variant,
            "task": self.task,
            "version_note": self.version_note,
            "steps": self.steps.tolist(),
            "mean": self.mean.tolist(),
            "deviation": self.deviation.tolist(),
            "seeds": self.seeds,
            "source": self.source,
        }


def published_curves(environment: str) -> list[PublishedCurve]:
    """Return the published curves for the task of an environment; none if there are none.

    The version of the task may differ, which `version_note` says. Environments of the DeepMind
    Control Suite have names such as `dm_control/dog-run-v0`.
    """
    task = _published_task(environment)
    methods: dict[str, list[dict[str, str]]] = {}
    for row in _rows():
        if row["task"] == task:
            methods.setdefault(row["method"], []).append(row)
    return [_curve(rows, _version_note(environment, rows[0]["task"])) for rows in methods.values()]


def _curve(rows: list[dict[str, str]], note: str) -> PublishedCurve:
    first = rows[0]
    ordered = sorted(rows, key=lambda row: int(row["env_steps"]))
    return PublishedCurve(
        method=first["method"],
        task=first["task"],
        version_note=note,
        steps=np.array([int(row["env_steps"]) for row in ordered]),
        mean=np.array([float(row["mean_return"]) for row in ordered]),
        deviation=np.array([float(row["std_over_seeds"]) for row in ordered]),
        seeds=int(first["seeds"]),
        source=first["source"],
        variant=VARIANTS.get(first["name_in_source"], ""),
    )


@functools.cache
def _rows() -> tuple[dict[str, str], ...]:
    file = resources.files("rl_training") / "assets" / "published" / "online.csv"
    return tuple(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def _published_task(environment: str) -> str | None:
    """Return the published name of a task. Arguments or wrappers make it a different task."""
    if control := re.fullmatch(r"dm_control/([\w-]+)-v\d+", environment):
        return control[1]
    named = re.fullmatch(r"(\w+)-v\d+", environment)
    return f"{named[1].lower()}-v4" if named else None


def _version_note(environment: str, task: str) -> str:
    if "/" in environment:
        return "published for the same task, with the authors' action repeat and count of steps"
    name, _, version = environment.rpartition("-")
    if version == "v4":
        return f"published for {environment}, the same version"
    detail = DIFFERENCES.get(name.lower()) if version == "v5" else None
    return (
        f"published for {name}-v4, not {version}: {detail}"
        if detail
        else f"published for {name}-v4, not {version}"
    )
