"""What a run needs of this machine: memory for its parts, and disk space for its checkpoints."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rl_training.algorithms.hyperparameters import (
    OnlineHyperparameters,
    RolloutHyperparameters,
    action_chunk,
    memory_size,
    priority_exponent,
    return_after_truncation,
)
from rl_training.checkpoints.run_folder import KEEP_LAST
from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import SEGMENT_ROWS
from rl_training.data.rollouts.minibatches import Rollouts
from rl_training.data.storage.rows import RowColumns
from rl_training.data.storage.stacks import FrameLayout
from rl_training.envs import EnvironmentFactory
from rl_training.errors import ConfigError
from rl_training.execution.random_streams import ROUNDS
from rl_training.internals import available_memory, is_out_of_memory
from rl_training.training.inputs import spaces_of
from rl_training.types import SpaceInfo

FLOAT_BYTES = 4
"""Bytes of a weight, and of a number in a minibatch"""
USABLE = 0.9
"""Fraction of a GPU's memory to plan with; the rest is for everything that is not counted"""


def check_memory(
    configs: list[TrainConfig], factory: EnvironmentFactory | None, device: str
) -> None:
    """Raise `ConfigError` if a run does not fit into memory, before many environments start.

    A single environment starts quickly; `build_parts` then checks its run.
    """
    if factory is None or len(configs) * configs[0].num_envs == 1:
        return
    online, spaces = configs[0].resolved_regime != "offline", spaces_of(factory, configs[0])
    # Whether transitions are stored again is known only later. At least they are stored once.
    on_host = replay_is_on_host(configs, spaces, device, online=online, repeats_rows=False)
    with memory_checked(
        configs, spaces, device, online=online, replay_on_host=on_host, repeats_rows=False
    ):
        pass


def replay_is_on_host(
    configs: list[TrainConfig],
    spaces: SpaceInfo,
    device: str,
    *,
    online: bool,
    width: int = 1,
    repeats_rows: bool = True,
) -> bool:
    """Resolve `replay_device`: whether updates on a GPU sample from the memory of the host."""
    wanted = configs[0].replay_device
    if isinstance(configs[0].algo_kwargs, RolloutHyperparameters):
        return False
    if device == "cpu" or not online:
        if wanted == "cuda" and online:
            raise ConfigError(
                "replay_device = 'cuda': updates run on the CPU; use replay_device: auto, or a GPU "
                "(device: cuda)"
            )
        return False
    if wanted != "auto":
        return wanted == "cpu"
    needs = memory_needs(configs, spaces, online=True, width=width, repeats_rows=repeats_rows)
    available = available_memory(device)
    return available is not None and sum(needs.values()) > USABLE * available


