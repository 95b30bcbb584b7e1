"""A fixed set of recorded transitions on the learner's device; its parts are sampled by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rl_training.data.episodes import returns_to_go
from rl_training.data.fingerprint import combined_fingerprint, subset_fingerprint
from rl_training.data.formats.recording import episode_lengths
from rl_training.data.hindsight.sampled import RecordedEpisodes, SampledHindsight
from rl_training.data.packing import RowLayout
from rl_training.data.storage.rows import stored_actions
from rl_training.data.transforms import ObservationNormalizer, RewardTransform
from rl_training.errors import DataError
from rl_training.types import Batch, Json, SpaceInfo, State

CHUNK_ROWS = 65_536
WEIGHT_BITS = 31
"""Random bits, out of 63 for each row, that select the part it is sampled from"""


@dataclass(frozen=True)
class LoadedPart:
    """Description of one part: a contiguous range of the dataset's rows."""

    rows: int
    ends: np.ndarray
    """Exclusive end row of each episode, counted from the start of the part"""
    returns: np.ndarray
    """Sum of the recorded rewards of each episode, before any transform"""
    weight: float
    fingerprint: Json
    rewards: RewardTransform = field(default_factory=RewardTransform)
    """Transform that was applied to the rewards"""


class OfflineDataset:
    """A fixed set of transitions: a `Source` that all seeds of a population share.

    Rows have the layout of a replay buffer, followed by the next action and the return if these are
    asked for. They are stored in time order, episode by episode.
    """

    def __init__(
        self,
        rows: Tensor,
        parts: Sequence[LoadedPart],
        spaces: SpaceInfo,
        *,
        step_rewards: Tensor,
        next_actions: bool = False,
        returns: bool = False,
        action_chunk: int = 1,
        hindsight: SampledHindsight | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`step_rewards` are the one-step rewards `(rows,)`; the rows may hold n-step returns.

        With `next_actions`, the rows also hold the recorded action at their next observation, and
        with `returns` the return of their episode. With an `action_chunk`, a row is a window of
        that many steps. With `hindsight`, sampled transitions get other goals.
        """
        self.spaces, self.device, self.generator = spaces, rows.device, generator
        self.action_chunk = action_chunk
        width = spaces.actions.chunks_of(action_chunk).width
        self.layout = RowLayout(spaces.obs_dim, width, next_actions, returns)
        self.parts = list(parts)
        self._rows, self._step_rewards = rows, step_rewards
        sizes = np.array([part.rows for part in parts], dtype=np.int64)
        weights = np.array([part.weight for part in parts], dtype=np.float64)
        self._sizes = torch.from_numpy(sizes).to(self.device)
        self._firsts = torch.from_numpy(np.cumsum(sizes) - sizes).to(self.device)
        shares = np.cumsum(weights / weights.sum())[:-1] * 2.0**WEIGHT_BITS
        self._thresholds = torch.from_numpy(np.round(shares).astype(np.int64)).to(self.device)
        self._episodes: RecordedEpisodes | None = None
        if hindsight is not None:
            self._episodes = RecordedEpisodes(hindsight, self.episode_ends, self.device)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def relabels(self) -> bool:
        """Whether sampled transitions get other goals."""
        return self._episodes is not None

    def sample(self, batch_size: int) -> Batch:
        """Sample rows with replacement."""
        bits = torch.empty(batch_size, dtype=torch.int64, device=self.device)
        return self.draw(bits.random_(generator=self.generator))

    def flush(self) -> None:
        """Do nothing: the rows are fixed."""

    def draw(self, bits: Tensor) -> Batch:
        """Return the rows selected by random integers in [0, 2^63).

        `bits` is `(batch,)`, or `(width, batch)` for a population, whose seeds share the rows.
        Uses only device tensors, so that it can be compiled and captured.
        """
        if len(self.parts) == 1:
            indices = bits % self._sizes
            if not self.relabels:
                return self.rows(indices)
            return self.relabelled(indices, bits // self._sizes)
        # The upper bits select the part by weight; the lower bits select a row uniformly.
        upper, lower = bits >> (63 - WEIGHT_BITS), bits & (2 ** (63 - WEIGHT_BITS) - 1)
        part = (upper.unsqueeze(-1) >= self._thresholds).sum(-1)
        indices = self._firsts[part] + lower % self._sizes[part]
        if not self.relabels:
            return self.rows(indices)
        # Above the threshold of its part, all values of the upper bits are equally likely.
        above = upper - torch.nn.functional.pad(self._thresholds, (1, 0))[part]
        size = self._sizes[part]
        left = above * (2 ** (63 - WEIGHT_BITS) // size) + lower // size
        return self.relabelled(indices, left)

    def relabelled(self, indices: Tensor, bits: Tensor) -> Batch:
        """Return the transitions at these row indices, with the goals that random bits choose."""
        assert self._episodes is not None
        batch = self.rows(indices)
        return self._episodes.relabel(batch, indices, bits, self._rows[:, self.layout.next_obs])

    def rows(self, indices: Tensor) -> Batch:
        """Return the transitions at these row indices."""
        gathered = self._rows.index_select(0, indices.reshape(-1))
        gathered = gathered.view(*indices.shape, self.layout.width)
        columns = torch.split(gathered, self.layout.widths, dim=-1)
        obs, action, reward, discount, next_obs = columns[:5]
        action = stored_actions(action, self.spaces.action_kind)
        batch = Batch(obs, action, reward.squeeze(-1), discount.squeeze(-1), next_obs)
        if self.layout.next_actions:
            batch = batch.with_fields(next_action=columns[5])
        if self.layout.returns:
            batch = batch.with_fields(returns=columns[-1].squeeze(-1))
        return batch

    @property
    def packed(self) -> Tensor:
        """All rows `(rows, width)`: the columns of `layout` side by side."""
        return self._rows

    @property
    def fingerprint(self) -> Json:
        """Hash and description of the data as JSON values; see `fingerprint_difference`."""
        return combined_fingerprint([part.fingerprint for part in self.parts])

    @property
    def rewards(self) -> RewardTransform | None:
        """The transform applied to the rewards; None if the parts have different ones."""
        first, *others = (part.rewards for part in self.parts)
        return first if all(other == first for other in others) else None

    @property
    def episode_ends(self) -> np.ndarray:
        """Exclusive end row of each episode."""
        firsts = self._firsts.tolist()
        return np.concatenate([p.ends + first for p, first in zip(self.parts, firsts, strict=True)])

    @property
    def episode_returns(self) -> np.ndarray:
        """Sum of the recorded rewards of each episode, before any transform, float64."""
        return np.concatenate([part.returns for part in self.parts])

    @property
    def episode_lengths(self) -> np.ndarray:
        return episode_lengths(self.episode_ends)

    def returns_to_go(self, gamma: float = 1.0) -> np.ndarray:
        """Discounted sum of rewards from each row to the end of its episode, float32."""
        if self.action_chunk > 1:
            raise ValueError("windows do not start at every step, so that rewards are missing")
        return returns_to_go(self._step_rewards.cpu().numpy(), self.episode_ends, gamma)

    def observation_statistics(self) -> State:
        """Mean, sum of squared deviations and count of the rows' observations, float64.

        Raises `DataError` if observations are not all numbers.
        """
        if not self.spaces.observation.is_numeric:
            raise DataError(
                f"observations {self.spaces.observation.describe()}: only numbers can be normalized"
            )
        rows = torch.split(self._rows[:, : self.layout.obs_dim], CHUNK_ROWS)
        chunks = [self.spaces.observation.numbers_of(each) for each in rows]
        mean = torch.stack([chunk.double().sum(0) for chunk in chunks]).sum(0) / len(self)
        deviations = ((chunk.double() - mean).square().sum(0) for chunk in chunks)
        squares = torch.stack(list(deviations)).sum(0)
        count = torch.tensor(len(self), dtype=torch.float64)
        return {"mean": mean.cpu(), "square_sum": squares.cpu(), "count": count}

    def fit(self, normalizer: ObservationNormalizer) -> None:
        """Set a normalizer's statistics to those of this data."""
        normalizer.load_state(self.observation_statistics())

    def split(self, fraction: float, seed: int = 0) -> tuple[OfflineDataset, OfflineDataset]:
        """Split into two datasets; the second has this fraction of each part's episodes.

        Rows are copied.
        """
        if not 0 < fraction < 1:
            raise DataError(
                f"held-out fraction = {fraction}: must be greater than 0 and less than 1"
            )
        generator = np.random.default_rng(np.random.SeedSequence([seed, len(self)]))
        kept, held = [], []
        for part in self.parts:
            episodes, number = generator.permutation(len(part.ends)), len(part.ends)
            if number < 2:
                raise DataError(
                    f"{part.fingerprint['source']}: has only one episode; at least two are "
                    "needed to hold some out"
                )
            count = min(max(round(fraction * number), 1), number - 1)
            held.append(np.sort(episodes[:count]))
            kept.append(np.sort(episodes[count:]))
        return self._subset(kept), self._subset(held)

    def _subset(self, episodes: Sequence[np.ndarray]) -> OfflineDataset:
        """Copy the chosen episodes of each part into a new dataset."""
        parts, indices = [], []
        for part, first, chosen in zip(self.parts, self._firsts.tolist(), episodes, strict=True):
            lengths = episode_lengths(part.ends)[chosen]
            ends = np.cumsum(lengths)
            starts = part.ends[chosen] - lengths
            indices.append(
                first + np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
            )
            about = subset_fingerprint(part.fingerprint, chosen, int(ends[-1]))
            parts.append(
                replace(
                    part,
                    rows=int(ends[-1]),
                    ends=ends,
                    returns=part.returns[chosen],
                    fingerprint=about,
                )
            )
        where = torch.from_numpy(np.concatenate(indices)).to(self.device)
        return OfflineDataset(
            self._rows[where],
            parts,
            self.spaces,
            step_rewards=self._step_rewards[where],
            next_actions=self.layout.next_actions,
            returns=self.layout.returns,
            action_chunk=self.action_chunk,
            hindsight=None if self._episodes is None else self._episodes.hindsight,
            generator=self.generator,
        )
