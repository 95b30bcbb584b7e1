"""The figures of a run's health: what they measure, and that they change nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import StopAt, each_algorithm, has_rollouts, hashes, metric_rows, tiny, tiny_of

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.envs.vector.step_arrays import StepResult
from rl_training.evaluation import evaluator
from rl_training.evaluation.evaluator import EpisodeRecorder, policy_health
from rl_training.execution.policy import Policy
from rl_training.types import SpaceInfo, TrainResult

VALUES = {"q_mean", "return_mean", "q_minus_return"}
SOFT = {"sac", "redq", "rlpd", "tqc", "cql", "cal_ql", "edac", "crossq", "xqc", "flash_sac"}
STOCHASTIC = SOFT | {"awac", "iql"}


def health(run_dir: Path) -> dict[str, float]:
    """The health in the last row of a run that has any, without the prefix."""
    *_, row = (row for row in metric_rows(run_dir) if "eval/mean_reward" in row)
    return {k.removeprefix("health/"): v for k, v in row.items() if k.startswith("health/")}


def expected_names(spec: AlgorithmSpec) -> set[str]:
    only = {"dqn": {"critic"}, "qr_dqn": {"critic"}, "bc": {"actor"}}
    parts = only.get(spec.name, {"actor", "critic"})
    if has_rollouts(spec):  # its critic values states, and its data is used up
        weights = {f"weight_norm_{part}" for part in parts}
        saturation = set() if spec.actions[0] == "discrete" else {"action_saturation"}
        return {"dead_units_actor", "entropy", *weights, *saturation}
    names = {f"dead_units_{part}" for part in parts}
    trained = parts | ({"value"} if spec.name == "iql" else set())
    names |= {f"{kind}_norm_{part}" for kind in ("weight", "gradient") for part in trained}
    # Evaluations do not know the scale of the rewards that critics see.
    is_scaled = spec.hyperparameters_type().return_scaling() is not None
    names |= set() if spec.name == "bc" else {"q_mean"} if is_scaled else VALUES
    names |= {"entropy"} if spec.name in STOCHASTIC else set()
    return names | (set() if (spec.actions[0] == "discrete") else {"action_saturation"})


@each_algorithm
@pytest.mark.fast_cases
def test_every_algorithm_has_its_figures(spec: AlgorithmSpec, tmp_path: Path) -> None:
    run = rl_training.train(tiny_of(spec, tmp_path, total_timesteps=60), progress=False)
    found = health(run.run_dir)
    assert found.keys() == expected_names(spec)
    assert all(isinstance(value, float) for value in found.values())
    for name in found:
        if "norm" in name:
            assert found[name] > 0
        if "dead" in name or "saturation" in name:
            assert 0 <= found[name] <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"algo": "dqn", "env_id": "CartPole-v1", "algo_kwargs": {"dueling": True}},
        {"algo": "dqn", "env_id": "CartPole-v1", "algo_kwargs": {"prioritized": True}},
        {"normalize_observations": True, "num_envs": 2},
        {"seeds": [0, 1], "eval_episodes": 3},
        {"overlap": "on", "algo_kwargs": {"activation": "tanh", "critic_layer_norm": True}},
        {"algo": "rlpd", "dataset": {"kind": "random", "size": 200, "seed": 0}},
    ],
    ids=["dueling", "prioritized", "normalized", "seeds", "overlap", "mixed"],
)
def test_health_changes_nothing_else(changes: dict[str, Any], tmp_path: Path) -> None:
    """Learned numbers, random streams and all other values are the same without it."""
    config = tiny(tmp_path, eval_interval=45, total_timesteps=60, **changes)
    if config["algo"] == "rlpd":
        config["algo_kwargs"] |= {"offline_pretrain_updates": 20, "num_critics": 2}
    with_it, without = (
        as_list(rl_training.train({**config, "health": on}, progress=False)) for on in (True, False)
    )
    for one, other in zip(with_it, without, strict=True):
        assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)
        assert one.metrics == other.metrics
        rows = metric_rows(one.run_dir)
        assert health(one.run_dir)["gradient_norm_critic"] > 0
        kept = [{k: v for k, v in row.items() if k[:7] != "health/"} for row in rows]
        assert kept == metric_rows(other.run_dir)


def as_list(found: Any) -> list[TrainResult]:
    return found if isinstance(found, list) else [found]


def test_a_resumed_run_has_the_same_health(tmp_path: Path) -> None:
    config = tiny(tmp_path, eval_interval=40)
    straight = rl_training.train(config, progress=False)
    stopped = rl_training.train(config, callbacks=[StopAt(60)], progress=False)
    resumed = rl_training.resume_training(stopped.run_dir, progress=False)
    assert metric_rows(resumed.run_dir) == metric_rows(straight.run_dir)


def test_a_failure_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("no such network")

    monkeypatch.setattr(evaluator, "_dead_units", fail)
    config = tiny(tmp_path, eval_interval=40)
    with pytest.warns(UserWarning, match="health cannot be computed.*no such network") as caught:
        run = rl_training.train(config, progress=False)
    assert len([each for each in caught if "health" in str(each.message)]) == 1
    assert health(run.run_dir) == {}
    assert run.metrics["global_step"] == 120


# What the figures measure, in episodes whose values are known


def recorded(
    rewards: np.ndarray, *, terminated: bool, obs_dim: int = 3, actions: float = 0.0
) -> EpisodeRecorder:
    """One recorded episode per column of `rewards`."""
    recorder, number = EpisodeRecorder(), rewards.shape[1]
    random = np.random.default_rng(0)
    for index, reward in enumerate(rewards):
        ends = np.full(number, index == len(rewards) - 1)
        obs = random.normal(size=(number, obs_dim)).astype(np.float32)
        no = np.zeros(number, np.bool_)
        either = (ends, no) if terminated else (no, ends)
        step = StepResult(obs, reward, *either, obs, [], {})
        recorder.add(obs, np.full((number, 1), actions, np.float32), step)
    return recorder


def policy_of(name: str = "td3", **settings: Any) -> Policy:
    algorithm = get_algorithm_spec(name).algorithm(3, 1, hidden_sizes=(8, 8), **settings)
    bounds = np.ones(1, np.float32)
    spaces = SpaceInfo(3, 1, action_low=-bounds, action_high=bounds)
    return Policy(algorithm, spaces, algorithm_name=name)


def figures(policy: Policy, recorder: EpisodeRecorder) -> dict[str, float]:
    return policy_health(policy, recorder, torch.Generator().manual_seed(0))


def with_q(policy: Policy, value: float) -> Policy:
    """Let all critics return a constant."""
    critic = policy.algorithm.model.critic
    parts = critic.unflatten(policy.algorithm.state["critic"])
    for name, part in parts.items():
        part.fill_(value if name == "bias_2" else 0.0)
    return policy


@pytest.mark.parametrize("steps", [4, 5000])
def test_returns_are_discounted_sums_of_rewards(steps: int) -> None:
    """Also of long episodes, of which not every state is kept."""
    policy = with_q(policy_of(gamma=0.9), 7.0)
    recorder = recorded(np.ones((steps, 2)), terminated=True)
    assert len(recorder.states()[0]) <= evaluator.MAX_STATES
    left = steps - recorder.times
    expected = np.mean((1 - 0.9**left) / 0.1)
    found = figures(policy, recorder)
    assert found["return_mean"] == pytest.approx(expected)
    assert found["q_mean"] == pytest.approx(7.0)
    assert found["q_minus_return"] == pytest.approx(7.0 - expected)


def test_after_a_cut_the_critics_estimate_the_rest() -> None:
    """Critics that are right for an endless episode have no error in one that is cut off."""
    policy = with_q(policy_of(gamma=0.9), 10.0)
    found = figures(policy, recorded(np.ones((50, 2)), terminated=False))
    assert found["q_minus_return"] == pytest.approx(0, abs=1e-5)
    # An error of the critics is at most halved by their own estimate.
    wrong = figures(with_q(policy, 20.0), recorded(np.ones((50, 2)), terminated=False))
    assert 5 <= wrong["q_minus_return"] <= 10
    short = figures(with_q(policy, 20.0), recorded(np.ones((2, 2)), terminated=False))
    assert short["q_minus_return"] == pytest.approx(10 * (1 - 0.9**2))


def test_returns_of_soft_critics_include_the_entropy() -> None:
    policy = policy_of("sac", gamma=0.9, alpha=0.5, entropy_in_target=True)
    recorder = recorded(np.zeros((40, 50)), terminated=True)
    found = figures(policy, recorder)
    left = np.arange(40)[::-1]  # the last state is followed by no other
    bonuses = 0.9 * (1 - 0.9**left) / 0.1
    assert found["return_mean"] == pytest.approx(0.5 * found["entropy"] * bonuses.mean(), rel=0.1)
    hard = policy_of("sac", gamma=0.9, alpha=0.5, entropy_in_target=False)
    assert figures(hard, recorder)["return_mean"] == 0


def test_rewards_have_the_scale_of_training() -> None:
    from rl_training.data.transforms import RewardTransform

    policy, recorder = policy_of(gamma=0.0), recorded(np.ones((5, 1)), terminated=True)
    policy.rewards = RewardTransform(scale=3.0, shift=1.0)
    assert figures(policy, recorder)["return_mean"] == pytest.approx(4.0)
    policy.rewards = None
    assert VALUES & figures(policy, recorder).keys() == {"q_mean"}


def test_normalized_rewards_are_not_compared(tmp_path: Path) -> None:
    """The critics know only normalized rewards, and evaluations only the original ones."""

    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.NormalizeReward(gym.make("Pendulum-v1"))

    run = rl_training.train(tiny(tmp_path, total_timesteps=60), env=make, progress=False)
    assert VALUES & health(run.run_dir).keys() == {"q_mean"}


def test_saturated_actions_are_counted() -> None:
    rewards = np.ones((5, 1))
    for action, share in ((0.98, 0.0), (-1.0, 1.0)):
        found = figures(policy_of(), recorded(rewards, terminated=True, actions=action))
        assert found["action_saturation"] == share


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
def test_dead_units_are_counted(activation: str) -> None:
    policy = policy_of(activation=activation)
    recorder = recorded(np.ones((20, 4)), terminated=True)
    before = figures(policy, recorder)
    for name in ("actor", "critic"):
        network = policy.algorithm.networks()[name]
        parts = network.unflatten(policy.algorithm.state[name])
        parts["weight_1"][..., :4] = 0  # half of the second layer ignores its inputs
        parts["bias_1"][..., :4] = -50.0
    found = figures(policy, recorder)
    for name in ("dead_units_actor", "dead_units_critic"):
        assert before[name] < 0.25 <= found[name] < 0.5


def test_gradient_norms_are_those_of_an_update(tmp_path: Path) -> None:
    """Before clipping; measured by the step of plain gradient descent."""
    small, clipped = (
        rl_training.train(
            tiny(tmp_path, algo="dqn", env_id="CartPole-v1", algo_kwargs={"max_grad_norm": norm}),
            progress=False,
        )
        for norm in (None, 1e9)
    )
    assert health(small.run_dir) == health(clipped.run_dir)
    tight = rl_training.train(
        tiny(tmp_path, algo="dqn", env_id="CartPole-v1", algo_kwargs={"max_grad_norm": 1e-3}),
        progress=False,
    )
    assert health(tight.run_dir)["gradient_norm_critic"] > 1e-2


def test_health_can_be_switched_off(tmp_path: Path) -> None:
    run = rl_training.train(tiny(tmp_path, health=False, total_timesteps=50), progress=False)
    assert health(run.run_dir) == {}
    assert not any("time/health_seconds" in row for row in metric_rows(run.run_dir, timed=True))
