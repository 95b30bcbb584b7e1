"""Recipes: record data with random actions or with a trained policy.

Recording is deterministic: the same recipe always gives the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import gymnasium as gym
import numpy as np

from rl_training.data.formats.recording import CHUNK_ROWS, ProgressListener, RecordingInfo, Steps
from rl_training.envs import EnvironmentFactory, EvaluationFactory, VectorEnvironment
from rl_training.envs.packages import gymnasium_id, twin_kwargs
from rl_training.errors import UserError
from rl_training.execution.execution import one_thread
from rl_training.execution.policy import Player, Policy
from rl_training.execution.random_streams import isolated_global_streams
from rl_training.types import Json, SpaceInfo

MAX_ENVS, ROWS_PER_ENV = 8, 2_000
RECIPES = 1_000
"""Added to the seed sequence, so that a recipe and a run with one seed use different streams"""

Actor = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""Chooses actions for observations; the second argument says which of them start an episode"""
"""Maps observations of all environments to actions for `VectorEnvironment.step`"""


def recipe_envs(size: int) -> int:
    """Number of environments for a recipe of this size; the recorded data depends on it."""
    return max(1, min(MAX_ENVS, size // ROWS_PER_ENV))


def record_random(
    factory: EnvironmentFactory,
    size: int,
    seed: int,
    *,
    num_envs: int | None = None,
    progress: ProgressListener | None = None,
) -> GeneratedRecording:
    """Record `size` steps of uniformly random actions."""
    return _record(factory, None, size, seed, num_envs, f"random, seed {seed}", progress)


def record_policy(
    factory: EnvironmentFactory,
    policy: Policy,
    size: int,
    seed: int,
    *,
    noise: float,
    name: str,
    num_envs: int | None = None,
    progress: ProgressListener | None = None,
) -> GeneratedRecording:
    """Record `size` steps of a policy's deterministic actions with Gaussian noise.

    `noise` is the standard deviation for actions in [-1, 1], which are clipped; if actions are
    choices, the fraction of random actions. As in an evaluation, wrappers use the statistics of
    the policy's training environment.
    """
    actor, factory = _noisy(policy, noise), factory.storing_as(policy.spaces.observation)
    if policy.wrapper_statistics is not None:
        factory = EvaluationFactory.like(factory, policy.wrapper_statistics)
    label = f"{name}, noise {noise:g}, seed {seed}"
    return _record(factory, (policy.spaces, actor), size, seed, num_envs, label, progress)


class GeneratedRecording:
    """Steps of parallel environments, ordered by environment."""

    def __init__(self, info: RecordingInfo, columns: tuple[np.ndarray, ...], steps: list[int]):
        """`columns` are `(steps, num_envs, ...)`; `steps` is the number for each environment."""
        self.info, self._columns, self._steps = info, columns, steps

    def chunks(self) -> Iterator[Steps]:
        for index, number in enumerate(self._steps):
            rows = self.info.rows_at_a_time(CHUNK_ROWS)
            for first in range(0, number, rows):
                last = min(first + rows, number)
                obs, action, reward, next_obs, terminated, truncated = (
                    column[first:last, index] for column in self._columns
                )
                ended = terminated | truncated
                if last == number:
                    ended[-1] = True  # the recording stops here
                yield Steps(obs, action, reward, next_obs, terminated, ended, first)


def _record(
    factory: EnvironmentFactory,
    policy: tuple[SpaceInfo, Actor] | None,
    size: int,
    seed: int,
    num_envs: int | None,
    label: str,
    progress: ProgressListener | None,
) -> GeneratedRecording:
    number = recipe_envs(size) if num_envs is None else min(num_envs, size)
    rounds = -(-size // number)
    environment_stream, action_stream = np.random.SeedSequence([seed, RECIPES]).spawn(2)
    environment_seed = int(environment_stream.generate_state(1)[0])
    generator = np.random.default_rng(action_stream)
    with (
        isolated_global_streams(seed),
        one_thread(),
        VectorEnvironment(factory, number, environment_seed) as environment,
    ):
        spaces = environment.spaces
        actor = _random_actor(spaces) if policy is None else policy[1]
        if policy is not None:
            _check_fit(policy[0], spaces, label)
        columns = _empty_columns(rounds, number, spaces)
        obs, starts = environment.reset(), np.ones(number, np.bool_)
        for index in range(rounds):
            action = actor(obs, starts, generator)
            step = environment.step(action)
            starts = step.terminated | step.truncated
            row = (obs, action, step.reward, step.next_obs, step.terminated, step.truncated)
            for column, values in zip(columns, row, strict=True):
                column[index] = values.reshape(column[index].shape)
            obs = step.obs
            if progress is not None:
                progress(min((index + 1) * number, size), size)
    if not spaces.is_continuous:
        columns[1][...] += spaces.first_choice
    kind = "random" if policy is None else "policy"
    name = f"{factory.label} ({label})"
    info = RecordingInfo.from_spaces(name, kind, spaces, size, describe_origin(factory))
    share, rest = divmod(size, number)
    return GeneratedRecording(info, columns, [share + (index < rest) for index in range(number)])


def _empty_columns(rounds: int, number: int, spaces: SpaceInfo) -> tuple[np.ndarray, ...]:
    wide, single = (rounds, number, spaces.obs_dim), (rounds, number)
    actions = np.empty(
        (rounds, number, spaces.actions.width),
        np.float32 if spaces.is_continuous else np.int64,
    )
    return (
        np.empty(wide, np.float32),
        actions,
        np.empty(single, np.float32),
        np.empty(wide, np.float32),
        np.empty(single, np.bool_),
        np.empty(single, np.bool_),
    )


def _random_actor(spaces: SpaceInfo) -> Actor:
    def act(obs: np.ndarray, starts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        if spaces.action_kind == "discrete":
            return generator.integers(spaces.action_dim, size=len(obs))
        size = (len(obs), spaces.action_dim)
        if not spaces.is_continuous:
            return generator.integers(spaces.actions.num_choices, size=size)
        return generator.uniform(-1.0, 1.0, size).astype(np.float32)

    return act


def _noisy(policy: Policy, noise: float) -> Actor:
    random_actor = _random_actor(policy.spaces)
    players: list[Player] = []

    def act(obs: np.ndarray, starts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        if not players:
            players.append(policy.player(len(obs)))
        players[0].end(starts)
        action = players[0].act(obs)
        if not policy.spaces.is_continuous:
            at_random = generator.random(len(obs)) < noise
            rows = at_random if action.ndim == 1 else at_random[:, None]
            return np.where(rows, random_actor(obs, starts, generator), action)
        disturbed = action + noise * generator.standard_normal(action.shape)
        return np.clip(disturbed, -1.0, 1.0).astype(np.float32)

    return act


def describe_origin(factory: EnvironmentFactory) -> Json | None:
    """Description of the environment for `RecordingInfo`; None if it has no id."""
    if not isinstance(factory.source, str):
        return None
    known = gymnasium_id(factory.source)  # it is the twin of a tensor environment that is recorded
    kwargs = twin_kwargs(factory.source, factory.kwargs)
    spec = copy.deepcopy(gym.spec(known))
    spec.kwargs = {**spec.kwargs, **kwargs}
    try:
        # The spec of an id lacks our wrappers, so it would make a different environment.
        text = None if factory.wrappers else spec.to_json()
    except (TypeError, ValueError, AttributeError):  # some arguments are not JSON
        text = None
    return {"id": known, "kwargs": kwargs, "spec": text}


def _check_fit(taken: SpaceInfo, given: SpaceInfo, label: str) -> None:
    if not taken.fits(given):
        raise UserError(f"{label}: {taken.misfit(given)}")
