"""Callbacks: code that runs at fixed events of training, with a read-only view of the run."""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.evaluation.evaluator import Evaluation
from rl_training.execution.execution import Execution
from rl_training.execution.policy import Policy
from rl_training.types import Json, ResumeLevel

MAX_NAME_LENGTH = 200
"""Characters of the name of a metric"""
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")
ROW_KEYS = ("step", "gradient_steps")
"""Keys of every row of `metrics.jsonl`"""
_OWN_GROUPS = ("eval", "health", "rollout", "time", "train")
"""Groups of this package's metrics, which pictures and comparisons of runs rely on"""


@dataclass
class Progress:
    """The counters of a run, whether it must stop, and why."""

    global_step: int = 0
    pretrain_updates: int = 0
    """Gradient steps before the first environment step"""
    update_blocks: int = 0
    gradient_steps: int = 0
    should_stop: bool = False
    stop_reason: str | None = None
    evaluated_at: int | None = None
    evaluation_due: bool = False
    """Requested, but postponed or given up because of an interruption"""
    updates_left: int = 0
    """Updates of the current block that an interruption left; a resumed run makes them first"""

    @property
    def position(self) -> int:
        """Steps so far, plus the pretraining updates before them.

        It is unique for each step boundary; intervals and checkpoint names use it.
        """
        return self.pretrain_updates + self.global_step

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True)
class LastStep:
    """The last step of a run's environments; the arrays have one row per environment."""

    observations: Any
    actions: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


@dataclass
class Pauses:
    """How long this process interrupted the steps of a run, in seconds."""

    total: float = 0.0
    last: dict[Literal["evaluation", "checkpoint"], float] = field(default_factory=dict)
    """Duration of the last pause of each kind"""

    @contextlib.contextmanager
    def measure(self, kind: Literal["evaluation", "checkpoint"]) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.last[kind] = time.perf_counter() - began
            self.total += self.last[kind]


TimeShare = Literal[
    "environments",
    "acting",
    "sampling",
    "update",
    "compilation",
    "evaluation",
    "health",
    "saving",
]
"""What a run spends its time on; the rest is logging, callbacks and the loop itself"""


