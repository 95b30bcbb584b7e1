"""R7: values that are not finite, or of a wrong shape, stop a run before they can do harm.

Values of an environment are caught in the step in which they appear. Losses and parameters that are
not finite are caught by the next row of the log or the next checkpoint. What is saved is finite,
and the last good checkpoint is named and can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import metric_rows
from safetensors.torch import load_file

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.format import checkpoint_folders
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import DataError, EnvironmentRuntimeError, TrainingError

from . import environments
from .processes import start
from .runner import Campaign, Figures, Trial, require
from .runs import (
    SPECS,
    Config,
    digest,
    reference,
    require_same,
    require_sound,
    run_folders,
    small,
    without_pictures,
)

STOPPED = 3
"""Exit code of a run that ended with a message"""
LOG = 10
VALUES = (
    "observation nan",
    "observation inf",
    "observation too large",
    "observation shape",
    "observation list",
    "reward nan",
    "reward inf",
    "reward too large",
    "reward shape",
    "reward text",
    "reward none",
    "terminated nan",
    "truncated text",
)
LEARNED = ("reward 1e30", "nan parameter", "inf parameter", "nan moment")
DATA = ("observations nan", "rewards inf", "actions nan", "terminals shape", "rewards 1e30")
ONLINE = [name for name, spec in SPECS.items() if "online" in spec.regimes]


class Case:
    """What a trial does: an algorithm, a wrong value, and where the environments are."""

    def __init__(self, algo: str, wrong: str, *, is_async: bool = False, offline: bool = False):
        self.algo, self.wrong, self.is_async, self.offline = algo, wrong, is_async, offline

    def __str__(self) -> str:
        where = "offline" if self.offline else "async" if self.is_async else "sync"
        return f"{self.algo}, {self.wrong}, {where}"


CASES = [
    *(Case(ONLINE[number % len(ONLINE)], wrong) for number, wrong in enumerate(VALUES)),
    *(
        Case(ONLINE[number * 5 % len(ONLINE)], wrong, is_async=True)
        for number, wrong in enumerate(VALUES)
    ),
    *(Case(algo, VALUES[number % len(VALUES)]) for number, algo in enumerate(ONLINE)),
    *(Case(algo, wrong) for algo in ONLINE for wrong in LEARNED),
    *(Case(algo, wrong, offline=True) for algo in ("iql", "td3_bc", "cql") for wrong in DATA),
    *(
        Case(algo, wrong, offline=True)
        for algo, spec in SPECS.items()
        if "offline" in spec.regimes
        for wrong in ("nan parameter", "inf parameter")
    ),
    *(Case(algo, "aliased", is_async=is_async) for algo in ("sac", "td3") for is_async in (0, 1)),
]


def case_of(trial: Trial) -> Case:
    return CASES[trial.index % len(CASES)]


def config_of(trial: Trial) -> Config:
    case = case_of(trial)
    changes: dict[str, Any] = {"log_interval": LOG, "total_timesteps": 200, "eval_interval": 0}
    if case.offline:
        changes |= {"regime": "offline"}
    else:
        changes |= {"regime": "online", "dataset": None, "env_id": None}
        if case.is_async:
            changes |= {"num_envs": 2, "vectorization": "async"}
    return small(case.algo, trial.folder / "runs", **changes)


def healthy(case: Case) -> Callable[[], Any] | None:
    if case.offline:
        return None
    discrete = SPECS[case.algo].actions[0] == "discrete"
    return environments.cart_pole if discrete else environments.pendulum


def run(trial: Trial) -> Figures:
    case = case_of(trial)
    if case.wrong == "aliased":
        _check_aliased(trial)
        return {}
    if case.wrong in DATA:
        _check_data(trial)
        return {}
    config = config_of(trial)
    moment = trial.random().randrange(60, 110)
    child = start(lambda: _train(trial, config, moment), trial.folder / "output.txt")
    child.wait()
    (folder,) = run_folders(config)
    if case.wrong == "reward 1e30" and child.code == 0:
        _check_that_all_was_finite(trial, folder)
        return {}
    require(child.code == STOPPED, f"exit code {child.code}: {case.wrong} was not caught")
    found = json.loads((trial.folder / "ended.json").read_text())
    _check_message(found, folder)
    figures: Figures = {}
    if case.wrong in VALUES:
        events = (trial.folder / "events").stat().st_size
        require(events <= moment + case.is_async, "the environment was stepped again")
    else:
        require(found["first"] is not None, f"stopped, but all is finite: {found['message']}")
        late = found["step"] - found["first"]
        require(late <= LOG, f"caught {late} steps later")
        figures = {"steps_until_caught": float(late)}
    _check_what_is_saved(folder)
    _resume(trial, folder)
    return figures


def _train(trial: Trial, config: Config, moment: int) -> None:
    """Train with a wrong value at a moment, and report how training ends."""
    case = case_of(trial)
    without_pictures()
    _watch_the_buffer()
    reached = Reached(trial.folder)
    callbacks: list[Callback] = [reached]
    if "parameter" in case.wrong or "moment" in case.wrong:
        callbacks.insert(0, Poison(moment, case.wrong))
    else:
        environments.misbehave("step", moment, case.wrong, trial.folder, in_training=True)
    report: dict[str, Any] = {}
    try:
        rl_training.train(config, env=healthy(case), callbacks=callbacks)
    except (EnvironmentRuntimeError, TrainingError) as error:
        notes = list(getattr(error, "__notes__", ()))
        report = {"message": str(error), "notes": notes, "step": reached.step}
    report["first"] = reached.first_not_finite
    (trial.folder / "ended.json").write_text(json.dumps(report))
    if "message" in report:
        raise SystemExit(STOPPED)


class Reached(Callback):
    """Remembers the step of training, and the first one with a learned number that is not finite.

    It also tells environments when training begins.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.step = folder, 0
        self.first_not_finite: int | None = None
        self._constants: set[str] = set()

    def on_train_start(self, context: TrainingContext) -> None:
        # Constants can be infinite on purpose, such as the logarithm of `alpha: 0`.
        self._constants = _not_finite(context)
        environments.begin(self._folder)

    def on_collect_end(self, context: TrainingContext) -> None:
        self.step = context.position

    def on_update_end(self, context: TrainingContext) -> None:
        self.step = context.position
        if self.first_not_finite is None and _not_finite(context) - self._constants:
            self.first_not_finite = self.step


