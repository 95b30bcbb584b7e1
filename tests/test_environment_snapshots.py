"""An environment restored from a JSON snapshot continues exactly like the original."""

from __future__ import annotations

import json
import os
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box

from rl_training.envs import (
    EnvironmentFactory,
    SnapshotUnsupported,
    VectorEnvironment,
    probe_resume_level,
    restore_environment,
    snapshot_environment,
)
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.errors import CheckpointError
from rl_training.types import Json, ResumeLevel

PLAIN_IDS = [
    "CartPole-v1",
    "Pendulum-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "FrozenLake-v1",
    "Taxi",
    "CliffWalking",
    "Blackjack-v1",
]
MUJOCO_IDS = [
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Humanoid-v5",
    "HumanoidStandup-v5",
    "Swimmer-v5",
    "Reacher-v5",
    "Pusher-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
]
Environment = gym.Env[Any, Any]


def newest(name: str) -> str:
    """Return the id with its highest version. Available versions differ between releases."""
    return name if "-v" in name else max(key for key in gym.registry if key.startswith(f"{name}-v"))


def through_json(snapshot: Json) -> Json:
    # Sorted keys and no bare NaN: a snapshot must survive any JSON writer.
    decoded: Json = json.loads(json.dumps(snapshot, sort_keys=True, allow_nan=False))
    return decoded


def actions_for(env: Environment, count: int) -> list[Any]:
    env.action_space.seed(3)
    return [env.action_space.sample() for _ in range(count)]


def exact(value: object) -> str:
    return json.dumps(Encoder().encode(value))


def play(env: Environment, actions: list[Any]) -> list[str]:
    """Return all results of `env`, and of one more episode to compare its random stream."""
    seen = []
    for action in actions:
        *result, _ = env.step(action)
        seen.append(exact(result))
        if result[2] or result[3]:
            seen.append(exact(env.reset()[0]))
    seen.append(exact(env.reset()[0]))
    seen.append(exact(env.step(actions[0])[0]))
    return seen


def assert_continues_exactly(original: Environment, fresh: Environment) -> None:
    actions = actions_for(original, 30)
    original.reset(seed=11)
    for action in actions[:9]:
        *_, terminated, truncated, _ = original.step(action)
        if terminated or truncated:
            original.reset()
    snapshot = through_json(snapshot_environment(original))
    expected = play(original, actions[9:])
    restore_environment(fresh, snapshot)
    assert play(fresh, actions[9:]) == expected
    assert fresh.action_space.sample() == pytest.approx(original.action_space.sample(), abs=0)
    original.close()
    fresh.close()


@pytest.mark.parametrize("name", PLAIN_IDS)
def test_classic_control_and_toy_text_continue_exactly(name: str) -> None:
    factory = EnvironmentFactory(newest(name))
    assert_continues_exactly(factory(), factory())


@pytest.mark.parametrize("name", MUJOCO_IDS)
def test_mujoco_continues_exactly(name: str) -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")
    factory = EnvironmentFactory(name)
    assert_continues_exactly(factory(), factory())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: wrappers.TimeLimit(env, 12),
        wrappers.RecordEpisodeStatistics,
        wrappers.NormalizeObservation,
        wrappers.NormalizeReward,
        lambda env: wrappers.FrameStackObservation(env, 4),
        lambda env: wrappers.FlattenObservation(wrappers.FrameStackObservation(env, 3)),
        lambda env: wrappers.NormalizeObservation(
            wrappers.RescaleAction(env, np.float32(-3), np.float32(3))
        ),
    ],
    ids=["time limit", "statistics", "obs norm", "reward norm", "stack", "flat stack", "two"],
)
def test_wrappers_continue_exactly(wrap: Any) -> None:
    assert_continues_exactly(wrap(gym.make("Pendulum-v1")), wrap(gym.make("Pendulum-v1")))


