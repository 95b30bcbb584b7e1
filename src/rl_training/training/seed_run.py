"""The run of one seed: its progress, its callbacks and what they request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_training.callbacks import Callback, PeriodicCallback, Progress, TrainingContext
from rl_training.config import TrainConfig
from rl_training.data.mixture import Mixture
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.source import Source
from rl_training.evaluation.evaluator import Evaluation, Evaluator
from rl_training.execution.execution import Execution
from rl_training.execution.explorer import Explorer
from rl_training.execution.learner import Learner
from rl_training.execution.policy import Policy
from rl_training.training.collector import Collector
from rl_training.types import Json, ResumeLevel


@dataclass(frozen=True)
class SharedLearner:
    """What a program's seeds share: all seeds of a run on a GPU, a single seed on a CPU.

    A GPU computes many small networks in hardly more time than one. A CPU does not: there, seeds
    take turns, and each one's bits are those of a run of its own.
    """

    learner: Learner
    explorer: Explorer | None = None
    """None, like the buffer, where nothing is collected"""
    replay: ReplayBuffer | None = None
    prior_data: Source | None = None
    """Recorded data alone, to pretrain on, where there is live experience too"""
    first_seed: int = 0
    """The index, among the seeds of the run, of the first one that is trained here"""

    @property
    def num_seeds(self) -> int:
        return len(self.learner.algorithms)


Listener = Callable[[TrainingContext], None]

INTERRUPTED = "interrupted"
"""The reason of a stop that must be quick, such as after a signal"""

FINISHED = ("total_timesteps", "max_updates", "early_stopping", "target_value")
"""Reasons after which a run goes on only if its total is raised; after any other it just does"""


class Saver(Protocol):
    """What keeps checkpoints."""

    def save(self, run: SeedRun, *, best: bool) -> None:
        """Save the run's present state, unless this step is saved already."""
        ...

    def best_return(self) -> float | None:
        """What the checkpoint that was last saved as the best one reached."""
        ...


class _Event:
    """Something that comes at every step of every seed, told to those whom it concerns.

    Not to a callback that does nothing then, nor to a periodic one before its time.
    """

    def __init__(self, name: str, callbacks: Sequence[Callback]) -> None:
        concerned = [one for one in callbacks if _overrides(one, name, Callback)]
        self._periodic = [
            one
            for one in concerned
            if isinstance(one, PeriodicCallback) and not _overrides(one, name, PeriodicCallback)
        ]
        self._all: list[Listener] = [getattr(one, name) for one in concerned]
        self._at_every_step: list[Listener] = [
            getattr(one, name) for one in concerned if one not in self._periodic
        ]
        self._quiet_until = 0.0

    def tell(self, context: TrainingContext, position: int) -> None:
        if position < self._quiet_until:
            for listener in self._at_every_step:
                listener(context)
            return
        for listener in self._all:
            listener(context)
        occasions = [callback.next_occasion(context) for callback in self._periodic]
        self._quiet_until = min(occasions, default=math.inf)


def _overrides(callback: Callback, name: str, base: type[Callback]) -> bool:
    return getattr(type(callback), name) is not getattr(base, name)


