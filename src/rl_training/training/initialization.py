"""Initializes a new run from a trained policy (`init_from`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.checkpoints.format import LEARNER, CheckpointReader
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
from rl_training.envs.tensors.vector import TensorVector
from rl_training.errors import CheckpointError, ConfigError, warn_user
from rl_training.execution.policy import Policy
from rl_training.models.mlp import Network
from rl_training.models.mlp_ppo import UnboundedGaussianHead
from rl_training.types import Json, State

SAME_FUNCTION = ("actor_head",)
"""Settings that change what parameters of equal shapes compute"""
SAME_SUPPORT = ("value_min", "value_max", "num_atoms")
"""The same, of categorical critics"""
ADAPTED_STD = 0.2
"""Standard deviation, before the tanh, of a squashed Gaussian whose actor had none"""
ADAM_PARTS = ("mean", "square", "count")


SEED = "{seed}"
"""Stands for the seed of the run in the path of `init_from`"""


def with_seed_in_path(config: TrainConfig) -> TrainConfig:
    """Let each of several seeds start from a policy of its own."""
    if config.init_from is None or SEED not in config.init_from:
        return config
    return config.with_changes(init_from=config.init_from.replace(SEED, str(config.seed)))


def inherit_normalization(config: TrainConfig) -> TrainConfig:
    """Normalize observations if the trained policy did, unless the config says otherwise."""
    if config.normalize_observations is not None:
        return config
    assert config.init_from is not None
    trained = load_policy(find_checkpoint(config.init_from, names=MODEL_FILES))
    return config.with_changes(normalize_observations=trained.normalizer is not None)


def initialize(
    policy: Policy,
    seed_index: int,
    config: TrainConfig,
    environment: VectorEnvironment | TensorVector | None,
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
                "environment, networks and heads it was trained with (hidden_sizes, num_critics, "
                "critic_layer_norm, actor_layer_norm, ...)"
            ) from None
    else:
        _adopt(policy, trained, path, reader)
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
    policy: Policy, seed_index: int, path: str, environment: VectorEnvironment | TensorVector | None
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
    both = [each.algorithm.hyperparameters for each in (policy, trained)]
    layer, trained_layer = (getattr(each, "recurrent", "none") for each in both)
    if layer != trained_layer:
        raise ConfigError(
            f"init_from = {path!r}: was trained with recurrent = {trained_layer!r}, but this run "
            f"uses {layer!r}; use the same recurrent layer, or train without init_from"
        )
    # Critics of different kinds are not taken over, so that their values need not agree.
    are_alike = all(getattr(each, "num_atoms", 1) > 1 for each in both)
    are_alike |= policy.algorithm_name == trained.algorithm_name
    for name in (*SAME_FUNCTION, *(SAME_SUPPORT if are_alike else ())):
        here, there = (getattr(each, name, None) for each in both)
        if None not in (here, there) and here != there:
            raise ConfigError(
                f"init_from = {path!r}: was trained with {name} = {there!r}, but this run "
                f"uses {here!r}; set algo_kwargs.{name}: {there}"
            )
    if policy.action_chunk != trained.action_chunk:
        raise ConfigError(
            f"init_from = {path!r}: was trained with action_chunk = {trained.action_chunk}, but "
            f"this run chooses {policy.action_chunk} actions at once; use the same number"
        )
    # Equal shapes are not enough: n means and n deviations look like 2n means.
    here, there = policy.spaces, trained.spaces
    if not there.fits(here):
        taken, found = (
            each.obs_dim if each.observation.is_vector else each.observation.describe()
            for each in (there, here)
        )
        raise ConfigError(
            f"init_from = {path!r}: was trained for {taken} observations and "
            f"{there.action_dim} actions, but this run has {found} and {here.action_dim}; "
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


def _adopt(policy: Policy, trained: Policy, path: str, reader: CheckpointReader) -> None:
    """Copy what fits from another algorithm's policy; the actor must fit.

    The head of an actor for continuous actions is adapted. If all networks fit, the run also takes
    over what both algorithms train besides them, as from a policy of its own algorithm.
    """
    algorithm, given = policy.algorithm, trained.algorithm
    own, theirs = algorithm.networks(), given.networks()
    found = {
        name: _fitted(network, algorithm.state[name], theirs[name], given.state[name])
        for name, network in own.items()
        if name in theirs
    }
    equal = {name: vector for name, vector in found.items() if vector is not None}
    fitting = dict(equal)
    if "actor" in found and "actor" not in equal and policy.spaces.is_continuous:
        vectors = algorithm.state["actor"], given.state["actor"]
        actor = _with_other_head(own["actor"], theirs["actor"], *vectors, policy.spaces.action_dim)
        fitting |= {} if actor is None else {"actor": actor}
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
    fresh = [name for name in own if name not in fitting]
    if not fresh and restore_learned(given, reader):
        algorithm.load_state({**algorithm.state, **_shared_state(algorithm, given, set(equal))})
    _say_what_is_taken(policy, trained, path, list(fitting), fresh, is_adapted=equal != fitting)


def _shared_state(algorithm: Algorithm, given: Algorithm, networks: set[str]) -> State:
    """What both train besides networks: targets, moments and scalars such as a temperature."""
    scalars = algorithm.extra_state().keys() & algorithm.optimizers().keys()
    scalars &= given.optimizers().keys()
    carried = networks | scalars
    targets = {target for target, source in algorithm.targets().items() if source in networks}
    names = scalars | targets | {f"{n}.adam_{p}" for n in carried for p in ADAM_PARTS}
    return {
        name: given.state[name]
        for name in names
        if name in algorithm.state
        and name in given.state
        and given.state[name].shape == algorithm.state[name].shape
    }


def _say_what_is_taken(
    policy: Policy,
    trained: Policy,
    path: str,
    taken: list[str],
    fresh: list[str],
    *,
    is_adapted: bool,
) -> None:
    if fresh:
        warn_user(
            f"init_from = {path!r}: {policy.algorithm_name!r} takes its {' and '.join(taken)} "
            f"from {trained.algorithm_name!r} and starts with a new {' and '.join(fresh)}"
        )
    if policy.spaces.is_continuous and _is_squashed(policy) != _is_squashed(trained):
        squashed, other = (policy, trained) if _is_squashed(policy) else (trained, policy)
        warn_user(
            f"init_from = {path!r}: the actor of {squashed.algorithm_name!r} limits actions by a "
            f"tanh and that of {other.algorithm_name!r} does not, so that actions far from zero "
            "differ from those of the trained policy; evaluate the policy before you rely on it"
        )
    elif is_adapted:
        warn_user(
            f"init_from = {path!r}: the head of the actor of {trained.algorithm_name!r} is adapted "
            f"to {policy.algorithm_name!r}: its most likely actions are the same, but not how "
            "they are sampled"
        )


def _is_squashed(policy: Policy) -> bool:
    """Whether continuous actions are the tanh of the actor's outputs; all but PPO's and A2C's."""
    head = getattr(policy.algorithm.model, "head", None)
    return not isinstance(head, UnboundedGaussianHead)