class Stopwatch:
    """The seconds that this process spends on runs that are trained together, and on what.

    A GPU computes actions, batches and updates while the host does something else. The host cannot
    tell which of them it waits for, so they count together as `update`.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.shares: dict[str, float] = {}
        self._one: tuple[TimeShare, ...] = ("acting", "sampling", "update") if on_gpu else ()
        self._began: float | None = None
        self._since = 0.0

    def begin(self) -> None:
        """Call this when training begins."""
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since training began in this process."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def start(self) -> None:
        """Call this before something that is measured."""
        self._since = time.perf_counter()

    def stop(self, share: TimeShare) -> None:
        """Add the time since `start`, or since the last `stop`."""
        now = time.perf_counter()
        self.add(share, now - self._since)
        self._since = now

    def add(self, share: TimeShare, seconds: float) -> None:
        if share in self._one:
            share = "update"
        self.shares[share] = self.shares.get(share, 0.0) + seconds


class ObservedRun(Protocol):
    """The parts of a run that its context shows to callbacks."""

    @property
    def config(self) -> TrainConfig: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def execution(self) -> Execution: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def evaluation(self) -> Evaluation | None: ...
    @property
    def resume_level(self) -> ResumeLevel: ...
    @property
    def best_return(self) -> float | None: ...
    @property
    def is_interrupted(self) -> bool: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def env(self) -> Any: ...
    @property
    def pauses(self) -> Pauses: ...
    @property
    def last_compile_seconds(self) -> float | None: ...
    @property
    def planned_end(self) -> int: ...
    def last_step(self) -> LastStep | None: ...
    def infos(self) -> Sequence[Mapping[str, Any]]: ...
    def log(self, name: str, value: float) -> None: ...
    def train_metrics(self) -> Mapping[str, float]: ...
    def rollout_metrics(self) -> Mapping[str, float]: ...
    def request_stop(self, reason: str) -> None: ...
    def request_evaluation(self) -> None: ...
    def request_checkpoint(self, *, best: bool = False) -> None: ...


class TrainingContext:
    """A run as callbacks see it: read its state, and request actions at the next step boundary."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self.pretraining_updates = run.config.pretraining_updates
        """Number of updates before the first environment step"""

    @property
    def config(self) -> TrainConfig:
        return self._run.config

    @property
    def run_dir(self) -> Path:
        return self._run.run_dir

    @property
    def execution(self) -> str:
        """A short description of how updates run, such as `cpu, compiled`."""
        return self._run.execution.describe()

    @property
    def global_step(self) -> int:
        """Environment steps so far; gradient steps in offline training."""
        return self._run.progress.global_step

    @property
    def gradient_steps(self) -> int:
        return self._run.progress.gradient_steps

    @property
    def position(self) -> int:
        """Pretraining updates plus steps so far; it differs at every step boundary."""
        return self._run.progress.position

    @property
    def total_timesteps(self) -> int:
        return self._run.config.total_timesteps

    @property
    def planned_end(self) -> int:
        """The step at which the run ends without early stopping, also if `max_updates` ends it."""
        return self._run.planned_end

    @property
    def is_pretraining(self) -> bool:
        """Whether the run is pretraining, before its first environment step."""
        return self.global_step == 0 < self.pretraining_updates

    @property
    def ends_pretraining(self) -> bool:
        """Whether the last pretraining update was just made."""
        return self.is_pretraining and self.gradient_steps == self.pretraining_updates

    @property
    def steps_of_phase(self) -> int:
        """The counter that intervals use: updates in pretraining, steps afterwards."""
        return self.gradient_steps if self.is_pretraining else self.global_step

    @property
    def should_stop(self) -> bool:
        return self._run.progress.should_stop

    @property
    def stop_reason(self) -> str | None:
        return self._run.progress.stop_reason

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal has asked the run to stop; what takes long should then end early."""
        return self._run.is_interrupted

    @property
    def evaluation(self) -> Evaluation | None:
        """The latest evaluation, if there was one."""
        return self._run.evaluation

    @property
    def compiled(self) -> bool:
        """Whether updates run as compiled programs."""
        return self._run.execution.compiled

    @property
    def resume_level(self) -> ResumeLevel:
        """How exactly this run can be continued."""
        return self._run.resume_level

    @property
    def best_return(self) -> float | None:
        """Mean return of the best checkpoint so far, if there is one."""
        return self._run.best_return

    @property
    def policy(self) -> Policy:
        """The policy that is being trained; `predict` returns its current actions."""
        return self._run.policy

    @property
    def env(self) -> Any:
        """The environment with its wrappers, or a list if the run has several.

        None if worker processes have them, and in offline training. Stepping or resetting an
        environment from a callback breaks its current episode.
        """
        return self._run.env

    @property
    def infos(self) -> Sequence[Mapping[str, Any]]:
        """The info of the last step of each environment.

        If an episode has just ended, this is the info of its final step. The infos are empty before
        the first step of this process; in offline training there are none. Worker processes send
        them when this property is read, without the entries that cannot be pickled.
        """
        return self._run.infos()

    @property
    def rewards(self) -> np.ndarray:
        """`(num_envs,)`: rewards of the last step, as the environments returned them.

        This and the other arrays of the last step have no rows before the first step of this
        process, and in offline training.
        """
        return self._last_step().rewards

    @property
    def terminations(self) -> np.ndarray:
        """`(num_envs,)` bool: the episodes that the last step terminated."""
        return self._last_step().terminations

    @property
    def truncations(self) -> np.ndarray:
        """`(num_envs,)` bool: the episodes that the last step truncated."""
        return self._last_step().truncations

    @property
    def actions(self) -> np.ndarray:
        """`(num_envs, ...)`: actions of the last step, in the environment's units."""
        return self._last_step().actions

    @property
    def observations(self) -> Any:
        """`(num_envs, ...)`: observations after the last step, or a dictionary of their arrays.

        If an episode has just ended, this is the first observation of the next one.
        """
        return self._last_step().observations

    @property
    def pauses(self) -> Pauses:
        """How long evaluations and checkpoints of this run took, in this process."""
        return self._run.pauses

    @property
    def last_compile_seconds(self) -> float | None:
        """How long these programs took to compile the last time, also in another run."""
        return self._run.last_compile_seconds

    def train_metrics(self) -> Mapping[str, float]:
        """The latest value of each of the algorithm's metrics; synchronizes with the device."""
        return self._run.train_metrics()

    def rollout_metrics(self) -> Mapping[str, float]:
        """Mean return and length of the last 100 episodes; empty until an episode has ended.

        If the environment provides `info["is_success"]` or `info["success"]`, also their
        `success_rate`.
        """
        return self._run.rollout_metrics()

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary and save a checkpoint.

        The first reason is kept, but any reason replaces an interruption by a signal.
        """
        self._run.request_stop(reason)

    def request_evaluation(self) -> None:
        """Evaluate at the next step boundary."""
        self._run.request_evaluation()

    def request_checkpoint(self, *, best: bool = False) -> None:
        """Save at the next step boundary; `best` also marks it as the best so far."""
        self._run.request_checkpoint(best=best)

    def log(self, name: str, value: Any) -> None:
        """Add a number to the next row of `metrics.jsonl`, and to TensorBoard at the same step.

        A row is written every `log_interval` steps, after each evaluation and at the end. If a name
        is logged several times before that, the last value is kept. Raises `UserError` if the value
        is not a finite number, if the name has characters that TensorBoard would replace, if it has
        more than 200 characters, or if it begins with `eval/`, `health/`, `rollout/`, `time/` or
        `train/`, which this package uses.
        """
        self._run.log(_checked_name(name), _checked_number(name, value))

    def _last_step(self) -> LastStep:
        return self._run.last_step() or _NO_STEP


_NO_STEP = LastStep(
    observations=np.zeros((0, 0), np.float32),
    actions=np.zeros((0, 0), np.float32),
    rewards=np.zeros(0, np.float32),
    terminations=np.zeros(0, np.bool_),
    truncations=np.zeros(0, np.bool_),
)


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"context.log: {name!r} is not a valid name; use letters, digits, `_`, `-` and `.`, "
            "with `/` between groups, as in 'custom/height'"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(
            f"context.log: {name[:40] + '...'!r} has {len(name):,} characters; use at most "
            f"{MAX_NAME_LENGTH}"
        )
    if name in ROW_KEYS:
        raise UserError(f"context.log: every row already has {name!r}; use another name")
    group, _, rest = name.partition("/")
    if rest and group in _OWN_GROUPS:
        raise UserError(
            f"context.log: {name!r}: names that begin with {group}/ are metrics of this package; "
            f"use another group, as in 'custom/{rest}'"
        )
    return name


def _checked_number(name: str, value: Any) -> float:
    try:
        scalar = value.item() if hasattr(value, "item") else value
        number = math.nan if isinstance(scalar, str | bytes) else float(scalar)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"context.log: {name!r} must be one finite number, not {value!r}")
    return number


class Callback:
    """Base class of callbacks. Override the events that you need.

    State that must survive a resume is returned by `state_dict` as plain values.
    """

    def __init__(self, verbose: int = 0) -> None:
        """`verbose` has no effect; Stable-Baselines3's callbacks pass it to their base class."""
        super().__init__()

    def on_train_start(self, context: TrainingContext) -> None:
        """Called before the first step, also in a resumed run."""

    def on_collect_end(self, context: TrainingContext) -> None:
        """Called after each step of the environments."""

    def on_update_end(self, context: TrainingContext) -> None:
        """Called after each block of gradient steps."""

    def on_compile_start(self, context: TrainingContext) -> None:
        """Called before the programs of the run are compiled; not called in an eager run."""

    def on_compile_end(self, context: TrainingContext) -> None:
        """Called when the programs are compiled; not called if a stop ended the compiler."""

    def on_evaluation_start(self, context: TrainingContext) -> None:
        """Called before an evaluation."""

    def on_evaluation_end(self, context: TrainingContext) -> None:
        """Called after an evaluation; the result is `context.evaluation`."""

    def on_train_end(self, context: TrainingContext) -> None:
        """Called after the final checkpoint and evaluation."""

    def close(self) -> None:
        """Called when the run ends for any reason, including an error."""

    def for_seed(self, seed: int) -> Callback:
        """Return the callback for one of several seeds that are trained together.

        The default is a deep copy, so that each seed has its own state. A callback that watches all
        seeds can return itself.
        """
        return copy.deepcopy(self)

    def state_dict(self) -> Json:
        return {}

    def load_state_dict(self, state: Json) -> None:
        """Restore what `state_dict` returned."""


