"""Off-policy evaluation: known values, held-out data, all algorithms, and the command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from helpers import BUILT_IN, TINY_OF, has_rollouts, tiny_of, tiny_settings

from rl_training import train
from rl_training.algorithms.bc import BC
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.checkpoints.format import LEARNER, MODEL, POLICY, write_checkpoint
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.data import DatasetPart, ObservationNormalizer, array_recording, load_dataset
from rl_training.data.transforms import RewardTransform
from rl_training.datasets.recipes import record_random
from rl_training.envs import EnvironmentFactory
from rl_training.errors import DataError, UserError
from rl_training.evaluation.diagnostics import policy_metrics
from rl_training.evaluation.fitted_q import FittedQ
from rl_training.evaluation.offline import fitted_q_metrics
from rl_training.execution.policy import Policy
from rl_training.runtime.workflows import evaluate_offline, evaluate_offline_at
from rl_training.training.saver import policy_description
from rl_training.types import SpaceInfo

GAMMA = 0.5
PENDULUM = SpaceInfo(3, 1, action_low=np.array([-2.0]), action_high=np.array([2.0]))
UNIT_BOX = {"action_low": -np.ones(1, np.float32), "action_high": np.ones(1, np.float32)}


class Rule(Policy):
    """A policy defined by a function of raw observations."""

    def __init__(self, rule: Any, obs_dim: int, gamma: float = GAMMA) -> None:
        algorithm = BC(obs_dim, 1, hidden_sizes=[4], gamma=gamma)
        super().__init__(algorithm, SpaceInfo(obs_dim, 1, **UNIT_BOX), algorithm_name="bc")
        self.rule = rule

    def act(self, obs: np.ndarray, *, explore: bool = False) -> np.ndarray:
        actions: np.ndarray = self.rule(obs).astype(np.float32)
        return actions


def constant(action: float) -> Rule:
    return Rule(lambda obs: np.full((len(obs), 1), action), 1)


def lever(terminal_at_one: bool = False, rows: int = 400) -> dict[str, np.ndarray]:
    """Return data of a lever that is pushed up (reward 1) or down (reward 0).

    With `terminal_at_one`, pushing it up terminates the episode; otherwise episodes are truncated.
    """
    random = np.random.default_rng(0)
    obs = random.integers(0, 2, (rows, 1)).astype(np.float32)
    if terminal_at_one:
        obs[:] = 0
    actions = random.choice([-1.0, 1.0], (rows, 1)).astype(np.float32)
    up = actions[:, 0] > 0
    terminals = up & terminal_at_one
    return {
        "observations": obs,
        "actions": actions,
        "rewards": up.astype(np.float32),
        "terminals": terminals,
        "timeouts": ~terminals,
        "next_observations": up.astype(np.float32)[:, None],
        **UNIT_BOX,
    }


def recorded(spec: AlgorithmSpec | None = None, episodes: int = 12) -> dict[str, np.ndarray]:
    """Return random episodes of ten steps for an algorithm's tiny policy."""
    random, rows = np.random.default_rng(1), 10 * episodes
    walk = random.normal(size=(rows + 1, 3)).astype(np.float32)
    discrete = spec is not None and (spec.actions[0] == "discrete")
    actions = random.integers(0, 2, rows) if discrete else random.uniform(-1, 1, (rows, 2))
    ended = np.arange(rows) % 10 == 9
    return {
        "observations": walk[:-1],
        "actions": actions if discrete else actions.astype(np.float32),
        "rewards": random.normal(size=rows).astype(np.float32),
        "terminals": ended & (np.arange(rows) % 20 == 9),
        "timeouts": ended & (np.arange(rows) % 20 == 19),
        "next_observations": walk[1:],
    }


def load(arrays: dict[str, np.ndarray], gamma: float = GAMMA, spaces: SpaceInfo | None = None):
    return load_dataset([DatasetPart(array_recording(arrays))], spaces, gamma=gamma)


