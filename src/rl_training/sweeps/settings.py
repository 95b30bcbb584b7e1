"""The keys of a sweep file and their meaning."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from rl_training.config import Interval, Positive, Seed
from rl_training.errors import ConfigError
from rl_training.experiment.statistics import interquartile_mean
from rl_training.validation import StrictModel, short, suggestion

METRICS = {
    "eval_return": "eval_return_mean",
    "eval_length": "eval_length_mean",
    "eval_success_rate": "eval_success_rate",
}
"""What an objective may name, and the metric of each seed's evaluations that it means"""
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "iqm": lambda values: float(interquartile_mean(np.asarray(values))),
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.median(values)),
    "min": lambda values: float(np.min(values)),
    "max": lambda values: float(np.max(values)),
}

OWN_OPTIONS = {
    "time": "use slurm.minutes",
    "mem": "use slurm.memory_gb",
    "partition": "use slurm.partition",
    "account": "use slurm.account",
    "cpus-per-task": "use resources.cpus",
    "gpus-per-node": "use resources.gpus, or gres for a kind of GPU",
    "array": "use --workers",
    **dict.fromkeys(
        (
            "error",
            "job-name",
            "nodes",
            "ntasks-per-node",
            "open-mode",
            "output",
            "requeue",
            "signal",
        ),
        "is set by this package; remove it",
    ),
}
"""Options of sbatch that a sweep sets, and what to do instead"""


class Objective(StrictModel):
    """How a trial is judged."""

    metric: str = "eval_return_iqm"
    """An evaluation metric and a statistic over seeds, such as `eval_return_iqm`"""
    over: Literal["seeds"] = "seeds"
    """What the statistic is computed over"""
    mode: Literal["max", "min"] = "max"
    """Whether a larger (`max`) or smaller (`min`) value is better"""

    @property
    def parts(self) -> tuple[str, str]:
        """The metric of an evaluation, and the statistic over seeds."""
        for name, metric in METRICS.items():
            if self.metric == name:
                return metric, "iqm"
            statistic = self.metric.removeprefix(f"{name}_")
            if statistic != self.metric and statistic in STATISTICS:
                return metric, statistic
        known = [f"{name}_{statistic}" for name in METRICS for statistic in STATISTICS]
        raise ConfigError(
            f"objective.metric = {short(self.metric)}: never appears"
            f"{suggestion(self.metric, known)}; use one of {', '.join(METRICS)}, followed by "
            f"{', '.join(f'_{name}' for name in STATISTICS)}"
        )

    def score(self, values: list[float]) -> float:
        """The value of a trial whose seeds have these values."""
        return STATISTICS[self.parts[1]](values)


class Resources(StrictModel):
    """What one trial needs."""

    cpus: Annotated[int, Field(ge=1, le=1024)] = 1
    """Cores, and threads for tensor operations unless the config sets `num_threads`"""
    gpus: Annotated[float, Field(ge=0, le=64)] = 0.0
    """GPUs; a fraction lets several trials share one, except on Slurm"""


class RaySection(StrictModel):
    """Where and how trials run with `--on ray`."""

    address: str | None = None
    """Address of a cluster, or `auto`. Not set: RAY_ADDRESS, or else Ray in this machine"""
    working_dir: str | None = None
    """Folder with your own modules, which is copied to every machine. Not set: the current folder
    if `--import` names modules"""
    pip: list[str] | None = None
    """Packages to install on every machine"""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every trial"""


class SlurmSection(StrictModel):
    """Options of the jobs with `--on slurm`."""

    partition: str | None = None
    """Partition of the cluster"""
    account: str | None = None
    """Account that is charged"""
    minutes: Positive = 240
    """Time limit of a job; a job that reaches it is stopped with a checkpoint and queued again"""
    memory_gb: Positive = 8
    """Memory of a job"""
    requeues: Interval = 100
    """How often a job that has reached its time limit is queued again"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of `sbatch`, such as `{constraint: a100}`; true is an option without value"""

    def check(self) -> None:
        """Raise `ConfigError` if an option is not one, or has its own key."""
        for key, value in self.options.items():
            name = key.replace("_", "-")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise ConfigError(
                    f"slurm.options.{short(key)}: must be the long name of an option of sbatch, "
                    "without dashes before it"
                )
            if name in OWN_OPTIONS:
                raise ConfigError(f"slurm.options.{key}: {OWN_OPTIONS[name]}")
            if not isinstance(value, str | int | float) or not str(value).isprintable():
                raise ConfigError(
                    f"slurm.options.{key} = {short(value)}: must be one line of text, a number or "
                    "true"
                )


class SweepSettings(StrictModel):
    """All keys of a sweep file."""

    base: str
    """Config that every trial starts from: a packaged name such as `sac/mujoco`, or a file"""
    set: dict[str, Any] = Field(default_factory=dict)
    """Changes of the config that all trials share"""
    search: dict[str, Any] | None = None
    """Ranges to search, by config key: `{log: [1e-4, 1e-2]}`, `{uniform: [0, 1]}`,
    `{int: [1, 8]}`, `{log_int: [16, 1024]}` or `{choice: [a, b]}`"""
    grid: dict[str, Any] | None = None
    """Lists of values, by config key; every combination is a trial"""
    trials: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of trials. Not set: 20, or every combination of a grid"""
    seeds: str | int | list[int] = "0-2"
    """Seeds of each trial, such as `0-4`"""
    fresh_seeds: str | int | list[int] | None = None
    """Seeds with which the winner is trained again. Not set: as many as `seeds`, following them"""
    objective: Objective = Field(default_factory=Objective)
    """How a trial is judged"""
    sampler: str | dict[str, dict[str, Any] | None] = "tpe"
    """Optuna's sampler: tpe, random, gp, cmaes, qmc or nsgaii; `{tpe: {multivariate: true}}`"""
    rounds: Positive | None = None
    """Trials per round. The next round is planned when all trials of a round are done, so that the
    result does not depend on which trial ends first. Not set: a new trial as soon as one ends"""
    prune: dict[str, dict[str, Any] | None] | None = None
    """Optuna's pruner: asha, hyperband, median, percentile or wilcoxon, as
    `{asha: {grace: 25k, factor: 3}}`. Not set: every trial runs to its end"""
    seed: Seed = 0
    """Seed of the search"""
    max_failures: Annotated[int, Field(ge=0, le=1_000)] = 5
    """How often the process of a trial may die without a new checkpoint before the trial fails"""
    resources: Resources = Field(default_factory=Resources)
    """What one trial needs"""
    storage: str | None = None
    """Folder or fsspec URL to which trials on machines without a shared disk save their runs"""
    study: str | None = None
    """URL of a database for Optuna's study. Not set: a journal file in the folder of the sweep"""
    ray: RaySection = Field(default_factory=RaySection)
    """Settings of `--on ray`"""
    slurm: SlurmSection = Field(default_factory=SlurmSection)
    """Settings of `--on slurm`"""
