"""What the pages of results show: measured curves, their intervals, and published rows beside them.

Reads the JSON files of `learning.py`. Does not import PyTorch, so that `make lint` can use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from learning_summary import Run
from published_rows import PublishedRow, counterparts

from rl_training.config_files import packaged_configs, read_yaml
from rl_training.errors import UserError
from rl_training.experiment import statistics
from rl_training.experiment.settings import NOT_LEARNING

STEPS = (100_000, 200_000, 300_000, 500_000, 1_000_000)
"""Steps of the tables; the last one that all seeds reached is shown too"""
NEAR = 0.03
"""How far an evaluation may be from these steps, as a share of them: rollouts have fixed lengths"""
OF_TASKS = ("env_id", "total_timesteps", "early_stopping")
"""Settings that say where and how long to learn, and not how"""
INSIDE, ABOVE, BELOW = "inside", "above", "below"


@dataclass(frozen=True)
class MeasuredCurve:
    """The seeds of one method on one task, up to the last evaluation that all of them reached."""

    task: str
    label: str
    """The packaged config, and what was changed"""
    config: str | None
    """The packaged config that has these settings; None if none has"""
    name: str
    """The name of the run in its files"""
    files: tuple[str, ...]
    sources: tuple[Mapping[str, Any], ...]
    """The contents of the files"""
    steps: np.ndarray
    returns: np.ndarray
    """Of shape `(evaluations, seeds)`"""
    training: np.ndarray
    """Returns of the latest training episodes at these steps, NaN where they are not known"""
    seconds: np.ndarray
    """Of shape `(evaluations, files)`: the seeds of a file are trained together"""
    planned: int
    stale: str | None
    """Why the code of today does not compute this curve any more"""

    @property
    def algorithm(self) -> str:
        return str(self.sources[0]["config"]).partition("/")[0]

    @property
    def peer(self) -> str | None:
        """The other package that learned this curve; None for this package."""
        peer = self.sources[0].get("peer")
        return None if peer is None else str(peer["package"])

    @property
    def is_drawn(self) -> bool:
        """Whether it belongs into the picture of its task, whose axis is environment steps."""
        return self.stale is None and not self.origins[0]

    @property
    def origins(self) -> tuple[str, ...]:
        """The names of the data and of the run that its learning began with, or empty names."""
        return _origins(self.sources[0])

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(seed for source in self.sources for seed in source["seeds"])

    @property
    def reached(self) -> int:
        return int(self.steps[-1])

    @property
    def is_complete(self) -> bool:
        return self.reached >= self.planned

    @property
    def is_dated(self) -> bool:
        """Whether the files say what their code computed."""
        return all(source.get("mathematics") for source in self.sources)

    @property
    def marks(self) -> list[str]:
        """What a reader must know of every row of this curve."""
        marks = {"stale": self.stale is not None, "not finished": not self.is_complete}
        return [mark for mark, holds in marks.items() if holds]

    def at(self, step: int) -> np.ndarray | None:
        """The returns of all seeds after these steps; None if they were not evaluated there."""
        places = np.flatnonzero(self.steps == step)
        return self.returns[places[0]] if len(places) else None

    def training_at(self, step: int) -> np.ndarray | None:
        """The returns of all seeds in training until this evaluation; None if one is not known."""
        values = self.training[np.flatnonzero(self.steps == step)[0]]
        return None if np.isnan(values).any() else values

    def near(self, step: int) -> int | None:
        """The step of the evaluation nearest to a step; None if it is too far away."""
        nearest = int(self.steps[np.argmin(np.abs(self.steps - step))])
        return nearest if abs(nearest - step) <= NEAR * step else None


@dataclass(frozen=True)
class Estimate:
    """A statistic over seeds with its 95 % bootstrap interval, NaN for a single seed."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray, statistic: statistics.Statistic) -> Estimate:
        low, high = statistics.interval(values, statistic)
        return cls(float(statistic(values)), float(low), float(high))


@dataclass(frozen=True)
class ResultRow:
    """A curve after some steps, beside published results after as many."""

    curve: MeasuredCurve
    step: int
    mean: Estimate
    middle: Estimate
    """Interquartile mean"""
    training: Estimate | None
    """The mean of training episodes; None if it is not known"""
    seconds: tuple[float, ...]
    """Wall time of each file until then"""
    published: tuple[PublishedRow, ...]

    def verdict(self, row: PublishedRow) -> str | None:
        """Where the published mean is: inside, above or below our interval of the mean.

        None for a stale curve, for one seed, which has no interval, and if the returns of training
        were published and ours are not known.
        """
        ours = self.training if row.of_training else self.mean
        if ours is None or self.curve.stale is not None or not ours.low <= ours.high:
            return None
        if row.mean > ours.high:
            return ABOVE
        return BELOW if row.mean < ours.low else INSIDE


def read_curves(folder: Path, stale: Mapping[str, str | None]) -> list[MeasuredCurve]:
    """Read every curve in the folder. `stale` says by file name why a result is outdated.

    Runs of one variant with different seeds are pooled. Stale ones are not mixed with others.
    """
    found: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text())
            is_evaluated = any(None not in each["returns"] for each in values["evaluations"])
            key = (values["env"], values["name"])
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: is not a learning curve ({error!r}); remove it") from None
        if is_evaluated:
            own = (path.name,) if stale.get(path.name) is not None else ()
            found.setdefault((*key, *own), []).append((path.name, values))
    return [_pooled(runs, stale.get(runs[0][0])) for runs in found.values()]