def tiny_policy(spec: AlgorithmSpec, *, normalized: bool = False) -> Policy:
    """Return an untrained policy with 3 observation and 2 action components."""
    bounds = {"action_low": -np.ones(2, np.float32), "action_high": np.ones(2, np.float32)}
    spaces = SpaceInfo(3, 2, spec.actions[0], **({} if spec.actions[0] == "discrete" else bounds))
    normalizer = None
    if normalized:
        normalizer = ObservationNormalizer(3)
        normalizer.observe(torch.randn(50, 3) * 3 + 5)
    algorithm = spec.algorithm(3, 2, tiny_settings(spec, **TINY_OF.get(spec.name, {})), seed=3)
    return Policy(algorithm, spaces, normalizer, algorithm_name=spec.name)


def saved(policy: Policy, folder: Path, *, learner: bool = True) -> Path:
    """Save the policy, with or without the state that only its losses need."""
    description = policy_description(policy.describe(), {"id": None, "label": "test"})
    contents: dict[str, Any] = {POLICY: description, MODEL: policy.tensors()}
    if learner:
        algorithm = policy.algorithm
        kept = {k: v for k, v in algorithm.state.items() if k not in algorithm.networks()}
        contents[LEARNER] = {name: tensor.contiguous() for name, tensor in kept.items()}
    write_checkpoint(folder, contents)
    return folder


def fitted(policy: Policy, dataset: Any, updates: int = 500) -> FittedQ:
    result = FittedQ(policy, dataset, seed=0)
    result.fit(dataset, updates)
    return result


# Fitted Q evaluation recovers known values


@pytest.mark.parametrize(("truncated", "value"), [(True, 2.0), (False, 1.0)])
def test_values_include_the_future_only_without_termination(truncated: bool, value: float) -> None:
    arrays = {
        "observations": np.zeros((50, 1), np.float32),
        "actions": np.linspace(-1, 1, 50, dtype=np.float32)[:, None],
        "rewards": np.ones(50, np.float32),
        "terminals": np.full(50, not truncated),
        "timeouts": np.full(50, truncated),
        "next_observations": np.zeros((50, 1), np.float32),
        **UNIT_BOX,
    }
    dataset = load(arrays)
    metrics = fitted_q_metrics(fitted(constant(0.0), dataset, 200), dataset)
    assert metrics["ope_fqe_value"] == pytest.approx(value, abs=0.05)
    assert metrics["ope_fqe_low"] <= metrics["ope_fqe_value"] <= metrics["ope_fqe_high"]


@pytest.mark.parametrize(("action", "value"), [(1.0, 2.0), (-1.0, 0.0)])
def test_the_value_is_that_of_the_policy_and_not_of_the_data(action: float, value: float) -> None:
    dataset = load(lever())
    metrics = fitted_q_metrics(fitted(constant(action), dataset), dataset)
    assert metrics["ope_fqe_value"] == pytest.approx(value, abs=0.1)
    assert metrics["ope_fqe_td_error"] < 0.01


def test_terminal_steps_have_no_future_value() -> None:
    dataset = load(lever(terminal_at_one=True))
    assert fitted_q_metrics(fitted(constant(1.0), dataset), dataset)[
        "ope_fqe_value"
    ] == pytest.approx(1.0, abs=0.1)
    # Always pushing down never gives a reward, even if other episodes terminate.
    assert fitted_q_metrics(fitted(constant(-1.0), dataset), dataset)[
        "ope_fqe_value"
    ] == pytest.approx(0.0, abs=0.1)


def test_values_along_a_chain_are_discounted_step_by_step() -> None:
    chain = np.tile(np.arange(3, dtype=np.float32), 40)[:, None]
    arrays = {
        "observations": chain,
        "actions": np.random.default_rng(0).uniform(-1, 1, chain.shape).astype(np.float32),
        "rewards": (chain[:, 0] == 2).astype(np.float32),
        "terminals": chain[:, 0] == 2,
        "next_observations": chain + 1,
        **UNIT_BOX,
    }
    dataset = load(arrays, gamma=0.9)
    policy = Rule(lambda obs: np.zeros((len(obs), 1)), 1, gamma=0.9)
    found = fitted(policy, dataset).policy_values(torch.tensor([[0.0], [1.0], [2.0]])).mean(0)
    torch.testing.assert_close(found, torch.tensor([0.81, 0.9, 1.0]), atol=0.05, rtol=0)


