"""Checks that every registered algorithm must pass.

The engine, checkpoints and populations treat all algorithms alike and rely on these properties.
Details that are not part of a spec, such as metric names, are given by a `Case`; `CASES` has those
of the built-in algorithms.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from action_spaces import INFOS
from helpers import (
    StopAt,
    has_returns,
    has_rollouts,
    hashes,
    metric_rows,
    rollout_fields,
    tiny_of,
    tiny_settings,
)
from torch import Tensor

import rl_training
from rl_training.algorithms.base import STATISTICS, Algorithm, draw_noise
from rl_training.algorithms.hyperparameters import (
    Hyperparameters,
    PrioritizedHyperparameters,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.config import TrainConfig
from rl_training.data import ObservationNormalizer
from rl_training.deployment.export import export_run
from rl_training.errors import ConfigError
from rl_training.execution.execution import Execution
from rl_training.execution.learner import Learner
from rl_training.execution.policy import Policy
from rl_training.execution.programs import Population
from rl_training.runtime.workflows import resume_together
from rl_training.types import (
    BUFFERS,
    ActionSpec,
    Batch,
    SpaceInfo,
    State,
    TrainResult,
    UpdateResult,
)
from rl_training.validation import validate

OBS_DIM, ACTION_DIM, ROWS = 3, 2, 16
TOLERANCE = 1e-4

Settings = dict[str, Any]


def at_every_update(chosen: Hyperparameters, updates: int, policy_updated: bool) -> bool:
    return True


def with_the_policy(chosen: Hyperparameters, updates: int, policy_updated: bool) -> bool:
    return policy_updated


def at_an_interval(chosen: Hyperparameters, updates: int, policy_updated: bool) -> bool:
    return updates % chosen.target_update_interval == 0


@dataclass(frozen=True)
class Case:
    """Details of an algorithm that the checks need."""

    metrics: frozenset[str]
    """Metrics of every update"""
    policy_metrics: frozenset[str] = frozenset()
    """Additional metrics of updates that change the policy"""
    policy: frozenset[str] = frozenset()
    """State tensors that change only in policy updates; empty if updates cannot be delayed"""
    targets_move: Callable[[Hyperparameters, int, bool], bool] = at_every_update
    """Whether targets change, given hyper-parameters, update count and policy updates"""
    interesting: dict[str, Settings] = field(default_factory=dict)
    """Further hyper-parameters to test, by label"""
    smooth: Settings = field(default_factory=dict)
    """Settings without kinks, where rounding errors could change the direction of a gradient"""
    unbounded: frozenset[str] = frozenset()
    """Settings that may be negative"""
    nonsense: tuple[tuple[str, Settings], ...] = ()
    """Settings that cannot be combined, with the key that the error names"""

    def delayed(self, updates: int) -> Settings:
        """Return settings that update the policy every `updates` updates, if it can be delayed."""
        return {"policy_delay": updates} if self.policy else {}


SOFT_METRICS = frozenset({"actor_loss", "entropy", "alpha", "alpha_loss"})
CRITIC_METRICS = frozenset({"critic_loss", "q_mean", "target_q_mean"})
SOFT_POLICY = frozenset({"actor", "log_alpha"})

WEIGHTED_METRICS = frozenset({"actor_loss", "advantage_mean", "advantage_weight_mean"})

SMOOTH: Settings = {"num_critics": 1, "adam_epsilon": 1e-4}
"""Many gradients of normalized networks are small, and Adam would enlarge their rounding errors"""
NORMALIZED_NONSENSE: tuple[tuple[str, Settings], ...] = (
    ("batch_norm_momentum", {"batch_norm_momentum": 0.0}),
    ("batch_size", {"batch_size": 1}),
    ("critic_layer_norm", {"critic_layer_norm": True}),
    ("n_step", {"n_step": 2}),
)
CATEGORICAL_NONSENSE: tuple[tuple[str, Settings], ...] = (
    ("num_atoms", {"num_atoms": 1}),
    ("value_max", {"value_max": 0.0}),
    ("initial_alpha", {"initial_alpha": 0.5, "alpha": 0.2}),
)

ON_POLICY_METRICS = frozenset({"actor_loss", "critic_loss", "entropy"})
ON_POLICY_NONSENSE: tuple[tuple[str, Settings], ...] = (
    ("rollout_steps", {"rollout_steps": 0}),
    ("gae_lambda", {"gae_lambda": 1.5}),
    ("value_coefficient", {"value_coefficient": -1.0}),
    ("actor_output_scale", {"actor_output_scale": 0.0}),
    ("initial_log_std", {"initial_log_std": 3.0}),
    ("policy_delay", {"policy_delay": 2}),
    ("buffer_capacity", {"buffer_capacity": 100}),
)

CASES = {
    "ppo": Case(
        metrics=ON_POLICY_METRICS | {"approximate_kl", "clip_fraction"},
        interesting={
            "clipped values": {"value_clip_range": 0.5, "entropy_coefficient": 0.01},
            "plain": {
                "normalize_advantages": False,
                "max_grad_norm": None,
                "initialization": "default",
                "actor_hidden_sizes": [8],
                "learning_rate_schedule": "linear",
            },
            "normalized rewards": {"normalize_rewards": True, "gae_lambda": 1.0},
            "recurrent": {"recurrent": "gru", "recurrent_size": 8, "sequence_length": 4},
        },
        unbounded=frozenset({"initial_log_std"}),
        nonsense=(
            ("clip_range", {"clip_range": 0.0}),
            ("num_epochs", {"num_epochs": 0}),
            ("target_kl", {"target_kl": 0.0}),
            *ON_POLICY_NONSENSE,
        ),
    ),
    "a2c": Case(
        metrics=ON_POLICY_METRICS,
        interesting={
            "adam": {"adam_betas": [0.9, 0.999], "entropy_coefficient": 0.01},
            "normalized": {"normalize_advantages": True, "gae_lambda": 0.5},
            "recurrent": {"recurrent": "lstm", "recurrent_size": 8, "sequence_length": 4},
        },
        unbounded=frozenset({"initial_log_std"}),
        nonsense=(("num_epochs", {"num_epochs": 2}), *ON_POLICY_NONSENSE),
    ),
    "bc": Case(
        metrics=frozenset({"actor_loss", "bc_loss"}),
        interesting={"likely": {"objective": "likelihood", "learning_rate_schedule": "linear"}},
        nonsense=(
            ("objective", {"objective": "guess"}),
            ("tau", {"tau": 0.1}),
            ("policy_delay", {"policy_delay": 2}),
            ("log_std_min", {"log_std_min": 1.0}),
        ),
        unbounded=frozenset({"log_std_min"}),
    ),
    "td3_bc": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=frozenset({"actor_loss", "bc_loss", "bc_lambda"}),
        policy=frozenset({"actor"}),
        targets_move=with_the_policy,
        interesting={"eager": {"policy_delay": 1, "num_critics": 3, "bc_alpha": 0.5}},
        nonsense=(
            ("bc_alpha", {"bc_alpha": 0.0}),
            ("policy_delay", {"policy_delay": 0}),
            ("policy_noise", {"policy_noise": -0.1}),
        ),
    ),
    "rebrac": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=frozenset({"actor_loss", "bc_loss", "bc_lambda"}),
        policy=frozenset({"actor"}),
        targets_move=with_the_policy,
        interesting={
            "eager": {"policy_delay": 1, "num_critics": 3, "critic_bc_alpha": 0.5, "n_step": 3},
            "plain": {"normalize_q": False, "critic_layer_norm": False, "actor_bc_alpha": 1.0},
        },
        smooth={"num_critics": 1},
        nonsense=(
            ("actor_bc_alpha", {"actor_bc_alpha": -1.0}),
            ("critic_bc_alpha", {"critic_bc_alpha": -0.1}),
            ("policy_delay", {"policy_delay": 0}),
        ),
    ),
    "fql": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=frozenset({"actor_loss", "flow_loss", "distillation_loss", "bc_lambda"}),
        policy=frozenset({"actor", "actor_flow"}),
        interesting={
            "normalized": {"normalize_q": True, "actor_bc_alpha": 0.3, "q_aggregation": "min"},
            "delayed": {"policy_delay": 2, "flow_steps": 3, "num_critics": 3},
        },
        smooth={"num_critics": 1},
        nonsense=(
            ("actor_bc_alpha", {"actor_bc_alpha": -1.0}),
            ("flow_steps", {"flow_steps": 0}),
            ("q_aggregation", {"q_aggregation": "max"}),
        ),
    ),
    "awac": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=WEIGHTED_METRICS,
        policy=frozenset({"actor"}),
        interesting={
            "sharp": {"awac_lambda": 0.1, "max_advantage_weight": 5.0},
            "squashed": {"actor_head": "squashed_gaussian", "weight_decay": 1e-2},
        },
        smooth={"num_critics": 1},
        unbounded=frozenset({"log_std_min"}),
        nonsense=(
            ("awac_lambda", {"awac_lambda": 0.0}),
            ("max_advantage_weight", {"max_advantage_weight": -1.0}),
        ),
    ),
    "iql": Case(
        metrics=CRITIC_METRICS | {"value_loss", "value_mean"},
        policy_metrics=WEIGHTED_METRICS,
        policy=frozenset({"actor"}),
        interesting={"sharp": {"expectile": 0.9, "beta": 10.0, "critic_layer_norm": True}},
        smooth={"num_critics": 1, "expectile": 0.5},
        unbounded=frozenset({"log_std_min"}),
        nonsense=(
            ("expectile", {"expectile": 1.0}),
            ("beta", {"beta": -1.0}),
            ("max_advantage_weight", {"max_advantage_weight": 0.0}),
        ),
    ),
    "cql": Case(
        metrics=CRITIC_METRICS | {"bellman_loss", "cql_gap"},
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "soft": {"entropy_in_target": True, "cql_alpha": 0.5},
            "subset": {"num_critics": 3, "subset_size": 2, "actor_layer_norm": True},
        },
        smooth={"num_critics": 1},
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("cql_alpha", {"cql_alpha": -1.0}),
            ("num_cql_samples", {"num_cql_samples": 0}),
            ("cql_target_gap", {"cql_target_gap": -0.5}),
        ),
    ),
    "cal_ql": Case(
        metrics=CRITIC_METRICS | {"bellman_loss", "cql_gap", "bound_rate"},
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "zero": {"return_after_truncation": "zero", "cql_alpha": 0.5, "num_critics": 3},
        },
        smooth={"num_critics": 1},
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("return_after_truncation", {"return_after_truncation": "guess"}),
            ("return_after_truncation", {"return_after_truncation": "last_reward", "gamma": 1.0}),
            ("cql_alpha", {"cql_alpha": -1.0}),
        ),
    ),
    "edac": Case(
        metrics=CRITIC_METRICS | {"bellman_loss", "gradient_similarity"},
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "diverse": {"eta": 5.0, "num_critics": 4, "critic_layer_norm": True},
            "two": {"num_critics": 2, "activation": "tanh"},
        },
        smooth={"activation": "tanh", "num_critics": 2},
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("eta", {"eta": -1.0}),
            ("eta", {"eta": 2.0, "num_critics": 1}),
            ("n_step", {"n_step": 3}),
        ),
    ),
    "sac": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "normed": {"num_critics": 3, "critic_layer_norm": True, "target_entropy": -0.5},
            "clipped": {"max_grad_norm": 0.5, "learning_rate_schedule": "cosine"},
            "modern": {
                "initialization": "orthogonal",
                "initial_alpha": 0.1,
                "alpha_learning_rate": 1e-2,
                "adam_betas": [0.5, 0.99],
                "adam_epsilon": 1e-5,
                "weight_decay": 1e-2,
                "learning_rate_schedule": "linear",
                "learning_rate_end_factor": 0.1,
                "entropy_in_target": False,
            },
        },
        smooth={"num_critics": 1},
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("alpha", {"alpha": "automatic"}),
            ("tau", {"tau": 0.0}),
            ("n_step", {"n_step": 2}),
            ("initial_alpha", {"initial_alpha": 0.0}),
            ("initial_alpha", {"initial_alpha": 0.5, "alpha": 0.2}),
            ("initialization", {"initialization": "zeros"}),
            ("adam_epsilon", {"adam_epsilon": 0.0}),
            ("weight_decay", {"weight_decay": -0.1}),
            ("learning_rate_end_factor", {"learning_rate_end_factor": 1.5}),
        ),
    ),
    "ddpg": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=frozenset({"actor_loss"}),
        policy=frozenset({"actor"}),
        targets_move=with_the_policy,
        interesting={"delayed": {"policy_delay": 3, "exploration_noise": 0.3}},
        nonsense=(("exploration_noise", {"exploration_noise": -0.1}), ("tau", {"tau": 1.5})),
    ),
    "td3": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=frozenset({"actor_loss"}),
        policy=frozenset({"actor"}),
        targets_move=with_the_policy,
        interesting={
            "eager": {"policy_delay": 1, "num_critics": 3, "critic_layer_norm": True},
            "categorical": {"num_atoms": 7, "value_min": -3.0, "value_max": 4.0},
        },
        unbounded=frozenset({"value_min", "value_max"}),
        nonsense=(
            ("policy_delay", {"policy_delay": 0}),
            ("policy_noise", {"policy_noise": -0.1}),
            ("noise_clip", {"noise_clip": -0.1}),
            ("num_atoms", {"num_atoms": 0}),
            ("value_min", {"value_min": 1.0, "value_max": 1.0}),
        ),
    ),
    "tqc": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={"untruncated": {"num_critics": 1, "top_quantiles_to_drop_per_critic": 0}},
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            (
                "top_quantiles_to_drop_per_critic",
                {"num_quantiles": 5, "top_quantiles_to_drop_per_critic": 5},
            ),
            ("num_quantiles", {"num_quantiles": 0}),
            ("n_step", {"n_step": 3}),
        ),
    ),
    "crossq": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "renormalized": {"renormalization_starts": 2, "policy_delay": 1},
            "three critics": {"num_critics": 3, "batch_norm_momentum": 0.3},
        },
        smooth=SMOOTH,
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("tau", {"tau": 0.005}),
            ("renormalization_starts", {"renormalization_starts": -1}),
            *NORMALIZED_NONSENSE,
        ),
    ),
    "xqc": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "three critics": {"num_critics": 3, "actor_hidden_sizes": [8], "value_max": 20.0},
            "raw rewards": {"normalize_rewards": False, "num_atoms": 2, "policy_delay": 1},
        },
        smooth=SMOOTH,
        unbounded=frozenset({"target_entropy"}),
        nonsense=(*NORMALIZED_NONSENSE, *CATEGORICAL_NONSENSE),
    ),
    "flash_sac": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "other noise": {"noise_repeat_max": 1, "target_std": 0.3, "policy_delay": 1},
            "three critics": {"num_critics": 3, "actor_hidden_sizes": [8], "value_max": 20.0},
            "raw rewards": {"normalize_rewards": False, "learning_rate_schedule": "constant"},
        },
        smooth=SMOOTH,
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("hidden_sizes", {"hidden_sizes": [16, 8]}),
            ("actor_hidden_sizes", {"actor_hidden_sizes": []}),
            ("noise_repeat_max", {"noise_repeat_max": 0}),
            ("noise_repeat_exponent", {"noise_repeat_exponent": -1.0}),
            ("target_std", {"target_std": 0.0}),
            *NORMALIZED_NONSENSE,
            *CATEGORICAL_NONSENSE,
        ),
    ),
    "redq": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "every": {"subset_size": 3, "policy_delay": 1},
            "least": {"actor_value": "minimum", "actor_layer_norm": True},
            "sparse": {"subset_size": 1, "train_frequency": 3, "gradient_updates_per_step": 5},
            "droq": {"num_critics": 2, "critic_dropout": 0.2, "critic_layer_norm": True},
        },
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("n_step", {"n_step": 3}),
            ("critic_dropout", {"critic_dropout": 1.0}),
            ("subset_size", {"num_critics": 2, "subset_size": 3}),
            ("gradient_updates_per_step", {"gradient_updates_per_step": 0}),
            ("policy_delay", {"policy_delay": 0}),
        ),
    ),
    "rlpd": Case(
        metrics=CRITIC_METRICS,
        policy_metrics=SOFT_METRICS,
        policy=SOFT_POLICY,
        interesting={
            "pretrained": {"offline_pretrain_updates": 30, "offline_batch_ratio": 0.25},
            "plain critics": {"critic_layer_norm": False, "subset_size": 1, "policy_delay": 1},
        },
        unbounded=frozenset({"target_entropy"}),
        nonsense=(
            ("subset_size", {"num_critics": 2, "subset_size": 3}),
            ("offline_batch_ratio", {"offline_batch_ratio": 1.5}),
            ("n_step", {"n_step": 3}),
            ("policy_delay", {"policy_delay": 0}),
        ),
    ),
    "qr_dqn": Case(
        metrics=CRITIC_METRICS,
        targets_move=at_an_interval,
        interesting={
            "rainbow": {
                "double": True,
                "dueling": True,
                "prioritized": True,
                "noisy": True,
                "target_update_interval": 3,
            },
            "polyak": {"target_update_interval": 1, "tau": 0.01},
        },
        nonsense=(
            ("num_quantiles", {"num_quantiles": 0}),
            ("noisy_std", {"noisy_std": 0.0}),
            ("policy_delay", {"policy_delay": 2}),
        ),
    ),
    "dqn": Case(
        metrics=CRITIC_METRICS,
        targets_move=at_an_interval,
        interesting={
            "older options": {"dueling": True, "prioritized": True, "target_update_interval": 3},
            "rainbow": {
                "dueling": True,
                "prioritized": True,
                "noisy": True,
                "num_atoms": 7,
                "value_min": -3.0,
                "value_max": 4.0,
                "target_update_interval": 3,
            },
            "noisy": {"noisy": True, "hidden_sizes": [8]},
            "polyak": {"double": False, "target_update_interval": 1, "tau": 0.01},
        },
        smooth={"double": False},
        nonsense=(
            ("epsilon_end", {"epsilon_start": 0.1, "epsilon_end": 0.2}),
            ("epsilon_fraction", {"epsilon_fraction": 0.0}),
            ("target_update_interval", {"target_update_interval": 0}),
            ("priority_exponent", {"priority_exponent": 1.5}),
            ("policy_delay", {"policy_delay": 2}),
            ("num_atoms", {"num_atoms": 0}),
            ("noisy_std", {"noisy_std": 0.0}),
            ("value_min", {"value_min": 1.0, "value_max": 1.0}),
        ),
        unbounded=frozenset({"value_min", "value_max"}),
    ),
}


# Algorithms and batches


def make(spec: AlgorithmSpec, *, seed: int = 0, **settings: Any) -> Algorithm:
    chosen = tiny_settings(spec, **{"batch_size": ROWS, **settings})
    actions = spaces_of(spec).actions
    return spec.algorithm(OBS_DIM, actions, chosen, seed=seed, planned_updates=1_000)


def make_batches(
    spec: AlgorithmSpec, count: int, settings: Settings | None = None, *, seed: int = 0
) -> Iterator[Batch]:
    """Return batches of random rows, for an algorithm with these settings. Some are terminal."""
    stream = torch.Generator().manual_seed(seed)
    weighted = issubclass(spec.hyperparameters_type, PrioritizedHyperparameters)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream)

    def next_actions() -> Tensor:
        """Return actions, with NaN in some rows: the data has none there."""
        return torch.where(draw(ROWS, 1) > 1, torch.nan, draw(ROWS, ACTION_DIM).tanh())

    def choices(actions: ActionSpec) -> Tensor:
        uniform = torch.rand(ROWS, actions.width, generator=stream)
        indices = (uniform * torch.tensor(actions.num_choices)).long()
        return indices.squeeze(-1) if actions.kind == "discrete" else indices

    actions = spaces_of(spec).actions
    for _ in range(count):
        action = draw(ROWS, ACTION_DIM).tanh()
        discount = torch.where(draw(ROWS) > 1, 0.0, 0.99)
        batch = Batch(
            draw(ROWS, OBS_DIM),
            action if actions.kind == "continuous" else choices(actions),
            draw(ROWS),
            discount,
            draw(ROWS, OBS_DIM),
            weights=draw(ROWS).exp() if weighted else None,
            next_action=next_actions() if spec.uses_next_actions else None,
            returns=draw(ROWS) if has_returns(spec) else None,
        )
        of_rollout = rollout_fields(lambda: draw(ROWS)) if has_rollouts(spec) else {}
        yield batch.with_fields(**of_rollout | sequence_fields(spec, settings or {}, draw))


def sequence_fields(
    spec: AlgorithmSpec, settings: Settings, draw: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return the fields of a batch that only recurrent policies need; some episodes end."""
    if "recurrent" not in settings:
        return {}
    chosen = validate(spec.hyperparameters_type, tiny_settings(spec, **settings))
    memory = draw(ROWS // chosen.sequence_steps, chosen.memory_size).tanh()
    return {"memory": memory, "ended": (draw(ROWS) > 1).float()}


def over_steps(spec: AlgorithmSpec, number: int) -> Settings:
    """Return settings for n-step targets. Soft critics support them only without entropy."""
    if has_rollouts(spec):
        return {}
    soft = "entropy_in_target" in spec.hyperparameters_type.model_fields
    return {"n_step": number, **({"entropy_in_target": False} if soft else {})}


def one_batch(spec: AlgorithmSpec, settings: Settings | None = None) -> Batch:
    return next(make_batches(spec, 1, settings))


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def moved(before: State, after: State) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def moments(names: set[str]) -> set[str]:
    return {f"{name}.adam_{part}" for name in names for part in ("mean", "square", "count")}


def owner_of(buffer: str) -> str:
    """Return the network that a buffer belongs to."""
    return buffer.removesuffix(STATISTICS)


def assert_agree(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor,
            second[name],
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# One update


def check_that_updates_change_the_expected_tensors(
    spec: AlgorithmSpec, case: Case, settings: Settings
) -> None:
    algorithm = make(spec, **settings)
    chosen = algorithm.hyperparameters
    learned = set(algorithm.optimizers())
    assert case.policy <= learned
    assert set(algorithm.networks()) <= learned
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in algorithm.state.items()}
    places = {name: tensor.data_ptr() for name, tensor in algorithm.state.items()}
    seen = set()
    batches = make_batches(spec, 2 * chosen.policy_delay + 6, settings)
    for number, batch in enumerate(batches, start=1):
        on = number % chosen.policy_delay == 0
        before = copied(algorithm.state)
        result = algorithm.update(batch)
        after = algorithm.state
        seen.add(on)
        # Exactly the parameters and moments that are learned in this update change.
        changing = learned if on or not case.policy else learned - case.policy
        expected = {"updates"} | changing | moments(changing)
        expected |= {name for name in algorithm.buffers() if owner_of(name) in changing}
        targets = algorithm.targets()
        assert moved(before, after) - set(targets) == expected, f"update {number}"
        assert int(after["updates"]) == number
        assert_targets_follow(algorithm, before, case.targets_move(chosen, number, on))
        assert_every_layer_moves(algorithm, before, changing)
        assert_metrics_are(result, case, policy_updated=on)
    assert seen == ({True, False} if chosen.policy_delay > 1 else {True})
    assert {name: (t.shape, t.dtype) for name, t in algorithm.state.items()} == shapes
    assert {name: t.data_ptr() for name, t in algorithm.state.items()} == places


def assert_targets_follow(algorithm: Algorithm, before: State, due: bool) -> None:
    after = algorithm.state
    for target, source in algorithm.targets().items():
        if not due:
            assert torch.equal(after[target], before[target]), f"{target} moved out of turn"
            continue
        step = algorithm.hyperparameters.tau * (after[source] - before[target])
        torch.testing.assert_close(after[target], before[target] + step, rtol=1e-5, atol=1e-6)
        assert not torch.equal(after[target], before[target]), f"{target} stood still"


def assert_every_layer_moves(algorithm: Algorithm, before: State, changing: set[str]) -> None:
    """Check that every layer has changed, in every member of an ensemble."""
    for name, network in algorithm.networks().items():
        if name not in changing:
            continue
        change = network.unflatten(algorithm.state[name] - before[name])
        for part, tensor in change.items():
            members = tensor.unbind(0) if network.ensemble is not None else [tensor]
            assert all(member.any() for member in members), f"{name}.{part} stood still"


def assert_metrics_are(result: UpdateResult, case: Case, *, policy_updated: bool) -> None:
    assert result.num_gradient_steps == 1
    expected = case.metrics | (case.policy_metrics if policy_updated else frozenset())
    assert result.metrics.keys() == expected
    for name, value in result.metrics.items():
        assert value.shape == (), name
        assert not value.requires_grad, name
        assert torch.isfinite(value), name
    if result.row_errors is not None:
        assert result.row_errors.shape == (ROWS,)
        assert not result.row_errors.requires_grad


def check_that_an_update_depends_only_on_its_inputs(
    spec: AlgorithmSpec, case: Case, settings: Settings
) -> None:
    first, second = (make(spec, **settings) for _ in range(2))
    batch = one_batch(spec, settings)
    given = Batch(*(None if part is None else part.clone() for part in batch))
    torch.manual_seed(1)
    results = [first.update(batch)]
    torch.manual_seed(2)
    results.append(second.update(batch))
    assert moved(first.state, second.state) == set()
    assert results[0].metrics == results[1].metrics
    assert all(
        one is other or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(batch, given, strict=True)
    )


def check_that_losses_have_gradients_only_for_their_parameters(
    spec: AlgorithmSpec, case: Case, settings: Settings
) -> None:
    """The gradient of `<name>_loss` equals the gradients of the objectives and is zero for targets.

    An update therefore minimizes `<name>_loss`, and the actor loss does not change the critics.
    """
    module = importlib.import_module(spec.algorithm.__module__)
    algorithm = make(spec, **settings)
    batch = one_batch(spec, settings)
    noise = draw_noise(algorithm.update_noise(ROWS), torch.Generator().manual_seed(1))
    leaves = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point())
        for name, tensor in algorithm.state.items()
    }
    loss, metrics = getattr(module, f"{spec.name}_loss")(algorithm, leaves, batch, noise)
    assert loss.shape == ()
    metrics.pop("row_errors", None)
    buffers = {name for name in metrics if name.startswith(BUFFERS)}
    assert buffers == {BUFFERS + name for name in algorithm.buffers()}
    assert metrics.keys() - buffers == case.metrics | case.policy_metrics
    learned = {name: leaves.pop(name) for name in algorithm.optimizers()}
    loss.backward()
    rest = [name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()]
    assert rest == []
    for objective in algorithm.objectives(update_policy=True):
        unclipped = objective._replace(max_grad_norm=None)
        own, own_metrics = algorithm.differentiate(unclipped, algorithm.state, batch, noise)
        assert own.keys() - algorithm.buffers().keys() == set(objective.parameters)
        for name in objective.parameters:
            gradient = own[name]
            torch.testing.assert_close(learned[name].grad, gradient, rtol=1e-5, atol=1e-7)
            learned.pop(name)
        for name in own_metrics.keys() & metrics.keys():
            torch.testing.assert_close(metrics[name].detach(), own_metrics[name])
    assert not learned, "learned by no objective"


