"""Evaluate a policy by playing episodes in separate environments, and its health by their states.

The figures of its health are explained in `docs/how-to/health.md`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import draw_kind, part_of
from rl_training.data.scores import ReferenceScale
from rl_training.data.transforms import RewardTransform
from rl_training.envs import EnvironmentFactory, EpisodeEnd, EvaluationFactory, VectorEnvironment
from rl_training.envs.vector.backends import Backend
from rl_training.envs.vector.step_arrays import SeedErrors, StepResult
from rl_training.errors import EnvironmentRuntimeError, UserError
from rl_training.execution.policy import Policy
from rl_training.execution.random_streams import isolated_global_streams
from rl_training.models.mlp import watched_units
from rl_training.types import EVALUATION_METRICS, SUCCESS_RATE, Json

MAX_PARALLEL = 10
MAX_EPISODE_STEPS = 100_000
MAX_STATES = 2_048
"""States of an evaluation from which the health of a policy is computed"""
UNIT_STATES = 256
"""States on which a hidden unit must change to count as alive"""
SATURATED = 0.99
"""Size from which an action component, in [-1, 1], counts as saturated"""
LARGEST_REST = 0.5
"""Largest share of a value that may be unknown because an episode was cut off after its state"""


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
    """`is_success` or `success` of the last info of each episode, where it has one"""
    health: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Figures of the health of the policy and its critics, by name; not saved in checkpoints"""

    played_in: str | None = None
    """The environment of Gymnasium, if it stands for the tensors that the policy was trained in"""

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

    def __init__(
        self,
        factory: EnvironmentFactory,
        num_episodes: int,
        seed: int,
        *,
        in_processes: bool = False,
    ) -> None:
        """With `in_processes`, worker processes step the environments: the results are the same."""
        if num_episodes < 1:
            raise UserError(f"num_episodes = {num_episodes}: must be at least 1")
        self._factory, self._num_episodes, self._seed = factory, num_episodes, seed
        self._in_processes = in_processes

    def evaluate(
        self,
        policy: Policy,
        stopping: Callable[[], bool] | None = None,
        recorder: EpisodeRecorder | None = None,
    ) -> Evaluation | None:
        """Play all episodes with the policy's deterministic actions, and show them to `recorder`.

        Returns None, without a partial result, if `stopping` returned True before the last one
        ended.
        """
        quota = episodes_per_environment(self._num_episodes)
        factory = EvaluationFactory.like(
            self._factory.storing_as(policy.spaces.observation), policy.wrapper_statistics
        )
        backend: Backend = "async" if self._in_processes and len(quota) > 1 else "sync"
        is_stopping = stopping or (lambda: False)
        with (
            isolated_global_streams(self._seed),
            VectorEnvironment(
                factory, len(quota), self._seed, backend=backend, seed_every_reset=True
            ) as environment,
        ):
            environment.watch_for_stop(is_stopping)
            results = _play(environment, policy, quota, is_stopping, recorder)
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
    recorder: EpisodeRecorder | None = None,
) -> list[list[EpisodeEnd]] | None:
    """Return the first `quota[i]` episodes of each environment i; None if it was stopped."""
    given, taken = environment.spaces, policy.spaces
    if not taken.fits(given):
        raise UserError(taken.misfit(given))
    results: list[list[EpisodeEnd]] = [[] for _ in quota]
    player = policy.player(len(quota))
    obs, errors = environment.try_reset([0])
    _raise(errors)
    steps_without_end = 0
    while any(len(done) < wanted for done, wanted in zip(results, quota, strict=True)):
        if stopping():
            return None
        actions = player.act(obs)
        environment.start(actions)
        step = environment.finish()
        _raise(step.errors)
        if recorder is not None:
            recorder.add(obs, actions, step)
        obs = step.obs
        player.end(step.terminated | step.truncated)
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


