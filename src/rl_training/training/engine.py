"""The training loop. It counts steps and updates, and decides when each is due."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from rl_training.algorithms.hyperparameters import OnlineHyperparameters, RolloutHyperparameters
from rl_training.callbacks import Progress, Stopwatch
from rl_training.config import TrainConfig
from rl_training.envs.vector.step_arrays import steps_per_round
from rl_training.errors import (
    CLEANUP_SECONDS,
    ERRORS_OF_ONE_RUN,
    INTERRUPTED,
    STOP_SIGNALS,
    EnvironmentRuntimeError,
    EnvironmentSetupError,
    TrainingError,
    TrainingInterrupted,
    warn_user,
)
from rl_training.execution.learner import Learner, SharedLearner
from rl_training.training.collector import CollectorContract
from rl_training.training.seed_run import SeedRun
from rl_training.types import TrainResult

Preparation = Callable[[Callable[[], bool]], bool]
"""Compiles a program until the given function returns True; returns whether it was completed"""

UPDATES_PER_TURN = 8
"""Updates of one learner before the next one's turn, if seeds have their own learners"""


@dataclass(frozen=True)
class UpdateSchedule:
    """The ratio of updates to steps. The default, used offline, is one update per step."""

    learning_starts: int = 0
    train_frequency: int = 1
    updates_per_block: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> UpdateSchedule:
        chosen = config.hyperparameters
        if isinstance(chosen, RolloutHyperparameters):
            rows = chosen.rollout_steps * config.num_envs
            return cls(0, rows, chosen.epochs * (rows // chosen.minibatch_size(rows)))
        if config.resolved_regime == "offline" or not isinstance(chosen, OnlineHyperparameters):
            return cls()
        return cls(
            learning_starts(config), chosen.train_frequency, chosen.gradient_updates_per_step
        )

    def blocks_due(self, global_step: int) -> int:
        """Number of update blocks that are due after `global_step` steps."""
        return max(0, global_step - self.learning_starts) // self.train_frequency


def learning_starts(config: TrainConfig) -> int:
    """Environment steps before the first update of a run that collects transitions.

    Their actions are random. Runs that learn from rollouts have no such steps.
    """
    chosen = config.hyperparameters
    if isinstance(chosen, RolloutHyperparameters):
        return 0
    assert isinstance(chosen, OnlineHyperparameters)
    assert chosen.learning_starts != "auto", "resolved for the run"
    return chosen.learning_starts


def steps_at_once(config: TrainConfig) -> int:
    """How much the step counter advances per iteration."""
    if config.resolved_regime == "offline":
        return 1
    return steps_per_round(config.vectorization, config.num_envs)


def planned_updates(config: TrainConfig) -> int:
    """Total gradient steps of a run, which is the horizon of its schedules."""
    rounds = -(-config.total_timesteps // steps_at_once(config))
    schedule = UpdateSchedule.of(config)
    updates = schedule.blocks_due(rounds * steps_at_once(config)) * schedule.updates_per_block
    updates += config.pretraining_updates
    return updates if config.max_updates is None else min(updates, config.max_updates)


class Engine:
    """Trains one seed, or several in lockstep.

    Online, offline and mixed training use the same loop. Offline runs have no collector. Mixed runs
    may pretrain on recorded data before they collect.

    With `overlap`, updates run while actions are computed and environments are stepped. An update
    then cannot sample the newest transition of each environment; the next update can.
    """

    def __init__(
        self,
        config: TrainConfig,
        runs: Sequence[SeedRun],
        collector: CollectorContract | None,
        *,
        schedule_timesteps: int | None = None,
        overlap: bool = False,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """`schedule_timesteps` is the step at which schedules end, by default the total."""
        self.config, self.runs = config, list(runs)
        self.collector = collector
        self._schedule_timesteps = schedule_timesteps or config.total_timesteps
        self._pretraining_updates = config.pretraining_updates
        self._schedule, self._has_data = UpdateSchedule.of(config), False
        self._overlap, self._stopwatch = overlap, stopwatch or Stopwatch()
        self._stop_requested = False
        if collector is not None:
            collector.watch_for_stop(lambda: self._stop_requested)
        self._may_compile = any(run.execution.compiled for run in self.runs)

    def run(self, finished: Callable[[SeedRun], None] = lambda run: None) -> None:
        """Train every run until it stops; `finished` is called with each completed run.

        An error in one run stops that run. It is raised after the others have finished.
        """
        self._stopwatch.begin()
        for run in self.runs:
            _attempt(run, run.start)
        training = self._finish_stopped(self.runs, finished)
        while training:
            if self._may_compile:
                self._compile(training)
            if not self._stop_requested:
                self._advance(training)
            self._at_step_boundary(training)
            training = self._finish_stopped(training, finished)
        for run in self.runs:
            if run.error is not None:
                raise run.error

    def request_stop(self, reason: str) -> None:
        self._stop_requested = True
        for run in self.runs:
            run.request_stop(reason)

    def _at_step_boundary(self, training: list[SeedRun]) -> None:
        saved = False
        for run in training:
            if run.error is None:
                _attempt(run, run.at_step_boundary)
                saved |= run.saved_at == run.progress.position
        if saved and len(training) > 1:
            # Save all runs or none, so that after a crash they resume from the same step. A failed
            # save is not repeated here: it would count as two.
            for run in training:
                if run.error is None and run.tried_to_save_at != run.progress.position:
                    _attempt(run, run.save)

    def _finish_stopped(
        self, training: list[SeedRun], finished: Callable[[SeedRun], None]
    ) -> list[SeedRun]:
        """Finish the runs that must stop and return the others."""
        if not any(run.progress.should_stop or run.error for run in training):
            return training
        still_training = []
        for run in training:
            if run.error is None and not run.progress.should_stop:
                still_training.append(run)
                continue
            if self.collector is not None:
                self.collector.retire(run.seed_index)
            if run.error is None:
                _attempt(run, run.finish)
            if run.error is None:
                finished(run)
            elif len(self.runs) > 1:
                warn_user(f"seed {run.config.seed} failed, the others continue: {run.error}")
        return still_training

    def _compile(self, training: list[SeedRun]) -> None:
        """Compile the programs that the next step needs; a requested stop ends the compiler.

        The first update would compile them too, in the middle of a step, where nothing can be
        saved. Here the run is at a step boundary.
        """
        shared_learners, progress = _shared_learners(training), training[0].progress
        needed = [each for shared in shared_learners for each in self._uncompiled(shared, progress)]
        if not needed:
            return
        for run in training:
            run.before_compiling()
        self._stopwatch.start()
        completed = all(self._run_unless_stopped(prepare) for prepare in needed)
        self._stopwatch.stop("compilation")
        if completed:
            for run in training:
                run.after_compiling()
        self._may_compile = any(shared.needs_compiling() for shared in shared_learners)

    def _run_unless_stopped(self, prepare: Preparation) -> bool:
        """Return whether the preparation was completed; a requested stop ends it."""
        return not self._stop_requested and prepare(lambda: self._stop_requested)

    def _uncompiled(self, shared: SharedLearner, progress: Progress) -> Iterator[Preparation]:
        """The preparations that the next step needs."""
        learner, explorer, step = shared.learner, shared.explorer, progress.global_step
        if progress.pretrain_updates < self._pretraining_updates:
            if learner.needs_compiling(shared.prior_data):
                yield functools.partial(learner.prepare, source=shared.prior_data)
            return
        acts = self.collector is not None and not self.collector.acts_at_random(step)
        if acts and explorer is not None and explorer.needs_compiling():
            yield explorer.prepare
        after = step + (1 if self.collector is None else self.collector.steps_per_round)
        due = self._schedule.blocks_due(after) > progress.update_blocks
        if (due or progress.updates_left) and learner.needs_compiling():
            yield learner.prepare

    def _advance(self, training: list[SeedRun]) -> None:
        """Advance all runs from one step boundary to the next."""
        progress = training[0].progress
        step = progress.global_step
        if progress.pretrain_updates < self._pretraining_updates:
            self._pretrain(training, progress.pretrain_updates)
            self._notify_updates(training, 1)
            return
        if progress.updates_left:
            self._notify_updates(training, self._make_updates(training, progress.updates_left))
            return
        if self.collector is None:
            self._count_steps(training, 1)
            self._notify_updates(training, self._update(training, step + 1))
            return
        after = step + self.collector.steps_per_round
        share = min(1.0, step / self._schedule_timesteps)
        self.collector.begin(step, share, progress.gradient_steps)
        if self._overlap:
            updates = self._update(training, after)
            self._finish_collecting(training, step)
        else:
            self._finish_collecting(training, step)
            updates = self._update(training, after)
        self._notify_updates(training, updates)

    def _finish_collecting(self, training: list[SeedRun], step: int) -> None:
        assert self.collector is not None
        errors = self.collector.finish(step, training[0].progress.gradient_steps)
        self._count_steps(training, self.collector.steps_per_round)
        for run in training:
            error = errors.get(run.seed_index)
            if isinstance(error, TrainingError):
                error = TrainingError.diverged(str(error), run.saver.latest)
            run.error = error
            if run.error is None:
                run.after_collecting()

    def _update(self, training: list[SeedRun], step: int) -> int:
        """Make the updates that are due after `step` steps and return their number."""
        progress = training[0].progress
        due = self._schedule.blocks_due(step) - progress.update_blocks
        if due <= 0:
            return 0
        if any(run.is_refilling for run in training):
            for run in training:  # these updates are left out: made later, they would be too many
                run.progress.update_blocks += due
            return 0
        if not self._can_learn(training):
            return 0
        updates = due * self._schedule.updates_per_block
        if self.config.max_updates is not None:
            updates = min(updates, self.config.max_updates - progress.gradient_steps)
        for run in training:
            run.progress.update_blocks += due
        return self._make_updates(training, updates)

    def _make_updates(self, training: list[SeedRun], updates: int) -> int:
        """Make updates in all runs; a requested stop leaves the rest to a resumed run."""
        learners = [shared.learner for shared in _shared_learners(training)]
        progress = training[0].progress
        first, made = progress.gradient_steps - progress.pretrain_updates, 0
        with self._measured(learners):
            if len(learners) == 1:
                made = learners[0].update(first, updates, stopping=self._must_leave_updates)
            else:  # they take turns, and are left at the same update
                while made < updates and not (made and self._must_leave_updates()):
                    turn = min(UPDATES_PER_TURN, updates - made)
                    for learner in learners:
                        learner.update(first + made, turn)
                    made += turn
        for run in training:
            run.progress.gradient_steps += made
            run.progress.updates_left = updates - made
        return made

    @contextlib.contextmanager
    def _measured(self, learners: Sequence[Learner]) -> Iterator[None]:
        """Measure the time of updates, and how much of it is spent on sampling."""
        self._stopwatch.start()
        yield
        self._stopwatch.stop("update")
        sampling = sum(learner.take_sampling_seconds() for learner in learners)
        self._stopwatch.add("update", -sampling)
        self._stopwatch.add("sampling", sampling)

    def _must_leave_updates(self) -> bool:
        # With overlap, the rest would be made with a transition that this block does not sample.
        return self._stop_requested and not self._overlap

    def _can_learn(self, training: list[SeedRun]) -> bool:
        # Rows are overwritten but never removed, so this stays true.
        self._has_data = self._has_data or all(run.has_data() for run in training)
        return self._has_data

    def _pretrain(self, training: list[SeedRun], already_made: int) -> None:
        """Make one update on recorded data."""
        sharing = list(_shared_learners(training))
        with self._measured([shared.learner for shared in sharing]):
            for shared in sharing:
                shared.learner.update(already_made, source=shared.prior_data)
        for run in training:
            run.progress.pretrain_updates += 1
            run.progress.gradient_steps += 1

    def _count_steps(self, training: list[SeedRun], steps: int) -> None:
        for run in training:
            run.progress.global_step += steps

    def _notify_updates(self, training: list[SeedRun], updates: int) -> None:
        if updates and not training[0].progress.updates_left:
            for run in training:
                if run.error is None:
                    run.after_updating()


def _shared_learners(training: list[SeedRun]) -> Iterable[SharedLearner]:
    return {id(run.shared): run.shared for run in training}.values()


def _attempt(run: SeedRun, action: Callable[[], None]) -> None:
    """Run `action`; an error stops this run, not the others."""
    try:
        action()
    except ERRORS_OF_ONE_RUN as error:
        run.error = error
    except EnvironmentSetupError as error:  # an evaluation makes new environments during the run
        run.error = EnvironmentRuntimeError(str(error))
        run.error.__cause__ = error.__cause__


class StopSignals:
    """The reaction to `STOP_SIGNALS` while runs are prepared, trained and closed.

    Before `save_first`, a signal raises `KeyboardInterrupt`: there is nothing to save. After that,
    the first signal requests a stop with a checkpoint, and the second raises `KeyboardInterrupt`.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.results: list[TrainResult] = []
        """The results of the runs, once they have stopped"""
        self._saves_first = False
        self._engine: Engine | None = None
        self._raised_at = -math.inf
        self._process = os.getpid()

    def save_first(self) -> None:
        """Call this before run folders exist; the next signal waits for `stop`."""
        self._saves_first = True

    def stop(self, engine: Engine) -> None:
        """Let the first signal stop this training loop, also if it was received before."""
        self._engine = engine
        if self.received:
            engine.request_stop(INTERRUPTED)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process that has no reaction of its own
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received.append(number)
        if self._saves_first and len(self.received) == 1:
            if self._engine is not None:
                self._engine.request_stop(INTERRUPTED)
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # such as a closed pipe
                print("stopping, with a checkpoint ...", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._raised_at + CLEANUP_SECONDS:
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt(signal.Signals(number))


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopSignals]:
    """Let SIGINT, SIGTERM and SIGUSR1 stop training; restore the previous reaction afterwards.

    Raises `TrainingInterrupted` at the end if a signal was received and the runs are saved.
    """
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python delivers signals to the main thread only
        return
    previous = {number: signal.signal(number, signals.handle) for number in STOP_SIGNALS}
    try:
        yield signals
    except KeyboardInterrupt as error:
        if isinstance(error, TrainingInterrupted) or not signals.results:
            raise
        raise TrainingInterrupted(
            signals.results, error.args
        ) from None  # while resources were closed
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if signals.received:
        raise TrainingInterrupted(signals.results, signals.received)