# State


def check_that_a_state_continues_in_another_learner(
    spec: AlgorithmSpec, case: Case, settings: Settings
) -> None:
    first, second = make(spec, seed=0, **settings), make(spec, seed=1, **settings)
    assert set(first.networks()) <= moved(first.state, second.state)
    for batch in make_batches(spec, 5, settings):
        first.update(batch)
    second.load_state(copied(first.state))
    second.generator.set_state(first.generator.get_state())
    for batch in make_batches(spec, 5, settings, seed=1):
        results = [algorithm.update(batch) for algorithm in (first, second)]
        assert results[0].metrics == results[1].metrics
    assert moved(first.state, second.state) == set()
    for name, network in second.networks().items():
        assert torch.equal(network.vector.data, second.state[name]), f"{name} is not the model's"
    with pytest.raises(ValueError, match="updates"):
        second.load_state({k: v for k, v in first.state.items() if k != "updates"})


def spaces_of(spec: AlgorithmSpec) -> SpaceInfo:
    """Return spaces with actions of the first kind that the algorithm supports."""
    if spec.actions[0] == "discrete":
        return SpaceInfo(OBS_DIM, ACTION_DIM, action_kind="discrete", action_start=3)
    if spec.actions[0] != "continuous":
        return INFOS[spec.actions[0]]
    low, high = np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32)
    return SpaceInfo(OBS_DIM, ACTION_DIM, action_low=low, action_high=high)


