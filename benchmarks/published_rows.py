"""Published results of the same method on the same task, from the files in benchmarks/published."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "published"
CURVES, REPORTED = FOLDER / "online.csv", FOLDER / "reported.csv"
METHODS: dict[str, tuple[str, ...]] = {
    "sac": ("SAC",),
    "td3": ("TD3",),
    "ddpg": ("DDPG",),
    "tqc": ("TQC",),
    "redq": ("REDQ20",),
    "redq/droq": ("DroQ20",),
    "crossq": ("CrossQ",),
    "xqc": ("XQC", "XQCrepo"),
    "flash_sac": ("FlashSAC",),
    "ppo": ("PPO",),
    "dqn/cartpole": ("DQN",),
    "qr_dqn": ("QR-DQN",),
}
"""Published names of a packaged config, or else of its algorithm"""
RELEASES = {
    **dict.fromkeys(("SAC", "CrossQ", "REDQ20", "DroQ20"), "SimbaV2"),
    **dict.fromkeys(("FlashSAC", "XQC", "PPO"), "FlashSAC"),
    "XQCrepo": "XQC",
}
"""The work whose authors released the curves of a method"""


@dataclass(frozen=True)
class PublishedRow:
    """The published result of a method on a task after some steps."""

    method: str
    task: str
    """Such as hopper-v4, or hopper where the version is not known"""
    step: int
    mean: float
    deviation: float | None
    """Over seeds; None for a single run"""
    seeds: int
    source: str
    is_curve: bool
    """Whether it is a point of a curve, and not a single figure"""
    of_training: bool
    """Whether it is the return of training episodes, with exploration"""

    @property
    def version(self) -> str:
        found = re.search(r"-(v\d+)$", self.task)
        return found[1] if found else "v2 to v4"

    @property
    def title(self) -> str:
        name = "XQC" if self.method == "XQCrepo" else self.method
        by = "" if self.source == name else f" ({self.source})"
        training = ", training episodes" if self.of_training else ""
        return f"{name}{by}, {self.version}{training}"


@functools.cache
def published_rows() -> tuple[PublishedRow, ...]:
    found = []
    for path in (CURVES, REPORTED):
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                deviation = row["std_over_seeds"]
                found.append(
                    PublishedRow(
                        method=row["method"],
                        task=row["task"],
                        step=int(row["env_steps"]),
                        mean=float(row["mean_return"]),
                        deviation=float(deviation) if deviation else None,
                        seeds=int(row["seeds"]),
                        source=row.get("source") or RELEASES.get(row["method"], ""),
                        is_curve=path == CURVES,
                        of_training=row.get("returns") == "training",
                    )
                )
    return tuple(found)


def counterparts(config: str, environment: str) -> list[PublishedRow]:
    """The published rows of the method of a packaged config, on any version of the task."""
    named = re.fullmatch(r"(\w+)-v\d+", environment)
    if named is None:
        return []
    methods = METHODS.get(config) or METHODS.get(config.partition("/")[0], ())
    task = named[1].lower()
    return [
        row
        for row in published_rows()
        if row.method in methods and re.sub(r"-v\d+$", "", row.task) == task
    ]
