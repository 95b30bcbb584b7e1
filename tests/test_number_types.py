"""Numbers of observations keep their types in storage, and learning does not depend on them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conformance import assert_same
from gymnasium import spaces
from helpers import BUILT_IN, StopAt, hashes, metric_rows, model_bytes
from test_spaces_zoo import ACTIONS, config_of

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.data.formats.columns import array_recording
from rl_training.data.loading import DatasetPart, load_dataset
from rl_training.deployment.hub_files import observation_size
from rl_training.envs import describe_spaces
from rl_training.envs.spaces import describe_observations
from rl_training.errors import CheckpointError, DataError, EnvironmentRuntimeError, UserError
from rl_training.models.network_plan import NetworkPlan
from rl_training.models.networks import EncodedNetwork
from rl_training.observations import ALL_FLOAT32, ObservationSpec
from rl_training.runtime.workflows import evaluate_offline
from rl_training.training import inputs, run, saved_run
from rl_training.types import TrainResult

FLOATS = np.float32
FEW = ("dqn", "fql", "sac")
"""Algorithms with networks of different kinds"""
PAIRS = [
    pytest.param(
        spec,
        kind,
        id=f"{spec.name}-{kind}",
        marks=[] if spec.name in FEW and kind == spec.actions[0] else pytest.mark.thorough,
    )
    for spec in BUILT_IN
    for kind in spec.actions
]


class Typed(gym.Env[Any, Any]):
    """Observes whole numbers that are declared in a given type; `change` is added to them."""

    def __init__(
        self, dtype: Any = np.uint8, action_space: Any = ACTIONS["continuous"], change: float = 0
    ) -> None:
        self.observation_space = spaces.Box(0, 100, (7,), dtype)
        self.action_space, self.change, self.time = action_space, change, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        ended = bool(self.np_random.random() < 0.1)
        return self._observe(), -(float(np.sum(action)) ** 2), ended, self.time >= 9, {}

    def _observe(self) -> Any:
        values = self.np_random.integers(0, 101, 7).astype(self.observation_space.dtype)
        return values + self.change if self.change else values


class TypedGoals(gym.Env[Any, Any]):
    """Reach a place on a grid, whose coordinates are declared in a given type."""

    def __init__(self, dtype: Any) -> None:
        place = spaces.Box(-50, 50, (3,), dtype)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict(dict.fromkeys(names, place))
        self.action_space, self.dtype, self.time = spaces.Box(-1, 1, (3,)), dtype, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.integers(-50, 51, (2, 3))
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        moved = np.rint(5 * np.asarray(action)).astype(int)
        self.place = np.clip(self.place + moved, -50, 50)
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self._observe(), reward, False, self.time >= 12, {}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        away = np.abs(achieved.astype(float) - desired.astype(float)).sum(-1)
        return -(away > 2).astype(float)

    def _observe(self) -> dict[str, np.ndarray]:
        place, goal = self.place.astype(self.dtype), self.goal.astype(self.dtype)
        return {"observation": place, "achieved_goal": place, "desired_goal": goal}


def learned(result: TrainResult) -> dict[str, str]:
    found = hashes(result.checkpoint_path)
    return {name: found[name] for name in ("model.safetensors", "learner.safetensors")}


def described(result: TrainResult) -> Any:
    """What the run's policy says about observations; None: a vector of float32."""
    return json.loads((result.checkpoint_path / "policy.json").read_text())["observation"]