@contextlib.contextmanager
def memory_checked(
    configs: list[TrainConfig],
    spaces: SpaceInfo,
    device: str,
    *,
    online: bool,
    width: int = 1,
    replay_on_host: bool = False,
    repeats_rows: bool = True,
) -> Iterator[None]:
    """Raise `ConfigError` if what is built does not fit into memory, before or while it is.

    With `online`, the replay buffers of all seeds count.
    """
    needs = memory_needs(configs, spaces, online=online, width=width, repeats_rows=repeats_rows)
    if replay_on_host:
        _require_memory(configs, {"buffer_capacity": needs.pop("buffer_capacity")}, "cpu")
    _require_memory(configs, needs, device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _memory_error(configs, needs, device) from error


def _require_memory(configs: list[TrainConfig], needs: Mapping[str, int], device: str) -> None:
    available = available_memory(device)
    if available is not None and sum(needs.values()) > available:
        raise _memory_error(configs, needs, device)


def _memory_error(configs: list[TrainConfig], needs: Mapping[str, int], device: str) -> ConfigError:
    from rl_training.training.memory import memory_error

    return memory_error(configs[0].algo_kwargs, needs, device, seeds=len(configs))


def memory_needs(
    configs: list[TrainConfig],
    spaces: SpaceInfo,
    *,
    online: bool,
    width: int = 1,
    repeats_rows: bool = True,
) -> dict[str, int]:
    """Return the bytes that settings need at least, by key, for all seeds of a run.

    A program of a certain `width` has networks and random numbers for seeds that are not resumed.
    `repeats_rows` says whether hindsight stores transitions again, or gives them goals later.
    """
    chosen, slots = configs[0].algo_kwargs, max(width, len(configs))
    actor = getattr(chosen, "actor_hidden_sizes", None) or chosen.hidden_sizes
    critic = getattr(chosen, "critic_hidden_sizes", None) or chosen.hidden_sizes
    critics = getattr(chosen, "num_critics", 0)
    needs = {
        # Weights and Adam's moments.
        "hidden_sizes": 3 * FLOAT_BYTES * _weights(spaces.obs_dim, actor),
        # The same and a target network, and the outputs of layers for the backward pass.
        "num_critics": FLOAT_BYTES
        * critics
        * (4 * _weights(spaces.obs_dim, critic) + chosen.batch_size * sum(critic)),
        # Random numbers that select rows, and the outputs of the actor's layers.
        "batch_size": chosen.batch_size * (8 * ROUNDS + FLOAT_BYTES * sum(actor)),
    }
    for key in ("num_quantiles", "num_atoms"):
        # Each quantile or atom of each critic is compared with all those of all critics.
        number = max(1, critics) * getattr(chosen, key, 0)
        if number > 1:
            needs[key] = FLOAT_BYTES * chosen.batch_size * number**2
    if samples := getattr(chosen, "num_cql_samples", 0):
        numbers = ROUNDS * chosen.batch_size * spaces.action_dim
        needs["num_cql_samples"] = FLOAT_BYTES * numbers * samples
    if getattr(chosen, "critic_dropout", 0.0):
        # Random numbers for the critics' own loss, for targets and for the policy's loss.
        numbers = 3 * ROUNDS * critics * sum(critic)
        needs["batch_size"] += FLOAT_BYTES * chosen.batch_size * numbers
    if online:
        capacity = stored_transitions(configs[0])
        needed = replay_bytes(configs[0], spaces, capacity, repeats_rows=repeats_rows)
        if priority_exponent(chosen) is not None:
            needed += FLOAT_BYTES * capacity
        key = "buffer_capacity"
        if isinstance(chosen, RolloutHyperparameters):
            key = "rollout_steps"
            needed += (
                FLOAT_BYTES * capacity * sum(Rollouts.widths(spaces.observation, spaces.actions))
            )
            needed += FLOAT_BYTES * capacity // chosen.sequence_steps * chosen.memory_size
        needs[key] = needed * len(configs) // slots
    return {key: slots * needed for key, needed in needs.items()}


def _weights(inputs: int, layers: Sequence[int]) -> int:
    return sum(first * second for first, second in pairwise((inputs, *layers)))


def stored_transitions(config: TrainConfig) -> int:
    """How many transitions of a seed are stored: those of a replay buffer, or of a rollout."""
    chosen = config.algo_kwargs
    if isinstance(chosen, RolloutHyperparameters):
        return chosen.rollout_steps * config.num_envs
    return online_hyperparameters(config).buffer_capacity


def online_hyperparameters(config: TrainConfig) -> OnlineHyperparameters:
    """The hyper-parameters of an algorithm that collects transitions in a replay buffer."""
    if not isinstance(config.algo_kwargs, OnlineHyperparameters):
        raise ConfigError(f"regime = {config.resolved_regime!r}: {config.algo} cannot collect data")
    return config.algo_kwargs


def frame_layout(
    config: TrainConfig, spaces: SpaceInfo, *, repeats_rows: bool = True
) -> FrameLayout | None:
    """How the images of a run's observations are stored; None: as they are, if there are any."""
    if config.hindsight is not None and repeats_rows:
        return None  # transitions with other goals do not follow each other
    if isinstance(config.algo_kwargs, RolloutHyperparameters):
        return None  # a rollout is short, and each of its positions belongs to one environment
    choice, steps = config.replay_frame_stack, transition_steps(config)
    return FrameLayout.of(spaces.observation, choice, config.num_envs, steps)


def transition_steps(config: TrainConfig) -> int:
    """How many steps of the environment a stored transition spans at most."""
    if isinstance(config.algo_kwargs, RolloutHyperparameters):
        return 1
    settings = online_hyperparameters(config)
    return max(settings.n_step, action_chunk(settings))


def replay_bytes(
    config: TrainConfig, spaces: SpaceInfo, transitions: int, *, repeats_rows: bool = True
) -> int:
    """Bytes of this many transitions of a seed in a replay buffer, without priorities."""
    frames = frame_layout(config, spaces, repeats_rows=repeats_rows)
    of_frames = 0 if frames is None else frames.bytes_of(transitions)
    returns = return_after_truncation(config.algo_kwargs) is not None
    actions = spaces.actions.chunks_of(action_chunk(config.algo_kwargs))
    ended = isinstance(config.algo_kwargs, RolloutHyperparameters)
    memory = memory_size(config.algo_kwargs)
    columns = RowColumns(spaces.observation, actions, frames, returns, ended, memory)
    return columns.row_bytes * transitions + of_frames


def check_disk(
    configs: list[TrainConfig],
    spaces: SpaceInfo,
    networks: int,
    *,
    online: bool,
    repeats_rows: bool,
) -> None:
    """Raise `ConfigError` if the checkpoints of a run cannot fit on the disk.

    `networks` are the bytes of a seed's networks, and of what its optimizers remember.
    `repeats_rows` says whether transitions are stored again with other goals.
    """
    config = configs[0]
    of_seed = disk_bytes(config, spaces, networks, online=online, repeats_rows=repeats_rows)
    needed, free = of_seed * len(configs), _free_bytes(Path(config.output_dir))
    if free is None or needed <= free:
        return
    from rl_training.training.memory import gibibytes

    way = "set another output_dir"
    if online and config.checkpoint_replay != "none":
        way += ", checkpoint_replay: none, or a smaller algo_kwargs.buffer_capacity"
    raise ConfigError(
        f"output_dir = {config.output_dir!r}: checkpoints will need up to {gibibytes(needed)} of "
        f"disk space; {gibibytes(free)} are free; {way}"
    )


def disk_bytes(
    config: TrainConfig,
    spaces: SpaceInfo,
    networks: int,
    *,
    online: bool = True,
    repeats_rows: bool = True,
) -> int:
    """Bytes of a seed's checkpoints when they take the most: while the last one is written.

    With hindsight, at most: `repeats_rows` is False if transitions get goals when sampled.
    """
    total, interval = config.total_timesteps, config.checkpoint_interval
    saves_often, evaluates = 0 < interval < total, 0 < config.eval_interval < total
    saves = 1  # at the end
    if saves_often:
        saves += math.ceil(total / interval) - 1
    if evaluates:  # each evaluation may be the best so far
        saves += math.ceil(total / config.eval_interval) - 1
    kept = KEEP_LAST + evaluates
    files = min(saves + 1, kept + 1) * networks  # the first checkpoint has no transitions yet
    if not online or config.checkpoint_replay == "none":
        return files
    copies = 0
    if config.hindsight is not None and repeats_rows:
        copies = config.hindsight.per_transition
    collected, capacity = total * (1 + copies), stored_transitions(config)
    stored = min(capacity, collected)
    # The newest checkpoints share no segments, so that damage to one leaves the other intact.
    rows = min(saves, KEEP_LAST) * stored
    if saves > KEEP_LAST:  # a new one shares the unchanged segments of the last but one
        gap = interval if saves_often else total
        rows += min(stored, 2 * gap * (1 + copies) + SEGMENT_ROWS)
    if saves > kept and evaluates:  # the best one, whose rows may have been overwritten since
        rows += min(stored, max(0, collected - capacity) + SEGMENT_ROWS)
    share = rows / max(1, stored)
    return files + math.ceil(
        share * replay_bytes(config, spaces, stored, repeats_rows=repeats_rows)
    )


def _free_bytes(path: Path) -> int | None:
    """Free space where a folder is or will be; None if it is unknown."""
    existing = next((each for each in (path, *path.absolute().parents) if each.is_dir()), None)
    try:
        return None if existing is None else shutil.disk_usage(existing).free
    except OSError:
        return None