class SeedRun:
    """A seed in training, alone or in a population; to its callbacks there is no difference."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        seed_index: int,
        run_dir: Path,
        policy: Policy,
        shared: SharedLearner,
        collector: Collector | None,
        evaluator: Evaluator | None,
        saver: Saver,
        callbacks: Sequence[Callback] = (),
        resume_level: ResumeLevel = ResumeLevel.BIT_EXACT,
    ) -> None:
        """`seed_index` counts the seeds that are trained together, from 0."""
        self.config, self.seed_index, self.run_dir = config, seed_index, run_dir
        self.policy, self.shared, self.collector = policy, shared, collector
        self.evaluator, self.saver, self.resume_level = evaluator, saver, resume_level
        self.callbacks = list(callbacks)
        self.progress = Progress()
        self.evaluation: Evaluation | None = None
        self.error: Exception | None = None
        self._context = TrainingContext(self)
        self.saved_at: int | None = None
        self._interrupted = False
        self._save_requested = False
        self._best_requested = False
        self._stop_request: str | None = None
        self._on_collect = _Event("on_collect_end", self.callbacks)
        self._on_update = _Event("on_update_end", self.callbacks)

    def start(self) -> None:
        if self.progress.position == 0:
            self.save()  # so that a run can be resumed from its first moment
        self._decide_whether_to_stop()
        for callback in self.callbacks:
            callback.on_train_start(self._context)
        if self.progress.evaluation_due:
            self.at_step_boundary()

    @property
    def position(self) -> int:
        """The index of this seed among those of its learner and replay buffer."""
        return self.seed_index - self.shared.first_seed

    @property
    def execution(self) -> Execution:
        return self.shared.learner.execution

    def has_data(self) -> bool:
        """Whether there is anything to learn from."""
        replay, source = self.shared.replay, self.shared.learner.source
        if isinstance(source, Mixture) and not source.needs_online_rows(self._batch_size):
            return True
        return replay is None or replay.rows_added(self.position) > 0

    def after_collecting(self) -> None:
        self._on_collect.tell(self._context, self.progress.position)

    def after_updating(self) -> None:
        self._on_update.tell(self._context, self.progress.position)

    def at_step_boundary(self) -> None:
        """Honour what was asked for since the last one: evaluate, then stop, then save."""
        if self.progress.evaluation_due and not self._interrupted:
            self._evaluate()
        self._decide_whether_to_stop()
        # The best policy is saved as it was evaluated, wherever its episode stands.
        wanted = self._best_requested or (self._save_requested and self._may_save())
        if self.progress.should_stop or wanted:
            self._save_as_asked()

    def save(self) -> None:
        """Save the present state, unless this step is saved already."""
        self.saver.save(self, best=False)
        self.saved_at = self.progress.position

    def finish(self) -> None:
        """Evaluate the final policy, unless that was just done or the run was interrupted.

        The final checkpoint is written before: what a run that goes on later does must not depend
        on its having paused here.
        """
        self.save()
        progress = self.progress
        done = progress.evaluated_at == progress.position
        if not done and not self._interrupted:
            self._evaluate()
            if self._best_requested:
                self._save_as_asked()
        for callback in self.callbacks:
            callback.on_train_end(self._context)

    def describe_wrappers(self) -> None:
        """Give the policy what the training environment's wrappers have learned by now."""
        if self.collector is not None:
            self.policy.wrapper_statistics = self.collector.wrapper_statistics(self.seed_index)

    def return_wrapper_statistics(self) -> None:
        """Give the training environments what the policy's wrappers had learned.

        A bit-exact snapshot holds it already; other environments start anew when a run is resumed.
        """
        learned = self.policy.wrapper_statistics
        if learned and self.collector and self.resume_level is not ResumeLevel.BIT_EXACT:
            self.collector.give_wrapper_statistics(learned, self.seed_index)

    @property
    def best_return(self) -> float | None:
        return self.saver.best_return()

    def request_stop(self, reason: str) -> None:
        self._stop_request = self._stop_request or reason
        self._interrupted |= reason == INTERRUPTED

    def request_evaluation(self) -> None:
        self.progress.evaluation_due = True

    def request_checkpoint(self, *, best: bool = False) -> None:
        self._save_requested = True
        self._best_requested |= best

    def train_metrics(self) -> dict[str, float]:
        return {**self.shared.learner.metrics(self.position), **self._mixture_metrics()}

    def rollout_metrics(self) -> dict[str, float]:
        return {} if self.collector is None else self.collector.metrics(self.seed_index)

    def callback_states(self) -> Json:
        return {name: callback.state_dict() for name, callback in self._named_callbacks()}

    def load_callback_states(self, states: Json) -> None:
        """Give each callback what it saved; one that is new starts afresh."""
        for name, callback in self._named_callbacks():
            if name in states:
                callback.load_state_dict(states[name])

    @property
    def _batch_size(self) -> int:
        return self.config.algo_kwargs.batch_size

    def _mixture_metrics(self) -> dict[str, float]:
        """What the newest batch was made of, and from how much; empty without recorded data."""
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
            "online_buffer_size": float(min(replay.rows_added(self.position), replay.capacity)),
        }

    def _decide_whether_to_stop(self) -> None:
        progress, updates = self.progress, self.config.max_updates
        if progress.global_step >= self.config.total_timesteps:
            self.request_stop("total_timesteps")
        if updates is not None and progress.gradient_steps >= updates:
            self.request_stop("max_updates")
        if self._stop_request is not None:
            progress.should_stop, progress.stop_reason = True, self._stop_request

    def _may_save(self) -> bool:
        """An environment that cannot be captured is saved where its next episode begins."""
        if self.resume_level is not ResumeLevel.EPISODE_EXACT or self.collector is None:
            return True
        return self.collector.at_episode_boundary(self.seed_index)

    def _evaluate(self) -> None:
        self.progress.evaluation_due = False
        if self.evaluator is None:
            return
        self.describe_wrappers()
        self.evaluation = self.evaluator.evaluate(self.policy)
        self.progress.evaluated_at = self.progress.position
        for callback in self.callbacks:
            callback.on_evaluation_end(self._context)

    def _save_as_asked(self) -> None:
        self.saver.save(self, best=self._best_requested)
        self.saved_at = self.progress.position
        self._save_requested = self._best_requested = False

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        named = []
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] += 1
            named.append((f"{name}#{seen[name]}" if seen[name] > 1 else name, callback))
        return named