def _not_finite(context: TrainingContext) -> set[str]:
    """Return the names of learned tensors with a number that is not finite."""
    state = context.policy.algorithm.state
    return {name for name, tensor in state.items() if not torch.isfinite(tensor).all()}


class Poison(Callback):
    """Overwrites one learned number."""

    def __init__(self, moment: int, what: str) -> None:
        self._moment, self._what = moment, what

    def on_update_end(self, context: TrainingContext) -> None:
        if context.position != self._moment:
            return
        state = context.policy.algorithm.state
        moments = [name for name in state if "optimizer" in name or "moment" in name]
        networks = list(context.policy.algorithm.networks())
        names = moments or list(state) if "moment" in self._what else networks
        value = torch.inf if "inf" in self._what else torch.nan
        tensor = next(state[name] for name in names if state[name].is_floating_point())
        with torch.no_grad():
            tensor.view(-1)[0] = value


def _watch_the_buffer() -> None:
    """End the process with a traceback if a row that is not finite is stored."""
    real = ReplayBuffer.add

    def add(self: ReplayBuffer, rows: Any, *rest: Any, **options: Any) -> Any:
        for field in (each for each in rows if each is not None):
            if not np.isfinite(np.asarray(field, dtype=np.float64)).all():
                raise AssertionError("a row that is not finite reached the buffer")
        return real(self, rows, *rest, **options)

    ReplayBuffer.add = add  # type: ignore[method-assign]