def test_running_statistics_and_episode_totals_are_restored() -> None:
    def make() -> Any:
        return wrappers.RecordEpisodeStatistics(
            wrappers.NormalizeObservation(gym.make("CartPole-v1"))
        )

    original, fresh = make(), make()
    original.reset(seed=0)
    for _ in range(5):
        original.step(0)
    restore_environment(fresh, through_json(snapshot_environment(original)))
    assert fresh.episode_lengths == 5
    assert fresh.return_queue.maxlen == original.return_queue.maxlen
    np.testing.assert_array_equal(fresh.env.obs_rms.mean, original.env.obs_rms.mean)
    assert fresh.env.obs_rms.count == original.env.obs_rms.count
    assert fresh.env.obs_rms is not original.env.obs_rms


def test_values_are_restored_with_their_types() -> None:
    shared = np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2]
    generator = np.random.Generator(np.random.MT19937(4))
    generator.random(5)
    original: dict[Any, Any] = {
        "tuple": (1, (2.5, None), "text", True),
        "deque": deque([shared, shared], maxlen=4),
        ("a", 1): [np.float32(0.1), np.bool_(True), np.str_("J"), float("-inf"), -0.0],
        "empty": np.zeros((0, 3), dtype=np.float16),
        "complex": np.array([1 + 2j]),
        "big": 2**100,
        "generator": generator,
    }
    back = Decoder().decode(through_json(Encoder().encode(original)))
    assert list(back) == list(original)
    assert back["tuple"] == original["tuple"]
    assert back["deque"].maxlen == 4
    assert back["deque"][0] is back["deque"][1]
    np.testing.assert_array_equal(back["deque"][0], shared)
    assert [type(value) for value in back[("a", 1)]] == [type(v) for v in original[("a", 1)]]
    assert str(back[("a", 1)]) == str(original[("a", 1)])
    assert (back["empty"].shape, back["empty"].dtype) == ((0, 3), np.float16)
    assert back["big"] == 2**100
    assert back["generator"].random() == generator.random()


@pytest.mark.parametrize(
    "damaged",
    [
        {"kind": "array", "dtype": "|O8", "shape": [1], "data": "AAAAAAAAAAA="},
        {"kind": "array", "dtype": "<f8", "shape": [10**12], "data": "AAAAAAAAAAA="},
        {"kind": "array", "dtype": "<f8", "shape": [-1], "data": "AAAAAAAAAAA="},
        {"kind": "array", "dtype": "<f8", "shape": [1], "data": "not base64"},
        {"kind": "array", "dtype": "<U999999999999", "shape": [1], "data": "AAAA"},
        {"kind": "generator", "state": {"kind": "dict", "items": [["bit_generator", "os.system"]]}},
        {"kind": "same", "number": 7},
        {"kind": "import", "name": "os"},
        {"kind": "dict", "items": [[[], 1]]},
        {"kind": ["unhashable"]},
        {"kind": "float", "value": "__import__('os')"},
        {"kind": "deque", "items": [], "maxlen": -1},
        {"no kind": 1},
    ],
)
def test_damaged_and_hostile_values_are_refused(damaged: Json) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Decoder().decode(damaged)


def snapshot_of(name: str) -> Json:
    env = gym.make(name)
    env.reset(seed=0)
    env.step(env.action_space.sample())
    return through_json(snapshot_environment(env))


def test_a_snapshot_of_another_environment_is_refused() -> None:
    with pytest.raises(CheckpointError, match="CartPoleEnv"):
        restore_environment(gym.make("Pendulum-v1"), snapshot_of("CartPole-v1"))


@pytest.mark.parametrize("name", ["step", "__class__", "planted"])
def test_a_snapshot_cannot_set_attributes_the_environment_does_not_have(name: str) -> None:
    env = gym.make("Pendulum-v1")
    snapshot = snapshot_of("Pendulum-v1")
    snapshot["layers"][-1]["attributes"][name] = 1
    with pytest.raises(CheckpointError, match=name):
        restore_environment(env, snapshot)
    assert name not in vars(env.unwrapped)


