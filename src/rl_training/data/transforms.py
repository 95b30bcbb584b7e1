"""Transforms of data: observation normalization, reward scaling, and action clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rl_training.data.formats.recording import Recording, Steps
from rl_training.data.packing import action_bounds, fit_spaces, in_model_units, out_of_bounds
from rl_training.errors import DataError
from rl_training.types import Batch, ReturnScaling, State
from rl_training.validation import StrictModel

CLIP = 10.0
"""Normalized observations are clipped to [-CLIP, CLIP]"""

EPSILON = 1e-8
"""Added to the variance, to avoid a division by zero"""

Rewards = TypeVar("Rewards", np.ndarray, Tensor)


class ObservationNormalizer:
    """Normalize observations with the mean and variance of all observations so far.

    Replay buffers store raw observations; they are normalized with the current statistics when they
    are used. The statistics are saved with the policy. They are stored on the host, unless they are
    moved; `shift` and `scale` are copies on the learner's device.
    """

    def __init__(self, obs_dim: int, device: torch.device | str = "cpu") -> None:
        # In double precision: a float32 mean stops changing after millions of steps.
        self.state: State = {
            "mean": torch.zeros(obs_dim, dtype=torch.float64),
            "square_sum": torch.zeros(obs_dim, dtype=torch.float64),
            "count": torch.zeros((), dtype=torch.float64),
        }
        self.place(torch.zeros(2, obs_dim, device=device))

    def place(self, storage: Tensor) -> None:
        """Store `shift` and `scale` in the two rows of `storage`, for example a population's."""
        self.shift, self.scale = storage
        self._storage = storage
        self._refresh()

    def move(self, device: torch.device) -> None:
        """Keep the statistics on the device of observations, so that the host does not wait."""
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        self._refresh()

    def observe(self, obs: Tensor) -> None:
        """Add observations `(batch, obs_dim)` to the statistics (Chan's parallel algorithm)."""
        mean, square_sum, count = (self.state[k] for k in ("mean", "square_sum", "count"))
        rows = obs.double()
        number = rows.shape[0]
        rows_mean = rows.mean(0)
        spread = (rows - rows_mean).square().sum(0).to(mean.device)
        delta = rows_mean.to(mean.device) - mean
        total = count + number
        square_sum += spread + delta**2 * (count * number / total)
        mean += delta * (number / total)
        count += number
        self._refresh()

    def normalize(self, obs: Tensor) -> Tensor:
        """Return normalized observations, clipped to [-CLIP, CLIP]."""
        shift, scale = self._storage.to(obs.device) if self._host is None else self._host
        return normalize(obs, shift, scale)

    def normalize_array(self, obs: np.ndarray) -> np.ndarray:
        """Same as `normalize`, with the same bits: for a few rows several times as fast."""
        if self._host is None:
            return self.normalize(torch.tensor(obs)).cpu().numpy()
        shift, scale = self._arrays
        # Not `np.clip`, which takes longer than all the rest.
        clipped: np.ndarray = np.minimum(np.maximum((obs - shift) * scale, -CLIP), CLIP)
        return clipped

    def load_state(self, state: State) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self._refresh()

    def _refresh(self) -> None:
        variance = self.state["square_sum"] / self.state["count"].clamp(min=1)
        # The scale is unknown before there are two observations: use 1.
        known = self.state["count"] > 1
        scale = torch.where(known, torch.rsqrt(variance + EPSILON), torch.ones_like(variance))
        both = torch.stack([self.state["mean"].float(), scale.float()])
        self._host: Tensor | None = None if both.is_cuda else both
        self._arrays = () if self._host is None else tuple(self._host.numpy())
        pinned = both.pin_memory() if self._storage.is_cuda and not both.is_cuda else both
        self._storage.copy_(pinned, non_blocking=True)


