"""Learning from recorded data. Slow; needs a marker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rl_training
from rl_training.config_files import load_config
from rl_training.datasets.opening import build_dataset

pytestmark = pytest.mark.learning

FIGURE = -300
"""Mean return on Pendulum-v1 over 20 fresh episodes"""


def evaluate(run_dir: Path) -> float:
    return rl_training.evaluate_checkpoint(run_dir, num_episodes=20, seed=1000)["eval_return_mean"]


@pytest.fixture(scope="module")
def mixed_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return all transitions of a SAC run that learns to hold the pendulum upright.

    Pendulum's returns are below -1,000. Rewards are scaled so that advantages have the size that
    the default settings of the algorithms expect.
    """
    folder = str(tmp_path_factory.mktemp("sac"))
    settings = {"total_timesteps": 15_000, "output_dir": folder, "compile": "off", "num_threads": 1}
    result = rl_training.train(load_config("sac/pendulum", **settings))
    return {"kind": "run", "path": str(result.run_dir), "reward_scale": 0.1}


@pytest.fixture(scope="module")
def cloned(mixed_data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = str(tmp_path_factory.mktemp("bc"))
    return evaluate(
        rl_training.train(
            load_config("bc/pendulum", dataset=mixed_data, output_dir=folder, compile="off")
        ).run_dir
    )


@pytest.mark.parametrize("algo", ["awac", "iql", "cql", "td3_bc"])
def test_the_policy_is_better_than_mixed_data(
    tmp_path: Path, mixed_data: dict[str, Any], cloned: float, algo: str
) -> None:
    config = load_config(
        f"{algo}/pendulum", dataset=mixed_data, output_dir=str(tmp_path), compile="off"
    )
    found = evaluate(rl_training.train(config).run_dir)
    in_data = float(build_dataset(mixed_data).episode_returns.mean())
    assert found > in_data
    assert found >= cloned
    assert found >= FIGURE


@pytest.mark.parametrize("algo", ["awac", "iql", "cql", "td3_bc", "fql"])
def test_a_packaged_config_learns_a_policy_from_random_data(tmp_path: Path, algo: str) -> None:
    config = load_config(f"{algo}/pendulum", output_dir=str(tmp_path))
    assert evaluate(rl_training.train(config).run_dir) >= FIGURE


def test_cloning_random_data_gives_the_return_of_the_data(tmp_path: Path) -> None:
    config = load_config("bc/pendulum", output_dir=str(tmp_path))
    # Random policies have returns between -1,000 and -1,700.
    assert -1_900 < evaluate(rl_training.train(config).run_dir) < -800


@pytest.fixture(scope="module")
def mixed_choices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return all transitions of a DQN run that learns to balance a pole."""
    chosen = load_config("dqn/cartpole").algo_kwargs.given()
    config = load_config(
        "dqn/cartpole",
        total_timesteps=10_000,
        early_stopping=None,
        output_dir=str(tmp_path_factory.mktemp("dqn")),
        compile="off",
        num_threads=1,
        algo_kwargs={**chosen, "n_step": 1},  # longer returns cannot be split into steps
    )
    return {"kind": "run", "path": str(rl_training.train(config).run_dir)}


@pytest.mark.parametrize("algo", ["bc", "cql", "iql"])
def test_a_policy_of_choices_is_better_than_mixed_data(
    tmp_path: Path, mixed_choices: dict[str, Any], algo: str
) -> None:
    config = load_config(
        f"{algo}/cartpole", dataset=mixed_choices, output_dir=str(tmp_path), compile="off"
    )
    found = evaluate(rl_training.train(config).run_dir)
    assert found > float(build_dataset(mixed_choices).episode_returns.mean())