@pytest.mark.parametrize("damaged", [{}, {"layers": 3}, {"layers": [{}]}, {"layers": []}])
def test_a_damaged_snapshot_is_refused(damaged: Json) -> None:
    with pytest.raises(CheckpointError):
        restore_environment(gym.make("Pendulum-v1"), damaged)


def test_a_damaged_attribute_changes_nothing() -> None:
    env = gym.make("Pendulum-v1")
    env.reset(seed=5)
    before = snapshot_environment(env)
    snapshot = snapshot_of("Pendulum-v1")
    snapshot["layers"][-1]["attributes"]["state"]["data"] = "AAAA"
    with pytest.raises(CheckpointError, match="damaged"):
        restore_environment(env, snapshot)
    assert snapshot_environment(env) == before


class Walk(gym.Env[np.ndarray, np.ndarray]):
    """A one-dimensional random walk whose state can be captured."""

    def __init__(self) -> None:
        self.observation_space = Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place(float(self.np_random.normal()))
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place(self.position() + float(action[0]) + float(self.np_random.normal()))
        return self.observe(), self.position(), False, False, {}

    def place(self, position: float) -> None:
        self.walker = position

    def position(self) -> float:
        return self.walker

    def observe(self) -> np.ndarray:
        return np.array([self.position()], dtype=np.float32)


class Walker:
    """Looks like a simulator written in another language."""

    def __init__(self, position: float) -> None:
        self.position = position


class OpaqueWalk(Walk):
    """Keeps its position in an object that cannot be captured."""

    walker: Any

    def place(self, position: float) -> None:
        self.walker = Walker(position)

    def position(self) -> float:
        return float(self.walker.position)


class SelfSavingWalk(OpaqueWalk):
    """Like `OpaqueWalk`, but with `snapshot` and `restore`."""

    def snapshot(self) -> dict[str, Any]:
        return {"position": np.array(self.position())}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.place(float(snapshot["position"]))


class NoisyWalk(Walk):
    """Uses random numbers that no seed controls."""

    def observe(self) -> np.ndarray:
        return np.frombuffer(os.urandom(1), dtype=np.uint8).astype(np.float32)


class ForgetfulWalk(OpaqueWalk):
    """Cannot be captured, and its episodes depend on earlier ones."""

    episodes = 0

    def place(self, position: float) -> None:
        self.episodes += 1
        super().place(position + self.episodes)


class SharedRandomWalk(Walk):
    """Stores its random generator in a second attribute."""

    def place(self, position: float) -> None:
        self.random = self.np_random
        super().place(position)

    def observe(self) -> np.ndarray:
        return np.array([self.position() + self.random.normal()], dtype=np.float32)


class BrokenWalk(Walk):
    def step(self, action: np.ndarray) -> Any:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("source", "level"),
    [
        ("CartPole-v1", ResumeLevel.BIT_EXACT),
        (Walk, ResumeLevel.BIT_EXACT),
        (SelfSavingWalk, ResumeLevel.BIT_EXACT),
        (SharedRandomWalk, ResumeLevel.BIT_EXACT),
        (OpaqueWalk, ResumeLevel.EPISODE_EXACT),
        (ForgetfulWalk, ResumeLevel.STATISTICAL),
        (NoisyWalk, ResumeLevel.STATISTICAL),
        (BrokenWalk, ResumeLevel.STATISTICAL),
        (lambda: 3, ResumeLevel.STATISTICAL),
    ],
)
def test_the_resume_level_matches_the_environment(source: Any, level: ResumeLevel) -> None:
    assert probe_resume_level(EnvironmentFactory(source)) is level


def test_the_error_names_an_attribute_that_cannot_be_captured() -> None:
    env = OpaqueWalk()
    env.reset(seed=0)
    with pytest.raises(SnapshotUnsupported, match=r"OpaqueWalk\.walker"):
        snapshot_environment(env)