def normalize(obs: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return ((obs - shift) * scale).clamp(-CLIP, CLIP)


def normalize_batch(batch: Batch, shift: Tensor, scale: Tensor) -> Batch:
    obs, next_obs = (normalize(rows, shift, scale) for rows in (batch.obs, batch.next_obs))
    return Batch(obs, batch.action, batch.reward, batch.discount, next_obs, *batch[5:])


def copy_arrays(given: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray]) -> None:
    """Copy arrays by name; raise `ValueError` if they are not of the expected shape and finite."""
    for name, target in targets.items():
        array = np.asarray(given[name])
        if array.shape != target.shape or not np.isfinite(array).all():
            raise ValueError(f"{name} is damaged")
        target[...] = array


class ReturnScaler:
    """Divide rewards by the standard deviation of the discounted returns so far.

    Replay buffers store raw rewards; they are scaled with the current statistics when they are
    sampled. The return of each environment is `gamma * return + reward`. As in the code of
    SimbaV2, XQC and FlashSAC, it starts again with the reward of an episode's last step. The
    statistics are on the host, in double precision; `scale` is a copy on the learner's device.
    """

    def __init__(self, scaling: ReturnScaling, num_envs: int) -> None:
        self._scaling = scaling
        self.state: dict[str, np.ndarray] = {
            "returns": np.zeros(num_envs),
            "mean": np.zeros(()),
            "square_sum": np.zeros(()),
            "count": np.zeros(()),
            "largest": np.zeros(()),
        }
        self.place(torch.ones(()))

    def place(self, scale: Tensor) -> None:
        """Store the scale in a given number, for example a population's."""
        self.scale = scale
        self._scale_on_host = scale.numpy() if scale.is_cpu else None
        self._refresh()

    def observe(self, reward: np.ndarray, ended: np.ndarray, chosen: np.ndarray | None) -> None:
        """Add the rewards `(num_envs,)` of one step; only of `chosen` environments, if given."""
        returns, gamma = self.state["returns"], self._scaling.gamma
        if chosen is None and len(returns) == 1:  # the same numbers, without the time of arrays
            value = float(reward[0]) + (0.0 if ended[0] else gamma * float(returns[0]))
            returns[0] = value
            self._add(1, value, 0.0, abs(value))
            return
        following = np.where(ended, 0.0, gamma * returns) + reward.astype(np.float64)
        if chosen is not None:
            following = np.where(chosen, following, returns)
        returns[...] = following
        seen = following if chosen is None else following[chosen]
        if not len(seen):
            return
        # At every step: reductions of `ufuncs` take half the time of methods.
        mean = float(np.add.reduce(seen)) / len(seen)
        spread = float(np.add.reduce(np.square(seen - mean)))
        self._add(len(seen), mean, spread, float(np.maximum.reduce(np.abs(seen))))

    def _add(self, number: int, seen_mean: float, spread: float, largest: float) -> None:
        """Add returns with this mean, sum of squared distances to it, and largest size."""
        # Python's numbers take a fraction of the time that arrays without axes need.
        state = self.state
        count, mean = float(state["count"]), float(state["mean"])
        delta, total = seen_mean - mean, count + number
        spread += delta**2 * (count * number / total)
        state["square_sum"][...] = float(state["square_sum"]) + spread
        state["mean"][...] = mean + delta * (number / total)
        state["count"][...] = total
        if largest > state["largest"]:
            state["largest"][...] = largest
        self._refresh()

    def drop(self, lost: np.ndarray) -> None:
        """Start the returns of some environments again, whose episodes were lost."""
        self.state["returns"][lost] = 0.0

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        copy_arrays(state, self.state)
        self._refresh()

    def _refresh(self) -> None:
        count, largest = float(self.state["count"]), self._scaling.largest
        # Nothing is known before there are two returns.
        variance = float(self.state["square_sum"]) / count if count > 1 else 1.0
        size = math.sqrt(variance + EPSILON)
        if largest is not None:
            size = max(size, float(self.state["largest"]) / largest)
        if self._scale_on_host is not None:
            self._scale_on_host[...] = 1 / size
        else:
            self.scale.fill_(1 / size)  # at every step: nothing is allocated, and no copy waits


