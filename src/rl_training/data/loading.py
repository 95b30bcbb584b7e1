"""Load recorded data in chunks into the tensor that an `OfflineDataset` samples from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rl_training.data.episodes import (
    EpisodeTotals,
    add_next_actions,
    add_returns,
    make_n_step,
    windows,
    windows_kept,
)
from rl_training.data.fingerprint import Hasher
from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.hindsight.recorded import add_relabelled
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.leaves.reordering import reordered
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
from rl_training.internals import available_memory, is_out_of_memory, release_freed_memory
from rl_training.observations import NumberTypes, ObservationSpec
from rl_training.types import Json, ReturnAfterTruncation, SpaceInfo

RETURN_RANGE = 1000.0
"""Range of episode returns after `return_range` normalization, the value used in IQL's code"""

CHUNKS_BETWEEN_RELEASES = 8
"""Chunks read before freed memory is returned to the system, to keep peak memory low"""


@dataclass(frozen=True)
class RewardOptions:
    """How rewards are transformed. The options apply in the order of the fields."""

    normalize_return_range: bool = False
    scale: float = 1.0
    shift: float = 0.0
    clip: float | None = None


@dataclass(frozen=True)
class DatasetPart:
    """Recorded data with its sampling weight and the options for loading it."""

    recording: Recording
    weight: float = 1.0
    rewards: RewardOptions | RewardTransform = field(default_factory=RewardOptions)
    """Options to apply to this data, or a transform that was computed from other data"""
    action_bounds: tuple[np.ndarray, np.ndarray] | None = None
    """Low and high, overriding the action space of the data and of the environment"""
    clip_actions: bool = False


def load_dataset(
    parts: Sequence[DatasetPart],
    spaces: SpaceInfo | None = None,
    *,
    number_types: NumberTypes | None = None,
    gamma: float = 0.99,
    n_step: int = 1,
    next_actions: bool = False,
    returns: ReturnAfterTruncation | None = None,
    action_chunk: int = 1,
    hindsight: Hindsight | SampledHindsight | None = None,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: ProgressListener | None = None,
    environment: str = "the environment",
) -> OfflineDataset:
    """Check recorded data and load it onto `device`.

    `spaces` are the environment's, which error messages call `environment`. If they are None, the
    spaces of the first part are used, with numbers of observations in `number_types` (None: those
    of the data, or float32 where its parts differ). With `next_actions`, batches have a
    `next_action`. With `returns`, they have the return of the episode, which counts rewards after a
    truncation in this way. With an `action_chunk`, rows are windows of that many steps; it excludes
    the other options of this kind, and `n_step`. With `hindsight`, transitions are repeated with
    other goals, or get them when they are sampled.
    Raises `DataError` if the data is invalid or does not fit the spaces.
    """
    if not parts:
        raise DataError("no dataset given")
    if action_chunk > 1 and (n_step > 1 or next_actions or hindsight is not None):
        raise ValueError("action_chunk excludes n_step, next_actions and hindsight")
    for info in (part.recording.info for part in parts):
        if hindsight is not None and info.lacks_last_observations:
            raise DataError(
                f"{info.name}: replay.hindsight needs the goal that each step reached, but there "
                "are no observations after terminal steps; add next_observations"
            )
    if spaces is None and number_types is None:
        number_types = _common_types([part.recording.info.observation for part in parts])
    for part in parts:
        fitted = fit_spaces(part.recording.info, spaces, environment)
        spaces = spaces or _with_bounds(fitted, part).stored_as(number_types or {})
    assert spaces is not None
    parts = [
        replace(part, recording=reordered(part.recording, spaces.observation)) for part in parts
    ]
    layout = RowLayout(spaces.obs_dim, spaces.actions.width, next_actions, returns is not None)
    total = sum(part.recording.info.max_rows for part in parts)
    repeats = hindsight if isinstance(hindsight, Hindsight) else None
    rows = _allocate(
        total if repeats is None else total * (1 + repeats.per_transition), layout.width, device
    )
    step_rewards = rows.new_empty(len(rows) if n_step > 1 else 0)
    loaded: list[LoadedPart] = []
    first = 0
    for part in parts:
        report = None if progress is None else _shifted(progress, first, total)
        result = _read(part, spaces, gamma, n_step, action_chunk, rows[first:], report)
        last = first + result.rows
        rewards = rows[first:last, layout.reward]
        result = replace(result, rewards=_reward_transform(part, result.returns))
        rewards.copy_(result.rewards(rewards))
        if next_actions:
            add_next_actions(rows[first:last], result.ends, layout)
        if returns is not None:
            add_returns(rows[first:last], result.ends, layout, gamma, returns)
        read = [result]
        if repeats is not None:  # while the rows are still single steps
            chosen = replace(repeats, transform=result.rewards)
            read = add_relabelled(rows[first:], result, layout, chosen)
        if n_step > 1:
            step_rewards[first:last] = rewards
            make_n_step(rows[first:last], result.ends, layout, n_step)
        summed = rows[first:last, -1] if returns is not None else rewards
        if not (torch.isfinite(rewards).all() and torch.isfinite(summed).all()):
            over = "an episode" if returns is not None else "n_step"
            is_summed = n_step > 1 or returns is not None
            raise DataError(
                f"{part.recording.info.name}: rewards overflow float32 when they are "
                f"{result.rewards}{f' and summed over {over}' if is_summed else ''}; use a smaller "
                "reward_scale"
            )
        loaded += read
        first += sum(each.rows for each in read)
        if n_step > 1:
            step_rewards[last:first] = rows[last:first, layout.reward]
    release_freed_memory()
    rows = rows[:first]
    step_rewards = step_rewards[:first] if n_step > 1 else rows[:, layout.reward]
    if action_chunk > 1:
        rows, loaded, step_rewards = _windows(rows, loaded, layout, action_chunk)
    return OfflineDataset(
        rows,
        loaded,
        spaces,
        step_rewards=step_rewards,
        next_actions=next_actions,
        hindsight=None if hindsight is repeats else _for_sampling(hindsight, loaded),
        action_chunk=action_chunk,
        returns=returns is not None,
        generator=generator,
    )