def check_that_a_saved_policy_predicts(spec: AlgorithmSpec, case: Case, settings: Settings) -> None:
    algorithm, spaces = make(spec, **settings), spaces_of(spec)
    for batch in make_batches(spec, 5, settings):
        algorithm.update(batch)
    normalizer = ObservationNormalizer(OBS_DIM)
    normalizer.observe(torch.randn(50, OBS_DIM) * 3 + 1)
    policy = Policy(algorithm, spaces, normalizer, algorithm_name=spec.name)
    loaded = Policy.from_parts(policy.describe(), policy.tensors())
    assert loaded.algorithm.hyperparameters == algorithm.hyperparameters
    observations = np.random.default_rng(0).normal(size=(40, OBS_DIM)) * 10
    many = first_actions(policy, observations)
    explored = first_actions(policy, observations, deterministic=False)
    for actions in (many, explored):
        assert_actions_fit(actions, spaces)
    assert np.array_equal(first_actions(policy, observations), many)
    assert np.array_equal(first_actions(loaded, observations), many)
    single = first_actions(policy, observations[0])
    assert single.shape == many[0].shape
    np.testing.assert_allclose(single, many[0], rtol=1e-5, atol=1e-6)


def first_actions(policy: Policy, obs: Any, *, deterministic: bool = True) -> np.ndarray:
    """Return the actions of first steps, with a state only where it is needed."""
    if not policy.memory_size:
        return policy.predict(obs, deterministic=deterministic)
    return policy.predict(obs, deterministic=deterministic, episode_start=True)[0]


