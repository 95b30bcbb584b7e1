"""Reads recorded data, in pieces, into the one block of rows that an `OfflineDataset` samples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rl_training.data.fingerprint import Hasher
from rl_training.data.formats.episodes import EpisodeTotals, make_n_step
from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.memory import release_freed_memory
from rl_training.data.offline_dataset import LoadedPart, OfflineDataset
from rl_training.data.packing import (
    RowLayout,
    RowPacker,
    action_bounds,
    fit_spaces,
    warn_about_clipping,
)
from rl_training.data.transforms import RewardTransform
from rl_training.errors import DataError
from rl_training.types import Json, SpaceInfo

RETURN_RANGE = 1000.0
"""The range of returns after normalisation by it, as in IQL's code: an episode's usual steps"""

CHUNKS_BETWEEN_RELEASES = 8
"""Few enough that what they leave behind is little beside the data"""


@dataclass(frozen=True)
class RewardOptions:
    """What is done to rewards, in this order."""

    normalize_return_range: bool = False
    scale: float = 1.0
    shift: float = 0.0
    clip: float | None = None


@dataclass(frozen=True)
class DatasetPart:
    """Recorded data, and how it becomes part of a data set."""

    recording: Recording
    weight: float = 1.0
    rewards: RewardOptions | RewardTransform = field(default_factory=RewardOptions)
    """Options to be worked out from this data, or what they came to for other data"""
    action_bounds: tuple[np.ndarray, np.ndarray] | None = None
    """Instead of the data's own action space or the environment's"""
    clip_actions: bool = False


def load_dataset(
    parts: Sequence[DatasetPart],
    spaces: SpaceInfo | None = None,
    *,
    gamma: float = 0.99,
    n_step: int = 1,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: ProgressListener | None = None,
) -> OfflineDataset:
    """Recorded data, checked and packed on the device; `spaces` are the environment's, if any."""
    if not parts:
        raise DataError("no data set is given")
    for part in parts:
        fitted = fit_spaces(part.recording.info, spaces)
        spaces = spaces or _with_bounds(fitted, part)
    assert spaces is not None
    layout = RowLayout(spaces.obs_dim, 1 if spaces.discrete else spaces.action_dim)
    total = sum(part.recording.info.max_rows for part in parts)
    rows = _allocate(total, layout.width, device)
    step_rewards = rows.new_empty(total if n_step > 1 else 0)
    loaded: list[LoadedPart] = []
    first = 0
    for part in parts:
        report = None if progress is None else _shifted(progress, first, total)
        result = _read(part, spaces, gamma, n_step, rows[first:], report)
        last = first + result.rows
        rewards = rows[first:last, layout.reward]
        result = replace(result, rewards=_reward_transform(part, result.returns))
        rewards.copy_(result.rewards(rewards))
        if n_step > 1:
            step_rewards[first:last] = rewards
            make_n_step(rows[first:last], result.ends, layout, n_step)
        loaded.append(result)
        first = last
    release_freed_memory()
    rows = rows[:first]
    step_rewards = step_rewards[:first] if n_step > 1 else rows[:, layout.reward]
    return OfflineDataset(rows, loaded, spaces, step_rewards=step_rewards, generator=generator)


