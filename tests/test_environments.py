"""Environments: creation, description of spaces, scaling and stepping."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from rl_training.checkpoints.run_folder import default_run_name, short_name
from rl_training.config import TrainConfig
from rl_training.envs import (
    ActionScaler,
    EnvironmentFactory,
    EpisodeEnd,
    StepResult,
    VectorEnvironment,
    check_environment,
    check_environment_id,
    describe_spaces,
)
from rl_training.envs.spaces import _warn_of_rounding
from rl_training.errors import EnvironmentRuntimeError, EnvironmentSetupError

Environment = gym.Env[Any, Any]


class Diary(gym.Env[np.ndarray, np.ndarray]):
    """Observations are (episode, step), so that every observation can be identified.

    Episode `k` terminates after `lengths[k % len(lengths)]` steps. The reward is the step.
    """

    def __init__(self, lengths: tuple[int, ...] = (3, 5), per_seed: bool = False) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = Box(-2.0, 4.0, (1,), np.float32)
        self.lengths = lengths
        self.per_seed = per_seed
        self.episode = -1
        self.count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if self.per_seed and seed is not None:
            self.lengths = (int(self.np_random.integers(2, 9)),)
        self.episode += 1
        self.count = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.count += 1
        length = self.lengths[self.episode % len(self.lengths)]
        assert self.count <= length, "stepped beyond its end"
        return self.observe(), float(self.count), self.count == length, False, {}

    def observe(self) -> np.ndarray:
        return np.array([self.episode, self.count], dtype=np.float32)


def diary(lengths: tuple[int, ...] = (3, 5), limit: int = 6, per_seed: bool = True) -> Environment:
    return wrappers.TimeLimit(Diary(lengths, per_seed), limit)


def run(vector: VectorEnvironment, steps: int) -> list[StepResult]:
    vector.reset()
    zeros = np.zeros((vector.num_envs, vector.spaces.action_dim), dtype=np.float32)
    return [vector.step(zeros) for _ in range(steps)]


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_every_transition_matches_the_environment(num_envs: int, backend: Any) -> None:
    """Episodes end at different times: they terminate, or are truncated after six steps."""
    with VectorEnvironment(EnvironmentFactory(diary), num_envs, 3, backend=backend) as vector:
        obs = vector.reset()
        ends = []
        for _ in range(30):
            result = vector.step(np.zeros((num_envs, 1), dtype=np.float32))
            # The next observation is the next step of the same episode, also at its end.
            np.testing.assert_array_equal(result.next_obs[:, 0], obs[:, 0])
            np.testing.assert_array_equal(result.next_obs[:, 1], obs[:, 1] + 1)
            np.testing.assert_array_equal(result.reward, result.next_obs[:, 1])
            ended = result.terminated | result.truncated
            # The current observation is the first of a new episode if one ended, else the next one.
            np.testing.assert_array_equal(result.obs[ended, 0], obs[ended, 0] + 1)
            np.testing.assert_array_equal(result.obs[ended, 1], 0)
            np.testing.assert_array_equal(result.obs[~ended], result.next_obs[~ended])
            assert [end.env_index for end in result.episodes] == list(np.flatnonzero(ended))
            ends.append(ended)
            obs = result.obs
    assert np.any(ends)
    if num_envs > 1:
        assert len({tuple(column) for column in np.transpose(ends)}) > 1


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_termination_and_truncation_are_distinguished(backend: Any) -> None:
    factory = EnvironmentFactory(diary, {"lengths": (3, 5), "limit": 4, "per_seed": False})
    with VectorEnvironment(factory, 2, 0, backend=backend) as vector:
        results = run(vector, 7)
    assert [bool(result.terminated[0]) for result in results] == [0, 0, 1, 0, 0, 0, 0]
    assert [bool(result.truncated[0]) for result in results] == [0, 0, 0, 0, 0, 0, 1]
    assert results[2].episodes == [EpisodeEnd(0, 6.0, 3), EpisodeEnd(1, 6.0, 3)]
    assert results[6].episodes == [EpisodeEnd(0, 10.0, 4), EpisodeEnd(1, 10.0, 4)]
    np.testing.assert_array_equal(results[6].next_obs, [[1, 4], [1, 4]])
    np.testing.assert_array_equal(results[6].obs, [[2, 0], [2, 0]])


class Counts(Diary):
    """Declares observations of a type of whole numbers; `change` is added to them."""

    def __init__(self, dtype: Any, change: float = 0.0) -> None:
        super().__init__()
        self.observation_space = Box(0, 100, (2,), dtype)
        self.change = change

    def observe(self) -> np.ndarray:
        values = super().observe().astype(self.observation_space.dtype)
        return values + self.change if self.change else values


@pytest.mark.parametrize(
    ("dtype", "change"), [(np.uint32, 0.0), (np.uint64, 0.0), (np.int64, 0.0), (np.int64, 0.5)]
)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_vectors_of_large_whole_numbers_keep_their_values(
    dtype: Any, change: float, backend: Any
) -> None:
    """Those of uint32 are not taken for the words of rows, which have the same type."""
    factory = EnvironmentFactory(Counts, {"dtype": dtype, "change": change})
    with VectorEnvironment(factory, 1, 0, backend=backend) as vector:
        first, (result,) = vector.reset(), run(vector, 1)
    np.testing.assert_array_equal(first, [[change, change]])
    np.testing.assert_array_equal(result.next_obs[:, 1], 1 + change)


def test_termination_and_truncation_in_one_step_are_both_reported() -> None:
    factory = EnvironmentFactory(diary, {"lengths": (4,), "limit": 4, "per_seed": False})
    with VectorEnvironment(factory, 1, 0) as vector:
        last = run(vector, 4)[-1]
    assert (last.terminated[0], last.truncated[0]) == (True, True)


def pendulum() -> Environment:
    return gym.make("Pendulum-v1", max_episode_steps=6)


def trajectory(backend: Any, seed: int, num_envs: int = 3, **options: Any) -> np.ndarray:
    factory = EnvironmentFactory(pendulum)
    with VectorEnvironment(factory, num_envs, seed, backend=backend, **options) as vector:
        rng = np.random.default_rng(0)
        seen = [vector.reset()]
        for _ in range(15):
            seen.append(vector.step(rng.uniform(-1, 1, (num_envs, 1))).obs)
    return np.stack(seen)


@pytest.mark.parametrize("seed_every_reset", [False, True])
def test_backends_agree_bit_for_bit_and_seeds_differ(seed_every_reset: bool) -> None:
    sync = trajectory("sync", 5, seed_every_reset=seed_every_reset)
    np.testing.assert_array_equal(trajectory("async", 5, seed_every_reset=seed_every_reset), sync)
    assert not np.array_equal(trajectory("sync", 6, seed_every_reset=seed_every_reset), sync)
    assert len(np.unique(sync[0], axis=0)) == 3


def test_results_share_no_memory() -> None:
    with VectorEnvironment(EnvironmentFactory(pendulum), 2, 0) as vector:
        first = vector.reset()
        kept = first.copy()
        result = vector.step(np.zeros((2, 1)))
        assert not np.shares_memory(result.obs, result.next_obs)
        before = vector.snapshot()
        result.obs[:] = 7
        result.next_obs[:] = 7
        assert vector.snapshot() == before
        vector.step(np.zeros((2, 1)))
        np.testing.assert_array_equal(first, kept)
        assert {array.dtype for array in (result.obs, result.next_obs, result.reward)} == {
            np.dtype(np.float32)
        }


class Buttons(Diary):
    """Three discrete actions numbered from 5. The reward is the action."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Discrete(3, start=5)  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, _, *flags = super().step(action)
        return observation, float(action), *flags  # type: ignore[return-value]