def _for_sampling(
    hindsight: Hindsight | SampledHindsight | None, parts: Sequence[LoadedPart]
) -> SampledHindsight:
    """Transform the rewards for other goals as those of the data."""
    assert isinstance(hindsight, SampledHindsight)
    first, *others = (part.rewards for part in parts)
    if any(other != first for other in others):
        raise DataError(
            "replay.hindsight: the datasets transform rewards differently, so rewards for other "
            "goals cannot be transformed to match; use the same reward_scale, reward_shift and "
            "reward_clip in all sections, and no reward_normalization"
        )
    return replace(hindsight, transform=first)


def _windows(
    rows: Tensor, parts: Sequence[LoadedPart], layout: RowLayout, length: int
) -> tuple[Tensor, list[LoadedPart], Tensor]:
    """Return the windows of all parts, their descriptions, and the rewards of their first steps."""
    made, described, rewards, first = [], [], [], 0
    for part in parts:
        own = rows[first : first + part.rows]
        first += part.rows
        kept = windows_kept(own, part.ends, layout, length)
        name = part.fingerprint["source"]
        if not kept.any():
            raise DataError(
                f"{name}: no episode has the {length} steps of an action chunk; use a smaller "
                "action_chunk"
            )
        rewards.append(own[torch.from_numpy(kept).to(own.device), layout.reward])
        made.append(windows(own, part.ends, layout, length))
        if not torch.isfinite(own[:, layout.reward]).all():
            raise DataError(
                f"{name}: rewards overflow float32 when they are summed over an action chunk; use "
                "a smaller reward_scale"
            )
        ends = np.cumsum(kept)[part.ends - 1]
        filled = np.diff(ends, prepend=0) > 0
        about = replace(part, rows=len(made[-1]), ends=ends[filled], returns=part.returns[filled])
        described.append(about)
    return torch.cat(made), described, torch.cat(rewards)


def _read(
    part: DatasetPart,
    spaces: SpaceInfo,
    gamma: float,
    n_step: int,
    action_chunk: int,
    rows: Tensor,
    progress: ProgressListener | None,
) -> LoadedPart:
    """Read one part into the first rows of `rows`, before any reward transform.

    Next actions are not read: they are known only when all steps are.
    """
    info = part.recording.info
    bounds = action_bounds(info, spaces, part.action_bounds)
    warn_of_other_bounds(info.name, bounds, spaces)
    packer = RowPacker(info, spaces, gamma, bounds, clip_actions=part.clip_actions)
    hasher, totals, sums = Hasher(), EpisodeTotals(), np.zeros(packer.layout.width)
    summed = packer.layout.number_columns(info.given_observation)
    for number, steps in enumerate(part.recording.chunks()):
        if number % CHUNKS_BETWEEN_RELEASES == 0:
            release_freed_memory()
        packed = packer.pack(steps)
        ended = steps.ended if steps.kept is None else steps.ended[steps.kept]
        chunk = rows[totals.rows : totals.rows + len(packed), : packer.layout.width]
        chunk.copy_(torch.from_numpy(packed))
        totals.add(packed[:, packer.layout.reward], ended)
        hasher.add(packed, ended)
        sums[summed] += packed[:, summed].sum(0, dtype=np.float64)
        if progress is not None:
            progress(totals.rows, info.max_rows)
    if not totals.rows:
        raise DataError(f"{info.name}: contains no steps")
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
        "options": _fingerprint_options(part, gamma, n_step, action_chunk),
        "sha256": hasher.digest(),
    }
    if info.given_observation is not None:  # else older fingerprints would differ
        about["observation"] = info.given_observation.describe()
    return LoadedPart(totals.rows, ends, returns, part.weight, about)