def _pooled(runs: Sequence[tuple[str, dict[str, Any]]], stale: str | None) -> MeasuredCurve:
    before: list[Run] = []
    for file, values in runs:
        run = Run.from_json(file, values)
        if reason := run.reason_apart(before):
            raise UserError(f"{file}: cannot be pooled: {reason}; give it a different --name")
        before.append(run)
    complete = [
        {each["step"]: each for each in values["evaluations"] if None not in each["returns"]}
        for _, values in runs
    ]
    steps = sorted(set.intersection(*(set(rounds) for rounds in complete)))
    if not steps:
        files = ", ".join(file for file, _ in runs)
        raise UserError(f"{files}: have no evaluation in common, so their seeds cannot be pooled")
    first = runs[0][1]
    label, config = named(first["config"], first["settings"])
    data, start = _origins(first)
    return MeasuredCurve(
        task=first["env"],
        label=label + (f", {data} data" if data else "") + (f", from `{start}`" if start else ""),
        config=config,
        name=first["name"],
        files=tuple(file for file, _ in runs),
        sources=tuple(values for _, values in runs),
        steps=np.array(steps, dtype=np.int64),
        returns=np.array(
            [[value for each in complete for value in each[step]["returns"]] for step in steps]
        ),
        training=np.array(
            [[value for each in complete for value in _training(each[step])] for step in steps]
        ),
        seconds=np.array([[each[step]["wall_seconds"] for each in complete] for step in steps]),
        planned=max(values["planned_steps"] for _, values in runs),
        stale=stale,
    )


def _origins(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(values.get(key, {}).get("name", "")) for key in ("data", "init_from"))


def _training(values: Mapping[str, Any]) -> list[float]:
    """The training returns of the seeds at an evaluation, NaN where they are not known."""
    found = values.get("training_returns") or [None] * len(values["returns"])
    return [np.nan if each is None else each for each in found]


def named(config: str, settings: Mapping[str, Any]) -> tuple[str, str | None]:
    """A label for readers, and the packaged config that has these settings, if there is one."""
    changes = _that_matter(settings)
    precision = ", TF32" if settings.get("float32_precision") == "high" else ""
    if not changes:
        return f"`{config}`{precision}", config
    wanted = _learning_settings(config) | changes
    for name in packaged_configs():
        is_related = name.partition("/")[0] == config.partition("/")[0]
        if is_related and _learning_settings(name) == wanted:
            return f"`{name}`{precision}", name
    words = [f"`{key.rpartition('.')[2]}: {value}`" for key, value in sorted(changes.items())]
    return f"`{config}`, {', '.join(words)}{precision}", None


def _learning_settings(config: str) -> dict[str, Any]:
    values = read_yaml(packaged_configs()[config])
    values |= {f"algo_kwargs.{key}": each for key, each in values.pop("algo_kwargs", {}).items()}
    return _that_matter(values)


def _that_matter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that change what is learned."""
    left_out = {*OF_TASKS, *NOT_LEARNING}
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in left_out}


def main_curves(curves: Sequence[MeasuredCurve]) -> list[MeasuredCurve]:
    """Our curves with packaged configs, or from data: the longest of each kind, and stale ones."""
    best: dict[tuple[str, ...], MeasuredCurve] = {}
    for curve in curves:
        if curve.peer is None and (curve.config is not None or any(curve.origins)):
            stale = "" if curve.stale is None else curve.files[0]
            key = (curve.task, curve.config or curve.label, *curve.origins, stale)
            known = best.get(key)
            if known is None or _size(curve) > _size(known):
                best[key] = curve
    return sorted(
        best.values(), key=lambda curve: (curve.task, curve.config or curve.label, curve.files)
    )


def _size(curve: MeasuredCurve) -> tuple[int, int]:
    return curve.reached, len(curve.seeds)


def result_rows(curve: MeasuredCurve) -> list[ResultRow]:
    """The rows of a curve at the standard steps, and at its last one."""
    rows = []
    published = counterparts(curve.config or "", curve.task)
    shown = {near: step for step in STEPS if (near := curve.near(step)) is not None}
    for step in sorted({*shown, curve.reached}):
        values, training = curve.at(step), curve.training_at(step)
        assert values is not None
        rows.append(
            ResultRow(
                curve=curve,
                step=step,
                mean=Estimate.of(values, statistics.mean),
                middle=Estimate.of(values, statistics.interquartile_mean),
                training=None if training is None else Estimate.of(training, statistics.mean),
                seconds=tuple(curve.seconds[curve.steps == step][0]),
                published=tuple(row for row in published if row.step == shown.get(step, step)),
            )
        )
    return rows


def normalized_scores(
    curves: Sequence[MeasuredCurve], tasks: Sequence[str], step: int
) -> dict[str, Estimate]:
    """By config: the mean over tasks of the normalized score, where all tasks were measured."""
    by_config: dict[str, dict[str, np.ndarray]] = {}
    for curve in curves:
        task, near = re.sub(r"-v\d+$", "", curve.task), curve.near(step)
        if curve.stale is None and curve.config is not None and near is not None:
            scores = statistics.normalized(curve.task, curve.returns[curve.steps == near][0])
            if task in tasks and scores is not None:
                by_config.setdefault(curve.config, {})[task] = scores
    return {
        config: Estimate.of(statistics.ragged([found[task] for task in tasks]), statistics.mean)
        for config, found in by_config.items()
        if set(found) == set(tasks)
    }