def assert_actions_fit(actions: np.ndarray, spaces: SpaceInfo) -> None:
    if spaces.action_kind == "discrete":
        assert actions.shape == (40,)
        assert np.issubdtype(actions.dtype, np.integer)
        assert set(actions) <= {3, 4}
        return
    assert actions.shape == (40, spaces.action_dim)
    assert np.issubdtype(actions.dtype, np.integer) == (not spaces.is_continuous)
    assert (actions >= spaces.action_low).all()
    assert (actions <= spaces.action_high).all()


# Many updates, in every mode


class Prepared:
    """A source that returns prepared batches and ignores the drawn indices."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = iter(batches)

    def __len__(self) -> int:
        return ROWS

    def flush(self) -> None:
        pass

    def sample(self, batch_size: int) -> Batch:
        return next(self._batches)

    def draw(self, bits: Tensor) -> Batch:
        return next(self._batches)


def make_learner(
    spec: AlgorithmSpec,
    seeds: tuple[int, ...],
    updates: int,
    *,
    compiled: bool = False,
    **settings: Any,
) -> Learner:
    """Return a learner whose batches and noise for a seed do not depend on the other seeds."""
    algorithms = [make(spec, seed=seed, **settings) for seed in seeds]
    streams = [make_batches(spec, updates, settings, seed=seed) for seed in seeds]
    return prepared_learner(algorithms, streams, seeds, compiled=compiled)


def prepared_learner(
    algorithms: Sequence[Algorithm],
    streams: Sequence[Iterable[Batch]],
    seeds: Sequence[int],
    *,
    compiled: bool = False,
) -> Learner:
    """Return a learner with one algorithm and one stream of batches for each seed."""
    return Learner(
        algorithms,
        Prepared([stack(parts) for parts in zip(*streams, strict=True)]),
        Execution("cpu", compiled, torch.get_num_threads(), "highest"),
        population=Population(len(seeds), tuple(range(len(seeds)))),
        generators=[torch.Generator().manual_seed(seed) for seed in seeds],
    )


def stack(parts: tuple[Batch, ...]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return Batch(*(None if part[0] is None else torch.stack(part) for part in columns))


def check_that_a_population_agrees_with_single_learners(
    spec: AlgorithmSpec, case: Case, settings: Settings, *, updates: int
) -> None:
    seeds = (5, 6, 7)
    together = make_learner(spec, seeds, updates, **settings)
    together.update(0, updates)
    for seed_index, seed in enumerate(seeds):
        alone = make_learner(spec, (seed,), updates, **settings)
        alone.update(0, updates)
        assert_agree(alone.algorithms[0].state, together.algorithms[seed_index].state)
        assert alone.metrics() == pytest.approx(together.metrics(seed_index), rel=1e-3, abs=1e-3)


def check_that_compiled_updates_agree_with_eager_ones(
    spec: AlgorithmSpec, case: Case, settings: Settings, *, seeds: tuple[int, ...], updates: int
) -> None:
    """With `policy_delay`, both programs run: with and without the policy update."""
    slow, fast = (
        make_learner(spec, seeds, updates, compiled=on, **{**case.delayed(2), **settings})
        for on in (False, True)
    )
    slow.update(0, updates)
    fast.update(0, updates)
    assert_agree(slow.state, fast.state)
    assert slow.metrics() == pytest.approx(fast.metrics(), rel=1e-3, abs=1e-3)


# Settings


def refusals(spec: AlgorithmSpec, settings: Settings) -> list[str]:
    """Return the error messages of the config and of the learner's constructor."""
    messages = []
    with pytest.raises(ConfigError) as raised:
        TrainConfig(algo=spec.name, algo_kwargs=settings)
    messages.append(str(raised.value))
    with pytest.raises(ConfigError) as raised:
        spec.algorithm(OBS_DIM, ACTION_DIM, settings)
    messages.append(str(raised.value))
    return messages


