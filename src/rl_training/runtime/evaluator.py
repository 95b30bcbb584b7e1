"""How good a policy is, on environments and seeds of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.errors import UserError
from rl_training.runtime.policy import Policy
from rl_training.types import EVALUATION_METRICS, Json

MAX_PARALLEL = 10


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes of one evaluation."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @cached_property
    def metrics(self) -> dict[str, float]:
        returns = np.asarray(self.returns)
        values = (
            returns.mean(),
            returns.std(),
            returns.min(),
            returns.max(),
            np.median(returns),
            np.mean(self.lengths),
        )
        return dict(zip(EVALUATION_METRICS, map(float, values), strict=True))

    def to_json(self) -> Json:
        return {"returns": list(self.returns), "lengths": list(self.lengths)}

    @classmethod
    def from_json(cls, values: Json) -> Evaluation:
        return cls(tuple(map(float, values["returns"])), tuple(map(int, values["lengths"])))

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % confidence interval of the mean return (normal approximation)."""
        mean, count = self.metrics["eval_return_mean"], len(self.returns)
        if count < 2:
            return mean, mean
        half = 1.96 * float(np.std(self.returns, ddof=1)) / math.sqrt(count)
        return mean - half, mean + half


class Evaluator:
    """Plays the same seeded episodes at every call, so that results compare.

    Episodes are shared out evenly in advance, never by who finishes first: that would favour
    short ones.
    """

    def __init__(self, factory: EnvironmentFactory, num_episodes: int, seed: int) -> None:
        if num_episodes < 1:
            raise UserError(f"num_episodes = {num_episodes}: must be at least 1")
        self._factory, self._num_episodes, self._seed = factory, num_episodes, seed
        self._environment: VectorEnvironment | None = None

    def evaluate(self, policy: Policy) -> Evaluation:
        """Play the policy's best actions for all episodes."""
        environment = self._environment or self._make()
        quota = np.full(environment.num_envs, self._num_episodes // environment.num_envs)
        quota[: self._num_episodes % environment.num_envs] += 1
        results: list[list[tuple[float, int]]] = [[] for _ in quota]
        obs = environment.reset()
        while any(len(done) < wanted for done, wanted in zip(results, quota, strict=True)):
            step = environment.step(policy.act(obs))
            obs = step.obs
            for episode in step.episodes:
                done = results[episode.env_index]
                if len(done) < quota[episode.env_index]:
                    done.append((episode.episode_return, episode.length))
        episodes = [episode for done in results for episode in done]
        returns, lengths = zip(*episodes, strict=True)
        return Evaluation(returns, lengths)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _make(self) -> VectorEnvironment:
        self._environment = VectorEnvironment(
            self._factory,
            min(self._num_episodes, MAX_PARALLEL),
            self._seed,
            seed_every_reset=True,
        )
        return self._environment
