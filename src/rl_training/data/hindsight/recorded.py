"""Relabel recorded episodes when they are loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rl_training.data.fingerprint import Hasher
from rl_training.data.formats.recording import episode_lengths
from rl_training.data.hindsight.episodes import Episode
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.offline_dataset import LoadedPart
from rl_training.data.packing import RowLayout
from rl_training.types import Json

RECORDED_SEED = 0
"""Chooses goals: all seeds of a run share its recorded data"""


def add_relabelled(
    rows: Tensor, part: LoadedPart, layout: RowLayout, hindsight: Hindsight
) -> list[LoadedPart]:
    """Write the relabelled transitions of a part after its own rows; return both parts.

    `rows` starts with the one-step rows of the part. Together the two parts have its weight, and
    all their rows are equally likely. Each relabelled row counts as an episode of its own, since no
    other row continues it with the same goal.
    """
    hasher, written = Hasher(), part.rows
    starts = part.ends - episode_lengths(part.ends)
    for number, (start, end) in enumerate(zip(starts.tolist(), part.ends.tolist(), strict=True)):
        found = _relabelled(rows[start:end].cpu().numpy(), layout, hindsight, number)
        rows[written : written + len(found)] = torch.from_numpy(found).to(rows.device)
        hasher.add(found, np.ones(len(found), np.bool_))
        written += len(found)
    number = written - part.rows
    copies = hindsight.per_transition
    return [
        replace(part, weight=part.weight / (1 + copies)),
        replace(
            part,
            rows=number,
            ends=np.arange(1, number + 1),
            returns=rows[part.rows : written, layout.reward].double().cpu().numpy(),
            weight=part.weight * copies / (1 + copies),
            fingerprint=_fingerprint(part.fingerprint, number, hindsight, hasher.digest()),
        ),
    ]


def _relabelled(
    recorded: np.ndarray, layout: RowLayout, hindsight: Hindsight, number: int
) -> np.ndarray:
    """The relabelled rows of the one-step rows of an episode."""
    obs, next_obs = slice(0, layout.obs_dim), layout.next_obs
    episode = Episode(
        recorded[:, obs],
        recorded[:, layout.action],
        recorded[:, layout.reward],
        recorded[:, layout.reward + 1] == 0,
        recorded[:, next_obs],
    )
    new = hindsight.relabel(episode, (RECORDED_SEED, number))
    rows: np.ndarray = recorded[new.first]
    rows[:, next_obs.start :] = recorded[new.last, next_obs.start :]
    rows[:, layout.reward], rows[:, layout.reward + 1] = new.reward, new.discount
    for columns in (obs, next_obs):
        rows[:, columns][:, hindsight.goals.desired] = new.goal
    return rows


def _fingerprint(recorded: Json, rows: int, hindsight: Hindsight, digest: str) -> Json:
    chosen = {"strategy": hindsight.strategy, "per_transition": hindsight.per_transition}
    return {
        **recorded,
        "source": f"{recorded['source']}, with other goals",
        "rows": rows,
        "episodes": rows,
        "options": {**recorded["options"], "hindsight": chosen},
        "sha256": digest,
    }
