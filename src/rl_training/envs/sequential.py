"""Environments of this process, stepped one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.step_arrays import NO_SEED, StepArrays
from rl_training.envs.vector_member import VectorMember
from rl_training.errors import EnvironmentSetupError

Troubles = dict[int, Exception]
"""What went wrong, by environment: an `EnvironmentFault`, or what the environment itself raised"""


def make_members(factory: EnvironmentFactory, number: int) -> list[VectorMember]:
    """As many environments, which must not be the same one."""
    members = [VectorMember(factory()) for _ in range(number)]
    if len({id(member.env.unwrapped) for member in members}) < number:
        raise EnvironmentSetupError(
            f"{factory.label} returned the same environment twice; it must make a new one each "
            "time, as `lambda: MyEnv()` does."
        )
    return members


class SequentialVector:
    """Steps its members in turn, and starts a new episode where one ended.

    Gymnasium's `SyncVectorEnv` has no way to step only some environments, to go on with the others
    when one raises, to start the next episode from a given seed in the same step, or to write into
    arrays that another process reads, and it merges infos, which nothing here needs. This loop
    alone is faster (`benchmarks/environments.py --one-process`); with the checks and copies of a
    `VectorEnvironment` around it the two are about equal.
    """

    def __init__(self, members: Sequence[VectorMember], arrays: StepArrays) -> None:
        self.arrays = arrays
        self._members = members
        self._everyone = range(len(members))
        self._chosen: Sequence[int] = ()

    def start(self, *, masked: bool) -> None:
        """Choose whom `finish` steps: all, or those in `arrays.active`."""
        self._chosen = self._masked() if masked else self._everyone

    def finish(self) -> tuple[bool, Troubles]:
        """Act in those chosen; returns whether an episode ended, and what went wrong."""
        arrays, members = self.arrays, self._members
        obs, reward = arrays.obs, arrays.reward
        actions = arrays.actions.copy()  # an environment may keep the action it was given
        any_ended, troubles = False, {}
        for index in self._chosen:
            try:
                observation, reward[index], terminated, truncated = members[index].step(
                    actions[index]
                )
                arrays.terminated[index] = terminated
                arrays.truncated[index] = truncated
                if terminated or truncated:
                    any_ended = True
                    arrays.final_obs[index] = observation
                    observation = self._reset_member(index)
                obs[index] = observation
            except Exception as error:  # trouble of one environment must not stop the others
                troubles[index] = error
        self._chosen = ()
        return any_ended, troubles

    def reset(self) -> Troubles:
        """Start an episode in those in `arrays.active`, by their `arrays.seeds`."""
        troubles: Troubles = {}
        for index in self._masked():
            try:
                self.arrays.obs[index] = self._reset_member(index)
            except Exception as error:
                troubles[index] = error
        return troubles

    def call(self, name: str, indices: Sequence[int], *arguments: Sequence[Any]) -> list[Any]:
        """A method of these members, each with its own of the arguments."""
        rows = zip(*arguments, strict=True) if arguments else ((),) * len(indices)
        return [
            getattr(self._members[index], name)(*row)
            for index, row in zip(indices, rows, strict=True)
        ]

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _reset_member(self, index: int) -> Any:
        seed = int(self.arrays.seeds[index])
        return self._members[index].reset(None if seed == NO_SEED else seed)

    def _masked(self) -> list[int]:
        chosen: list[int] = self.arrays.active.nonzero()[0].tolist()
        return chosen