def test_discrete_actions_are_counted_from_zero() -> None:
    with VectorEnvironment(EnvironmentFactory(Buttons), 3, 0) as vector:
        assert (vector.spaces.action_kind, vector.spaces.action_dim) == ("discrete", 3)
        vector.reset()
        np.testing.assert_array_equal(vector.step(np.array([0, 1, 2])).reward, [5, 6, 7])
        for wrong in (np.array([0, 1, 3]), np.array([0, 1, -1]), np.zeros(3), np.zeros((3, 1))):
            with pytest.raises(ValueError, match="ctions"):
                vector.step(wrong)


class Faulty(Diary):
    """Returns an invalid result at its second step."""

    def __init__(self, observation: Any = None, reward: Any = 1.0, at_reset: Any = None) -> None:
        super().__init__()
        self.odd = (observation, reward, at_reset)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**kwargs)
        later = self.episode > 0 and self.odd[2] is not None
        return (self.odd[2] if later else observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        if self.count == 2:
            reward = self.odd[1]
            observation = observation if self.odd[0] is None else self.odd[0]
        return observation, reward, *rest  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"observation": np.array([np.nan, 0], np.float32)}, "observation is not finite.*nan"),
        ({"reward": float("inf")}, "reward is not finite.*inf"),
        ({"reward": 1e300}, "reward is not finite in float32: 1e"),
        ({"reward": np.zeros(2)}, "reward is not a number"),
        ({"reward": None}, "reward is not a number: None"),
        ({"observation": np.zeros(1, np.float32)}, r"shape \(1,\), not \(2,\)"),
        ({"observation": np.zeros((1, 2), np.float32)}, r"shape \(1, 2\), not \(2,\)"),
        ({"observation": "text"}, "observation is not numeric: 'text'"),
    ],
)
def test_an_invalid_result_is_reported_in_its_step(
    odd: dict[str, Any], message: str, backend: Any
) -> None:
    factory = EnvironmentFactory(Faulty, odd)
    with VectorEnvironment(factory, 2, 0, backend=backend) as vector:
        vector.reset()
        vector.step(np.zeros((2, 1)))
        with pytest.raises(
            EnvironmentRuntimeError, match=f"Environment 0: its {message}|{message}"
        ):
            vector.step(np.zeros((2, 1)))
        with pytest.raises(RuntimeError, match="reset"):
            vector.step(np.zeros((2, 1)))
        vector.reset()
        vector.step(np.zeros((2, 1)))