def test_an_environment_that_saves_itself_continues_exactly() -> None:
    assert_continues_exactly(SelfSavingWalk(), SelfSavingWalk())


def roll(vector: VectorEnvironment, steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(steps)
    seen = []
    for _ in range(steps):
        result = vector.step(rng.uniform(-1, 1, (vector.num_envs, vector.spaces.action_dim)))
        seen += [result.next_obs, result.reward, result.terminated, result.truncated, result.obs]
    return seen


def assert_same_bits(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert [array.tobytes() for array in left] == [array.tobytes() for array in right]


def short_pendulum() -> Environment:
    return gym.make("Pendulum-v1", max_episode_steps=9)


@pytest.mark.parametrize(("saving", "loading"), [("async", "sync"), ("sync", "async")])
def test_a_vector_snapshot_can_be_restored_in_either_backend(saving: Any, loading: Any) -> None:
    factory = EnvironmentFactory(short_pendulum)
    with VectorEnvironment(factory, 2, seed=1, backend=saving) as original:
        original.reset()
        current = roll(original, 13)[-1]
        snapshot = through_json(original.snapshot())
        expected = roll(original, 20)
    with VectorEnvironment(factory, 2, seed=99, backend=loading) as resumed:
        assert_same_bits([resumed.restore(snapshot)], [current])
        assert_same_bits(roll(resumed, 20), expected)


def test_restored_episodes_report_their_complete_return_and_length() -> None:
    factory = EnvironmentFactory(short_pendulum)

    def first_episode(vector: VectorEnvironment, steps: int) -> list[Any]:
        return [
            episode
            for _ in range(steps)
            for episode in vector.step(np.zeros((1, 1), dtype=np.float32)).episodes
        ]

    with VectorEnvironment(factory, 1, seed=1) as vector:
        vector.reset()
        assert first_episode(vector, 5) == []
        snapshot = through_json(vector.snapshot())
        expected = first_episode(vector, 4)
        vector.restore(snapshot)
        assert first_episode(vector, 4) == expected
        assert expected[0].length == 9


def test_seeded_episodes_are_resumed_without_a_snapshot_of_the_environment() -> None:
    factory = EnvironmentFactory(lambda: wrappers.TimeLimit(OpaqueWalk(), 6))
    with VectorEnvironment(factory, 2, seed=1, seed_every_reset=True) as original:
        original.reset()
        current = roll(original, 12)[-1]
        assert original.at_episode_boundary()
        snapshot = through_json(original.snapshot())
        expected = roll(original, 15)
    with VectorEnvironment(factory, 2, seed=1, seed_every_reset=True) as resumed:
        assert_same_bits([resumed.restore(snapshot)], [current])
        assert_same_bits(roll(resumed, 15), expected)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_environment_continues_after_a_failed_snapshot(backend: Any) -> None:
    with VectorEnvironment(EnvironmentFactory(OpaqueWalk), 2, seed=0, backend=backend) as vector:
        vector.reset()
        with pytest.raises(SnapshotUnsupported, match=r"Environment 0: .*walker"):
            vector.snapshot()
        assert len(roll(vector, 3)) == 15


@pytest.mark.parametrize(
    "change",
    [
        {"episode_numbers": [0]},
        {"episode_returns": ["x", 1]},
        {"environments": []},
        {"environments": [{}, {}]},
        {"observations": None},
        {"seed_every_reset": True},
        {"episode_lengths": [[1], [2, 3]]},
    ],
)
def test_a_vector_snapshot_that_does_not_fit_is_refused(change: Json) -> None:
    with VectorEnvironment(EnvironmentFactory(short_pendulum), 2, seed=0) as vector:
        vector.reset()
        snapshot = through_json(vector.snapshot())
        with pytest.raises(CheckpointError):
            vector.restore(snapshot | change)