def as_callbacks(given: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return a list of callbacks; raise `ConfigError` for anything else."""
    if given is None:
        return []
    callbacks = list(given) if isinstance(given, Iterable) else [given]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks: {callback!r} is not a Callback; derive a class from "
                "rl_training.Callback and override the events you need, for example\n"
                "  class ShowStep(Callback):\n"
                "      def on_update_end(self, context):\n"
                "          print(context.global_step)"
            )
        _check_events(type(callback))
    return callbacks


_EVENTS = [name for name in vars(Callback) if name.startswith("on_")]
_OTHER_EVENTS = {
    "on_rollout_end": "on_collect_end",
    "on_rollout_start": "on_update_end",
    "on_step": "on_collect_end",
    "on_training_end": "on_train_end",
    "on_training_start": "on_train_start",
}
"""Events of Stable-Baselines3, also with a leading underscore, and those to use instead"""


def _check_events(kind: type[Callback]) -> None:
    """Raise `ConfigError` for a method that looks like an event but would never be called."""
    for name in dir(kind):
        if name in _EVENTS:
            continue
        if ours := _OTHER_EVENTS.get(name.removeprefix("_")):
            raise ConfigError(
                f"callbacks: {kind.__name__}.{name} is an event of Stable-Baselines3, which is "
                f"never called here; use {ours}(self, context)"
            )
        close = difflib.get_close_matches(name, _EVENTS, n=1, cutoff=0.77)
        if close and name.startswith("on_"):
            raise ConfigError(
                f"callbacks: {kind.__name__}.{name} is not an event; did you mean {close[0]}? "
                f"The events are {', '.join(_EVENTS)}"
            )


@dataclass
class Cadence:
    """Due every `interval` steps, even if the step counter advances unevenly."""

    interval: int
    last: int = 0

    def crossed(self, step: int) -> bool:
        """Whether a multiple of the interval was passed since the last call; never for 0."""
        if self.interval == 0 or step // self.interval == self.last // self.interval:
            return False
        self.last = step
        return True


class PeriodicCallback(Callback):
    """A callback that fires every `interval` steps, or every `interval` updates offline.

    Periodic callbacks always fire when pretraining ends; the steps after it are counted from 0.
    """

    def __init__(self, interval: int) -> None:
        self._cadence = Cadence(interval)

    def on_train_start(self, context: TrainingContext) -> None:
        if context.position == 0:
            self._cadence.last = 0  # the same object may have been used in another run

    def on_collect_end(self, context: TrainingContext) -> None:
        self._check(context)

    def on_update_end(self, context: TrainingContext) -> None:
        self._check(context)

    def state_dict(self) -> Json:
        return {"last": self._cadence.last}

    def load_state_dict(self, state: Json) -> None:
        self._cadence.last = int(state["last"])

    def due(self, context: TrainingContext) -> None:
        """Called when the interval has passed."""
        raise NotImplementedError

    def _check(self, context: TrainingContext) -> None:
        due = self._cadence.crossed(context.steps_of_phase)
        if context.ends_pretraining:
            due = self._cadence.interval > 0
            self._cadence.last = 0
        if due:
            self.due(context)

    def next_due(self, context: TrainingContext) -> float:
        """The earliest position at which this callback can be due."""
        interval = self._cadence.interval
        if interval == 0:
            return math.inf
        ahead = interval - context.steps_of_phase % interval
        if context.is_pretraining:
            ahead = min(ahead, context.pretraining_updates - context.position)
        return context.position + ahead