def test_an_invalid_reset_is_reported() -> None:
    factory = EnvironmentFactory(Faulty, {"at_reset": np.array([0, np.inf], np.float32)})
    with (
        VectorEnvironment(factory, 1, 0) as vector,
        pytest.raises(EnvironmentRuntimeError, match="inf"),
    ):
        run(vector, 3)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_the_error_names_the_environment(backend: Any) -> None:
    with VectorEnvironment(EnvironmentFactory(pendulum), 3, 0, backend=backend) as vector:
        vector.reset()
        with pytest.raises(EnvironmentRuntimeError, match=r"Environment 1: its action.*nan"):
            vector.step(np.array([[0.0], [np.nan], [0.0]]))
        with pytest.raises(ValueError, match="shape"):
            vector.step(np.zeros((3, 2)))
        assert vector.step(np.zeros((3, 1))).obs.shape == (3, 3)


def test_a_worker_that_dies_raises_an_error_and_closes_cleanly() -> None:
    vector = VectorEnvironment(EnvironmentFactory(Dying), 2, 0, backend="async")
    vector.reset()
    with pytest.raises(EnvironmentRuntimeError, match="died"):
        vector.step(np.zeros((2, 1)))
    vector.close()
    vector.close()


class Dying(Diary):
    """Ends its process, like a crash in a simulator."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_only_the_parent_process_handles_an_interrupt() -> None:
    with VectorEnvironment(EnvironmentFactory(diary), 2, 0, backend="async") as vector:
        before = vector.reset()
        for worker in multiprocessing.active_children():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)
        np.testing.assert_array_equal(
            vector.step(np.zeros((2, 1))).next_obs, before + np.array([0, 1], np.float32)
        )
    assert multiprocessing.active_children() == []


bounds = st.tuples(
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
    # Every range is wide enough for float32 to distinguish its ends.
    st.just(0.0) | st.floats(2.0**-60, 1e6, width=32),
)


@given(st.lists(bounds, min_size=1, max_size=4), st.data())
def test_actions_fill_the_bounds_exactly(limits: list[tuple[float, float]], data: Any) -> None:
    low = np.array([start for start, _ in limits], dtype=np.float32)
    high = np.maximum(low, np.array([start + width for start, width in limits], dtype=np.float32))
    scaler = ActionScaler(low, high)
    np.testing.assert_array_equal(scaler.to_environment(-np.ones_like(low)), low)
    np.testing.assert_array_equal(scaler.to_environment(np.ones_like(low)), high)

    action = np.array(data.draw(st.lists(st.floats(-3, 3), min_size=len(low), max_size=len(low))))
    scaled = scaler.to_environment(np.stack([action, action]))
    assert scaled.shape == (2, len(low))
    assert scaled.dtype == np.float32
    assert (low <= scaled).all()
    assert (scaled <= high).all()

    back = scaler.from_environment(scaled[0])
    assert (np.abs(back) <= 1).all()
    width = np.maximum(high.astype(np.float64) - low, 1e-30)
    rounding = 4 * np.spacing(np.maximum(np.abs(low), np.abs(high))) / width + 1e-6
    expected = np.where(high > low, np.clip(action, -1, 1), 0)
    assert (np.abs(back - expected) <= rounding).all()


def test_space_info_describes_the_spaces() -> None:
    info = describe_spaces(Diary())
    assert (info.obs_dim, info.action_dim, info.action_kind) == (2, 1, "continuous")
    np.testing.assert_array_equal(info.action_low, np.array([-2.0], np.float32))
    np.testing.assert_array_equal(info.action_high, np.array([4.0], np.float32))


def with_spaces(observation: spaces.Space[Any], action: spaces.Space[Any]) -> Environment:
    env = Diary()
    env.observation_space = observation
    env.action_space = action
    return env


VECTOR = Box(-1.0, 1.0, (2,), np.float32)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Text(5), VECTOR, "observation space is Text.*Wrap"),
        (spaces.Dict({"a": VECTOR, "b": spaces.Text(5)}), VECTOR, r"'b'.*Text.*keys: \[a\]"),
        (
            spaces.Dict({"a": spaces.Text(5), "b": spaces.Text(5), "c": VECTOR}),
            VECTOR,
            r"'a'.*Text.*keys: \[c\]",
        ),
        (spaces.Dict({"a/b": VECTOR}), VECTOR, "'a/b'.*Rename"),
        (spaces.Dict({}), VECTOR, "is empty"),
        (spaces.Dict({1: VECTOR}), VECTOR, "key 1;.*not strings.*Rename"),
        (
            spaces.Dict({"a": VECTOR, "b": Box(-1, 1, (0, 3))}),
            VECTOR,
            r"'b' of the observation has the shape \(0, 3\), which is empty.*keys: \[a\]",
        ),
        (VECTOR, Box(-1.0, 1.0, (0,)), "action space .* is empty"),
        (VECTOR, Box(0, 10, (2,), np.int64), "whole numbers.*MultiDiscrete"),
        (VECTOR, Box(-np.inf, np.inf, (2,), np.float32), "no finite bounds.*`action_range: 3.0`"),
        (VECTOR, Box(0.0, np.inf, (2,), np.float32), "no finite bounds"),
        (VECTOR, spaces.Tuple([VECTOR]), r"Tuple.*only Box, Discrete, MultiDiscrete and"),
    ],
)
def test_unsupported_spaces_are_explained(observation: Any, action: Any, message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        describe_spaces(with_spaces(observation, action))


@pytest.mark.parametrize(
    ("dtype", "high", "largest"),
    [(np.int64, 2**24 + 1, "16,777,217"), (np.int32, 2**31 - 1, "2,147,483,64[78]")],
)
def test_whole_numbers_that_float32_rounds_are_warned_of_once(
    dtype: Any, high: int, largest: str
) -> None:
    _warn_of_rounding.cache_clear()
    space = spaces.Dict({"time": Box(0, high, (2,), dtype), "place": VECTOR})
    with pytest.warns(UserWarning, match=f"'time' .*up to {largest}, .*beyond 16,777,216"):
        describe_spaces(with_spaces(space, VECTOR))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        describe_spaces(with_spaces(space, VECTOR))
        describe_spaces(with_spaces(Box(-(2**24), 2**24, (2,), dtype), VECTOR))


def test_a_vector_of_unsupported_environments_is_refused() -> None:
    factory = EnvironmentFactory(lambda: with_spaces(spaces.Text(5), VECTOR))
    with pytest.raises(EnvironmentSetupError, match="Text"):
        VectorEnvironment(factory, 2, 0)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("Pendulum-v0", "Pendulum-v1"),
        ("Pendulm-v1", "Pendulum-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole", "CartPole-v1"),
        ("HalfCheeta-v5", "HalfCheetah-v5"),
    ],
)
def test_the_error_for_a_misspelt_id_suggests_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=f"Did you mean .*{right}"):
        EnvironmentFactory(wrong)()


def test_the_error_for_an_unknown_id_has_no_suggestion() -> None:
    with pytest.raises(EnvironmentSetupError, match=r"not registered\. If it comes"):
        check_environment_id("zzzzzzzz")


def test_an_id_cannot_import_code() -> None:
    with pytest.raises(EnvironmentSetupError, match="--import antigravity"):
        EnvironmentFactory("antigravity:Space-v0")()
    assert "antigravity" not in sys.modules


def test_the_error_names_invalid_arguments() -> None:
    with pytest.raises(EnvironmentSetupError, match="gravty"):
        EnvironmentFactory("Pendulum-v1", {"gravty": 3})()
    with pytest.raises(EnvironmentSetupError, match="wingspan"):
        EnvironmentFactory(Diary, {"wingspan": 3})()


def test_the_error_for_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium.envs.mujoco.hopper_v5", None)
    with pytest.raises(EnvironmentSetupError, match=r'pip install "rl-training\[mujoco\]"'):
        EnvironmentFactory("Hopper-v5")()


def test_arguments_reach_the_environment() -> None:
    assert EnvironmentFactory("Pendulum-v1", {"g": 1.5})().unwrapped.g == 1.5  # type: ignore[attr-defined]
    assert EnvironmentFactory(Diary, {"lengths": (7,)})().unwrapped.lengths == (7,)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source", ["Pendulum-v1", gym.make("Pendulum-v1"), Diary(), Diary, lambda: Diary()]
)
def test_each_call_makes_a_new_environment_also_in_a_worker(source: Any) -> None:
    factory = cloudpickle.loads(cloudpickle.dumps(EnvironmentFactory(source)))
    first, second = factory(), factory()
    assert first.unwrapped is not second.unwrapped
    assert first.unwrapped is not getattr(source, "unwrapped", None)
    first.reset(seed=0)
    second.reset(seed=0)
    action = np.zeros(1, dtype=np.float32)
    np.testing.assert_array_equal(first.step(action)[0], second.step(action)[0])


class Unrecordable(gym.Wrapper[Any, Any, Any, Any]):
    """A user's wrapper that Gymnasium cannot recreate."""


