"""Offline runs on observations of every kind, from files, recipes, runs and arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import StopAt, hashes
from observation_zoo import OBSERVATIONS, Zoo
from test_observation_data import buffers

import rl_training
from rl_training import BC, IQL, SAC, TD3BC
from rl_training.datasets.opening import build_dataset
from rl_training.datasets.workflows import describe_dataset, open_source, record_dataset
from rl_training.envs.spaces import describe_spaces
from rl_training.errors import ConfigError, DataError, EnvironmentSetupError, UserError
from rl_training.runtime.workflows import evaluate_offline, resume_training, split_dataset

QUICK: dict[str, Any] = {"hidden_sizes": [16, 16], "batch_size": 16, "compile": "off"}
DATA_ID = "maze/point/random-v0"


class Maze(gym.Env[Any, Any]):
    """Reach a goal in the plane: observations as in the mazes and kitchens of D4RL."""

    def __init__(self) -> None:
        plane = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = spaces.Dict(
            observation=spaces.Box(-np.inf, np.inf, (4,), np.float64),
            achieved_goal=plane,
            desired_goal=plane,
        )
        self.action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.goal, self.place = self.np_random.normal(size=(2, 2))
        self.speed, self.time = np.zeros(2), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.speed = 0.5 * self.speed + 0.2 * np.asarray(action)
        self.place = self.place + self.speed
        reward = -float(np.linalg.norm(self.place - self.goal))
        return self._observe(), reward, reward > -0.1, self.time == 25, {}

    def _observe(self) -> Any:
        return {
            "observation": np.concatenate([self.place, self.speed]),
            "achieved_goal": self.place.copy(),
            "desired_goal": self.goal.copy(),
        }


class WithText(Zoo):
    """Zoo whose observations also have a text."""

    def __init__(self) -> None:
        super().__init__("dictionary")
        self.observation_space = spaces.Dict(
            {**OBSERVATIONS["dictionary"].spaces, "mission": spaces.Text(5)}  # type: ignore[attr-defined]
        )


for name, maker in {"Maze-v0": Maze, "Zoo-v0": Zoo, "WithText-v0": WithText}.items():
    if name not in gym.registry:
        gym.register(name, maker)


@pytest.fixture(autouse=True)
def _minari_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def run(algo: str, tmp_path: Path, callbacks: Any = None, **changes: Any) -> Any:
    settings = {"total_timesteps": 20, "eval_interval": 20, "eval_episodes": 1, **changes}
    config = {"algo": algo, "output_dir": str(tmp_path / "runs"), "compile": "off", **settings}
    networks = {"hidden_sizes": [16, 16], "batch_size": 16}
    return rl_training.train({**config, "algo_kwargs": networks}, callbacks=callbacks)


@pytest.mark.parametrize("algo", ["bc", "iql"])
def test_goals_from_minari_train_a_policy(algo: str, tmp_path: Path) -> None:
    record_dataset(None, 120, env_id="Maze-v0", dataset_id=DATA_ID)
    dataset = {"kind": "minari", "id": DATA_ID}
    result = run(algo, tmp_path, env_id="Maze-v0", dataset=dataset)
    assert np.isfinite(result.metrics["eval_return_mean"])
    agent = {"bc": BC, "iql": IQL}[algo].load(result.run_dir)
    observation, _ = Maze().reset(seed=0)
    assert agent.predict(observation).shape == (2,)
    metrics = evaluate_offline(result.run_dir, fqe_updates=5)
    assert np.isfinite(metrics["ope_action_distance"])
    assert np.isfinite(metrics["ope_fqe_value"])


@pytest.mark.filterwarnings("ignore")
def test_goals_written_by_minari_train_a_policy_without_an_environment(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    space = Maze().observation_space
    minari.create_dataset_from_buffers(
        DATA_ID,
        buffers(space, [9, 12, 7]),
        action_space=spaces.Box(-2, 2, (2,)),
        observation_space=space,
        algorithm_name="random",
        code_permalink="https://example.org",
        author="a",
        author_email="a@example.org",
    )
    result = run("iql", tmp_path, dataset={"kind": "minari", "id": DATA_ID})
    chosen = run(
        "bc",
        tmp_path,
        env_id="Maze-v0",
        observation_keys=["observation", "desired_goal"],
        dataset={"kind": "minari", "id": DATA_ID},
    )
    assert IQL.load(result.run_dir).predict(space.sample()).shape == (2,)
    assert "achieved_goal" not in str(BC.load(chosen.run_dir).policy.spaces.observation)
    metrics = evaluate_offline(chosen.run_dir, fqe_updates=0)
    assert np.isfinite(metrics["ope_action_distance"])


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.fast_cases("dictionary", "image")
def test_every_observation_can_be_cloned_and_resumed_exactly(name: str, tmp_path: Path) -> None:
    path = tmp_path / "data.hdf5"
    record_dataset(path, 60, env_id="Zoo-v0", env_kwargs={"observation": name})
    settings: dict[str, Any] = {
        "env_id": "Zoo-v0",
        "env_kwargs": {"observation": name},
        "dataset": {"kind": "hdf5", "path": str(path)},
    }
    whole = run("bc", tmp_path / "whole", **settings)
    half = run("bc", tmp_path / "half", callbacks=[StopAt(10)], **settings)
    resumed = resume_training(half.run_dir)
    model = "model.safetensors"
    assert hashes(half.checkpoint_path)[model] != hashes(whole.checkpoint_path)[model]
    assert hashes(resumed.checkpoint_path)[model] == hashes(whole.checkpoint_path)[model]
    metrics = evaluate_offline(whole.run_dir, fqe_updates=2)
    assert np.isfinite(metrics["ope_fqe_value"])


def test_recipes_policies_and_runs_are_data(tmp_path: Path) -> None:
    environment: dict[str, Any] = {
        "env_id": "Zoo-v0",
        "env_kwargs": {"observation": "tuple"},
        "normalize_observations": False,
    }
    agent = SAC(
        "Zoo-v0",
        env_kwargs={"observation": "tuple"},
        total_timesteps=60,
        learning_starts=20,
        buffer_capacity=100,
        output_dir=str(tmp_path / "sac"),
        **QUICK,
    )
    online = agent.learn()
    for section in (
        {"kind": "random", "size": 50},
        {"kind": "policy", "size": 50, "checkpoint": str(online.run_dir)},
        {"kind": "run", "path": str(online.run_dir)},
    ):
        result = run("td3_bc", tmp_path, **environment, dataset=section)
        assert np.isfinite(result.metrics["eval_return_mean"])
    recording = open_source(online.run_dir)
    assert recording.info.observation == describe_spaces(Zoo("tuple")).observation
    assert recording.info.max_rows == 60
    path = record_dataset(tmp_path / "policy.npz", 40, checkpoint=online.run_dir)
    assert describe_dataset(path).info.observation == recording.info.observation
    with pytest.raises(UserError, match="observation_keys: a policy is recorded"):
        record_dataset(tmp_path / "no.npz", 40, checkpoint=online.run_dir, observation_keys=["0"])


def test_dictionaries_of_arrays_train_a_policy(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    observations = {
        "place": stream.normal(size=(61, 3)),
        "arm": {"joints": stream.normal(size=(61, 2, 2)), "grip": stream.random((61, 2)) < 0.5},
        "camera": stream.integers(0, 256, (61, 12, 12, 3), np.uint8),
    }

    def steps(value: Any, chosen: slice) -> Any:
        if isinstance(value, dict):
            return {key: steps(inner, chosen) for key, inner in value.items()}
        return value[chosen]

    ends = np.arange(60) % 20 == 19
    dataset = {
        "observations": steps(observations, slice(60)),
        "next_observations": steps(observations, slice(1, 61)),
        "actions": stream.uniform(-1, 1, (60, 2)),
        "rewards": stream.normal(size=60),
        "terminals": ends,
        "timeouts": np.zeros(60),
        "action_low": -np.ones(2),
        "action_high": np.ones(2),
    }
    agent = TD3BC(
        dataset=dataset,
        normalize_observations=False,
        total_timesteps=10,
        output_dir=str(tmp_path),
        **QUICK,
    )
    agent.learn()
    assert agent.predict(steps(observations, slice(0, 1))).shape == (1, 2)
    chosen = TD3BC(
        dataset=dataset,
        observation_keys=["place", "arm/joints"],
        normalize_observations=True,
        total_timesteps=10,
        output_dir=str(tmp_path),
        **QUICK,
    )
    chosen.learn()
    one = {"place": np.zeros(3), "arm": {"joints": np.zeros((2, 2))}}
    assert chosen.predict(one).shape == (2,)
    with pytest.raises(ConfigError, match="only numbers can be"):
        TD3BC(
            dataset=dataset,
            normalize_observations=True,
            total_timesteps=10,
            output_dir=str(tmp_path),
            **QUICK,
        ).learn()
    # Tuples are observations of several arrays as well.
    place = observations["place"]
    parts: dict[str, Any] = {"observations": (place[:60],), "next_observations": (place[1:],)}
    tuples = build_dataset({**dataset, **parts})
    assert [leaf.name for leaf in tuples.spaces.observation.leaves] == ["0"]
    parts["next_observations"] = {"1": place[1:]}
    with pytest.raises(DataError, match="next_observations/0 missing"):
        build_dataset({**dataset, **parts})


def test_text_is_left_out_of_recordings(tmp_path: Path) -> None:
    keys = ["camera", "mode"]
    with pytest.raises(EnvironmentSetupError, match=r"'mission'.*Text.*observation_keys"):
        record_dataset(tmp_path / "no.npz", 20, env_id="WithText-v0")
    path = record_dataset(tmp_path / "data.npz", 40, env_id="WithText-v0", observation_keys=keys)
    assert [leaf.name for leaf in open_source(path).info.observation.leaves] == keys
    first, second = split_dataset(
        path,
        [0.5, 0.5],
        [tmp_path / "a.hdf5", tmp_path / "b.npz"],
        observation_keys=["camera"],
    )
    assert first.steps + second.steps == 40
    assert [leaf.name for leaf in open_source(second.path).info.observation.leaves] == ["camera"]