def _check_message(found: dict[str, Any], folder: Path) -> None:
    text = "\n".join([found["message"], *found["notes"]])
    last = checkpoint_folders(folder / "checkpoints")[0]
    require(last.name in text, f"does not name the last good checkpoint: {text}")
    require("checkpoint is None" not in text, f"a message with None: {text}")


def _check_what_is_saved(folder: Path) -> None:
    require_sound(folder)
    for path in folder.rglob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if tensor.is_floating_point():
                require(torch.isfinite(tensor).all(), f"{path.name}: {name} is not finite")
    # The last row may show what was wrong. Earlier ones mean that training went on.
    for row in metric_rows(folder)[:-1]:
        empty = [key for key, value in row.items() if value is None]
        require(not empty, f"logged without a value at step {row['step']}: {empty}")


def _check_that_all_was_finite(trial: Trial, folder: Path) -> None:
    """A large reward may not be sampled, or its loss may grow no faster than its error."""
    found = json.loads((trial.folder / "ended.json").read_text())
    require(found["first"] is None, f"not finite since step {found['first']}, but not caught")
    _check_what_is_saved(folder)
    empty = [key for key, value in metric_rows(folder)[-1].items() if value is None]
    require(not empty, f"the last row has no value of {empty}")


def _resume(trial: Trial, folder: Path) -> None:
    """The last good checkpoint continues to the end in a healthy environment."""

    def resume() -> None:
        without_pictures()
        rl_training.resume_training(folder, env=healthy(case_of(trial)))

    if case_of(trial).wrong == "reward 1e30":
        return  # it may be in the buffer: the number itself is finite
    child = start(resume, trial.folder / "output.txt")
    child.wait()
    require(child.code == 0, "the last good checkpoint cannot be resumed")


def _check_aliased(trial: Trial) -> None:
    """An environment that overwrites the arrays it returned gives the same run."""
    case, config = case_of(trial), config_of(trial)
    name = f"{case.algo}-{config.get('num_envs', 1)}"

    def train(make: Callable[[], Any], own: Config) -> None:
        without_pictures()
        rl_training.train(own, env=make)

    expected = reference(trial, name, config, train=lambda own: train(environments.pendulum, own))
    child = start(lambda: train(environments.aliased, config), trial.folder / "output.txt")
    child.wait()
    require(child.code == 0, "did not finish")
    (folder,) = run_folders(config)
    require_same(digest(folder), expected.digests[0], ("collector", "policy.json"))


def _check_data(trial: Trial) -> None:
    """Recorded data that is wrong is refused before training, or caught by the next log."""
    wrong, config = case_of(trial).wrong, config_of(trial)
    arrays = _wrong_arrays(wrong)
    config["dataset"] = None

    def train() -> None:
        without_pictures()
        try:
            rl_training.train(config, dataset=arrays)
        except (DataError, TrainingError) as error:
            print(f"error: {error}")
            raise SystemExit(STOPPED) from None

    child = start(train, trial.folder / "output.txt")
    child.wait()
    require(child.code == STOPPED, f"exit code {child.code}: {wrong} was not caught")
    (folder,) = run_folders(config)
    if folder.exists():
        _check_what_is_saved(folder)


def _wrong_arrays(wrong: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    size = 200
    arrays = {
        "observations": generator.normal(size=(size, 3)).astype(np.float32),
        "actions": generator.uniform(-2, 2, size=(size, 1)).astype(np.float32),
        "rewards": generator.normal(size=size).astype(np.float32),
        "next_observations": generator.normal(size=(size, 3)).astype(np.float32),
        "terminals": np.zeros(size, dtype=bool),
    }
    name, kind = wrong.split()
    if kind == "shape":
        arrays[name] = arrays[name][:-1]
    else:
        arrays[name].reshape(size, -1)[77, 0] = {"nan": np.nan, "inf": np.inf, "1e30": 1e30}[kind]
    return arrays


CAMPAIGN = Campaign(
    name="R7",
    title="values that are not finite or of a wrong shape",
    trials=len(CASES),
    run=run,
    describe=lambda trial: str(case_of(trial)),
)
