"""Actions of every kind and shape, from the environment to the policy and to recorded data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from action_spaces import INFOS, SPACES, Choices
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete, Space
from helpers import StopAt, hashes, tiny, tiny_of

import rl_training
from rl_training import SAC
from rl_training.algorithms import TD3Algorithm
from rl_training.algorithms.spec import AlgorithmSpec, action_kinds, get_algorithm_spec
from rl_training.checkpoints.loading import saved_factory
from rl_training.data import DatasetPart, array_recording, load_dataset
from rl_training.data.formats.lerobot_own import OwnValues
from rl_training.data.formats.writing import write_recording
from rl_training.data.sections import read_sections
from rl_training.data.summary import summarize
from rl_training.datasets.describing import summary_lines
from rl_training.datasets.opening import open_section
from rl_training.datasets.recipes import record_random
from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.envs.spaces import describe_space_pair
from rl_training.errors import CheckpointError, ConfigError, DataError, EnvironmentSetupError
from rl_training.execution.policy import Policy
from rl_training.types import ACTION_KINDS, ActionKind, Json, SpaceInfo

each_kind = pytest.mark.parametrize("kind", ACTION_KINDS)
several = pytest.mark.parametrize("kind", ["multi_discrete", "multi_binary"])


def described(space: Space[Any]) -> SpaceInfo:
    return describe_space_pair(Box(-1.0, 1.0, (3,), np.float32), space)


@each_kind
def test_the_kinds_are_described(kind: ActionKind) -> None:
    found, expected = described(SPACES[kind]), INFOS[kind]
    assert found.actions == expected.actions
    if kind != "discrete":
        np.testing.assert_array_equal(found.bounds, expected.bounds)
    np.testing.assert_array_equal(
        found.first_choice if kind != "continuous" else 0,
        {"discrete": 5, "multi_discrete": [1, -1], "multi_binary": [0, 0, 0]}.get(kind, 0),
    )
    assert found.actions.width == {"discrete": 1, "multi_binary": 3}.get(kind, 2)


@pytest.mark.parametrize(
    "space",
    [
        Box(np.array([[-1.0, 0.0, 1.0], [2.0, 3.0, 4.0]]), 5.0, dtype=np.float64),
        Box(-1.0, 2.0, (), np.float32),
        MultiDiscrete([[3, 2], [4, 5]]),
        MultiBinary([2, 3]),
    ],
    ids=str,
)
def test_actions_of_any_rank_reach_the_environment_in_their_shape(space: Any) -> None:
    spaces = described(space)
    assert (spaces.action_dim, spaces.action_shape) == (int(np.prod(space.shape)), space.shape)
    with VectorEnvironment(EnvironmentFactory(lambda: Choices(space)), 2, 0) as environment:
        environment.reset()
        kind = np.float32 if spaces.is_continuous else np.int64
        environment.step(np.zeros((2, spaces.action_dim), kind))
        taken = environment.last_actions()
        assert taken.shape == (2, *space.shape)
        middle = (space.low + space.high) / 2 if spaces.is_continuous else 0
        np.testing.assert_allclose(taken[0], np.broadcast_to(middle, space.shape), rtol=1e-6)


@several
def test_indices_out_of_range_are_refused(kind: ActionKind) -> None:
    factory = EnvironmentFactory(lambda: Choices(SPACES[kind]))
    with VectorEnvironment(factory, 2, 0) as environment:
        environment.reset()
        actions = np.zeros((2, INFOS[kind].action_dim), np.int64)
        for wrong in (2, -1):
            actions[1, 1] = wrong
            with pytest.raises(ValueError, match="not all in"):
                environment.step(actions)
        with pytest.raises(ValueError, match=r"Multi-\w+ actions must be 2 x \d integers"):
            environment.step(actions.astype(np.float32))


# Algorithms and their kinds


def test_an_algorithm_names_its_kinds_and_fits_them() -> None:
    class Anything:
        pass

    spec = AlgorithmSpec("x", "X", "a test", Anything, actions=("continuous", "discrete"))  # type: ignore[arg-type]
    assert [kind for kind in ACTION_KINDS if spec.fits(INFOS[kind])] == ["continuous", "discrete"]
    assert spec.action_kind == spec.summary.action_kind == "continuous, discrete"
    assert action_kinds(ACTION_KINDS) == "any"


@several
def test_a_kind_that_an_algorithm_lacks_is_refused_with_those_that_fit(
    kind: ActionKind, tmp_path: Path
) -> None:
    config = tiny(tmp_path, algo="td3", env_id=None)
    with pytest.raises(EnvironmentSetupError) as raised:
        rl_training.train(config, env=lambda: Choices(SPACES[kind]))
    assert "'td3' needs continuous actions, but" in str(raised.value)
    assert f"has {kind} actions; algorithms that fit: " in str(raised.value)


def test_a_policy_file_without_a_kind_is_read_as_before(tmp_path: Path) -> None:
    for discrete, algo, spaces in ((False, "sac", "continuous"), (True, "dqn", "discrete")):
        algorithm = get_algorithm_spec(algo).algorithm(
            3, INFOS[spaces].actions, {"hidden_sizes": [4]}
        )
        saved = Policy(algorithm, INFOS[spaces], algorithm_name=algo)
        description = saved.describe()
        assert description["discrete"] == discrete
        old = {k: v for k, v in description.items() if k not in ("action_kind", "action_shape")}
        loaded = Policy.from_parts(old, saved.tensors())
        assert loaded.spaces.actions == INFOS[spaces].actions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_shape": [3, 2]}, "action_shape does not fit"),
        ({"action_kind": "discrete"}, "action_low and action_high do not fit"),
        ({"action_kind": "many"}, "action_kind"),
        ({"action_kind": "multi_binary"}, "needs continuous"),
    ],
)
def test_a_damaged_description_of_actions_is_refused(change: dict, message: str) -> None:
    algorithm = TD3Algorithm(3, 2, {"hidden_sizes": [4]})
    policy = Policy(algorithm, INFOS["continuous"], algorithm_name="td3")
    with pytest.raises(CheckpointError, match=message):
        Policy.from_parts({**policy.describe(), **change}, policy.tensors())


def test_a_matrix_of_actions_is_learned_and_predicted(tmp_path: Path) -> None:
    space = Box(np.array([[-1.0, 0.0, 1.0], [2.0, 3.0, 4.0]]), 5.0, dtype=np.float32)
    agent = SAC(
        lambda: Choices(space),
        total_timesteps=60,
        learning_starts=20,
        batch_size=8,
        hidden_sizes=[8],
        output_dir=str(tmp_path),
        eval_episodes=1,
        device="cpu",
        compile="off",
    )
    agent.learn()
    for deterministic in (True, False):
        actions = agent.predict(np.zeros((4, 3)), deterministic=deterministic)
        assert actions.shape == (4, 2, 3)
        assert all(space.contains(action) for action in actions)
        assert agent.predict(np.zeros(3), deterministic=deterministic).shape == (2, 3)
    agent.save(tmp_path / "policy")
    loaded = SAC.load(tmp_path / "policy")
    np.testing.assert_array_equal(loaded.predict(np.zeros(3)), agent.predict(np.zeros(3)))
    module = agent.policy.module
    np.testing.assert_allclose(
        module(torch.zeros(4, 3)).numpy(force=True), agent.predict(np.zeros((4, 3))), rtol=1e-6
    )


# Action spaces without bounds


class Unbounded(Choices):
    def __init__(self, low: float = -np.inf) -> None:
        super().__init__(Box(low, np.inf, (2,), np.float32))
        self.taken: list[np.ndarray] = []


gym.register("Unbounded-v0", Unbounded)


def test_unbounded_actions_need_a_stated_range(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentSetupError, match="Set `action_range`"):
        rl_training.train(tiny(tmp_path, env_id="Unbounded-v0"))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_an_algorithm_for_discrete_actions_is_not_advised_a_range(
    num_envs: int, tmp_path: Path
) -> None:
    unfit = r"'dqn' needs discrete actions, but .*algorithms that fit: .*sac.*"
    with pytest.raises(EnvironmentSetupError, match=unfit) as raised:
        rl_training.train(tiny(tmp_path, algo="dqn", env_id="Unbounded-v0", num_envs=num_envs))
    assert "action_range" not in str(raised.value)
    with pytest.raises(EnvironmentSetupError, match=unfit):
        rl_training.DQN("Unbounded-v0").predict(np.zeros(3))


@pytest.mark.parametrize(
    ("given", "low", "high"), [(3.0, [-3, -3], [3, 3]), ([-1.0, 0.5], [-1, -1], [0.5, 0.5])]
)
def test_a_stated_range_is_the_range_of_the_policy(
    given: Any, low: list[float], high: list[float], tmp_path: Path
) -> None:
    config = tiny(tmp_path, env_id="Unbounded-v0", action_range=given, checkpoint_interval=40)
    whole = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(77)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(whole.checkpoint_path) == hashes(resumed.checkpoint_path)
    policy = SAC.load(whole.run_dir).policy
    np.testing.assert_array_equal(policy.spaces.bounds, (low, high))
    far = np.random.default_rng(0).normal(size=(50, 3)) * 1e4
    actions = policy.predict(far, deterministic=False)
    assert (actions >= low).all()
    assert (actions <= high).all()
    rl_training.evaluate_checkpoint(whole.run_dir, num_episodes=1)
    written = json.loads((whole.checkpoint_path / "policy.json").read_text())
    assert written["environment"]["action_range"] == [low[0], high[0]]


def test_a_bound_that_exists_is_kept() -> None:
    half = EnvironmentFactory(lambda: Unbounded(low=-0.5), action_range=(-2.0, 2.0))()
    np.testing.assert_array_equal(half.action_space.low, [-0.5, -0.5])
    np.testing.assert_array_equal(half.action_space.high, [2.0, 2.0])


def test_bounds_that_float32_does_not_have_are_no_bounds(tmp_path: Path) -> None:
    space = Box(-1e300, 1e300, (2,), np.float64)
    with pytest.raises(EnvironmentSetupError, match="Set `action_range`"):
        rl_training.train(tiny(tmp_path), env=lambda: Choices(space))
    assert not list(tmp_path.iterdir())
    stated = EnvironmentFactory(lambda: Choices(space), action_range=(-2.0, 2.0))()
    np.testing.assert_array_equal(stated.action_space.high, [2.0, 2.0])


def test_a_range_for_bounded_actions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentSetupError, match=r"action_range = \[-3.0, 3.0\]: is for action"):
        rl_training.train(tiny(tmp_path, action_range=3.0))


@pytest.mark.parametrize("value", [0.0, -1.0, [1.0, 1.0], [2.0, 1.0], [1.0], "wide"])
def test_a_wrong_range_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="action_range"):
        rl_training.TrainConfig(algo="sac", action_range=value)


@pytest.mark.parametrize("value", [[1, 0], [0], "wide", [0, None], [0, float("inf")]])
def test_a_damaged_range_in_a_policy_file_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="action_range"):
        saved_factory({"id": "Unbounded-v0", "action_range": value})


# Recorded data


def recorded(kind: ActionKind) -> Any:
    return record_random(EnvironmentFactory(lambda: Choices(SPACES[kind])), 300, 0)


def written(recording: Any, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Json:
    """Write a recording; return the section of a config that reads it."""
    if ending == "minari":
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
        write_recording(recording, tmp_path, "minari", dataset_id="my/data-v0")
        return {"kind": "minari", "id": "my/data-v0"}
    if ending == "lerobot":
        pytest.importorskip("pyarrow")
        path = write_recording(recording, tmp_path / "data", "lerobot")
        return {"kind": "lerobot", "path": str(path)}
    path = write_recording(recording, tmp_path / f"data{ending}", ending[1:])
    return {"kind": ending[1:], "path": str(path)}


each_format = pytest.mark.parametrize("ending", [".npz", ".hdf5", "minari", "lerobot"])


@each_kind
@each_format
def test_recorded_actions_of_every_kind_survive(
    kind: ActionKind, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, spaces = recorded(kind), INFOS[kind]
    section = written(recording, ending, tmp_path, monkeypatch)
    loaded = open_section(read_sections(section))
    direct, again = (
        load_dataset([DatasetPart(each)], spaces).packed for each in (recording, loaded)
    )
    np.testing.assert_allclose(direct.numpy(), again.numpy(), atol=1e-6)
    if kind != "discrete":  # files of arrays do not say how many choices there are
        assert load_dataset([DatasetPart(loaded)]).spaces.actions == spaces.actions


@each_format
@pytest.mark.parametrize(
    "space",
    [
        Box(-1.0, 2.0, (), np.float32),
        Box(-1.0, 2.0, (1,), np.float32),
        Box(np.arange(6, dtype=np.float32).reshape(2, 3), 9.0, dtype=np.float32),
        MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
        MultiBinary([2, 3]),
    ],
    ids=str,
)
def test_a_policy_of_recorded_data_alone_predicts_actions_of_the_environments_shape(
    space: Any, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record_random(EnvironmentFactory(lambda: Choices(space)), 60, 0)
    section = written(recording, ending, tmp_path, monkeypatch)
    loaded = open_section(read_sections(section))
    assert loaded.info.action_shape == (None if len(space.shape) == 1 else space.shape)
    lines = "\n".join(summary_lines(summarize(loaded)))
    assert (f"of shape {space.shape}" in lines) == (len(space.shape) != 1)
    direct, again = (load_dataset([DatasetPart(each)]).packed for each in (recording, loaded))
    np.testing.assert_allclose(direct.numpy(), again.numpy(), atol=1e-6)
    bc = get_algorithm_spec("bc")
    config = tiny_of(bc, tmp_path / "runs", env_id=None, dataset=section, total_timesteps=2)
    result = rl_training.train(config)
    actions = rl_training.predict_checkpoint(result.run_dir, np.zeros((4, 3)))
    assert actions.shape == (4, *space.shape)
    assert all(space.contains(action.astype(space.dtype)) for action in actions)


def test_a_column_of_numbers_without_bounds_has_vectors_of_one_component() -> None:
    assert array_recording(arrays_with([0.5, 0.25])).info.action_shape is None
    bounded = {**arrays_with([0.5, 0.25]), "action_low": [-1.0], "action_high": [1.0]}
    assert array_recording(bounded).info.action_shape is None


@pytest.mark.parametrize("shape", [[2], [3, 3], [-2, -3], "six", [6.0]])
def test_a_damaged_shape_in_a_lerobot_dataset_is_refused(shape: Any) -> None:
    with pytest.raises(DataError, match=r"meta/rl_training\.json is damaged"):
        OwnValues.read({"action_shape": shape}, 6, is_one=False, name="data")


@several
def test_batches_have_indices_for_every_component(kind: ActionKind) -> None:
    dataset = load_dataset([DatasetPart(recorded(kind))], INFOS[kind])
    actions = dataset.sample(64).action
    assert actions.shape == (64, INFOS[kind].action_dim)
    assert not actions.is_floating_point()
    for column, number in zip(actions.T, INFOS[kind].actions.num_choices, strict=True):
        assert set(column.tolist()) == set(range(number))


def arrays_with(actions: Any) -> dict[str, np.ndarray]:
    rows = len(actions)
    return {
        "observations": np.zeros((rows, 3), np.float32),
        "actions": np.asarray(actions),
        "rewards": np.zeros(rows),
        "terminals": np.arange(rows) == rows - 1,
    }


def test_integers_are_what_the_environment_says() -> None:
    integers = array_recording(arrays_with([[1, 0], [3, -1]]))
    loaded = load_dataset([DatasetPart(integers)], INFOS["multi_discrete"])
    assert loaded.rows(torch.arange(2)).action.tolist() == [[0, 1], [2, 0]]
    switches = array_recording(arrays_with([[1, 0, 1], [0, 1, 1]]))
    loaded = load_dataset([DatasetPart(switches)], INFOS["multi_binary"])
    assert loaded.rows(torch.arange(2)).action.tolist() == [[1, 0, 1], [0, 1, 1]]


@pytest.mark.parametrize(
    ("actions", "kind", "message"),
    [
        (
            [[1, 0], [4, 0]],
            "multi_discrete",
            r"actions\[1, 0\] is 4; it must be an integer from 1 to 3",
        ),
        ([[1, 0], [1.5, 0]], "multi_discrete", r"actions\[1, 0\] is 1.5"),
        ([[0, 2, 0]], "multi_binary", r"actions\[0, 1\] is 2; it must be an integer from 0 to 1"),
        ([[1, 0, 0]], "multi_discrete", "actions are continuous, the environment's are multi_disc"),
    ],
)
def test_wrong_choices_in_data_are_named(actions: Any, kind: ActionKind, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset([DatasetPart(array_recording(arrays_with(actions)))], INFOS[kind])


def test_data_with_other_choices_does_not_fit() -> None:
    space = MultiDiscrete([3, 4])
    data = record_random(EnvironmentFactory(lambda: Choices(space)), 100, 0)
    with pytest.raises(DataError, match=r"\(3, 4\) choices, the environment's have \(3, 2\)"):
        load_dataset([DatasetPart(data)], INFOS["multi_discrete"])
