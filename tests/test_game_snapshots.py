"""Atari games, MiniGrid and environments seen as images continue exactly from a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from helpers import assert_resumes_bit_for_bit
from test_environment_snapshots import (
    Environment,
    assert_continues_exactly,
    exact,
    play,
    through_json,
)

from rl_training.config_files import load_config
from rl_training.envs import (
    EnvironmentFactory,
    SnapshotUnsupported,
    probe_resume_level,
    restore_environment,
    snapshot_environment,
)
from rl_training.envs.snapshots import atari
from rl_training.envs.snapshots.codec import Decoder
from rl_training.errors import CheckpointError
from rl_training.types import Json, ResumeLevel

MINIGRID_IDS = [
    "MiniGrid-Empty-Random-6x6-v0",
    "MiniGrid-DoorKey-6x6-v0",  # a door, a key to carry
    "MiniGrid-Dynamic-Obstacles-6x6-v0",  # moving objects
    "MiniGrid-KeyCorridorS3R2-v0",  # rooms that refer to each other
    "MiniGrid-LockedRoom-v0",
    "MiniGrid-MultiRoom-N2-S4-v0",
    "MiniGrid-ObstructedMaze-1Dlh-v0",  # boxes that contain keys
]
MINIGRID_WRAPPERS: dict[str, dict[str, Any]] = {
    "ActionBonus": {},
    "DirectionObsWrapper": {},
    "FlatObsWrapper": {},
    "FullyObsWrapper": {},
    "ImgObsWrapper": {},
    "OneHotPartialObsWrapper": {},
    "PositionBonus": {},
    "ReseedWrapper": {"seeds": (4, 5)},
    "RGBImgPartialObsWrapper": {},
    "StochasticActionWrapper": {"prob": 0.5},
    "SymbolicObsWrapper": {},
    "ViewSizeWrapper": {},
}


def atari_factory(
    name: str = "Pong", *, preprocessed: bool = False, **kwargs: Any
) -> EnvironmentFactory:
    pytest.importorskip("ale_py")

    def make() -> Environment:
        if not preprocessed:
            return gym.make(f"ALE/{name}-v5", **kwargs)
        env = gym.make(f"ALE/{name}-v5", frameskip=1, obs_type="grayscale", **kwargs)
        return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)

    return EnvironmentFactory(make)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Pong", {"preprocessed": True}),
        ("Breakout", {"preprocessed": True, "repeat_action_probability": 0.0}),
        ("Qbert", {}),  # its state in the emulator is incomplete
        ("Pong", {"frameskip": (2, 5), "obs_type": "ram"}),
        ("Tennis", {"continuous": True, "mode": 2, "difficulty": 1}),
    ],
)
def test_atari_games_continue_exactly(name: str, options: dict[str, Any]) -> None:
    if options.get("preprocessed"):
        pytest.importorskip("cv2")
    factory = atari_factory(name, **options)
    assert_continues_exactly(factory(), factory())


def test_a_game_that_is_loaded_again_continues_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atari, "RELOAD_AFTER", 40)
    factory = atari_factory(max_num_frames_per_episode=24)
    original, fresh = factory(), factory()
    original.reset(seed=3)
    loaded = []
    for step in range(60):
        *_, terminated, truncated, _ = original.step(step % 6)
        if terminated or truncated:
            original.reset()
            loaded.append(original.unwrapped.ale.read()["seed"])  # type: ignore[attr-defined]
    assert len(set(loaded)) > 2
    restore_environment(fresh, through_json(snapshot_environment(original)))
    assert play(fresh, [2, 3, 4] * 15) == play(original, [2, 3, 4] * 15)


def test_episodes_are_those_of_the_game_without_a_record() -> None:
    recorded, plain = atari_factory()(), atari_factory().source()  # type: ignore[operator]
    for env in (recorded, plain):
        env.reset(seed=5)
    assert play(recorded, [0, 2, 3] * 9) == play(plain, [0, 2, 3] * 9)


def atari_snapshot(env: Environment) -> Json:
    env.reset(seed=0)
    env.step(0)
    return through_json(snapshot_environment(env))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("seed", 2**40, "seed"),
        ("seed", "0", "seed"),
        ("stream", None, "random stream"),
        ("inputs", [255, 1], "vector of bytes"),
        ("inputs", np.array([[255]], np.uint8), "vector of bytes"),
        ("inputs", np.array([255, 18], np.uint8), "actions and resets"),
        ("inputs", np.array([3], np.uint8), "actions and resets"),
        ("inputs", np.full(2_000_000, 255, np.uint8), "more than"),
        ("strengths", np.ones(3, np.float32), "paddle strengths"),
        ("strengths", None, "float32"),
    ],
)
def test_a_damaged_record_of_a_game_is_refused(name: str, value: Any, problem: str) -> None:
    env = atari_factory()()
    env.reset(seed=0)
    state = env.unwrapped.ale.read()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=problem):
        env.unwrapped.ale.check(state | {name: value})  # type: ignore[attr-defined]


def test_a_record_of_another_course_is_refused() -> None:
    env = atari_factory()()
    snapshot = atari_snapshot(env)
    items = dict(snapshot["layers"][-1]["atari"]["items"])
    snapshot["layers"][-1]["atari"]["items"] = [*({**items, "seed": 1}).items()]
    with pytest.raises(CheckpointError, match="another course"):
        restore_environment(env, snapshot)


@pytest.mark.thorough
def test_a_run_in_a_game_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With the packaged preprocessing and sticky actions, in the middle of games."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    packaged = load_config("dqn/atari").to_mapping()
    small = {"learning_starts": 40, "batch_size": 4, "buffer_capacity": 100}
    config = {
        **packaged,
        "env_kwargs": {"frameskip": 1, "max_num_frames_per_episode": 100},
        "seeds": None,
        "num_envs": 2,
        "total_timesteps": 120,
        "eval_interval": 60,
        "eval_episodes": 1,
        "checkpoint_interval": 20,
        "compile": "off",
        "device": "cpu",
        "output_dir": str(tmp_path),
        "algo_kwargs": {**packaged["algo_kwargs"], **small},
    }
    assert_resumes_bit_for_bit(config)


def test_a_game_changed_from_outside_is_resumed_at_episodes_only() -> None:
    env = atari_factory()()
    atari_snapshot(env)
    emulator = env.unwrapped.ale  # type: ignore[attr-defined]
    emulator.setRAM(3, 1)
    with pytest.raises(SnapshotUnsupported, match="setRAM"):
        snapshot_environment(env)


@pytest.mark.parametrize("name", MINIGRID_IDS)
def test_minigrid_continues_exactly(name: str) -> None:
    pytest.importorskip("minigrid")
    factory = EnvironmentFactory(name)
    assert_continues_exactly(factory(), factory())


@pytest.mark.parametrize("name", MINIGRID_WRAPPERS)
def test_wrappers_of_minigrid_continue_exactly(name: str) -> None:
    kind = getattr(pytest.importorskip("minigrid.wrappers"), name)

    def make() -> Environment:
        env: Environment = kind(gym.make("MiniGrid-DoorKey-6x6-v0"), **MINIGRID_WRAPPERS[name])
        return env

    assert_continues_exactly(make(), make())


def test_a_carried_object_is_restored() -> None:
    pytest.importorskip("minigrid")
    original, fresh = (gym.make("MiniGrid-Fetch-5x5-N2-v0") for _ in range(2))
    original.reset(seed=0)
    grid = original.unwrapped
    grid.carrying = grid.grid.grid[grid.grid.grid.index(None) - 1]  # type: ignore[attr-defined]
    restore_environment(fresh, through_json(snapshot_environment(original)))
    restored = fresh.unwrapped
    assert exact(restored.carrying) == exact(grid.carrying)  # type: ignore[attr-defined]
    assert any(
        cell is restored.carrying  # type: ignore[attr-defined]
        for cell in restored.grid.grid  # type: ignore[attr-defined]
    )


def test_babyai_is_resumed_at_episodes_only() -> None:
    pytest.importorskip("minigrid")
    level = probe_resume_level(EnvironmentFactory("BabyAI-GoToRedBall-v0"))
    assert level is ResumeLevel.EPISODE_EXACT


@pytest.mark.parametrize(
    "damaged",
    [
        {"class": "minigrid.core.world_object:WorldObj", "attributes": []},
        {"class": "subprocess:Popen", "attributes": []},
        {"class": "minigrid.core.grid:Grid", "attributes": [1]},
        {"class": ["minigrid"], "attributes": []},
    ],
)
def test_objects_of_other_classes_are_refused(damaged: Json) -> None:
    pytest.importorskip("minigrid")
    with pytest.raises(ValueError, match=r".+"):
        Decoder().decode({"kind": "object", **damaged})


def rendered(name: str, *layers: Callable[[Environment], Environment]) -> Environment:
    env: Environment = wrappers.AddRenderObservation(gym.make(name, render_mode="rgb_array"))
    for layer in layers:
        env = layer(env)
    return env


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Acrobot-v1"])
def test_rendered_observations_continue_exactly(name: str) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("cv2")
    layers = [
        lambda env: wrappers.ResizeObservation(env, (84, 84)),
        wrappers.GrayscaleObservation,
        lambda env: wrappers.MaxAndSkipObservation(env, 2),
        lambda env: wrappers.TransformObservation(env, lambda frame: 255 - frame, None),
        lambda env: wrappers.FrameStackObservation(env, 3),
    ]
    assert_continues_exactly(rendered(name, *layers), rendered(name, *layers))