class DeviceReturnScaler(ReturnScaler):
    """A `ReturnScaler` whose statistics are on the device of the rewards."""

    tensors: State
    """The same statistics as `state`, which is not used"""

    def __init__(self, scaling: ReturnScaling, num_envs: int, device: torch.device | str) -> None:
        self._on_device = torch.device(device)
        super().__init__(scaling, num_envs)

    def place(self, scale: Tensor) -> None:
        if not hasattr(self, "tensors"):
            self.tensors = {
                name: torch.as_tensor(array).to(self._on_device)
                for name, array in self.state.items()
            }
        super().place(scale)

    @torch.no_grad()
    def observe_on_device(self, reward: Tensor, ended: Tensor) -> None:
        """Add the rewards `(num_envs,)` of one step; see `observe`."""
        state = self.tensors
        kept = torch.where(ended, 0.0, self._scaling.gamma * state["returns"])
        seen = kept + reward.double()
        state["returns"].copy_(seen)
        number, total = len(seen), state["count"] + len(seen)
        delta = seen.mean() - state["mean"]
        spread = (seen - seen.mean()).square().sum()
        state["square_sum"] += spread + delta**2 * (state["count"] * number / total)
        state["mean"] += delta * (number / total)
        state["count"] += number
        state["largest"].copy_(torch.maximum(state["largest"], seen.abs().max()))
        self._refresh()

    def load_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Restore `tensors`."""
        for name, tensor in self.tensors.items():
            if state[name].shape != tensor.shape or not torch.isfinite(state[name]).all():
                raise ValueError(f"{name} is damaged")
            tensor.copy_(state[name])
        self._refresh()

    def forget(self) -> None:
        """Start all returns again, because the episodes that they belong to are gone."""
        self.tensors["returns"].zero_()

    def _refresh(self) -> None:
        state, largest = self.tensors, self._scaling.largest
        count = state["count"]
        # Nothing is known before there are two returns.
        variance = torch.where(count > 1, state["square_sum"] / count.clamp(min=1), 1.0)
        size = torch.sqrt(variance + EPSILON)
        if largest is not None:
            size = torch.maximum(size, state["largest"] / largest)
        self.scale.copy_(1 / size)


class RewardTransform(StrictModel):
    """Scale rewards, then shift them, then clip them to [-clip, clip].

    The transform is saved with the policy, like the observation normalization: the critics are
    trained on rewards of this scale. It applies to recorded and to online rewards.
    """

    scale: Annotated[float, Field(gt=0)] = 1.0
    shift: float = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None

    def __call__(self, rewards: Rewards) -> Rewards:
        """Return transformed rewards, as an array or tensor like the input."""
        if self.scale == 1 and self.shift == 0 and self.clip is None:
            return rewards
        changed = rewards * self.scale + self.shift
        return changed if self.clip is None else changed.clip(-self.clip, self.clip)

    def undo(self, rewards: Rewards) -> Rewards:
        """Recover the original rewards; `clip` must be None."""
        assert self.clip is None
        return (rewards - self.shift) / self.scale

    def __str__(self) -> str:
        text = f"scaled by {self.scale:g}"
        if self.shift:
            text += f", shifted by {self.shift:g}"
        return text if self.clip is None else f"{text}, clipped to ±{self.clip:g}"


class ClippedRecording:
    """A recording with its actions clipped to the bounds of its own action space."""

    def __init__(self, recording: Recording) -> None:
        self.info = recording.info
        if not self.info.is_continuous:
            kind = self.info.action_kind
            raise DataError(f"{self.info.name}: {kind} actions cannot be clipped")
        self._recording = recording
        self._bounds = action_bounds(self.info, fit_spaces(self.info, None), None)
        self.clipped = self.components = 0
        """Action components clipped, and all action components, in the last call of `chunks`"""

    def chunks(self) -> Iterator[Steps]:
        self.clipped = self.components = 0
        low, high = self._bounds or (np.float64(-1), np.float64(1))
        for steps in self._recording.chunks():
            kept = slice(None) if steps.kept is None else steps.kept
            beyond = out_of_bounds(in_model_units(steps.action, self._bounds))[kept]
            self.clipped += int(beyond.sum())
            self.components += beyond.size
            yield steps._replace(action=np.clip(steps.action, low, high))