def test_copies_of_an_instance_keep_its_wrappers_and_arguments() -> None:
    copied = EnvironmentFactory(Unrecordable(gym.make("Pendulum-v1", g=2.5)))()
    assert isinstance(copied, Unrecordable)
    assert copied.unwrapped.g == 2.5  # type: ignore[attr-defined]
    remade = EnvironmentFactory(
        wrappers.RescaleAction(gym.make("Pendulum-v1"), np.float32(-3), np.float32(3))
    )()
    assert isinstance(remade, wrappers.RescaleAction)


def test_the_error_for_an_instance_that_cannot_be_copied_suggests_a_factory() -> None:
    env = Diary()
    env.stream = sys.stdout  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentSetupError, match=r"lambda: MyEnv\(\)"):
        EnvironmentFactory(env)()


def test_an_object_that_is_not_an_environment_is_refused() -> None:
    with pytest.raises(EnvironmentSetupError, match="returned int"):
        EnvironmentFactory(lambda: 3)()  # type: ignore[arg-type, return-value]
    with pytest.raises(EnvironmentSetupError, match="not as list"):
        EnvironmentFactory([])()  # type: ignore[arg-type]


def test_a_function_that_returns_one_environment_twice_is_refused() -> None:
    env = Diary()
    with pytest.raises(EnvironmentSetupError, match="same environment twice"):
        VectorEnvironment(EnvironmentFactory(lambda: env), 2, 0)


