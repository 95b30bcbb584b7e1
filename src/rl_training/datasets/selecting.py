"""Split a dataset by episodes, and keep the episodes with the best returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.formats.writing import Format, write_recording
from rl_training.datasets.subsets import (
    ROUNDING,
    EpisodeTable,
    SubsetRecording,
    best_episodes,
    read_episodes,
    split_episodes,
)
from rl_training.datasets.workflows import (
    MAX_SEED,
    RecordedSource,
    choose_destination,
    open_source,
)
from rl_training.errors import UserError
from rl_training.types import Json
from rl_training.version import __version__


@dataclass(frozen=True)
class WrittenPart:
    """A dataset that was written, and what it contains."""

    path: Path
    episodes: int
    steps: int
    returns: np.ndarray
    """Sum of the recorded rewards of each episode"""

    def __str__(self) -> str:
        number = "1 episode" if self.episodes == 1 else f"{self.episodes:,} episodes"
        span = f"return {self.returns.min():.2f} to {self.returns.max():.2f}"
        return f"{number}, {self.steps:,} steps, {span} in {self.path}"


def split_dataset(
    source: RecordedSource,
    fractions: Sequence[float],
    destinations: Sequence[str | Path | None],
    *,
    seed: int = 0,
    data_format: Format | None = None,
    dataset_ids: Sequence[str] | None = None,
    frames_per_second: int | None = None,
    observation_keys: Sequence[str] | None = None,
    progress: ProgressListener | None = None,
) -> list[WrittenPart]:
    """Split a dataset at random into parts that share no episode, and write each part.

    Each fraction gives the share of the episodes of one part; if they add up to less than 1, the
    other episodes are left out. The same source, fractions and seed always give the same parts.
    For Minari datasets, `dataset_ids` are the ids of the parts. An episode that is cut off at the
    end of the data counts like any other. `observation_keys` select leaves of the observations.
    """
    _check_fractions(fractions)
    if not 0 <= seed < MAX_SEED:
        raise UserError(f"seed = {seed}: must be between 0 and {MAX_SEED - 1}")
    ids = [None] * len(fractions) if dataset_ids is None else list(dataset_ids)
    if dataset_ids is not None and len(destinations) <= 1:
        destinations = [*(destinations or [None])] * len(fractions)
    if not len(fractions) == len(destinations) == len(ids):
        raise UserError(
            f"{len(fractions)} fractions need {len(fractions)} outputs, but there are "
            f"{len(destinations) if dataset_ids is None else len(ids)}"
        )
    targets = [
        (*choose_destination(path, data_format, dataset_id, frames_per_second), dataset_id)
        for path, dataset_id in zip(destinations, ids, strict=True)
    ]
    if len({(path.resolve(), dataset_id) for path, _, dataset_id in targets}) < len(targets):
        raise UserError("two parts have the same output; choose different names")
    recording = open_source(source, observation_keys)
    table = read_episodes(recording, progress)
    parts = split_episodes(len(table.returns), fractions, seed, recording.info.name)
    written = []
    for part, (path, chosen_format, dataset_id) in enumerate(targets):
        options = {"fractions": list(fractions), "part": part, "seed": seed}
        written.append(
            _write(
                recording,
                table,
                parts == part,
                (path, chosen_format, dataset_id),
                ("split", options),
                frames_per_second,
            )
        )
    return written


def filter_dataset(
    source: RecordedSource,
    destination: str | Path | None,
    *,
    top: float | None = None,
    min_return: float | None = None,
    max_return: float | None = None,
    min_length: int | None = None,
    data_format: Format | None = None,
    dataset_id: str | None = None,
    frames_per_second: int | None = None,
    observation_keys: Sequence[str] | None = None,
    progress: ProgressListener | None = None,
) -> WrittenPart:
    """Write the episodes of a dataset whose return and length are in the given range.

    `top` is the fraction of the episodes, in (0, 1], with the highest returns of those that
    fulfill the other conditions; their number is rounded up. An episode that is cut off at the end
    of the data counts with the rewards that it has; `min_length` leaves such episodes out.
    `observation_keys` select leaves of the observations.
    """
    conditions = {
        "top": top,
        "min_return": min_return,
        "max_return": max_return,
        "min_length": min_length,
    }
    options = {key: value for key, value in conditions.items() if value is not None}
    if not options:
        raise UserError("no condition; give top, min_return, max_return or min_length")
    if top is not None and not 0 < top <= 1:
        raise UserError(f"top = {top:g}: must be greater than 0 and at most 1 (100 %)")
    for key in ("min_return", "max_return"):
        if math.isnan(options.get(key, 0.0)):
            raise UserError(f"{key} = nan: must be a number")
    target = choose_destination(destination, data_format, dataset_id, frames_per_second)
    recording = open_source(source, observation_keys)
    table = read_episodes(recording, progress)
    chosen = best_episodes(
        table, top=top, min_return=min_return, max_return=max_return, min_length=min_length
    )
    if not chosen.any():
        raise UserError(
            f"{recording.info.name}: none of its {len(chosen):,} episodes fulfills the conditions; "
            f"returns are {table.returns.min():g} to {table.returns.max():g}, lengths "
            f"{table.lengths.min()} to {table.lengths.max()}"
        )
    return _write(
        recording, table, chosen, (*target, dataset_id), ("filter", options), frames_per_second
    )


def _write(
    recording: Recording,
    table: EpisodeTable,
    chosen: np.ndarray,
    target: tuple[Path, Format, str | None],
    made_by: tuple[str, Json],
    frames_per_second: int | None,
) -> WrittenPart:
    path, data_format, dataset_id = target
    command, options = made_by
    info, number = recording.info, int(chosen.sum())
    provenance: Json = {
        "command": f"dataset {command}",
        "options": options,
        "source": f"{info.kind} {Path(info.name).name}",
        "source_sha256": table.sha256,
        "source_episodes": len(chosen),
        "version": __version__,
    }
    if info.provenance is not None:
        provenance["source_provenance"] = info.provenance
    subset = SubsetRecording(recording, table, chosen)
    written = write_recording(
        subset,
        path,
        data_format,
        dataset_id=dataset_id,
        description=f"{number} of {len(chosen)} episodes of {Path(info.name).name} ({command}).",
        provenance=provenance,
        frames_per_second=frames_per_second,
    )
    return WrittenPart(written, number, subset.info.max_rows, table.returns[chosen])


def _check_fractions(fractions: Sequence[float]) -> None:
    shown = ", ".join(f"{each:g}" for each in fractions)
    if not fractions or not all(0 < each <= 1 for each in fractions):
        raise UserError(f"fractions = {shown}: each must be greater than 0 and at most 1")
    if sum(fractions) > 1 + ROUNDING:
        raise UserError(f"fractions = {shown}: add up to more than 1")
