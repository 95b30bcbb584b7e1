"""A plan of runs that is measured bit by bit: it knows what is done, and continues the rest.

A plan is a YAML file. `runs` is a list in order of importance; `defaults` holds values for all.

    defaults: {seeds: 8, steps: 1e6, eval_interval: 50000, eval_episodes: 10}
    runs:
      - {name: sac-1M, config: sac/mujoco, tasks: [HalfCheetah-v5, Hopper-v5]}
      - {name: redq, config: redq/hopper, tasks: [Hopper-v5], steps: 125000, set: {gamma: 0.98}}
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curves.mathematics import Mathematics, cached_mathematics, stale
from curves.processes import INTERRUPTED, NOT_STARTED, run_processes
from curves.run import CURVE
from curves.settings import Variant, curve_path, differences, process_options, variant_config
from curves.stored import is_complete, other_request, read_stored
from rl_training.config import TrainConfig
from rl_training.config_files import load_config, read_yaml
from rl_training.errors import ConfigError, UserError

NUMBERS = ("seeds", "first_seed", "steps", "eval_interval", "eval_episodes")
REQUIRED = ("name", "config", "tasks", "seeds", "steps", "eval_interval", "eval_episodes")
KEYS = (*REQUIRED, "first_seed", "set")
DONE, STALE, STARTED, OPEN = "done", "stale", "started", "open"


@dataclass(frozen=True)
class PlannedRun:
    """One curve of a plan."""

    variant: Variant
    arguments: argparse.Namespace
    """Those of the command line, with the values of the plan"""
    config: TrainConfig

    @property
    def path(self) -> Path:
        given = self.arguments
        return curve_path(given.out, str(self.config.env_id), self.variant.name, given.first_seed)

    @property
    def words(self) -> list[str]:
        return process_options(self.variant, self.arguments)


@dataclass(frozen=True)
class State:
    kind: str
    """done, stale, started or open"""
    about: str = ""

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.about}" if self.about else self.kind


def read_plan(path: Path, arguments: argparse.Namespace) -> list[PlannedRun]:
    """The runs of a plan, in order. Raises `UserError` for anything that cannot be measured."""
    try:
        content = read_yaml(path)
    except ConfigError as error:
        raise UserError(f"--plan {error}") from None
    _known(path, "the plan", content, ("defaults", "runs"))
    defaults, entries = content.get("defaults") or {}, content.get("runs")
    if not isinstance(defaults, Mapping):
        raise UserError(f"{path}: defaults = {defaults!r}: must be a mapping of keys to values")
    _known(path, "defaults", defaults, KEYS)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: runs = {entries!r}: must be a list with at least one run")
    runs: list[PlannedRun] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping):
            raise UserError(f"{path}: run {number}: {entry!r} must be a mapping of keys to values")
        runs += _runs_of(path, f"run {number}", {**defaults, **entry}, arguments)
    files = [run.path for run in runs]
    if repeated := sorted({file.name for file in files if files.count(file) > 1}):
        raise UserError(
            f"{path}: two runs would write {', '.join(repeated)}; give them different names"
        )
    return runs


def _known(path: Path, where: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    if unknown := sorted(str(key) for key in values if key not in keys):
        raise UserError(
            f"{path}: {where}: unknown key {', '.join(unknown)}; the keys are {', '.join(keys)}"
        )


def _runs_of(
    path: Path, where: str, entry: Mapping[str, Any], arguments: argparse.Namespace
) -> list[PlannedRun]:
    """The runs of one entry, one for each of its tasks."""
    _known(path, where, entry, KEYS)
    if missing := [key for key in REQUIRED if entry.get(key) is None]:
        raise UserError(f"{path}: {where}: {', '.join(missing)} is missing")
    numbers = {key: _number(path, where, key, entry.get(key, 0)) for key in NUMBERS}
    tasks, settings = entry["tasks"], entry.get("set") or {}
    if not isinstance(tasks, list) or not all(isinstance(each, str) for each in tasks):
        raise UserError(f"{path}: {where}: tasks = {tasks!r}: must be a list of task ids")
    if not isinstance(settings, Mapping):
        raise UserError(f"{path}: {where}: set = {settings!r}: must map settings to values")
    overrides = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    found = []
    for task in tasks:
        given = copy.copy(arguments)
        vars(given).update(numbers, config=str(entry["config"]), env=task)
        try:
            variant = Variant(str(entry["name"]), overrides)
            config = variant_config(variant, given)
        except UserError as error:
            raise UserError(f"{path}: {where}, {task}: {error}") from None
        if config.to_mapping()["dataset"] is not None:
            raise UserError(f"{path}: {where}: {config.algo} needs recorded data; plan online runs")
        found.append(PlannedRun(variant, given, config))
    return found


def _number(path: Path, where: str, key: str, value: Any) -> int:
    least = 0 if key == "first_seed" else 1
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number.is_integer() or number < least:
        raise UserError(
            f"{path}: {where}: {key} = {value!r}: must be a whole number of at least {least}"
        )
    return int(number)


def state_of(run: PlannedRun, rehearsed: Mathematics) -> State:
    """What is known of a run: from its stored curve, and from its work folder."""
    wanted = {
        "config": run.arguments.config,
        "settings": differences(load_config(run.arguments.config), run.config),
        "seeds": run.config.seeds,
        "planned_steps": run.config.total_timesteps,
        "eval_episodes": run.config.eval_episodes,
    }
    values = read_stored(run.path)
    work = run.arguments.work / run.path.stem / CURVE
    try:
        started = read_stored(work)
        for each in (values, started):
            if each is not None:
                reason = other_request(each, wanted)
                reason = reason or stale(each.get("mathematics"), rehearsed(run.config))
                if reason is not None:
                    return State(STALE, f"{reason}; measured again")
        if values is not None and is_complete(values):
            return State(DONE, f"{values['planned_steps']:,} steps")
        if started is not None:
            return State(STARTED, f"{_reached(started):,} steps evaluated; continues")
        if values is not None:
            return State(OPEN, f"{_reached(values):,} steps stored, but its run folders are gone")
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{run.path}: is not a learning curve ({error!r}); remove it") from None
    return State(OPEN)


def _reached(values: Mapping[str, Any]) -> int:
    return max((each["step"] for each in values["evaluations"]), default=0)


def measure_plan(path: Path, arguments: argparse.Namespace) -> bool:
    """Measure what is not done, up to the time limit. Return whether no run has failed."""
    runs, rehearsed = read_plan(path, arguments), cached_mathematics()
    states = [state_of(run, rehearsed) for run in runs]
    for run, state in zip(runs, states, strict=True):
        print(f"{run.path.stem}: {state.text}", flush=True)
    left = [run for run, state in zip(runs, states, strict=True) if state.kind != DONE]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are done", flush=True)
    if arguments.list or not left:
        return True
    seconds = None if arguments.minutes is None else 60.0 * arguments.minutes
    codes = run_processes([run.words for run in left], arguments.parallel, seconds)
    for run, code in zip(left, codes, strict=True):
        if code not in (0, NOT_STARTED):
            ended = "stopped; the same command continues it"
            failed = f"failed with exit code {code}"
            print(f"{run.path.stem}: {ended if code == INTERRUPTED else failed}")
    done = len(runs) - len(left) + codes.count(0)
    print(f"{done} of {len(runs)} runs are done", flush=True)
    return all(code in (0, INTERRUPTED, NOT_STARTED) for code in codes)