def test_discrete_policies_are_evaluated() -> None:
    arrays = lever()
    arrays["actions"] = (arrays.pop("actions")[:, 0] > 0).astype(np.int64)
    del arrays["action_low"], arrays["action_high"]
    spaces = SpaceInfo(1, 2, action_kind="discrete")
    algorithm = get_algorithm_spec("dqn").algorithm(1, 2, {"hidden_sizes": [4], "gamma": GAMMA})
    policy = Policy(algorithm, spaces, algorithm_name="dqn")
    policy.act = lambda obs, explore=False: np.ones(len(obs), np.int64)  # type: ignore
    dataset = load(arrays, spaces=spaces)
    found = fitted_q_metrics(fitted(policy, dataset), dataset)
    assert found["ope_fqe_value"] == pytest.approx(2.0, abs=0.1)


def swing_up(obs: np.ndarray) -> np.ndarray:
    """Swing the pendulum up by adding energy, and balance it near the top."""
    cosine, sine, speed = obs[:, 0:1], obs[:, 1:2], obs[:, 2:3]
    angle = np.arctan2(sine, cosine)
    energy = speed**2 / 6 + 5 * (cosine - 1)
    pumped = np.sign(speed) * np.clip(-energy, -2, 2)
    return np.where(np.abs(angle) < 0.4, np.clip(-10 * angle - 2 * speed, -2, 2), pumped) / 2


def test_a_better_policy_has_a_higher_estimate_on_random_data() -> None:
    recording = record_random(EnvironmentFactory("Pendulum-v1", {}), 10_000, 0)
    kept, held = load_dataset([DatasetPart(recording)], gamma=0.95).split(0.2)
    rules = (swing_up, lambda obs: np.zeros((len(obs), 1)), lambda obs: -swing_up(obs))
    better, idle, worse = (
        fitted_q_metrics(fitted(Rule(rule, 3, gamma=0.95), kept, 600), held) for rule in rules
    )
    # Their true returns from these states are about -95, -130 and -150.
    assert better["ope_fqe_value"] > idle["ope_fqe_value"] + 5
    assert idle["ope_fqe_value"] > worse["ope_fqe_value"] + 5
    assert -160 < worse["ope_fqe_value"] < better["ope_fqe_value"] < -85


# Held-out data and seeds


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    path = saved(tiny_policy(get_algorithm_spec("cql")), tmp_path / "policy")
    numbers = [evaluate_offline(path, recorded(), seed=seed, fqe_updates=20) for seed in (0, 0, 1)]
    assert numbers[0] == numbers[1]
    for name in ("ope_data_value", "ope_fqe_value", "ope_validation_loss", "ope_q_gap"):
        assert numbers[0][name] != numbers[2][name]


def test_held_out_data_are_not_used_for_the_fit(tmp_path: Path) -> None:
    clean = recorded()
    kept, held = load(clean, spaces=tiny_policy(get_algorithm_spec("bc")).spaces).split(0.2, 7)
    there = {tuple(row) for row in held.packed[:, :3].tolist()}
    poisoned = {key: values.copy() for key, values in clean.items()}
    rows = [tuple(row) in there for row in clean["observations"].tolist()]
    assert sum(rows) == len(held)
    poisoned["rewards"][rows] = 1e6
    path = saved(tiny_policy(get_algorithm_spec("bc")), tmp_path / "policy")
    before, after = (
        evaluate_offline(path, arrays, seed=7, fqe_updates=20) for arrays in (clean, poisoned)
    )
    assert after["ope_data_return_mean"] == pytest.approx(1e7)
    for name in ("ope_fqe_value", "ope_fqe_std", "ope_fqe_low", "ope_fqe_high"):
        assert before[name] == after[name]
    assert len(kept) + len(held) == len(clean["rewards"])


def test_the_other_metrics_are_the_same_without_a_fit(tmp_path: Path) -> None:
    path = saved(tiny_policy(get_algorithm_spec("sac")), tmp_path / "policy")
    complete = evaluate_offline(path, recorded(), fqe_updates=5)
    without = evaluate_offline(path, recorded(), fqe_updates=0)
    assert without == {k: v for k, v in complete.items() if not k.startswith("ope_fqe")}


# Diagnostics


