"""The run of one seed: its progress, its callbacks and what they request."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from rl_training.algorithms.hyperparameters import OnlineHyperparameters
from rl_training.callbacks import (
    Callback,
    LastStep,
    Pauses,
    PeriodicCallback,
    Progress,
    Stopwatch,
    TrainingContext,
)
from rl_training.checkpoints.format import MAX_STATE_BYTES, MAX_STATE_VALUES, count_values
from rl_training.config import TrainConfig
from rl_training.data.mixture import Mixture
from rl_training.envs.snapshots.codec import decode_plain, encode_plain
from rl_training.envs.wrapper_statistics import first_not_finite
from rl_training.errors import INTERRUPTED, TrainingError, warn_user
from rl_training.evaluation.evaluator import (
    EpisodeRecorder,
    Evaluation,
    Evaluator,
    policy_health,
)
from rl_training.execution.compile_cache import last_compile_seconds, remember_compile_seconds
from rl_training.execution.execution import Execution
from rl_training.execution.learner import SharedLearner
from rl_training.execution.policy import Policy
from rl_training.execution.random_streams import Stream, stream_seed
from rl_training.training.collector import CollectorContract
from rl_training.types import Json, ResumeLevel

DOUBLE_PRECISION = "normalize_observations: true computes in double precision and may help"

MAX_CALLBACK_BYTES, MAX_CALLBACK_VALUES = MAX_STATE_BYTES // 2, MAX_STATE_VALUES // 2
"""Largest state of all callbacks; the rest of `state.json` is for the environments"""

Listener = Callable[[TrainingContext], None]


class Saver(Protocol):
    """Writes checkpoints."""

    def save(self, run: SeedRun, *, best: bool) -> bool:
        """Save the current state of the run, unless this step is already saved.

        Returns False if that failed and the run can continue without it.
        """
        ...

    def best_return(self) -> float | None:
        """Mean evaluation return of the best checkpoint, if there is one."""
        ...

    def describe_loss(self, level: ResumeLevel) -> None:
        """State this level in `metadata.json` and in later checkpoints, after a lost episode."""
        ...

    @property
    def latest(self) -> Path | None:
        """The latest checkpoint that this process wrote or started from."""
        ...


class _Event:
    """Dispatches one event to the callbacks that handle it.

    The event occurs at every step of every seed, so callbacks that do not override it are left out
    and periodic callbacks are skipped until they can be due.
    """

    def __init__(self, name: str, callbacks: Sequence[Callback]) -> None:
        handlers = [callback for callback in callbacks if _overrides(callback, name, Callback)]
        self._periodic = [
            callback
            for callback in handlers
            if isinstance(callback, PeriodicCallback)
            and not _overrides(callback, name, PeriodicCallback)
        ]
        self._all: list[Listener] = [getattr(callback, name) for callback in handlers]
        self._at_every_step: list[Listener] = [
            getattr(callback, name) for callback in handlers if callback not in self._periodic
        ]
        self._next_due = 0.0

    def dispatch(self, context: TrainingContext, position: int) -> None:
        if position < self._next_due:
            for listener in self._at_every_step:
                listener(context)
            return
        for listener in self._all:
            listener(context)
        due = [callback.next_due(context) for callback in self._periodic]
        self._next_due = min(due, default=math.inf)


def _check_sizes(states: Mapping[str, bytes]) -> None:
    """Raise an error that names the largest state if all of them are too large to be saved.

    It is an `OSError`, as if the disk were full: the state may become smaller, so training
    continues.
    """
    together = b"".join(states.values())
    if len(together) <= MAX_CALLBACK_BYTES and count_values(together) <= MAX_CALLBACK_VALUES:
        return
    name, largest = max(states.items(), key=lambda item: len(item[1]))
    raise OSError(
        f"callbacks: the state_dict of {name} is too large ({len(largest):,} bytes and "
        f"{count_values(largest):,} values; all callbacks together may have "
        f"{MAX_CALLBACK_BYTES:,} bytes and {MAX_CALLBACK_VALUES:,} values); keep less in it, or "
        "write it to a file of your own"
    )


def _overrides(callback: Callback, name: str, base: type[Callback]) -> bool:
    return getattr(type(callback), name) is not getattr(base, name)


class SeedRun:
    """Trains one seed, alone or together with others; callbacks cannot tell the difference."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        seed_index: int,
        run_dir: Path,
        policy: Policy,
        shared: SharedLearner,
        collector: CollectorContract | None,
        evaluator: Evaluator | None,
        saver: Saver,
        log: Callable[[str, float], None],
        planned_end: int,
        callbacks: Sequence[Callback] = (),
        resume_level: ResumeLevel = ResumeLevel.BIT_EXACT,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """`seed_index` is the index of this seed among the seeds that are trained together.

        `log` adds a value to the next row of the run's metrics. `planned_end` is the step at which
        the run ends without early stopping.
        """
        self.config, self.seed_index, self.run_dir = config, seed_index, run_dir
        self.policy, self.shared, self.collector = policy, shared, collector
        self.evaluator, self.saver, self.resume_level = evaluator, saver, resume_level
        self._has_lost_episodes = False
        self.callbacks, self.log, self.planned_end = list(callbacks), log, planned_end
        self.progress, self.pauses = Progress(), Pauses()
        self._stopwatch = stopwatch or Stopwatch()
        self.evaluation: Evaluation | None = None
        self.error: Exception | None = None
        self._context = TrainingContext(self)
        self.tried_to_save_at: int | None = None
        self.saved_at: int | None = None
        """Position of the latest save; differs from the line above if that save failed"""
        self._compiling_since = 0.0
        self._rows_to_refill = 0
        self._metrics_were_read = self._health_failed = False
        self._interrupted = False
        self._save_requested = False
        self._best_requested = False
        self._stop_request: str | None = None
        self._on_collect = _Event("on_collect_end", self.callbacks)
        self._on_update = _Event("on_update_end", self.callbacks)

    def start(self) -> None:
        if self.progress.position == 0:
            self.save()  # so that the run can be resumed from the start
        elif (name := self.shared.learner.first_not_finite(self.seed_index)) is not None:
            raise TrainingError(  # earlier versions did not check
                f"{name} is not finite in the checkpoint of step {self.progress.global_step:,}; "
                "resume an earlier checkpoint by its path, or start a new run"
            )
        self._decide_whether_to_stop()
        for callback in self.callbacks:
            callback.on_train_start(self._context)
        if self.progress.evaluation_due and not self.progress.updates_left:
            self.at_step_boundary()

    @property
    def execution(self) -> Execution:
        return self.shared.learner.execution

    def has_data(self) -> bool:
        """Whether an update has data to sample."""
        replay, source = self.shared.replay, self.shared.learner.source
        if isinstance(source, Mixture) and not source.needs_online_rows(self._batch_size):
            return True
        return replay is None or replay.rows_added(self.seed_index) > 0

    def refill_replay(self) -> None:
        """Collect transitions before the next update, because the checkpoint contains none."""
        chosen, progress = self.config.hyperparameters, self.progress
        assert isinstance(chosen, OnlineHyperparameters)
        assert chosen.learning_starts != "auto", "resolved for the run"
        self._rows_to_refill = min(chosen.learning_starts, progress.global_step)
        progress.updates_left = 0  # of a block whose transitions are lost
        if progress.global_step:
            warn_user(
                "the checkpoint has no replay buffer (checkpoint_replay: none); updates continue "
                f"after {self._rows_to_refill:,} new transitions"
            )

    @property
    def is_refilling(self) -> bool:
        """Whether the replay buffer still lacks transitions that the checkpoint did not contain."""
        replay = self.shared.replay
        return replay is not None and replay.rows_added(self.seed_index) < self._rows_to_refill

    def after_collecting(self) -> None:
        self.notice_losses()
        self._on_collect.dispatch(self._context, self.progress.position)

    def notice_losses(self) -> None:
        """Lower the resume level if an environment's state was lost with its worker process."""
        reason = None if self.collector is None else self.collector.why_lost(self.seed_index)
        if reason is None or self._has_lost_episodes:
            return
        self._has_lost_episodes, before = True, self.resume_level
        self.resume_level = level = ResumeLevel.STATISTICAL
        if before is not level:
            warn_user(f"from now on, resuming this run is {level} instead of {before}: {reason}")
        self.saver.describe_loss(level)

    def after_updating(self) -> None:
        self._on_update.dispatch(self._context, self.progress.position)

    def before_compiling(self) -> None:
        """Call this before the programs of the run are compiled."""
        self._compiling_since = time.perf_counter()
        for callback in self.callbacks:
            callback.on_compile_start(self._context)

    def after_compiling(self) -> None:
        """Call this when all programs of the run are compiled."""
        seconds = time.perf_counter() - self._compiling_since
        remember_compile_seconds(self._programs, self.execution.device, seconds)
        for callback in self.callbacks:
            callback.on_compile_end(self._context)

    @property
    def last_compile_seconds(self) -> float | None:
        return last_compile_seconds(self._programs, self.execution.device)

    def at_step_boundary(self) -> None:
        """Carry out what was requested since the last boundary: check, evaluate, stop, save."""
        if self._metrics_were_read or self.progress.evaluation_due:
            self.check_finite()
        due = self.progress.evaluation_due and not self.progress.updates_left
        if due and not self._interrupted:
            self._evaluate()
        self._decide_whether_to_stop()
        # The best policy is saved exactly as it was evaluated, even in the middle of an episode.
        save_now = self._best_requested or (self._save_requested and self._may_save())
        if self.progress.should_stop or save_now:
            self._save_requested_checkpoint()

    def save(self) -> None:
        """Save the current state, unless this step is already saved."""
        self._write_checkpoint(best=False)

    def check_finite(self, *, recompute: bool = False) -> None:
        """Raise `TrainingError` if a metric or a part of the learned state is not finite.

        Called after a row was logged, and before every evaluation and save. `recompute` also finds
        what callbacks have changed since the last update.
        """
        self._metrics_were_read = False
        name = self.shared.learner.first_not_finite(self.seed_index, recompute=recompute)
        if name is not None:
            raise TrainingError.diverged(f"{name} is not finite {self._when()}", self.saver.latest)

    def finish(self) -> None:
        """Save, then evaluate the final policy unless it was just evaluated or interrupted.

        The checkpoint is written first, so that a run that is extended later does not depend on
        this evaluation.
        """
        self.save()
        if self.lacks_evaluation and not self._interrupted:
            self._evaluate()
            if self._best_requested:
                self._save_requested_checkpoint()
        for callback in self.callbacks:
            callback.on_train_end(self._context)

    @property
    def lacks_evaluation(self) -> bool:
        """Whether the current policy could be evaluated, but was not."""
        return self.evaluator is not None and self.progress.evaluated_at != self.progress.position

    def describe_wrappers(self) -> None:
        """Copy the statistics of the training environment's wrappers to the policy."""
        if self.collector is not None:
            found = self.collector.wrapper_statistics(self.seed_index)
            if found and (name := first_not_finite(found)) is not None:
                problem = f"the {name} is not finite {self._when()}"
                raise TrainingError.diverged(problem, self.saver.latest, DOUBLE_PRECISION)
            self.policy.wrapper_statistics = found

    def return_wrapper_statistics(self) -> None:
        """Copy the policy's wrapper statistics to the training environments of a resumed run.

        A bit-exact snapshot already contains them.
        """
        learned = self.policy.wrapper_statistics
        if learned and self.collector and self.resume_level is not ResumeLevel.BIT_EXACT:
            self.collector.give_wrapper_statistics(learned, self.seed_index)

    @property
    def best_return(self) -> float | None:
        return self.saver.best_return()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted

    def request_stop(self, reason: str) -> None:
        if self._stop_request in (None, INTERRUPTED):
            # Any other reason outranks an interruption: the run would have stopped without it.
            self._stop_request = reason
        self._interrupted |= reason == INTERRUPTED

    def request_evaluation(self) -> None:
        self.progress.evaluation_due = True

    def request_checkpoint(self, *, best: bool = False) -> None:
        self._save_requested = True
        self._best_requested |= best

    def train_metrics(self) -> dict[str, float]:
        self._metrics_were_read = True
        return {**self.shared.learner.metrics(self.seed_index), **self._mixture_metrics()}

    def rollout_metrics(self) -> dict[str, float]:
        return {} if self.collector is None else self.collector.metrics(self.seed_index)

    def last_step(self) -> LastStep | None:
        return None if self.collector is None else self.collector.last_step(self.seed_index)

    def infos(self) -> Sequence[Mapping[str, Any]]:
        return () if self.collector is None else self.collector.infos(self.seed_index)

    @property
    def env(self) -> Any:
        return None if self.collector is None else self.collector.environment_of(self.seed_index)

    def callback_states(self) -> Json:
        """Return the state of each callback; raise `OSError` if they are too large to be saved."""
        states = {
            name: encode_plain(callback.state_dict(), f"callbacks: the state_dict of {name}")
            for name, callback in self._named_callbacks()
        }
        _check_sizes({name: json.dumps(state).encode() for name, state in states.items()})
        return states

    def load_callback_states(self, states: Json) -> None:
        """Restore the saved state of each callback; new callbacks keep their initial state."""
        for name, callback in self._named_callbacks():
            if name in states:
                callback.load_state_dict(decode_plain(states[name]))

    @property
    def _programs(self) -> str:
        """What the compiled programs depend on."""
        algorithm, width = self.policy.algorithm, self.shared.learner.population.width
        sizes = (algorithm.obs_dim, algorithm.action_dim, self.config.num_envs, width)
        source = "recorded data" if self._context.is_pretraining else self.config.resolved_regime
        return f"{self.config.algo} {self.config.algo_kwargs!r} {sizes} {source} {self.execution}"

    @property
    def _batch_size(self) -> int:
        return self.config.algo_kwargs.batch_size

    def _mixture_metrics(self) -> dict[str, float]:
        """Composition of the latest batch and sizes of its sources; empty without recorded data."""
        mixture, replay, progress = self.shared.learner.source, self.shared.replay, self.progress
        if not isinstance(mixture, Mixture) or replay is None:
            return {}
        pretraining = 0 < progress.gradient_steps == progress.pretrain_updates
        size = self._batch_size
        offline = size if pretraining else mixture.offline_rows(size)
        return {
            "offline_batch_size": float(offline),
            "online_batch_size": float(size - offline),
            "pretrain_updates_done": float(progress.pretrain_updates),
            "offline_dataset_size": float(len(mixture.offline)),
            "online_buffer_size": float(min(replay.rows_added(self.seed_index), replay.capacity)),
        }

    def _decide_whether_to_stop(self) -> None:
        progress, updates = self.progress, self.config.max_updates
        if progress.global_step >= self.config.total_timesteps and not progress.updates_left:
            self.request_stop("total_timesteps")
        if updates is not None and progress.gradient_steps >= updates:
            self.request_stop("max_updates")
        if self._stop_request is not None:
            progress.should_stop, progress.stop_reason = True, self._stop_request

    def _may_save(self) -> bool:
        """Episode-exact runs are saved only at episode boundaries."""
        if self.resume_level is not ResumeLevel.EPISODE_EXACT or self.collector is None:
            return True
        return self.collector.at_episode_boundary(self.seed_index)

    def _evaluate(self) -> None:
        """Evaluate the policy; an interruption ends it without a result, so it stays due."""
        if self.evaluator is None:
            self.progress.evaluation_due = False
            return
        with self._paused("evaluation"):
            for callback in self.callbacks:
                callback.on_evaluation_start(self._context)
            self.describe_wrappers()
            recorder = EpisodeRecorder() if self.config.health else None
            evaluation = self.evaluator.evaluate(self.policy, lambda: self._interrupted, recorder)
            if evaluation is None:
                return
            if recorder is not None:
                self._stopwatch.stop("evaluation")
                evaluation = dataclasses.replace(evaluation, health=self._health(recorder))
                self._stopwatch.stop("health")
            self.evaluation, self.progress.evaluation_due = evaluation, False
            self.progress.evaluated_at = self.progress.position
            for callback in self.callbacks:
                callback.on_evaluation_end(self._context)

    def _health(self, recorder: EpisodeRecorder) -> dict[str, float]:
        """Figures of the run's health; a failure to compute them does not stop the run."""
        seed = stream_seed(self.config.seed, Stream.HEALTH) + self.progress.position
        generator = torch.Generator(self.execution.device).manual_seed(seed % 2**63)
        learner, source = self.shared.learner, None
        if self._context.is_pretraining and self.progress.gradient_steps:
            source = self.shared.prior_data
        elif self.progress.gradient_steps and self.has_data() and learner.rollouts is None:
            source = learner.source  # a rollout is partly replaced by the next one
        try:
            found = policy_health(self.policy, recorder, generator)
            norms = learner.norms(self.seed_index, generator, source)
            return found | {name: float(value) for name, value in norms.items()}
        except Exception as error:  # an algorithm of another package may have other networks
            if not self._health_failed:
                warn_user(f"the figures of the run's health cannot be computed: {error!r}")
            self._health_failed = True
            return {}

    def _save_requested_checkpoint(self) -> None:
        self._write_checkpoint(best=self._best_requested)
        self._save_requested = self._best_requested = False

    def _when(self) -> str:
        step, updates = self.progress.global_step, self.progress.gradient_steps
        return f"at step {step:,}, after {updates:,} updates"

    def _write_checkpoint(self, *, best: bool) -> None:
        self.check_finite(recompute=True)
        already_saved = self.saved_at == self.progress.position
        self.tried_to_save_at = self.progress.position
        with contextlib.nullcontext() if already_saved else self._paused("checkpoint"):
            if self.saver.save(self, best=best):
                self.saved_at = self.progress.position

    @contextlib.contextmanager
    def _paused(self, kind: Literal["evaluation", "checkpoint"]) -> Iterator[None]:
        """Measure how long this interrupts the steps."""
        self._stopwatch.start()
        try:
            with self.pauses.measure(kind):
                yield
        finally:
            self._stopwatch.stop("saving" if kind == "checkpoint" else "evaluation")

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        named = []
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] += 1
            named.append((f"{name}#{seen[name]}" if seen[name] > 1 else name, callback))
        return named