class EpisodeRecorder:
    """Records the first episode of each environment of an evaluation.

    It keeps every reward, and the states of every n-th step: n doubles whenever there are more than
    `MAX_STATES` states.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self._rewards: list[np.ndarray] = []
        self._stride = 1

    def add(self, obs: np.ndarray, actions: np.ndarray, step: StepResult) -> None:
        """Add the observations before a step of all environments, the actions, and the step."""
        number = len(self._rewards)
        if number == 0:
            self.lengths = np.zeros(len(obs), np.int64)
            self.terminated = np.zeros(len(obs), np.bool_)
            self.last_obs = obs.copy()
        if self.lengths.all():
            return
        if number % self._stride == 0:
            self._kept.append((obs, actions))
        if len(self._kept) > max(1, MAX_STATES // len(obs)):
            self._kept, self._stride = self._kept[::2], 2 * self._stride
        self._rewards.append(step.reward)
        ended = (step.terminated | step.truncated) & (self.lengths == 0)
        if ended.any():
            self.lengths[ended] = number + 1
            self.terminated |= ended & step.terminated
            self.last_obs[ended] = step.next_obs[ended]

    @property
    def times(self) -> np.ndarray:
        """`(kept,)`: the steps whose states were kept."""
        return self._stride * np.arange(len(self._kept))

    @property
    def in_episode(self) -> np.ndarray:
        """`(kept, environments)` bool: the states that belong to the recorded episodes."""
        mask: np.ndarray = self.times[:, None] < self.lengths
        return mask

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """The observations and actions of the recorded episodes, a state per row."""
        obs, actions = (
            np.stack(column)[self.in_episode] for column in zip(*self._kept, strict=True)
        )
        return obs, actions

    def returns(
        self,
        rewards: RewardTransform,
        gamma: float,
        rest: np.ndarray,
        bonus: np.ndarray,
    ) -> np.ndarray:
        """The discounted return from each kept state, `(kept, environments)`.

        `rest` is the value after the end of each episode, and `bonus`, of the kept states, is added
        to the reward of the step before.
        """
        scaled = np.stack(self._rewards).astype(np.float64)
        if rewards != RewardTransform():
            scaled = rewards(scaled)
        bonuses = np.repeat(bonus, self._stride, axis=0)[: len(scaled)]
        found, value = np.zeros_like(bonus), np.zeros(len(rest))
        for time in range(len(scaled) - 1, -1, -1):
            value = scaled[time] + gamma * np.where(self.lengths == time + 1, rest, value)
            if time % self._stride == 0:
                found[time // self._stride] = value
            value = value + bonuses[time]
        return found


@torch.no_grad()
def policy_health(
    policy: Policy, recorder: EpisodeRecorder, generator: torch.Generator
) -> dict[str, float]:
    """Figures of the health of a policy and its critics, from the states of an evaluation.

    Figures that an algorithm does not have are left out: without critics there are no Q-values. If
    the policy chooses chunks, they are not compared with returns: most states are in the middle of
    a chunk, where the policy would choose another one.
    """
    raw, actions = recorder.states()
    valued = actions if policy.action_chunk == 1 else policy.act(raw)
    obs, chosen = _inputs(policy, raw), torch.as_tensor(valued, device=policy.algorithm.device)
    found = {}
    if policy.spaces.is_continuous:
        found["action_saturation"] = float(np.mean(np.abs(actions) > SATURATED))
    entropies = _entropies(policy, obs, generator)
    if entropies is not None:
        found["entropy"] = float(entropies.mean())
    critics = critics_of(policy)
    if critics is not None:
        q = critics(obs, chosen).double().cpu().numpy()
        found["q_mean"] = float(q.mean())
        if policy.action_chunk == 1:
            found |= _value_errors(policy, recorder, q, entropies, generator)
    some = torch.linspace(0, len(obs) - 1, min(len(obs), UNIT_STATES)).round().long()
    return found | _dead_units(policy, obs[some], chosen[some])


def critics_of(policy: Policy) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A function that returns the mean Q-value of the critics `(rows,)`; None without critics."""
    q_values = getattr(policy.algorithm.model, "q_values", None)
    if q_values is None:
        return None

    algorithm = policy.algorithm

    def of_actions(obs: Tensor, actions: Tensor) -> Tensor:
        values = algorithm.action_values(algorithm.state, obs)
        if values is not None:
            return values.gather(-1, actions[:, None]).squeeze(-1)
        mean: Tensor = q_values(obs, actions).mean(-1)
        return mean

    return of_actions


