"""The one training loop. It counts, and asks its parts to collect and update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from rl_training.config import TrainConfig
from rl_training.errors import EnvironmentFault, TrainingFault
from rl_training.runtime.collector import Collector
from rl_training.runtime.member import Member
from rl_training.runtime.schedules import UpdateSchedule, pretraining_updates
from rl_training.runtime.team import Team


class Engine:
    """Trains one seed, or several in step. Three regimes are this loop: no collector is offline,
    and where there is recorded data beside one, collection may be put off by pretraining.

    With `overlap`, updates are launched while the actions of a step are being computed and its
    environments run beside them: an update then learns from all transitions but the newest one of
    each environment, which its successor sees.
    """

    def __init__(
        self,
        config: TrainConfig,
        members: Sequence[Member],
        collector: Collector | None,
        *,
        schedule_timesteps: int | None = None,
        overlap: bool = False,
    ) -> None:
        """`schedule_timesteps` is when schedules end: an extended run keeps its first total."""
        self.config, self.members = config, list(members)
        self.collector = collector
        self._schedule_timesteps = schedule_timesteps or config.total_timesteps
        self._pretraining_updates = pretraining_updates(config)
        self._schedule, self._has_data = UpdateSchedule.of(config), False
        self._overlap = overlap

    def run(self, finished: Callable[[Member], None] = lambda member: None) -> None:
        """Train every member until something ends it; `finished` is told of each that is done.

        A member's fault ends that member; it is raised once the others have finished.
        """
        for member in self.members:
            _attempt(member, member.start)
        training = self._finish_stopped(self.members, finished)
        while training:
            self._advance(training)
            self._at_step_boundary(training)
            training = self._finish_stopped(training, finished)
        for member in self.members:
            if member.fault is not None:
                raise member.fault

    def request_stop(self, reason: str) -> None:
        for member in self.members:
            member.request_stop(reason)

    def _at_step_boundary(self, training: list[Member]) -> None:
        saved = False
        for member in training:
            if member.fault is None:
                _attempt(member, member.at_step_boundary)
                saved |= member.saved_at == member.progress.position
        if saved and len(training) > 1:
            # All or none, so that after a crash they can go on from the same step.
            for member in training:
                if member.fault is None:
                    _attempt(member, member.save)

    def _finish_stopped(
        self, training: list[Member], finished: Callable[[Member], None]
    ) -> list[Member]:
        """End the members that are to stop; those that go on."""
        if not any(member.progress.should_stop or member.fault for member in training):
            return training
        going_on = []
        for member in training:
            if member.fault is None and not member.progress.should_stop:
                going_on.append(member)
                continue
            if self.collector is not None:
                self.collector.retire(member.index)
            if member.fault is None:
                _attempt(member, member.finish)
            if member.fault is None:
                finished(member)
            elif len(self.members) > 1:
                warnings.warn(
                    f"seed {member.config.seed} has failed, the others go on: {member.fault}",
                    stacklevel=2,
                )
        return going_on

    def _advance(self, training: list[Member]) -> None:
        """From one step boundary to the next; all members stand at the same one."""
        progress = training[0].progress
        step = progress.global_step
        if progress.pretrain_updates < self._pretraining_updates:
            self._pretrain(training, progress.pretrain_updates)
            self._tell_of_updates(training, 1)
            return
        if self.collector is None:
            self._count_steps(training, 1)
            self._tell_of_updates(training, self._update(training, step + 1))
            return
        after = step + self.collector.num_envs
        self.collector.begin(step, min(1.0, step / self._schedule_timesteps))
        if self._overlap:
            updates = self._update(training, after)
            self._finish_collecting(training, step)
        else:
            self._finish_collecting(training, step)
            updates = self._update(training, after)
        self._tell_of_updates(training, updates)

    def _finish_collecting(self, training: list[Member], step: int) -> None:
        assert self.collector is not None
        faults = self.collector.finish(step)
        self._count_steps(training, self.collector.num_envs)
        for member in training:
            member.fault = faults.get(member.index)
            if member.fault is None:
                member.after_collecting()

    def _update(self, training: list[Member], step: int) -> int:
        """Make every update that `step` steps call for, so that the ratio is exact; how many."""
        progress = training[0].progress
        due = self._schedule.blocks_due(step) - progress.update_blocks
        if due <= 0 or not self._can_learn(training):
            return 0
        updates = due * self._schedule.updates_per_block
        if self.config.max_updates is not None:
            updates = min(updates, self.config.max_updates - progress.gradient_steps)
        for team in _teams(training):
            team.learner.update(progress.gradient_steps - progress.pretrain_updates, updates)
        for member in training:
            member.progress.update_blocks += due
            member.progress.gradient_steps += updates
        return updates

    def _can_learn(self, training: list[Member]) -> bool:
        # Rows are overwritten, but never taken away: who has data keeps having some.
        self._has_data = self._has_data or all(member.has_data() for member in training)
        return self._has_data

    def _pretrain(self, training: list[Member], already_made: int) -> None:
        """One update on recorded data alone."""
        for team in _teams(training):
            team.learner.update(already_made, source=team.prior_data)
        for member in training:
            member.progress.pretrain_updates += 1
            member.progress.gradient_steps += 1

    def _count_steps(self, training: list[Member], steps: int) -> None:
        for member in training:
            member.progress.global_step += steps

    def _tell_of_updates(self, training: list[Member], updates: int) -> None:
        if updates:
            for member in training:
                if member.fault is None:
                    member.after_updating()


def _teams(training: list[Member]) -> Iterable[Team]:
    return {id(member.team): member.team for member in training}.values()


def _attempt(member: Member, action: Callable[[], None]) -> None:
    """What goes wrong with one member must not end the others."""
    try:
        action()
    except (EnvironmentFault, TrainingFault, OSError) as fault:
        member.fault = fault