def test_labels_describe_the_source_of_an_environment() -> None:
    assert EnvironmentFactory("Pendulum-v1").label == "Pendulum-v1"
    assert EnvironmentFactory(gym.make("Pendulum-v1")).label == "Pendulum-v1"
    assert EnvironmentFactory(Diary).label.endswith("test_environments.Diary")
    assert EnvironmentFactory(Diary()).label.endswith("test_environments.Diary")
    assert EnvironmentFactory(diary).label.endswith("test_environments.diary")
    assert EnvironmentFactory(functools.partial(diary)).label.endswith("test_environments.diary")
    assert EnvironmentFactory(lambda: Diary()).label.startswith(
        "lambda (test_environments.py, line"
    )
    assert EnvironmentFactory("Pendulum-v1").is_registered_id
    assert not EnvironmentFactory(Diary).is_registered_id


def test_the_name_of_a_run_is_that_of_the_environment_that_is_made() -> None:
    class Local(Diary):
        pass

    def limited() -> Environment:
        return wrappers.TimeLimit(Local(), 5)

    def name(source: Any) -> str:
        return short_name(check_environment(EnvironmentFactory(source)))

    assert name("Pendulum-v1") == "Pendulum-v1"
    assert name(lambda: gym.make("Pendulum-v1")) == "Pendulum-v1"
    assert name(lambda: Diary()) == "Diary"
    assert name(functools.partial(Diary)) == "Diary"
    assert name(limited) == "Local"
    config = TrainConfig(algo="sac")
    folder = default_run_name(config, check_environment(EnvironmentFactory(lambda: Diary())))
    assert re.fullmatch(r"sac__Diary__seed0__\d{8}-\d{6}-[0-9a-f]{6}", folder)
    long = default_run_name(config, "module." + "Very" * 100)
    assert len(long) < 120