def check_that_invalid_settings_are_refused_by_name(spec: AlgorithmSpec, case: Case) -> None:
    known = spec.hyperparameters_type.model_fields
    for key in known:
        wrong: list[Any] = [{"a": 1}, float("nan"), -1]
        for value in wrong[: 2 if key in case.unbounded else 3]:
            for message in refusals(spec, {key: value}):
                assert f"{key} = " in message or f"{key}.a" in message  # a section
                assert len(message.splitlines()) == 1, message
    for key, settings in case.nonsense:
        for message in refusals(spec, settings):
            assert f"{key} = {settings[key]!r}" in message
            assert len(message.splitlines()) == 1, message
    for message in refusals(spec, {"learning_rat": 1e-3}):
        assert "unknown key; did you mean 'learning_rate'?" in message


# Runs


def assert_same(one: TrainResult, other: TrainResult) -> None:
    assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)
    assert metric_rows(one.run_dir) == metric_rows(other.run_dir)


def check_that_a_run_resumes_bit_for_bit(
    spec: AlgorithmSpec, settings: Settings, tmp_path: Path, **changes: Any
) -> TrainResult:
    config = tiny_of(spec, tmp_path, algo_kwargs=settings, **changes)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(77)])
    assert stopped.metrics["global_step"] < uninterrupted.metrics["global_step"]
    resumed = rl_training.resume_training(stopped.run_dir)
    assert resumed.metrics == uninterrupted.metrics
    assert_same(uninterrupted, resumed)
    return uninterrupted


