"""A plan of runs that is measured bit by bit: it knows what is done, and continues the rest.

A plan is a YAML file. `runs` is a list in order of importance; `defaults` holds values for all.

    defaults: {seeds: 8, steps: 1e6, eval_interval: 50000, eval_episodes: 10}
    runs:
      - {name: sac-1M, config: sac/mujoco, tasks: [HalfCheetah-v5, Hopper-v5]}
      - {name: redq, config: redq/hopper, tasks: [Hopper-v5], steps: 125000, set: {gamma: 0.98}}
      - {name: cql, config: cql/mujoco, tasks: [Hopper-v5], steps: 2e5, data: replay}
      - {name: cql-then-sac, config: sac/mujoco, tasks: [Hopper-v5], steps: 2e5, init_from: cql}

`data` names recorded data of benchmarks/recorded_data.py; the steps of an offline method are
updates. With `init_from`, each seed starts from the last checkpoint of the same seed of an earlier
run, in the same task. These checkpoints stay in the work folder until all that need them are done.

With `peer: {package: d3rlpy, algo: IQL, networks: [...], options: {...}}`, another package learns,
with the sizes and rates of the config and its own `options` (see curves/peer_tasks.py).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curves.data import NAMES, how_to_record, missing_files
from curves.mathematics import Mathematics, cached_mathematics
from curves.peer_tasks import check_peer, code_of
from curves.processes import INTERRUPTED, NOT_STARTED, run_processes
from curves.run import CURVE
from curves.settings import FINAL, Variant, curve_path, process_options, request, variant_config
from curves.stored import difference, is_complete, read_stored
from rl_training.config import TrainConfig
from rl_training.config_files import read_yaml
from rl_training.errors import ConfigError, UserError

NUMBERS = ("seeds", "first_seed", "steps", "eval_interval", "eval_episodes")
REQUIRED = ("name", "config", "tasks", "seeds", "steps", "eval_interval", "eval_episodes")
KEYS = (*REQUIRED, "first_seed", "set", "data", "init_from", "peer")
DONE, STALE, STARTED, OPEN = "done", "stale", "started", "open"


@dataclass(frozen=True)
class PlannedRun:
    """One curve of a plan."""

    variant: Variant
    arguments: argparse.Namespace
    """Those of the command line, with the values of the plan"""
    config: TrainConfig
    start: PlannedRun | None = None
    """The run from whose checkpoints this one starts"""

    @property
    def work(self) -> Path:
        return Path(self.arguments.work) / self.path.stem

    @property
    def missing_data(self) -> list[Path]:
        """Files of recorded data that are needed and are not here."""
        given = self.arguments
        if given.data is None:
            return []
        return missing_files(
            given.data_folder, given.data_about, str(self.config.env_id), given.data
        )

    def wanted(self, rehearsed: Mathematics) -> dict[str, Any]:
        """What a stored curve of this run must contain."""
        found = {
            **request(self.variant, self.arguments, self.config),
            "mathematics": code_of(self.config, self.arguments, rehearsed),
        }
        return found if self.start is None else {**found, "init_from": self.start.wanted(rehearsed)}

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
        runs += _runs_of(path, f"run {number}", {**defaults, **entry}, arguments, runs)
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
    path: Path,
    where: str,
    entry: Mapping[str, Any],
    arguments: argparse.Namespace,
    earlier: Sequence[PlannedRun],
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
    data, start = entry.get("data"), entry.get("init_from")
    if data is not None and data not in NAMES:
        raise UserError(f"{path}: {where}: data = {data!r}: must be one of {', '.join(NAMES)}")
    overrides = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    found = []
    for task in tasks:
        given = copy.copy(arguments)
        vars(given).update(
            numbers, config=str(entry["config"]), env=task, data=data, peer=entry.get("peer")
        )
        vars(given).update(init_from=None if start is None else str(start), keep=False)
        try:
            variant = Variant(str(entry["name"]), overrides)
            config = variant_config(variant, given)
            if given.peer is not None:
                check_peer(given)
        except UserError as error:
            raise UserError(f"{path}: {where}, {task}: {error}") from None
        if config.reads_data and data is None:
            raise UserError(
                f"{path}: {where}: {config.algo} needs recorded data; choose it with data: "
                f"{' | '.join(NAMES)}"
            )
        begun = None if start is None else _start(path, where, given, earlier)
        found.append(PlannedRun(variant, given, config, begun))
    return found


def _start(
    path: Path, where: str, given: argparse.Namespace, earlier: Sequence[PlannedRun]
) -> PlannedRun:
    """The earlier run from whose checkpoints this one starts, which is told to keep them."""
    for run in earlier:
        if (run.variant.name, run.config.env_id) == (given.init_from, given.env):
            if (run.arguments.seeds, run.arguments.first_seed) != (given.seeds, given.first_seed):
                continue
            run.arguments.keep = True
            return run
    raise UserError(
        f"{path}: {where}: init_from = {given.init_from!r}: no earlier run of this plan has "
        f"this name, {given.env} and the same seeds"
    )


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
    values = read_stored(run.path)
    try:
        started = read_stored(run.work / CURVE)
        if kept := [each for each in (values, started) if each is not None]:
            wanted = run.wanted(rehearsed)
            for each in kept:
                if (reason := difference(each, wanted)) is not None:
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


def states_of(runs: Sequence[PlannedRun], rehearsed: Mathematics) -> list[State]:
    """The states of all runs of a plan."""
    states = [state_of(run, rehearsed) for run in runs]
    for index in reversed(range(len(runs))):  # a run comes after the one that it starts from
        names = [
            each.variant.name
            for each, state in zip(runs, states, strict=True)
            if each.start is runs[index] and state.kind != DONE
        ]
        if states[index].kind != DONE or (runs[index].work / FINAL / CURVE).exists() or not names:
            continue
        again = f"trained again, because its checkpoints are gone and {', '.join(names)} needs them"
        states[index] = State(OPEN, again)
    return states


def measure_plan(path: Path, arguments: argparse.Namespace) -> bool:
    """Measure what is not done, up to the time limit. Return whether no run has failed."""
    runs, rehearsed = read_plan(path, arguments), cached_mathematics()
    states = states_of(runs, rehearsed)
    left = [run for run, state in zip(runs, states, strict=True) if state.kind != DONE]
    unable = _unable(left)
    for run, state in zip(runs, states, strict=True):
        waits = "; waits for recorded data" if run in unable else ""
        print(f"{run.path.stem}: {state.text}{waits}", flush=True)
    print(f"{len(runs) - len(left)} of {len(runs)} runs are done", flush=True)
    if unable:
        print(how_to_record(_missing(unable), arguments.data_folder), flush=True)
    able = [run for run in left if run not in unable]
    if arguments.list or not able:
        return arguments.list or not unable
    codes = _measure(able, arguments)
    left = [run for run, code in zip(able, codes, strict=True) if code != 0] + unable
    for run in runs:
        if run.arguments.keep and not any(each.start is run for each in left) and run not in left:
            shutil.rmtree(run.work, ignore_errors=True)
    print(f"{len(runs) - len(left)} of {len(runs)} runs are done", flush=True)
    return not unable and all(code in (0, INTERRUPTED, NOT_STARTED) for code in codes)


def _measure(runs: Sequence[PlannedRun], arguments: argparse.Namespace) -> list[int | None]:
    seconds = None if arguments.minutes is None else 60.0 * arguments.minutes
    after = {runs.index(each): runs.index(each.start) for each in runs if each.start in runs}
    codes = run_processes([run.words for run in runs], arguments.parallel, seconds, after)
    for run, code in zip(runs, codes, strict=True):
        if code not in (0, NOT_STARTED):
            ended = "stopped; the same command continues it"
            failed = f"failed with exit code {code}"
            print(f"{run.path.stem}: {ended if code == INTERRUPTED else failed}")
    return codes


def _unable(left: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those that cannot be measured now, because data is missing for them or for their start."""
    unable: list[PlannedRun] = []
    for run in left:
        if run.missing_data or run.start in unable:
            unable.append(run)
    return unable


def _missing(runs: Sequence[PlannedRun]) -> dict[str, list[Path]]:
    """The files that are missing, by task."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        paths = found.setdefault(str(run.config.env_id), [])
        paths += [path for path in run.missing_data if path not in paths]
    return found