class Broken(Diary):
    """Fails in its constructor, in `reset` or in `step`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self._fail("constructor")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._fail("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._fail("step")
        return super().step(action)

    def _fail(self, place: str) -> None:
        if self.place == place:
            raise OSError("cannot start the simulator:\nno licence file in /opt")


@pytest.mark.parametrize("place", ["constructor", "reset", "step"])
def test_an_error_of_the_environments_code_is_shown_by_its_last_line(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gym.envs.registration.EnvSpec("Broken-v0", entry_point=Broken, kwargs={"place": place})
    monkeypatch.setitem(gym.registry, "Broken-v0", spec)
    with pytest.raises(EnvironmentSetupError) as caught:
        check_environment(EnvironmentFactory("Broken-v0"))
    message = str(caught.value)
    assert "Broken-v0" in message
    assert "OSError: no licence file in /opt" in message
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, OSError)


def test_mujoco_prints_nothing_and_writes_no_files(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")
    program = (
        "import numpy as np\n"
        "from rl_training.envs import EnvironmentFactory, VectorEnvironment\n"
        "factory = EnvironmentFactory('HalfCheetah-v5')\n"
        "for backend in ('sync', 'async'):\n"
        "    with VectorEnvironment(factory, 1, 0, backend=backend) as vector:\n"
        "        vector.reset()\n"
        "        vector.step(np.zeros((1, 6)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_mujoco_warnings_about_the_simulation_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mujoco = pytest.importorskip("mujoco")
    pytest.importorskip("imageio")
    monkeypatch.chdir(tmp_path)
    env: Any = EnvironmentFactory("Hopper-v5")()
    env.reset(seed=0)
    env.unwrapped.data.qpos[0] = np.nan
    mujoco.mj_step(env.unwrapped.model, env.unwrapped.data)
    assert "MuJoCo" in caplog.text
    assert list(tmp_path.iterdir()) == []