def check_that_a_population_resumes_bit_for_bit(
    spec: AlgorithmSpec, settings: Settings, tmp_path: Path, **changes: Any
) -> None:
    config = tiny_of(spec, tmp_path, seeds=[3, 1], algo_kwargs=settings, **changes)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(77)])
    resumed = resume_together([result.run_dir for result in stopped])
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert_same(one, other)


def check_that_its_policy_can_be_exported(spec: AlgorithmSpec, tmp_path: Path) -> None:
    """The file is compared with the policy before it is written, also with sampled actions."""
    result = rl_training.train(tiny_of(spec, tmp_path, total_timesteps=60))
    policy = load_policy(find_checkpoint(result.run_dir))
    for stochastic in [False] if policy.algorithm.why_deterministic() else [False, True]:
        path = tmp_path / f"policy_{stochastic}.pt2"
        exported = export_run(result.run_dir, path, format="torch", stochastic=stochastic)
        assert exported.path.stat().st_size
        assert json.loads(exported.metadata["stochastic"]) == stochastic


ONE_UPDATE_CHECKS = [
    check_that_updates_change_the_expected_tensors,
    check_that_an_update_depends_only_on_its_inputs,
    check_that_a_state_continues_in_another_learner,
    check_that_a_saved_policy_predicts,
]