def _fitted(own: Network, vector: Tensor, other: Network, trained: Tensor) -> Tensor | None:
    """The trained parameters in the layout of another network; None if they do not fit.

    If only the new actor has a learned standard deviation, it keeps the default one.
    """
    return _in_layout(own, vector, other.unflatten(trained))


def _with_other_head(
    own: Network, other: Network, vector: Tensor, trained: Tensor, action_dim: int
) -> Tensor | None:
    """The trained parameters of an actor whose head for continuous actions is another one.

    The first outputs of every such head are the most likely action before its tanh, if it has one
    (`_is_squashed`). Those of a
    squashed Gaussian are followed by logarithms of standard deviations, and `log_std` of a Gaussian
    are such logarithms for all states. None if the rest does not fit.
    """
    tensors = other.unflatten(trained)
    log_std = tensors.pop("log_std", None)
    last = len(own.sizes) - 2
    weight, bias = f"weight_{last}", f"bias_{last}"
    if len(own.sizes) != len(other.sizes) or not {weight, bias} <= tensors.keys():
        return None  # other layers, or a module of the user's
    if own.sizes[-1] < other.sizes[-1]:
        tensors |= {name: tensors[name][..., :action_dim] for name in (weight, bias)}
    elif own.sizes[-1] > other.sizes[-1]:
        if log_std is None:
            log_std = trained.new_full((action_dim,), math.log(ADAPTED_STD))
        tensors[weight] = torch.nn.functional.pad(tensors[weight], (0, action_dim))
        tensors[bias] = torch.cat([tensors[bias], log_std])
    return _in_layout(own, vector, tensors)


def _in_layout(own: Network, vector: Tensor, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Parameters by name as the vector of a network; None if they do not fit.

    A standard deviation that is missing is the network's own.
    """
    current = own.unflatten(vector)
    if not current.keys() - {"log_std"} <= tensors.keys() <= current.keys():
        return None
    if any(tensor.shape != current[name].shape for name, tensor in tensors.items()):
        return None
    return own.flatten({**current, **tensors})
