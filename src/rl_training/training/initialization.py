"""Initializes a new run from a trained policy (`init_from`)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.checkpoints.format import LEARNER
from rl_training.checkpoints.loading import (
    MODEL_FILES,
    find_checkpoint,
    load_policy,
    restore_learned,
)
from rl_training.config import TrainConfig
from rl_training.data.loading import warn_of_other_bounds
from rl_training.data.transforms import RewardTransform
from rl_training.envs import VectorEnvironment
from rl_training.errors import CheckpointError, ConfigError, warn_user
from rl_training.execution.policy import Policy
from rl_training.models.mlp import Network
from rl_training.types import Json


def inherit_normalization(config: TrainConfig) -> TrainConfig:
    """Normalize observations if the trained policy did, unless the config says otherwise."""
    if config.normalize_observations is not None:
        return config
    assert config.init_from is not None
    trained = load_policy(find_checkpoint(config.init_from, names=MODEL_FILES))
    return config.with_changes(normalize_observations=trained.normalizer is not None)


def initialize(
    policy: Policy, seed_index: int, config: TrainConfig, environment: VectorEnvironment | None
) -> None:
    """Give a new run what the policy of `init_from` has learned."""
    assert config.init_from is not None
    initialize_from(policy, config.init_from, scales_rewards=config.reads_data)
    _carry_wrapper_statistics(policy, seed_index, config.init_from, environment)


def initialize_from(policy: Policy, path: str, *, scales_rewards: bool = True) -> None:
    """Copy the networks and the observation normalization of a trained policy.

    A checkpoint, unlike an exported policy, also provides target networks, temperature and
    optimizer moments. Without the moments, the first steps of Adam are equally large for all
    parameters and can undo what was learned. The reward transform is copied too, unless the run
    `scales_rewards` by its own data.
    """
    reader = find_checkpoint(path, names=MODEL_FILES)
    trained = load_policy(reader)
    if (wrong := trained.first_not_finite()) is not None:
        raise ConfigError(f"init_from = {path!r}: {wrong} is not finite; use an earlier checkpoint")
    _check_normalization(policy, trained, path)
    _check_same_function(policy, trained, path)
    if trained.algorithm_name == policy.algorithm_name:
        try:
            policy.load_tensors(trained.tensors())
            restore_learned(policy.algorithm, reader)
        except (CheckpointError, ValueError) as error:
            raise ConfigError(
                f"init_from = {path!r}: does not fit this run's networks ({error}); use the "
                "environment, hidden_sizes, num_critics and critic_layer_norm it was trained with"
            ) from None
    else:
        _adopt(policy, trained, path)
    _carry_rewards(policy, trained, path, scales_rewards=scales_rewards)
    policy.wrapper_statistics = trained.wrapper_statistics


def trained_fingerprint(path: str) -> Json:
    """The hashes of the files that `initialize_from` reads."""
    files = find_checkpoint(path, names=MODEL_FILES).files
    return {name: files[name]["sha256"] for name in (*MODEL_FILES, LEARNER) if name in files}


def require_same_policy(saved: Json | None, path: str) -> None:
    """Raise `CheckpointError` if `init_from` is no longer what a run was created with."""
    if trained_fingerprint(path) != saved:
        raise CheckpointError(
            f"init_from = {path!r}: has changed since this run was created, so the run would not "
            "be the same; start a new run"
        )


def _carry_wrapper_statistics(
    policy: Policy, seed_index: int, path: str, environment: VectorEnvironment | None
) -> None:
    """Copy the wrapper statistics of a trained policy to the training environments."""
    if policy.wrapper_statistics is None or environment is None:
        return
    try:
        environment.give_statistics(policy.wrapper_statistics, seed_index)
    except CheckpointError as error:
        raise ConfigError(f"init_from = {path!r}: {error}") from None


def _check_normalization(policy: Policy, trained: Policy, path: str) -> None:
    """Raise `ConfigError` if only one of the two policies normalizes observations."""
    if (policy.normalizer is None) != (trained.normalizer is None):
        was, now = ("with", "without") if trained.normalizer else ("without", "with")
        raise ConfigError(
            f"init_from = {path!r}: was trained {was} normalize_observations and cannot continue "
            f"{now} it; remove that key"
        )


def _check_same_function(policy: Policy, trained: Policy, path: str) -> None:
    """Raise `ConfigError` if equal parameter shapes would compute another function."""
    now, was = (each.algorithm.hyperparameters.activation for each in (policy, trained))
    if now != was:
        raise ConfigError(
            f"init_from = {path!r}: was trained with activation = {was!r}, but this run uses "
            f"{now!r}, which would change the function; set activation: {was}"
        )
    heads = [
        getattr(each.algorithm.hyperparameters, "actor_head", None) for each in (policy, trained)
    ]
    if None not in heads and heads[0] != heads[1]:
        raise ConfigError(
            f"init_from = {path!r}: was trained with actor_head = {heads[1]!r}, but this run "
            f"uses {heads[0]!r}; set algo_kwargs.actor_head: {heads[1]}"
        )
    if policy.action_chunk != trained.action_chunk:
        raise ConfigError(
            f"init_from = {path!r}: was trained with action_chunk = {trained.action_chunk}, but "
            f"this run chooses {policy.action_chunk} actions at once; use the same number"
        )
    # Equal shapes are not enough: n means and n deviations look like 2n means.
    here, there = policy.spaces, trained.spaces
    if not there.fits(here):
        raise ConfigError(
            f"init_from = {path!r}: was trained for {there.obs_dim} observations and "
            f"{there.action_dim} actions, but this run has {here.obs_dim} and {here.action_dim}; "
            "use an environment or data of the same sizes"
        )
    if there.action_low is not None and there.action_high is not None:
        warn_of_other_bounds(f"init_from = {path!r}", (there.action_low, there.action_high), here)


def _carry_rewards(policy: Policy, trained: Policy, path: str, *, scales_rewards: bool) -> None:
    if trained.rewards is None:
        policy.rewards = policy.rewards or RewardTransform()
        warn_user(
            f"init_from = {path!r}: was trained on datasets with different reward transforms; "
            "its critics have to learn the scale of the new rewards"
        )
    elif not scales_rewards:
        policy.rewards = trained.rewards
    elif policy.rewards != trained.rewards:
        warn_user(
            f"init_from = {path!r}: its rewards were {trained.rewards}, those of this run are "
            f"{policy.rewards}; its critics have to learn the new scale"
        )


def _adopt(policy: Policy, trained: Policy, path: str) -> None:
    """Copy the networks that fit from another algorithm's policy; the actor must fit."""
    algorithm, given = policy.algorithm, trained.algorithm
    own, theirs = algorithm.networks(), given.networks()
    found = {
        name: _fitted(network, algorithm.state[name], theirs[name], given.state[name])
        for name, network in own.items()
        if name in theirs
    }
    fitting = {name: vector for name, vector in found.items() if vector is not None}
    if "actor" not in fitting or policy.spaces.actions != trained.spaces.actions:
        raise ConfigError(
            f"init_from = {path!r}: the actor of {trained.algorithm_name!r} does not fit "
            f"{policy.algorithm_name!r}: its shape or kind of output differs; train "
            f"{trained.algorithm_name!r} further, or use the same networks and head"
        )
    with torch.no_grad():
        for name, vector in fitting.items():
            algorithm.state[name].copy_(vector)
    if (
        policy.normalizer is not None and trained.normalizer is not None
    ):  # either both have one or neither
        policy.normalizer.load_state(trained.normalizer.state)
    algorithm.load_state({**algorithm.state, **algorithm.initial_state()})
    if fresh := [name for name in own if name not in fitting]:
        warn_user(
            f"init_from = {path!r}: {policy.algorithm_name!r} takes its {' and '.join(fitting)} "
            f"from {trained.algorithm_name!r} and starts with a new {' and '.join(fresh)}"
        )


def _fitted(own: Network, vector: Tensor, other: Network, trained: Tensor) -> Tensor | None:
    """The trained parameters in the layout of another network; None if they do not fit.

    If only the new actor has a learned standard deviation, it keeps the default one.
    """
    shapes, theirs = own.layout.shapes, other.layout.shapes
    free = {name: shape for name, shape in shapes.items() if name not in theirs}
    if {**theirs, **free} != shapes or not free.keys() <= {"log_std"}:
        return None
    fitted = own.flatten({**own.unflatten(vector), **other.unflatten(trained)})
    return fitted if fitted.shape == vector.shape else None
