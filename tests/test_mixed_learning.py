"""Learning with prior data and after a switch from offline to online. Slow; needs a marker."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers import metric_rows

import rl_training
from rl_training.config_files import load_config
from rl_training.datasets.opening import build_dataset

pytestmark = pytest.mark.learning

SEEDS = (0, 1, 2)
FIGURE = -200
"""Mean return on Pendulum-v1 over 20 episodes"""


def steps_to_figure(config: str, seed: int, tmp_path: Path, **changes: Any) -> float:
    """Return the number of steps until an evaluation reaches the return; infinite if none does."""
    result = rl_training.train(
        load_config(
            config,
            seed=seed,
            eval_interval=250,
            eval_episodes=20,
            early_stopping={"target_value": FIGURE, "patience": 1000},
            output_dir=str(tmp_path),
            **changes,
        )
    )
    reached = result.stop_reason == "target_value"
    return result.metrics["global_step"] if reached else float("inf")


@pytest.fixture(scope="module")
def steps_of_sac(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("sac")
    return median(steps_to_figure("sac/pendulum", seed, folder) for seed in SEEDS)


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Record 5,000 noisy steps of a policy that cannot hold the pendulum upright yet."""
    folder = tmp_path_factory.mktemp("half")
    result = rl_training.train(
        load_config("sac/pendulum", total_timesteps=2_500, output_dir=str(folder), compile="off")
    )
    return {"kind": "policy", "checkpoint": str(result.run_dir), "size": 5_000, "noise": 0.3}


@pytest.mark.parametrize("data", ["random", "half-trained"])
def test_prior_data_halves_the_steps_needed_for_a_pendulum(
    data: str, half_trained: dict[str, Any], steps_of_sac: float, tmp_path: Path
) -> None:
    random = {"kind": "random", "size": 5_000, "seed": 0}
    prior = random if data == "random" else half_trained
    factory = rl_training.envs.environment_factory("Pendulum-v1", {}, None)
    assert build_dataset(prior, factory=factory).episode_returns.mean() < -700  # mediocre
    steps = [steps_to_figure("rlpd/pendulum", seed, tmp_path, dataset=prior) for seed in SEEDS]
    assert median(steps) <= steps_of_sac / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_the_packaged_config_reaches_its_documented_return(seed: int, tmp_path: Path) -> None:
    result = rl_training.train(load_config("rlpd/pendulum", seed=seed, output_dir=str(tmp_path)))
    found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=20, seed=seed + 1000)
    assert found["eval_return_mean"] >= FIGURE


class SparsePendulum(gym.Wrapper):
    """Starts hanging at rest. Only upright states have a reward; random actions reach none."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1"))

    def reset(self, **options: Any) -> Any:
        self.env.reset(**options)
        pendulum = self.unwrapped
        pendulum.state = np.array([np.pi, 0.0]) + pendulum.np_random.uniform(-0.1, 0.1, 2)
        return pendulum._get_obs(), {}

    def step(self, action: np.ndarray) -> Any:
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, 10.0 * (obs[0] > 0.9), terminated, truncated, info


def clumsy_swinging(steps: int) -> dict[str, np.ndarray]:
    """Record data in which half of the actions are random and half follow the velocity."""
    environment, generator = SparsePendulum(), np.random.default_rng(0)
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    obs, _ = environment.reset(seed=0)
    for _ in range(steps):
        with_it = generator.random() < 0.5
        torque = 2 * np.sign(obs[2]) if with_it else generator.uniform(-2, 2)
        action = np.array([torque], dtype=np.float32)
        following, reward, terminated, truncated, _ = environment.step(action)
        row = (obs, action, reward, terminated, truncated, following)
        for name, value in zip(names, row, strict=True):
            columns[name].append(value)
        obs = environment.reset()[0] if truncated else following
    return {name: np.array(values) for name, values in columns.items()}


def test_prior_data_finds_a_reward_that_sac_alone_never_sees(tmp_path: Path) -> None:
    settings = {
        "total_timesteps": 2_500,
        "eval_interval": 0,
        "eval_episodes": 20,
        "learning_rate": 1e-3,
        "learning_starts": 400,
        "batch_size": 128,
        "hidden_sizes": [64, 64],
        "tau": 0.02,
        "gradient_updates_per_step": 5,
        "output_dir": str(tmp_path),
    }
    data = clumsy_swinging(5_000)
    assert data["rewards"].sum() / 25 < 400  # per episode: the pendulum falls again
    returns: dict[str, list[float]] = {"rlpd": [], "sac": []}
    for seed in SEEDS:
        agents = {
            "rlpd": rl_training.RLPD(
                SparsePendulum, dataset=data, num_critics=5, seed=seed, **settings
            ),
            "sac": rl_training.SAC(SparsePendulum, seed=seed, **settings),
        }
        for name, agent in agents.items():
            returns[name].append(agent.learn().metrics["eval_return_mean"])
    assert median(returns["rlpd"]) >= 1_200
    assert max(returns["sac"]) <= 10


@pytest.fixture(scope="module", params=["awac", "iql", "cql"])
def offline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train an algorithm's packaged offline config. Return its name and the result."""
    config = load_config(
        f"{request.param}/pendulum",
        eval_interval=0,
        eval_episodes=20,
        output_dir=str(tmp_path_factory.mktemp(request.param)),
    )
    return request.param, rl_training.train(config)


@pytest.mark.parametrize("regime", ["online", "mixed"])
def test_an_offline_policy_does_not_collapse_when_it_goes_online(
    offline: Any, regime: str, tmp_path: Path
) -> None:
    algo, before = offline
    # With only one live episode, the policy would get worse.
    settings = load_config(f"{algo}/pendulum").algo_kwargs.given() | {"learning_starts": 1_000}
    config = load_config(
        f"{algo}/pendulum",
        regime=regime,
        init_from=str(before.run_dir),
        total_timesteps=3_000,
        eval_interval=250,
        eval_episodes=20,
        algo_kwargs=settings,
        compile="off",
        output_dir=str(tmp_path),
    )
    result = rl_training.train(config)
    assert result.metrics["gradient_steps"] == 2_000
    rows = metric_rows(result.run_dir)
    returns = [row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row]
    assert len(returns) == 12
    least = before.metrics["eval_return_mean"] - before.metrics["eval_return_std"]
    assert min(returns) >= least, f"{algo} had {before.metrics['eval_return_mean']:.0f}: {returns}"