def _common_types(observations: Sequence[ObservationSpec]) -> NumberTypes:
    """The types of numbers that are stored alike in all parts; float32 is that of the others."""
    first, *others = (observation.number_types for observation in observations)
    return {
        name: kind
        for name, kind in first.items()
        if all(types.get(name) == kind for types in others)
    }


def _reward_transform(part: DatasetPart, returns: np.ndarray) -> RewardTransform:
    """Compute the reward transform of a part from its options and its episode returns."""
    options = part.rewards
    if isinstance(options, RewardTransform):
        return options
    scale = options.scale
    if options.normalize_return_range:
        spread = float(returns.max() - returns.min())
        if spread <= 0:
            raise DataError(
                f"{part.recording.info.name}: all {len(returns)} episodes have the return "
                f"{returns[0]:g}; reward_normalization: return_range needs different returns"
            )
        scale *= RETURN_RANGE / spread
        if not math.isfinite(scale):
            raise DataError(
                f"{part.recording.info.name}: the returns of its episodes differ by {spread:g} at "
                "most, too little for reward_normalization: return_range"
            )
    return RewardTransform(scale=scale, shift=options.shift, clip=options.clip)


def _fingerprint_options(part: DatasetPart, gamma: float, n_step: int, action_chunk: int) -> Json:
    """The loading options of a part as they are stored in its fingerprint."""
    rewards = part.rewards
    values = rewards.model_dump() if isinstance(rewards, RewardTransform) else asdict(rewards)
    options = {"weight": part.weight, "gamma": gamma, "n_step": n_step}
    options |= {f"reward_{key}": value for key, value in values.items()}
    # Included only if set, so that older fingerprints stay valid.
    if action_chunk > 1:
        options["action_chunk"] = action_chunk
    return {**options, "clip_actions": True} if part.clip_actions else options


def _with_bounds(spaces: SpaceInfo, part: DatasetPart) -> SpaceInfo:
    """The spaces with the bounds that the actions are scaled from, for data without environment."""
    if not spaces.is_continuous:
        return spaces
    bounds = action_bounds(part.recording.info, spaces, part.action_bounds)
    if bounds is None:
        return spaces
    low, high = (bound.astype(np.float32) for bound in bounds)
    return replace(spaces, action_low=low, action_high=high)


def warn_of_other_bounds(
    name: str, bounds: tuple[np.ndarray, np.ndarray] | None, spaces: SpaceInfo
) -> None:
    """Warn if the action bounds differ from the environment's."""
    if bounds is None or spaces.action_low is None or spaces.action_high is None:
        return
    if not all(
        np.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        for ours, theirs in zip(bounds, (spaces.action_low, spaces.action_high), strict=True)
    ):
        warnings.warn(
            f"{name}: actions range from {_brief(bounds[0])} to {_brief(bounds[1])}, the "
            f"environment's from {_brief(spaces.action_low)} to {_brief(spaces.action_high)}; "
            "actions are rescaled to the environment's range",
            stacklevel=2,
        )


def _brief(bound: np.ndarray) -> str:
    values = np.unique(bound)
    return f"{values[0]:g}" if len(values) == 1 else f"({values[0]:g} .. {values[-1]:g})"


def _allocate(rows: int, width: int, device: torch.device | str) -> Tensor:
    needed, available = rows * width * 4, available_memory(device)
    if available is None or needed <= available:
        try:
            return torch.empty(rows, width, device=device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    free = "" if available is None else f"; {available / 2**30:,.1f} GiB are available"
    elsewhere = "" if torch.device(device).type == "cpu" else ", or device: cpu"
    raise DataError(
        f"the dataset has {rows:,} steps and needs {needed / 2**30:,.1f} GiB of memory on "
        f"{device}{free}; use a smaller dataset{elsewhere}"
    )


def _shifted(progress: ProgressListener, done: int, total: int) -> ProgressListener:
    return lambda count, _: progress(done + count, total)