def _read(
    part: DatasetPart,
    spaces: SpaceInfo,
    gamma: float,
    n_step: int,
    rows: Tensor,
    progress: ProgressListener | None,
) -> LoadedPart:
    """Fill `rows` from the front."""
    info = part.recording.info
    bounds = action_bounds(info, spaces, part.action_bounds)
    warn_of_other_bounds(info.name, bounds, spaces)
    packer = RowPacker(info, spaces, gamma, bounds, clip_actions=part.clip_actions)
    hasher, totals, sums = Hasher(), EpisodeTotals(), np.zeros(packer.layout.width)
    for number, steps in enumerate(part.recording.chunks()):
        if number % CHUNKS_BETWEEN_RELEASES == 0:
            release_freed_memory()
        packed = packer.pack(steps)
        ended = steps.ended if steps.kept is None else steps.ended[steps.kept]
        rows[totals.rows : totals.rows + len(packed)].copy_(torch.from_numpy(packed))
        totals.add(packed[:, packer.layout.reward], ended)
        hasher.add(packed, ended)
        sums += packed.sum(0, dtype=np.float64)
        if progress is not None:
            progress(totals.rows, info.max_rows)
    if not totals.rows:
        raise DataError(f"{info.name}: is empty: it holds no step")
    ends, returns = totals.finish()
    layout = packer.layout
    warn_about_clipping(info.name, packer.clipped, totals.rows * layout.action_width)
    about: Json = {
        "source": f"{info.kind} {info.name}",
        "rows": totals.rows,
        "episodes": len(ends),
        "obs_dim": layout.obs_dim,
        "action_dim": layout.action_width,
        "reward_sum": float(sums[layout.reward]),
        "obs_sum": float(sums[: layout.obs_dim].sum()),
        "action_sum": float(sums[layout.obs_dim : layout.reward].sum()),
        "options": {
            "weight": part.weight,
            "gamma": gamma,
            "n_step": n_step,
            **_reward_settings(part.rewards),
            # Only where it is set: fingerprints from before there was this option stay as they are.
            **({"clip_actions": True} if part.clip_actions else {}),
        },
        "sha256": hasher.digest(),
    }
    return LoadedPart(totals.rows, ends, returns, part.weight, about)


def _reward_transform(part: DatasetPart, returns: np.ndarray) -> RewardTransform:
    """What the options come to for episodes with these returns."""
    options = part.rewards
    if isinstance(options, RewardTransform):
        return options
    scale = options.scale
    if options.normalize_return_range:
        spread = float(returns.max() - returns.min())
        if spread <= 0:
            raise DataError(
                f"{part.recording.info.name}: its {len(returns)} episodes all return "
                f"{returns[0]:g}: there is no range to normalise by (reward_normalization)"
            )
        scale *= RETURN_RANGE / spread
    return RewardTransform(scale=scale, shift=options.shift, clip=options.clip)


def _reward_settings(rewards: RewardOptions | RewardTransform) -> Json:
    """As a fingerprint names them."""
    values = rewards.model_dump() if isinstance(rewards, RewardTransform) else asdict(rewards)
    return {f"reward_{key}": value for key, value in values.items()}


def _with_bounds(spaces: SpaceInfo, part: DatasetPart) -> SpaceInfo:
    """The data's own spaces, for data without an environment, with the bounds it is scaled by."""
    if spaces.discrete:
        return spaces
    bounds = action_bounds(part.recording.info, spaces, part.action_bounds)
    if bounds is None:
        return spaces
    low, high = (bound.astype(np.float32) for bound in bounds)
    return SpaceInfo(spaces.obs_dim, spaces.action_dim, action_low=low, action_high=high)


def warn_of_other_bounds(
    name: str, bounds: tuple[np.ndarray, np.ndarray] | None, spaces: SpaceInfo
) -> None:
    """Say that actions were made for other bounds than the environment's, if they were."""
    if bounds is None or spaces.action_low is None or spaces.action_high is None:
        return
    if not all(
        np.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        for ours, theirs in zip(bounds, (spaces.action_low, spaces.action_high), strict=True)
    ):
        warnings.warn(
            f"{name}: actions range from {_brief(bounds[0])} to {_brief(bounds[1])}, the "
            f"environment's from {_brief(spaces.action_low)} to {_brief(spaces.action_high)}; the "
            "one's ends are taken for the other's",
            stacklevel=2,
        )


def _brief(bound: np.ndarray) -> str:
    values = np.unique(bound)
    return f"{values[0]:g}" if len(values) == 1 else f"({values[0]:g} .. {values[-1]:g})"


def _allocate(rows: int, width: int, device: torch.device | str) -> Tensor:
    try:
        return torch.empty(rows, width, device=device)
    except (RuntimeError, MemoryError):
        gigabytes = rows * width * 4 / 1e9
        raise DataError(
            f"the data set's {rows:,} rows need {gigabytes:.1f} GB, which {device} does not have"
        ) from None


def _shifted(progress: ProgressListener, done: int, total: int) -> ProgressListener:
    return lambda count, _: progress(done + count, total)
