"""The `dataset` section of a config: valid values, error messages, and YAML round trips."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_training.algorithms import SACAlgorithm
from rl_training.algorithms import spec as registry
from rl_training.config import TrainConfig
from rl_training.config_files import dump_yaml, load_config, parse_yaml
from rl_training.data.sections import Hdf5Section, MinariSection, RandomSection
from rl_training.errors import ConfigError
from rl_training.experiment import AlgorithmSpec, register_algorithm

EVERY_KIND: list[dict[str, Any]] = [
    {"kind": "random", "size": 100, "seed": 3},
    {"kind": "policy", "size": 100, "checkpoint": "runs/x", "noise": 0.3},
    {"kind": "run", "path": "runs/x"},
    {"kind": "npz", "path": "a.npz", "action_low": -2, "action_high": [2.0, 3.0]},
    {"kind": "hdf5", "path": "a.hdf5", "max_episode_steps": 1000, "reward_clip": 1},
    {"kind": "minari", "id": "D4RL/door/human-v2", "weight": 0.5, "reward_shift": -1},
]


@pytest.fixture(autouse=True)
def _offline_algorithm() -> Iterator[None]:
    """Return an algorithm that supports offline training."""
    regimes = ("offline", "mixed")
    register_algorithm(AlgorithmSpec("offline_toy", "Toy", "a test", SACAlgorithm, regimes))
    yield
    del registry._registered["offline_toy"]


def offline(dataset: Any) -> dict[str, Any]:
    return {"algo": "offline_toy", "env_id": "Pendulum-v1", "dataset": dataset}


@pytest.mark.parametrize("dataset", [*EVERY_KIND, EVERY_KIND], ids=lambda d: str(d)[:20])
def test_dataset_sections_survive_a_yaml_round_trip(dataset: Any) -> None:
    config = load_config(offline(dataset))
    again = load_config(parse_yaml(dump_yaml(config.to_mapping()), "test"))
    assert again == config
    assert again.to_mapping() == config.to_mapping()
    assert [section.kind for section in config.dataset_sections] == (
        [part["kind"] for part in dataset] if isinstance(dataset, list) else [dataset["kind"]]
    )


def test_an_entry_is_changed_on_the_command_line_and_a_mapping_replaces_the_section() -> None:
    base = offline({"kind": "random", "size": 5, "seed": 2})
    changed = load_config(base, ["dataset.size=1e3"])
    assert changed.dataset == RandomSection(size=1000, seed=2)
    replaced = load_config(base, ["dataset={kind: hdf5, path: x.hdf5}"])
    assert replaced.dataset == Hdf5Section(path="x.hdf5")
    assert base["dataset"]["size"] == 5


def test_sections_can_be_given_as_objects_and_paths_as_paths() -> None:
    section = MinariSection(id="a/b-v0")
    config = TrainConfig(**offline([section, {"kind": "npz", "path": Path("x.npz")}]))
    assert config.dataset_sections[0] is section
    assert config.with_changes(seed=3).dataset_sections == config.dataset_sections


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (3, ["dataset = 3", "mapping"]),
        ([], ["dataset = []"]),
        ("random", ["dataset = 'random'"]),
        ({"size": 5}, ["dataset.kind", "required", "hdf5"]),
        ({"kind": "hdf"}, ["dataset.kind = 'hdf'", "minari", "did you mean 'hdf5'?"]),
        ({"kind": ["npz"]}, ["dataset.kind = ['npz']"]),
        ({"kind": "npz"}, ["dataset.path: required"]),
        ({"kind": "npz", "pth": "x", "path": "x"}, ["dataset.pth = 'x'", "did you mean 'path'?"]),
        ({"kind": "npz", "path": 3}, ["dataset.path = 3", "a string"]),
        ({"kind": "random", "size": 0}, ["dataset.size = 0", "greater than or equal to 1"]),
        ({"kind": "random", "size": 2.5}, ["dataset.size = 2.5", "an integer"]),
        ({"kind": "policy", "size": 5, "checkpoint": "x", "noise": 2}, ["dataset.noise = 2"]),
        ({"kind": "minari", "id": "../../etc-v0"}, ["dataset.id = '../../etc-v0'", "D4RL/door"]),
        ({"kind": "minari", "id": "/etc/x-v0"}, ["dataset.id"]),
        ({"kind": "minari", "id": "a/../b-v0"}, ["dataset.id"]),
        ([EVERY_KIND[0], {"kind": "run", "path": "x", "weight": 0}], ["dataset[1].weight = 0"]),
        ([EVERY_KIND[0], 7], ["dataset[1] = 7"]),
        ([{"kind": "npz"}, {"kind": "run"}], ["dataset[0].path", "dataset[1].path"]),
        (
            {"kind": "run", "path": "x", "reward_normalization": "range"},
            ["dataset.reward_normalization = 'range'", "none, return_range"],
        ),
        ({"kind": "npz", "path": "x", "action_low": 1}, ["dataset.action_high: required"]),
        (
            {"kind": "npz", "path": "x", "action_low": [0, 1], "action_high": [1, 1]},
            ["dataset.action_low = [0.0, 1.0]", "less than"],
        ),
        (
            {"kind": "npz", "path": "x", "action_low": [0, 1], "action_high": [1, 2, 3]},
            ["dataset.action_low", "the same length"],
        ),
        ({"kind": "npz", "path": "x", "reward_scale": float("nan")}, ["dataset.reward_scale"]),
    ],
)
def test_an_error_names_the_key_the_value_and_what_is_allowed(
    dataset: Any, expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(offline(dataset))
    assert [part for part in expected if part not in str(caught.value)] == []


def test_a_huge_value_is_shortened_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(offline("x" * 100_000))
    assert len(str(caught.value)) < 500


@pytest.fixture
def recorded_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that creates the metadata of a Minari dataset and returns its id."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    def create(environment: str) -> str:
        folder = tmp_path / "my" / "set-v0" / "data"
        folder.mkdir(parents=True)
        spec = {
            "id": environment,
            "entry_point": "robots.door:Door",
            "kwargs": {"goal_velocity": 0},
        }
        (folder / "metadata.json").write_text(json.dumps({"env_spec": json.dumps(spec)}))
        return "dataset={kind: minari, id: my/set-v0}"

    return create


def test_a_packaged_config_takes_the_environment_of_the_chosen_dataset(
    recorded_in: Callable[[str], str],
) -> None:
    override = recorded_in("MountainCarContinuous-v0")
    with pytest.warns(UserWarning, match="is for HalfCheetah-v5.*in MountainCarContinuous-v0"):
        config = load_config("bc/mujoco", [override])
    assert (config.env_id, config.env_kwargs) == ("MountainCarContinuous-v0", {"goal_velocity": 0})


def test_an_offline_run_needs_no_environment_if_that_of_its_data_is_not_registered(
    recorded_in: Callable[[str], str],
) -> None:
    override = recorded_in("RobotDoor-v1")
    with pytest.warns(UserWarning, match="RobotDoor-v1, which is not registered.*install robots"):
        config = load_config("bc/mujoco", [override])
    assert config.env_id is None
    with pytest.warns(UserWarning, match="RobotDoor-v1, which is used instead"):
        assert load_config("rlpd/mujoco", [override]).env_id == "RobotDoor-v1"


@pytest.mark.filterwarnings("error")
def test_the_environment_that_the_user_chose_is_kept(recorded_in: Callable[[str], str]) -> None:
    override = recorded_in("RobotDoor-v1")
    assert load_config("bc/mujoco", [override], env_id="Hopper-v5").env_id == "Hopper-v5"
    assert load_config("bc/mujoco", [override, "env_id=Hopper-v5"]).env_id == "Hopper-v5"


@pytest.mark.filterwarnings("error")
def test_data_of_another_version_of_the_environment_is_used_with_the_configs(
    recorded_in: Callable[[str], str],
) -> None:
    override = recorded_in("HalfCheetah-v2")
    assert load_config("bc/mujoco", [override]).env_id == "HalfCheetah-v5"