def _inputs(policy: Policy, obs: np.ndarray) -> Tensor:
    """Observations as the networks take them."""
    inputs = torch.tensor(obs, dtype=torch.float32)
    if policy.normalizer is not None:
        inputs = policy.normalizer.normalize(inputs)
    return inputs.to(policy.algorithm.device)


def _entropies(policy: Policy, obs: Tensor, generator: torch.Generator) -> Tensor | None:
    """Minus the log-probability of one sampled action per state; None without a distribution."""
    model = policy.algorithm.model
    head, actor = getattr(model, "head", None), getattr(model, "actor", None)
    if head is None or actor is None:
        return None
    if not head.is_distribution:
        return None  # a standard deviation that is not learned
    shape = (len(obs), head.noise_size(policy.algorithm.action_dim))
    noise = draw_kind(head.noise_kind, shape, generator)
    inputs = policy.algorithm.actor_input(policy.algorithm.state, obs)
    _, log_probs = head.sample(actor, inputs, None, noise)
    entropies: Tensor = -log_probs.double()
    return entropies


def _value_errors(
    policy: Policy,
    recorder: EpisodeRecorder,
    q: np.ndarray,
    entropies: Tensor | None,
    generator: torch.Generator,
) -> dict[str, float]:
    """Mean return of the states, in the units of the critics, and how far Q-values exceed it.

    Soft critics value entropy too, so that it is part of their returns. After the cut of a
    truncated episode the critics' own value stands for the rest, and states of which that is a
    large share are left out, except for the first one. Empty if training has rewards of another
    scale, which evaluations do not know.
    """
    settings, state = policy.algorithm.hyperparameters, policy.algorithm.state
    gamma, critics = getattr(settings, "gamma", None), critics_of(policy)
    scaled = [each for each in policy.wrapper_statistics or () if each["kind"] == "reward"]
    if gamma is None or critics is None or policy.rewards is None or scaled:
        return {}
    if settings.return_scaling() is not None:
        return {}
    obs = _inputs(policy, recorder.last_obs)
    actions = torch.as_tensor(policy.act(recorder.last_obs), device=obs.device)
    rest = critics(obs, actions).double().cpu().numpy()
    bonus = np.zeros(recorder.in_episode.shape)
    if entropies is not None and getattr(settings, "entropy_in_target", False):
        alpha = float(state["log_alpha"].exp())
        bonus[recorder.in_episode] = alpha * entropies.cpu().numpy()
        at_end = _entropies(policy, obs, generator)
        assert at_end is not None
        rest = rest + alpha * at_end.cpu().numpy()
    rest = np.where(recorder.terminated, 0.0, rest)
    returns = recorder.returns(policy.rewards, gamma, rest, bonus)
    steps_left = recorder.lengths - recorder.times[:, None]
    known = recorder.terminated | (gamma ** np.maximum(steps_left, 0) <= LARGEST_REST)
    known[0] = True
    used = known[recorder.in_episode]
    q_mean = float(q[used].mean())
    return_mean = float(returns[recorder.in_episode][used].mean())
    return {"q_mean": q_mean, "return_mean": return_mean, "q_minus_return": q_mean - return_mean}


def _dead_units(policy: Policy, obs: Tensor, actions: Tensor) -> dict[str, float]:
    """The share of hidden units whose output is the same for all observations, by part."""
    algorithm, critics = policy.algorithm, critics_of(policy)
    bits = obs.view(torch.int32)  # words that are no floats may look like NaN
    if (bits == bits[0]).all():
        return {}
    with watched_units() as seen:
        algorithm.act(algorithm.state, obs)
        if critics is not None:
            critics(obs, actions)
    parts = {
        id(module): part_of(name)
        for name, network in algorithm.networks().items()
        for module in network.modules()
    }
    dead: dict[str, list[Tensor]] = defaultdict(list)
    for network, outputs in seen:
        spread = outputs.amax(-2) - outputs.amin(-2)
        dead[parts[id(network)]].append((spread <= 1e-6 * outputs.abs().max()).flatten())
    return {
        f"dead_units_{part}": float(torch.cat(units).float().mean()) for part, units in dead.items()
    }
