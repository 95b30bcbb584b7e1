"""Evaluate a policy by playing episodes in separate environments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rl_training.data.scores import ReferenceScale
from rl_training.envs import EnvironmentFactory, EpisodeEnd, EvaluationFactory, VectorEnvironment
from rl_training.envs.vector.step_arrays import SeedErrors
from rl_training.errors import EnvironmentRuntimeError, UserError
from rl_training.execution.policy import Policy
from rl_training.execution.random_streams import isolated_global_streams
from rl_training.types import EVALUATION_METRICS, SUCCESS_RATE, Json

MAX_PARALLEL = 10
MAX_EPISODE_STEPS = 100_000


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes of one evaluation."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    scale: ReferenceScale | None = None
    """Scale for a normalized score, if there is one"""
    seed: int | None = None
    """Seed of fresh episodes; None for the run's own, which also select its best checkpoint"""
    successes: tuple[bool, ...] = ()
    """`is_success` of the last info of each episode, for the episodes that have it"""

    @property
    def score(self) -> float | None:
        """Normalized score of the mean return; None without a scale."""
        return None if self.scale is None else self.scale.score(self.metrics["eval_return_mean"])

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
        metrics = dict(zip(EVALUATION_METRICS, map(float, values), strict=True))
        if self.successes:
            metrics[SUCCESS_RATE] = float(np.mean(self.successes))
        return metrics

    @property
    def episodes(self) -> str:
        """Description of the episodes, for messages."""
        number = len(self.returns)
        noun = "episode" if number == 1 else "episodes"
        if self.seed is None:
            return f"{number} {noun} of the run's own evaluations"
        return f"{number} fresh {noun} (seed {self.seed}), not used to choose the best checkpoint"

    def to_json(self) -> Json:
        successes = {"successes": list(self.successes)} if self.successes else {}
        return {"returns": list(self.returns), "lengths": list(self.lengths), **successes}

    @classmethod
    def from_json(cls, values: Json) -> Evaluation:
        """Read what `to_json` returned; raise an error if it has no statistics."""
        saved = cls(
            tuple(map(float, values["returns"])),
            tuple(map(int, values["lengths"])),
            successes=tuple(map(bool, values.get("successes", ()))),
        )
        if (
            len(saved.returns) != len(saved.lengths)
            or not np.isfinite([*saved.returns, *saved.metrics.values()]).all()
        ):
            raise ValueError("the saved evaluation is damaged")
        return saved

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % confidence interval of the mean return (Student's t)."""
        mean, count = self.metrics["eval_return_mean"], len(self.returns)
        if count < 2:
            return -math.inf, math.inf
        half = student_quantile(count - 1) * float(np.std(self.returns, ddof=1)) / math.sqrt(count)
        return mean - half, mean + half


class Evaluator:
    """Play the same seeded episodes at every call, so that results are comparable.

    Each evaluation creates new environments and restores the global random generators afterwards,
    so that it affects neither later evaluations nor training. Wrappers use the statistics of the
    policy's training environment. Each environment plays a fixed number of episodes: taking the
    episodes that finish first would favour short ones.
    """

    def __init__(self, factory: EnvironmentFactory, num_episodes: int, seed: int) -> None:
        if num_episodes < 1:
            raise UserError(f"num_episodes = {num_episodes}: must be at least 1")
        self._factory, self._num_episodes, self._seed = factory, num_episodes, seed

    def evaluate(
        self, policy: Policy, stopping: Callable[[], bool] | None = None
    ) -> Evaluation | None:
        """Play all episodes with the policy's deterministic actions.

        Returns None, without a partial result, if `stopping` returned True before the last one
        ended.
        """
        quota = episodes_per_environment(self._num_episodes)
        factory = EvaluationFactory.like(self._factory, policy.wrapper_statistics)
        with (
            isolated_global_streams(self._seed),
            VectorEnvironment(
                factory, len(quota), self._seed, seed_every_reset=True
            ) as environment,
        ):
            results = _play(environment, policy, quota, stopping or (lambda: False))
        if results is None:
            return None
        episodes = [episode for done in results for episode in done]
        return Evaluation(
            tuple(episode.episode_return for episode in episodes),
            tuple(episode.length for episode in episodes),
            successes=tuple(each.success for each in episodes if each.success is not None),
        )


def episodes_per_environment(num_episodes: int) -> np.ndarray:
    """Return how many episodes each environment of an evaluation plays."""
    number = min(num_episodes, MAX_PARALLEL)
    quota = np.full(number, num_episodes // number)
    quota[: num_episodes % number] += 1
    return quota


def _play(
    environment: VectorEnvironment,
    policy: Policy,
    quota: np.ndarray,
    stopping: Callable[[], bool],
) -> list[list[EpisodeEnd]] | None:
    """Return the first `quota[i]` episodes of each environment i; None if it was stopped."""
    given, taken = environment.spaces, policy.spaces
    if (given.obs_dim, given.action_dim) != (taken.obs_dim, taken.action_dim):
        raise UserError(
            f"the policy expects {taken.obs_dim} observations and {taken.action_dim} actions, "
            f"but the environment has {given.obs_dim} and {given.action_dim}"
        )
    results: list[list[EpisodeEnd]] = [[] for _ in quota]
    obs, errors = environment.try_reset([0])
    _raise(errors)
    steps_without_end = 0
    while any(len(done) < wanted for done, wanted in zip(results, quota, strict=True)):
        if stopping():
            return None
        environment.start(policy.act(obs))
        step = environment.finish()
        _raise(step.errors)
        obs = step.obs
        steps_without_end = 0 if step.episodes else steps_without_end + 1
        if steps_without_end > MAX_EPISODE_STEPS:
            raise EnvironmentRuntimeError(
                f"no episode ended within {MAX_EPISODE_STEPS:,} steps of evaluation; add a time "
                "limit to the environment, for example gymnasium.wrappers.TimeLimit"
            )
        for episode in step.episodes:
            if len(results[episode.env_index]) < quota[episode.env_index]:
                results[episode.env_index].append(episode)
    return results


def _raise(errors: SeedErrors) -> None:
    """Raise an error that names the environment; its `__cause__` is what the environment raised."""
    for error in errors.values():
        raise error


def student_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t distribution (series expansion around the normal one)."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