@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
def test_every_algorithm_can_be_evaluated_without_writing_files(
    spec: AlgorithmSpec, tmp_path: Path
) -> None:
    path = saved(tiny_policy(spec), tmp_path / "policy")
    before = {file: file.read_bytes() for file in path.iterdir()}
    result = evaluate_offline_at(path, recorded(spec), fqe_updates=3)
    metrics = result.metrics
    assert {"ope_action_distance", "ope_fqe_value"} <= metrics.keys()
    assert ("ope_validation_loss" in metrics) != has_rollouts(spec)
    assert any("its own rollouts" in note for note in result.notes) == has_rollouts(spec)
    assert all(math.isfinite(value) for value in metrics.values())
    model = tiny_policy(spec).algorithm.model
    assert ("ope_q_gap" in metrics) == hasattr(model, "q_values")
    assert ("ope_log_likelihood" in metrics) == hasattr(model, "action_logprobs")
    assert any("no critics" in note for note in result.notes) != ("ope_q_gap" in metrics)
    assert max(map(len, result.lines())) <= 80
    assert {file: file.read_bytes() for file in path.iterdir()} == before


@torch.no_grad()
def test_diagnostics_match_their_definitions_with_normalized_observations(tmp_path: Path) -> None:
    policy = tiny_policy(get_algorithm_spec("awac"), normalized=True)
    assert policy.normalizer is not None
    metrics = evaluate_offline(saved(policy, tmp_path / "p"), recorded(), fqe_updates=0)
    gamma, model = policy.algorithm.hyperparameters.gamma, policy.algorithm.model
    held = load(recorded(), gamma, policy.spaces).split(0.2)[1]
    batch = held.rows(torch.arange(len(held)))
    own, next_own = (
        torch.from_numpy(policy.predict(obs.numpy())) for obs in (batch.obs, batch.next_obs)
    )
    obs, next_obs = (policy.normalizer.normalize(each) for each in (batch.obs, batch.next_obs))
    q, q_own = (model.q_values(obs, actions).mean(-1) for actions in (batch.action, own))
    target = batch.reward + batch.discount * model.q_values(next_obs, next_own).mean(-1)
    expected = {
        "ope_action_distance": (own - batch.action).square().mean(),
        "ope_q_mean": q.mean(),
        "ope_q_policy_mean": q_own.mean(),
        "ope_q_gap": (q_own - q).mean(),
        "ope_td_error": (q - target).square().mean(),
        "ope_log_likelihood": model.action_logprobs(obs, batch.action).mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name
    firsts = held.episode_ends - held.episode_lengths
    assert metrics["ope_data_value"] == pytest.approx(held.returns_to_go(gamma)[firsts].mean())
    assert metrics["ope_data_return_mean"] == pytest.approx(held.episode_returns.mean())


def test_the_validation_loss_is_the_loss_of_the_algorithm(tmp_path: Path) -> None:
    path = saved(tiny_policy(get_algorithm_spec("bc")), tmp_path / "policy")
    metrics = evaluate_offline(path, recorded(episodes=40), fqe_updates=0)
    assert metrics["ope_validation_loss"] == metrics["ope_validation_actor_loss"]
    # The 80 held-out rows are exactly five batches, so every row is used once.
    assert metrics["ope_validation_bc_loss"] == pytest.approx(metrics["ope_action_distance"])


def test_losses_use_the_target_networks_and_are_absent_without_them(tmp_path: Path) -> None:
    policy = tiny_policy(get_algorithm_spec("td3_bc"))
    first = evaluate_offline(saved(policy, tmp_path / "a"), recorded(), fqe_updates=0)
    policy.algorithm.state["target_critic"].mul_(3)
    second = evaluate_offline(saved(policy, tmp_path / "b"), recorded(), fqe_updates=0)
    assert first["ope_validation_critic_loss"] != second["ope_validation_critic_loss"]
    assert first["ope_td_error"] == second["ope_td_error"]
    exported = saved(policy, tmp_path / "c", learner=False)
    result = evaluate_offline_at(exported, recorded(), fqe_updates=0)
    assert not any(name.startswith("ope_validation") for name in result.metrics)
    assert any("ope_validation_loss: not available" in note for note in result.notes)
    cloned = saved(tiny_policy(get_algorithm_spec("bc")), tmp_path / "d", learner=False)
    assert "ope_validation_loss" in evaluate_offline(cloned, recorded(), fqe_updates=0)


# Choice of data


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny run on `data.npz` in an environment with actions in [-2, 2]."""
    folder = tmp_path_factory.mktemp("offline")
    random = np.random.default_rng(0)
    walk = random.normal(size=(301, 3)).astype(np.float32)
    np.savez(
        folder / "data.npz",
        observations=walk[:-1],
        next_observations=walk[1:],
        actions=random.uniform(-2, 2, (300, 1)).astype(np.float32),
        rewards=random.normal(size=300).astype(np.float32),
        terminals=np.zeros(300, np.bool_),
        timeouts=np.arange(300) % 50 == 49,
    )
    section = {"kind": "npz", "path": str(folder / "data.npz"), "reward_scale": 0.1}
    config = tiny_of(
        get_algorithm_spec("td3_bc"), folder, dataset=section, total_timesteps=5, run_name="run"
    )
    train(config)
    return folder


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr(EnvironmentFactory, "__call__", refuse)


@pytest.mark.usefixtures("no_environment")
def test_the_data_of_the_run_are_the_default_with_the_same_reward_transform(
    offline_run: Path,
) -> None:
    own = evaluate_offline_at(offline_run / "run", fqe_updates=5)
    given = evaluate_offline_at(offline_run / "run", offline_run / "data.npz", fqe_updates=5)
    assert own.metrics == given.metrics
    assert any("trained on this data" in note for note in own.notes)
    assert any("were truncated" in note for note in own.notes)
    assert any("ope_data_return_mean use rewards" in note for note in own.notes)
    plain = {"kind": "npz", "path": str(offline_run / "data.npz")}
    assert evaluate_offline(offline_run / "run", plain, fqe_updates=5) == own.metrics
    mixed = evaluate_offline(offline_run / "run", [plain, {**plain, "weight": 2}], fqe_updates=5)
    assert math.isfinite(mixed["ope_fqe_value"])


@pytest.fixture(scope="module")
def normalized_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on `all.npz` with rewards divided by the range of returns; `half.npz` is a part of it.

    Returns increase from episode to episode, so the range of the part is half as wide.
    """
    folder = tmp_path_factory.mktemp("normalized")
    arrays = recorded(episodes=20)
    arrays["actions"] = arrays["actions"][:, :1]
    arrays["rewards"] = np.repeat(np.arange(20), 10).astype(np.float32)
    np.savez(folder / "all.npz", **arrays)
    np.savez(folder / "half.npz", **{key: values[:110] for key, values in arrays.items()})
    section = {"kind": "npz", "path": str(folder / "all.npz")}
    section["reward_normalization"] = "return_range"
    spec = get_algorithm_spec("td3_bc")
    train(tiny_of(spec, folder, dataset=section, total_timesteps=5, run_name="run"))
    return folder


def test_every_form_of_data_is_evaluated_with_the_reward_scale_of_the_policy(
    normalized_run: Path,
) -> None:
    run, half = normalized_run / "run", normalized_run / "half.npz"
    with np.load(half) as file:
        arrays = dict(file)
    # The smallest and the largest return differ by 19 times the 10 steps of an episode.
    arrays["rewards"] = arrays["rewards"] * np.float32(1000 / 190)
    algorithm, scaled = load_policy(find_checkpoint(run)), load(arrays, 0.99, PENDULUM)
    expected = policy_metrics(algorithm, scaled.split(0.2, 0)[1])["ope_td_error"]
    section = {"kind": "npz", "path": str(half)}
    renormalized = {**section, "reward_normalization": "return_range"}
    with np.load(half) as file:
        in_memory = dict(file)
    for given in (half, section, renormalized, [renormalized], in_memory):
        result = evaluate_offline_at(run, given, fqe_updates=0)
        assert result.metrics["ope_td_error"] == pytest.approx(expected, rel=1e-4)
        assert any("use rewards scaled by 5.26316" in note for note in result.notes)
    own = evaluate_offline_at(run, fqe_updates=0)
    same = evaluate_offline_at(run, normalized_run / "all.npz", fqe_updates=0)
    assert own.metrics == same.metrics


def test_a_note_lists_reward_options_that_differ_from_the_policys(
    normalized_run: Path,
) -> None:
    run, section = normalized_run / "run", {"kind": "npz", "path": str(normalized_run / "all.npz")}

    def notes(source: Any) -> list[str]:
        result = evaluate_offline_at(run, source, fqe_updates=0)
        return [
            note for note in result.notes if "reward options of its section are not used" in note
        ]

    assert notes(None) == notes(normalized_run / "half.npz") == notes(section) == []
    assert notes({**section, "reward_scale": 1000 / 190}) == []
    (note,) = notes({**section, "reward_scale": 3.0})
    assert "all.npz" in note
    assert "rewards are scaled by 5.26316, as in the policy's training" in note
    assert len(notes({**section, "reward_normalization": "return_range"})) == 1


def test_without_a_reward_transform_of_the_policy_sections_use_their_own(tmp_path: Path) -> None:
    policy = tiny_policy(get_algorithm_spec("td3_bc"))
    np.savez(tmp_path / "data.npz", **recorded())
    section = {"kind": "npz", "path": str(tmp_path / "data.npz")}

    def value(rewards: RewardTransform | None, **options: float) -> float:
        policy.rewards = rewards
        path = saved(policy, tmp_path / f"policy{rewards}{options}")
        return evaluate_offline(path, {**section, **options}, fqe_updates=0)["ope_data_value"]

    plain = value(RewardTransform())
    assert value(None, reward_scale=2.0) == pytest.approx(2 * plain, rel=1e-5)
    assert value(RewardTransform(scale=3.0), reward_scale=2.0) == pytest.approx(3 * plain, rel=1e-5)


def test_a_policy_of_datasets_with_different_transforms_has_none_for_other_data(
    normalized_run: Path, tmp_path: Path
) -> None:
    with np.load(normalized_run / "all.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "wide.npz", **{**arrays, "rewards": 3 * arrays["rewards"]})
    normalized = {"kind": "npz", "reward_normalization": "return_range"}
    sections = [
        {**normalized, "path": str(folder / name)}
        for folder, name in ((normalized_run, "all.npz"), (tmp_path, "wide.npz"))
    ]
    config = tiny_of(get_algorithm_spec("td3_bc"), tmp_path, dataset=sections, total_timesteps=5)
    run, half = train(config).run_dir, normalized_run / "half.npz"

    def td_error(source: Any = None) -> float:
        return evaluate_offline(run, source, fqe_updates=0)["ope_td_error"]

    # Each of its own datasets has the range that it had in training.
    own = [td_error(section["path"]) for section in sections]
    assert own[0] == pytest.approx(own[1], rel=1e-4)
    assert td_error() == pytest.approx(own[0], rel=0.5)
    for unknown in (half, {**normalized, "path": str(half)}):
        with pytest.raises(DataError, match=r"half\.npz: its rewards cannot .*leave out the data"):
            td_error(unknown)
    section = {"kind": "npz", "path": str(half)}
    with np.load(half) as file:
        in_memory = dict(file)
    stated = [{**section, "reward_scale": scale} for scale in (1.0, 10.0)]
    for unknown in (section, in_memory, [stated[0], section], {**section, "weight": 2.0}):
        with pytest.raises(DataError, match=r"its rewards cannot .*or state the scale"):
            td_error(unknown)
    assert td_error(stated[0]) < td_error(stated[1])


def test_data_given_by_path_are_clipped_as_in_the_run(tmp_path: Path) -> None:
    arrays = recorded()
    arrays["actions"] = 3 * arrays["actions"][:, :1]
    np.savez(tmp_path / "data.npz", **arrays)
    section = {"kind": "npz", "path": str(tmp_path / "data.npz")}
    config = tiny_of(get_algorithm_spec("bc"), tmp_path, dataset=section, total_timesteps=5)
    with pytest.raises(DataError, match=r"it must be in \[-2, 2\]; .*clip_actions: true"):
        train(config)
    section["clip_actions"] = True
    with pytest.warns(UserWarning, match="action components were out of bounds"):
        run = train(config).run_dir
    with pytest.warns(UserWarning, match="action components were out of bounds"):
        given = evaluate_offline(run, tmp_path / "data.npz", fqe_updates=0)
    with pytest.warns(UserWarning, match="action components were out of bounds"):
        assert evaluate_offline(run, fqe_updates=0) == given
    with pytest.raises(DataError, match=r"it must be in \[-2, 2\]"):
        evaluate_offline(run, {**section, "clip_actions": False}, fqe_updates=0)


def test_a_recipe_records_in_the_environment_of_the_run(tmp_path: Path, offline_run: Path) -> None:
    recipe = {"kind": "random", "size": 450, "seed": 3}
    result = evaluate_offline_at(offline_run / "run", recipe, fqe_updates=3)
    assert "1 of 3 episodes held out" in result.subject
    assert not any("trained on this data" in note for note in result.notes)
    exported = saved(tiny_policy(get_algorithm_spec("bc")), tmp_path / "policy")
    with pytest.raises(DataError, match=r"custom environment.*env=\.\.\."):
        evaluate_offline(exported, recipe)


# The command


@pytest.mark.usefixtures("no_environment")
def test_the_command_prints_a_table_and_does_not_change_the_run(
    rl: Command, work: Path, offline_run: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in offline_run.rglob("*")}
    options = ("--ope", "--fqe-updates", "1e1", "--seed", "2")
    shown = rl("evaluate", "--checkpoint", offline_run / "run", *options)
    assert (shown.code, shown.err) == (0, "")
    for name in ("ope_fqe_value", "ope_fqe_low", "ope_q_gap", "ope_validation_critic_loss"):
        assert f"\n{name} " in shown.out
    assert "1 of 6" in " ".join(shown.out.split())
    assert "ope_log_likelihood: not available" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    data = ("--dataset", offline_run / "data.npz")
    again = rl("evaluate", "--checkpoint", offline_run / "run", *options, *data)
    assert again.out == shown.out
    half = rl("evaluate", "--checkpoint", offline_run / "run", *options, "--held-out", "0.5")
    assert "3 of 6" in " ".join(half.out.split())
    assert {p: p.stat().st_mtime_ns for p in offline_run.rglob("*")} == before
    assert list(work.iterdir()) == []


def test_a_runs_replay_can_be_evaluated_on(rl: Command, finished_run: Any) -> None:
    run = finished_run.run_dir
    refused = rl("evaluate", "--checkpoint", run, "--ope")
    assert refused.code == 2
    assert "has no dataset" in refused.err
    # The replay buffer has one long episode, so none can be held out.
    alone = rl("evaluate", "--checkpoint", run, "--ope", "--dataset", run)
    assert alone.code == 2
    assert "has only one episode; at least two are needed" in alone.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ope", "--episodes", "3"), "--episodes: cannot be used with --ope"),
        (("--dataset", "x.npz"), "can only be used with --ope"),
        (("--fqe-updates", "5"), "can only be used with --ope"),
        (("--ope", "--dataset", "missing.npz"), "missing.npz: no such file"),
        (("--ope", "--dataset", "wide.npz"), "observations have 4 components, the policy's have 3"),
        (("--ope", "--dataset", "pushed.npz"), "actions have 2 components, the policy's have 1"),
        (("--ope", "--held-out", "1.5"), "held-out fraction = 1.5"),
        (("--ope", "--fqe-updates", "-1"), "fqe_updates = -1: must not be negative"),
        (("--ope", "--seed", "-1"), "seed = -1: must not be negative"),
    ],
)
def test_an_error_is_reported_by_the_command(
    options: tuple[str, ...], message: str, rl: Command, work: Path, offline_run: Path
) -> None:
    with np.load(offline_run / "data.npz") as file:
        arrays = dict(file)
    obs = np.zeros((300, 4), np.float32)
    np.savez(work / "wide.npz", **{**arrays, "observations": obs, "next_observations": obs})
    np.savez(work / "pushed.npz", **{**arrays, "actions": obs[:, :2]})
    outcome = rl("evaluate", "--checkpoint", offline_run / "run", *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_an_error_is_raised_in_python(tmp_path: Path) -> None:
    path = saved(tiny_policy(get_algorithm_spec("bc")), tmp_path / "policy")
    with pytest.raises(UserError, match="fqe_updates = -5"):
        evaluate_offline(path, recorded(), fqe_updates=-5)
    with pytest.raises(DataError, match="actions are discrete, the policy's are continuous"):
        evaluate_offline(path, recorded(get_algorithm_spec("dqn")))
