"""Experiments with several seeds, the algorithm registry, and the files of a run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
from helpers import each_algorithm, model_bytes, tiny_of

from rl_training import train
from rl_training.algorithms import SACAlgorithm
from rl_training.algorithms import spec as spec_module
from rl_training.callbacks import Callback, TrainingContext
from rl_training.config import TrainConfig
from rl_training.config_files import load_config
from rl_training.errors import ConfigError
from rl_training.experiment import (
    AlgorithmSpec,
    ExperimentManager,
    get_algorithm_spec,
    list_algorithm_specs,
    register_algorithm,
)
from rl_training.experiment.overview import list_runs
from rl_training.runtime.sac_trainer import train_sac
from rl_training.training.engine import planned_updates
from rl_training.types import TrainResult

MakeConfig = Callable[..., dict[str, Any]]


# Several seeds


@each_algorithm
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.fast_cases
def test_seeds_are_trained_resumed_and_summarized(spec: AlgorithmSpec, tmp_path: Path) -> None:
    config = tiny_of(spec, tmp_path, seeds=[3, 5], total_timesteps=55)
    manager = ExperimentManager(config)
    assert manager.seeds == [3, 5]
    first = manager.train()
    assert manager.results == first
    assert len({result.run_dir for result in first}) == 2
    assert [_config_of(result).algo for result in first] == [spec.name] * 2
    assert [_config_of(result).seed for result in first] == [3, 5]
    assert [_config_of(result).seeds for result in first] == [None, None]
    assert model_bytes(first[0]) != model_bytes(first[1])
    updates = planned_updates(TrainConfig(**config))
    assert [result.metrics["gradient_steps"] for result in first] == [updates] * 2

    returns = [result.metrics["eval_return_mean"] for result in first]
    assert manager.summary() == {
        "num_seeds": 2,
        "eval_return_mean": pytest.approx(statistics.mean(returns)),
        "eval_return_std_over_seeds": pytest.approx(statistics.stdev(returns)),
    }

    second = manager.resume(total_timesteps=65, schedule="extend")
    assert [result.run_dir for result in second] == [result.run_dir for result in first]
    assert [result.metrics["global_step"] for result in second] == [65, 65]
    updates = planned_updates(TrainConfig(**{**config, "total_timesteps": 65}))
    assert [result.metrics["gradient_steps"] for result in second] == [updates] * 2
    assert manager.results == second


def _config_of(result: TrainResult) -> TrainConfig:
    return load_config(result.run_dir / "config.yaml")


def test_a_seed_among_several_is_trained_as_if_alone(make_config: MakeConfig) -> None:
    together = train(make_config(seeds=[1, 2], total_timesteps=55))
    alone = train(make_config(seed=2, total_timesteps=55))
    assert isinstance(together, list)
    assert isinstance(alone, TrainResult)
    assert model_bytes(together[1]) == model_bytes(alone)


def test_runs_are_named_for_their_seeds(make_config: MakeConfig) -> None:
    results = ExperimentManager(
        make_config(seeds=[0, 1], total_timesteps=20, run_name="mine")
    ).train()
    assert [result.run_dir.name for result in results] == ["mine__seed0", "mine__seed1"]
    (default,) = ExperimentManager(make_config(seed=7, total_timesteps=20)).train()
    assert default.run_dir.name.startswith("sac__Pendulum-v1__seed7__")


def test_runs_given_by_folder_are_resumed(make_config: MakeConfig) -> None:
    results = ExperimentManager(make_config(seeds=[0, 1], total_timesteps=20)).train()
    later = ExperimentManager(make_config())
    resumed = later.resume([str(result.run_dir) for result in results], total_timesteps=30)
    assert [result.metrics["global_step"] for result in resumed] == [30, 30]
    assert later.summary()["num_seeds"] == 2


def test_an_interruption_ends_all_seeds_of_an_experiment(make_config: MakeConfig) -> None:
    class Interrupt(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            context.request_stop("interrupted")

    manager = ExperimentManager(make_config(seeds=[0, 1, 2]))
    results = manager.train(callbacks=[Interrupt()])
    assert [result.stop_reason for result in results] == ["interrupted"] * 3


def test_an_experiment_accepts_an_environment_object(make_config: MakeConfig) -> None:
    config = make_config(env_id=None, seeds=[0, 1], total_timesteps=20)
    manager = ExperimentManager(config, env=lambda: gym.make("Pendulum-v1", g=5.0))
    manager.train()
    assert [result.metrics["global_step"] for result in manager.resume(total_timesteps=25)] == [
        25,
        25,
    ]


def test_summary_needs_results(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="train"):
        ExperimentManager(make_config()).summary()


def test_an_invalid_config_is_refused_by_the_constructor() -> None:
    with pytest.raises(ConfigError, match="sede"):
        ExperimentManager({"algo": "sac", "sede": 1})


def test_a_trainer_accepts_only_one_seed_and_its_own_algorithm(make_config: MakeConfig) -> None:
    config = make_config(total_timesteps=20)
    del config["algo"]
    assert train_sac(config).metrics["global_step"] == 20
    with pytest.raises(ConfigError, match="seeds"):
        train_sac(make_config(seeds=[0, 1]))


# Algorithms


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, AlgorithmSpec]:
    """Remove registered algorithms after the test."""
    registered: dict[str, AlgorithmSpec] = {}
    monkeypatch.setattr(spec_module, "_registered", registered)
    return registered


class Variant(SACAlgorithm):
    """A third-party algorithm."""


def variant(name: str) -> AlgorithmSpec:
    return dataclasses.replace(
        get_algorithm_spec("sac"), name=name, title="A variant", algorithm=Variant
    )


def test_known_algorithms_are_listed_by_name() -> None:
    names = [spec.name for spec in list_algorithm_specs()]
    assert names == sorted(set(names))
    assert get_algorithm_spec("sac").algorithm is SACAlgorithm


@pytest.mark.parametrize("name", ["sca", "", "base", "spec", "../sac", "os.path", "functional"])
def test_the_error_for_an_unknown_algorithm_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm.*known: .*sac"):
        get_algorithm_spec(name)


@pytest.mark.usefixtures("registry")
def test_a_registered_algorithm_is_trained_evaluated_and_resumed_like_any_other(
    make_config: MakeConfig,
) -> None:
    register_algorithm(variant("variant"))
    assert "variant" in [spec.name for spec in list_algorithm_specs()]
    manager = ExperimentManager(make_config(algo="variant", total_timesteps=55))
    (result,) = manager.train()
    assert result.run_dir.name.startswith("variant__")
    assert manager.resume(total_timesteps=60)[0].metrics["gradient_steps"] == 10


@pytest.mark.usefixtures("registry")
def test_a_name_can_be_registered_only_once() -> None:
    with pytest.raises(ConfigError, match="'sac' is already used"):
        register_algorithm(variant("sac"))
    mine = register_algorithm(variant("variant"))
    assert register_algorithm(mine) is mine
    with pytest.raises(ConfigError, match="'variant' is already used"):
        register_algorithm(dataclasses.replace(mine, algorithm=SACAlgorithm))


@pytest.mark.usefixtures("registry")
def test_installed_packages_add_algorithms_through_entry_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = SimpleNamespace(load=lambda: variant("installed"))
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [point] if group == "rl_training.algorithms" else [],
    )
    assert get_algorithm_spec("installed").algorithm is Variant
    assert "installed" in [spec.name for spec in list_algorithm_specs()]


# Files of a run


def test_the_config_in_the_run_folder_reproduces_the_run(
    finished_run: TrainResult, tmp_path: Path
) -> None:
    path = finished_run.run_dir / "config.yaml"
    again = train(load_config(path, [f"output_dir={tmp_path}"]))
    assert isinstance(again, TrainResult)
    assert again.run_dir != finished_run.run_dir
    assert model_bytes(again) == model_bytes(finished_run)
    assert again.metrics == finished_run.metrics


def test_the_config_of_the_run_folder_has_every_setting(finished_run: TrainResult) -> None:
    text = (finished_run.run_dir / "config.yaml").read_text()
    config = load_config(finished_run.run_dir / "config.yaml")
    assert set(config.to_mapping()) == set(TrainConfig.model_fields)
    for name in (*TrainConfig.model_fields, *type(config.algo_kwargs).model_fields):
        assert f"{name}:" in text


def test_the_metadata_describe_the_code_and_the_machine(finished_run: TrainResult) -> None:
    metadata = json.loads((finished_run.run_dir / "metadata.json").read_text())
    assert metadata["command"] == sys.argv
    assert metadata["git_commit"] is None or len(metadata["git_commit"]) == 40
    assert metadata["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"rl_training", "python", "gymnasium", "numpy"} <= metadata["versions"].keys()
    assert {"platform", "processor", "cpu_count", "cuda"} <= metadata["hardware"].keys()
    assert metadata["resume_level"] == "bit-exact"
    assert metadata["environment"]["id"] == "Pendulum-v1"
    assert metadata["execution"]["device"] == "cpu"


def test_a_run_folder_contains_the_documented_files(finished_run: TrainResult) -> None:
    names = {path.name for path in finished_run.run_dir.iterdir()} - {".lock"}
    assert names == {
        "checkpoints",
        "config.yaml",
        "learning_curve.png",
        "metadata.json",
        "metrics.jsonl",
        "run.json",
        "tensorboard",
    }
    assert list((finished_run.run_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_list_runs_finds_only_runs_at_any_depth(
    finished_run: TrainResult, run_copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.yaml").write_text("not: a run\n")
    (overview,) = list_runs(tmp_path)
    assert overview.path == run_copy
    assert (overview.algo, overview.environment, overview.seed) == ("sac", "Pendulum-v1", 0)
    assert (overview.step, overview.total_timesteps) == (120, 120)
    assert (overview.state, overview.detail) == ("finished", "stop reason: total_timesteps")
    assert overview.last_return == finished_run.metrics["eval_return_mean"]
    rows = (finished_run.run_dir / "metrics.jsonl").read_text().splitlines()
    returns = [json.loads(row).get("eval/mean_reward", float("-inf")) for row in rows]
    assert overview.best_return == max(returns)