def sac_config(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    config = config_of(get_algorithm_spec("sac"), tmp_path)
    config["algo_kwargs"] |= settings
    return config


def vector(dtype: Any, size: int = 7) -> ObservationSpec:
    return describe_observations(spaces.Box(0, 100, (size,), dtype))


def as_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store all numbers as float32, and describe them like versions without other types."""
    for module in (inputs, run, saved_run):
        monkeypatch.setattr(module, "own_number_types", lambda config: ALL_FLOAT32)


# --- Storage ---


@pytest.mark.parametrize(
    ("dtype", "size", "words"),
    [
        (np.uint8, 128, 32),  # the RAM of an Atari game
        (np.uint8, 5, 2),
        (np.int8, 1, 1),
        (np.int16, 3, 2),
        (np.uint16, 2, 1),
        (np.float16, 3, 2),
        (np.int32, 3, 3),
        (np.float64, 3, 3),
        (np.int64, 3, 3),
        (np.uint32, 3, 3),
        (np.bool_, 3, 3),
    ],
)
def test_rows_have_the_bytes_of_the_type(dtype: Any, size: int, words: int) -> None:
    space = spaces.Box(0, 1, (size,), dtype)
    spec = describe_observations(space)
    assert spec.size == words
    row = np.zeros(words, np.float32)
    spec.write(space.sample(), row)
    stored = spec.arrays_of(row[None])
    keeps = dtype not in (np.float64, np.int64, np.uint32, np.bool_)
    assert stored.dtype == (dtype if keeps else np.float32)


def test_extreme_values_are_stored_exactly() -> None:
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.int32):
        limits = np.iinfo(dtype)
        spec = vector(dtype, 2)
        for given in ([limits.min, limits.max], [float(limits.min), float(limits.max)]):
            rows, _ = spec.rows_of(given)
            assert spec.unpack(rows)[""].tolist() == [[limits.min, limits.max]]
            found = spec.leaves_of(torch.from_numpy(rows))[""]
            assert found.dtype == torch.float32
            assert found.tolist() == [
                [float(np.float32(limits.min)), float(np.float32(limits.max))]
            ]
        for wrong in ([limits.min - 1, 0], [0, limits.max + 1]):
            with pytest.raises(ValueError, match="must be whole numbers"):
                spec.rows_of(wrong)


def test_a_vector_of_float32_is_its_row_and_its_network_plain() -> None:
    spec = vector(FLOATS)
    assert spec.is_vector
    assert not vector(np.uint8).is_vector
    plain = NetworkPlan(spec).build("critic", [8], 1, ensemble=2)
    assert not isinstance(plain, EncodedNetwork)


def test_numbers_of_all_types_have_the_network_of_floats() -> None:
    found = []
    for dtype in (FLOATS, np.uint8, np.int16, np.float16):
        generator = torch.Generator().manual_seed(3)
        plan = NetworkPlan(vector(dtype))
        network = plan.build("critic", [8], 1, other_inputs=2, ensemble=3, generator=generator)
        rows, _ = plan.observation.rows_of(np.arange(14).reshape(2, 7))
        inputs = torch.cat([torch.from_numpy(rows), torch.ones(2, 2)], dim=1)
        vectors = network.select(network.vector, torch.tensor([2, 0]))
        found.append((network.layout.shapes, network.vector, network(inputs, vectors)))
    for shapes, parameters, outputs in found[1:]:
        assert shapes == found[0][0]
        assert torch.equal(parameters, found[0][1])
        assert torch.equal(outputs, found[0][2])


def test_infinite_halves_are_found() -> None:
    spec = vector(np.float16)
    rows, _ = spec.rows_of(np.zeros(7))
    assert spec.are_finite(rows)
    for wrong in (np.inf, np.nan, 1e6):
        rows, _ = spec.rows_of([0, 0, 0, 0, 0, 0, wrong])
        assert not spec.are_finite(rows)
        assert spec.problem_in(rows) == "contains numbers that are not finite"


def test_an_environment_with_infinite_halves_is_stopped(tmp_path: Path) -> None:
    env = partial(Typed, np.float16, change=np.float16(np.inf))
    with pytest.raises(EnvironmentRuntimeError, match="not finite"):
        rl_training.train(sac_config(tmp_path), env=env)


def test_values_that_the_type_does_not_have_are_refused(tmp_path: Path) -> None:
    message = "must be whole numbers from 0 to 255, because it is stored as uint8"
    with pytest.raises(EnvironmentRuntimeError, match=message):
        rl_training.train(sac_config(tmp_path), env=partial(Typed, np.uint8, change=0.5))
    result = rl_training.train(sac_config(tmp_path), env=Typed)
    for wrong in ([0.5] * 7, [-1] * 7, [256] * 7, [float("nan")] * 7):
        with pytest.raises(UserError, match=f"obs: its observation {message}"):
            rl_training.predict_checkpoint(result.run_dir, wrong)
    same = [rl_training.predict_checkpoint(result.run_dir, [x] * 7) for x in (3, 3.0, np.uint8(3))]
    assert (same[0] == same[1]).all()
    assert (same[0] == same[2]).all()


# --- Learning ---


@pytest.mark.parametrize(("spec", "kind"), PAIRS)
def test_a_vector_of_bytes_is_learned_from_as_one_of_floats(
    spec: AlgorithmSpec, kind: Any, tmp_path: Path
) -> None:
    config = config_of(spec, tmp_path)
    if spec.name == "dqn":  # streams without a body
        config["algo_kwargs"] |= {"dueling": True, "hidden_sizes": [8]}
    typed, floats = (
        rl_training.train(config, env=partial(Typed, dtype, ACTIONS[kind]))
        for dtype in (np.uint8, FLOATS)
    )
    assert typed.metrics["gradient_steps"] > 0
    assert described(typed)[0]["number_type"] == "uint8"
    assert learned(typed) == learned(floats)
    assert metric_rows(typed.run_dir) == metric_rows(floats.run_dir)


def test_goals_of_small_types_are_repeated_as_floats_are(tmp_path: Path) -> None:
    config = {**sac_config(tmp_path), "replay": {"hindsight": {}}, "total_timesteps": 120}
    results = [
        rl_training.train(config, env=partial(TypedGoals, dtype)) for dtype in (np.int16, FLOATS)
    ]
    assert learned(results[0]) == learned(results[1])


def test_normalized_numbers_are_stored_as_floats(tmp_path: Path) -> None:
    config = {**sac_config(tmp_path), "normalize_observations": True}
    typed, floats = (rl_training.train(config, env=partial(Typed, x)) for x in (np.uint8, FLOATS))
    assert described(typed) is None
    assert_same(typed, floats)


def test_settings_for_encoders_apply_to_bytes(tmp_path: Path) -> None:
    networks = {"shared_encoder": True, "encoders": {"observation": {"encoder": "mlp"}}}
    config = sac_config(tmp_path, networks=networks)
    typed, floats = (rl_training.train(config, env=partial(Typed, x)) for x in (np.uint8, FLOATS))
    assert learned(typed) == learned(floats)


class Encoder(torch.nn.Module):
    """A user's encoder, which gets numbers as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(7, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(values))


class Networks:
    def encoder(self, observation: ObservationSpec) -> torch.nn.Module:
        return Encoder()


def test_encoders_of_users_get_floats(tmp_path: Path) -> None:
    config = {**sac_config(tmp_path)["algo_kwargs"], "output_dir": str(tmp_path)}
    agent = rl_training.SAC(Typed, networks=Networks, **config)
    agent.learn(50)
    agent.export(tmp_path / "policy.pt2", format="torch")
    module = torch.export.load(tmp_path / "policy.pt2").module()
    obs = np.arange(7, dtype=np.uint8)
    np.testing.assert_allclose(
        module(torch.from_numpy(obs[None])).numpy(force=True)[0], agent.predict(obs), atol=1e-5
    )


# --- Checkpoints and policies of earlier versions ---


def test_an_earlier_run_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sac_config(tmp_path)
    with monkeypatch.context() as patch:
        as_earlier_versions(patch)
        whole = rl_training.train(config, env=Typed)
        stopped = rl_training.train(config, env=Typed, callbacks=[StopAt(43)])
    assert described(stopped) is None
    resumed = rl_training.resume_training(stopped.run_dir, env=Typed)
    assert_same(whole, resumed)
    assert described(resumed) is None


def test_an_earlier_policy_acts_and_is_trained_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        as_earlier_versions(patch)
        earlier = rl_training.train(sac_config(tmp_path), env=Typed)
    newer = rl_training.train(sac_config(tmp_path), env=Typed)
    assert model_bytes(earlier) == model_bytes(newer)
    obs = [1, 2, 3, 4, 5, 6, 255]
    one, other = (rl_training.predict_checkpoint(x.run_dir, obs) for x in (earlier, newer))
    assert (one == other).all()
    one, other = (
        rl_training.evaluate_checkpoint(x.run_dir, env=Typed, num_episodes=2)
        for x in (earlier, newer)
    )
    assert one == other
    config = sac_config(tmp_path)
    one, other = (
        rl_training.train({**config, "init_from": str(x.run_dir)}, env=Typed)
        for x in (earlier, newer)
    )
    assert described(one)[0]["number_type"] == "uint8"
    assert learned(one) == learned(other)


def test_a_policy_acts_where_numbers_have_another_type(tmp_path: Path) -> None:
    result = rl_training.train(sac_config(tmp_path), env=Typed)
    one, other = (
        rl_training.evaluate_checkpoint(result.run_dir, env=partial(Typed, dtype), num_episodes=2)
        for dtype in (np.uint8, np.float64)
    )
    assert one == other


@pytest.mark.parametrize("dtype", [np.uint8, FLOATS])
def test_no_observations_have_no_actions(dtype: Any, tmp_path: Path) -> None:
    result = rl_training.train(sac_config(tmp_path), env=partial(Typed, dtype))
    assert rl_training.predict_checkpoint(result.run_dir, np.zeros((0, 7), dtype)).shape == (0, 2)


def test_a_saved_policy_keeps_its_types(tmp_path: Path) -> None:
    result = rl_training.train(sac_config(tmp_path), env=Typed)
    policy = load_policy(find_checkpoint(result.run_dir))
    assert policy.spaces.observation == vector(np.uint8)
    description = policy.describe()
    description["observation"][0]["kind"] = "image"
    with pytest.raises(CheckpointError, match="number_type, but is image"):
        type(policy).from_parts(description, policy.tensors())


# --- Recorded data ---


def arrays(dtype: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    observations = random.integers(0, 101, (60, 7)).astype(dtype)
    return {
        "observations": observations,
        "actions": random.uniform(-1, 1, (60, 2)).astype(np.float32),
        "rewards": random.normal(size=60).astype(np.float32),
        "terminals": np.arange(60) % 12 == 11,
        "action_low": -2 * np.ones(2, np.float32),
        "action_high": 2 * np.ones(2, np.float32),
    }


@pytest.mark.parametrize("env_type", [np.uint8, FLOATS, None])
@pytest.mark.parametrize("data_type", [np.uint8, FLOATS, np.int64])
def test_data_is_stored_in_the_type_of_the_environment(data_type: Any, env_type: Any) -> None:
    """Data without an environment keeps its own type. The values are the same in all cases."""
    given = None if env_type is None else describe_spaces(Typed(env_type))
    dataset = load_dataset([DatasetPart(array_recording(arrays(data_type)))], given)
    spec = dataset.spaces.observation
    has_bytes = env_type is np.uint8 or (env_type is None and data_type is np.uint8)
    assert spec == vector(np.uint8 if has_bytes else FLOATS)
    obs = spec.leaves_of(dataset.packed[:, : spec.size])[""]
    assert obs[:3].tolist() == arrays(FLOATS)["observations"][:3].tolist()


def test_mixed_data_of_different_types_is_stored_as_floats() -> None:
    parts = [DatasetPart(array_recording(arrays(dtype))) for dtype in (np.uint8, FLOATS)]
    dataset = load_dataset(parts)
    assert dataset.spaces.observation.is_vector
    alike = load_dataset([parts[0], parts[0]])
    assert alike.spaces.observation == vector(np.uint8)


def test_data_that_does_not_fit_the_type_names_its_row() -> None:
    data = arrays(FLOATS)
    data["observations"][17, 3] = 0.5
    message = r"observations\[17, 3\] is 0.5; it must be a whole number from 0 to 255 \(uint8\)"
    with pytest.raises(DataError, match=message):
        load_dataset([DatasetPart(array_recording(data))], describe_spaces(Typed()))


def test_data_that_would_become_infinite_names_its_row() -> None:
    data = arrays(FLOATS)
    data["observations"][17, 3] = 70000
    message = r"observations\[17, 3\] is 70000.0; it must be from -65504 to 65504 \(float16\)"
    with pytest.raises(DataError, match=message):
        load_dataset([DatasetPart(array_recording(data))], describe_spaces(Typed(np.float16)))


def test_a_policy_is_judged_by_data_of_any_type(tmp_path: Path) -> None:
    config = config_of(get_algorithm_spec("td3_bc"), tmp_path)
    config.pop("dataset")
    found = []
    for dtype in (np.uint8, FLOATS):
        result = rl_training.train(config, dataset=arrays(dtype))
        found.append(evaluate_offline(result.run_dir, arrays(np.uint8), fqe_updates=5))
    assert found[0] == found[1]


def test_the_hub_shows_an_observation_with_all_its_numbers(tmp_path: Path) -> None:
    typed, floats = (
        rl_training.train(sac_config(tmp_path), env=partial(Typed, x)) for x in (np.uint8, FLOATS)
    )
    for result in (typed, floats):
        assert observation_size(load_policy(find_checkpoint(result.run_dir)).describe()) == 7
    assert observation_size({"obs_dim": 9, "observation": [{"name": "a"}, {"name": "b"}]}) is None
