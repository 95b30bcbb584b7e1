"""Fitted Q evaluation (1903.08738): what a policy is worth, learned from recorded data alone.

A fresh Q-function is fitted to `reward + discount * Q(next_obs, policy(next_obs))`. Several are
fitted, each to episodes drawn with replacement (2102.03607), so that how far they differ says how
much the answer depends on the data that there happens to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.functional import (
    bootstrapped_target,
    gradients,
    polyak_update,
    schedule_factor,
)
from rl_training.algorithms.optimizer import Adam
from rl_training.data.formats.recording import ProgressListener
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.transforms import ObservationNormalizer
from rl_training.evaluation.diagnostics import CHUNK_ROWS, batches, policy_actions
from rl_training.execution.policy import Policy
from rl_training.models.mlp import MLP
from rl_training.types import Batch, Metrics, State

ENSEMBLE_SIZE = 5
HIDDEN_SIZES = (128, 128)
BATCH_SIZE = 128
LEARNING_RATE = 1e-3
TARGET_RATE = 0.05
"""Ten times an actor-critic's: values must travel along whole episodes in few updates, and there
is no policy that could chase the critic's errors"""


@dataclass(frozen=True)
class Units:
    """What the networks' outputs mean: a network says `(value - offset) / scale`."""

    offset: float
    scale: float
    low: float
    """No value of any policy can be less, or more than `high`"""
    high: float

    @classmethod
    def of(cls, dataset: OfflineDataset, gamma: float) -> Units:
        """Such that a fit begins at the best constant, and is off by about one."""
        reward, discount = dataset.packed[:, dataset.layout.reward :][:, :2].double().unbind(1)
        # For a constant, `value = mean(reward) + mean(discount) * value`.
        offset = reward.mean() / (1 - discount.mean()).clamp(min=1e-3)
        spread = max(float(dataset.returns_to_go(gamma).std()), float(reward.abs().mean()))
        steps = 1 / (1 - gamma) if gamma < 1 else math.inf
        least, most = float(reward.min()), float(reward.max())
        return cls(
            float(offset),
            spread if spread > 0 else 1.0,
            least * (steps if least < 0 else 1.0),
            most * (steps if most > 0 else 1.0),
        )

    def to_values(self, outputs: Tensor) -> Tensor:
        return (self.offset + self.scale * outputs).clamp(self.low, self.high)


class FittedQ:
    """Q-functions of one policy; a member for each resampling of the episodes."""

    def __init__(self, policy: Policy, dataset: OfflineDataset, seed: int) -> None:
        """`dataset` is what will be fitted: only its statistics are taken here."""
        spaces = policy.spaces
        self.policy = policy
        # The data's own statistics: the policy's may be another data set's, or there are none.
        self._normalizer = ObservationNormalizer(spaces.obs_dim)
        dataset.fit(self._normalizer)
        self.units = Units.of(dataset, policy.algorithm.hyperparameters.gamma)
        self._generator = torch.Generator().manual_seed(seed)
        self._network = MLP(
            spaces.obs_dim + spaces.action_dim,
            HIDDEN_SIZES,
            1,
            ensemble=ENSEMBLE_SIZE,
            generator=self._generator,
        )
        self.vector = self._network.vector.data
        """The parameters of all members"""

    def fit(
        self, dataset: OfflineDataset, updates: int, progress: ProgressListener | None = None
    ) -> None:
        """Descend the error of every member for so many updates."""
        rows = _Rows(self, dataset, self._generator)
        optimizer = Adam(LEARNING_RATE)
        state: State = {"q": self.vector, **optimizer.initial_state("q", self.vector)}
        target = self.vector.clone()
        for made in range(updates):
            sample = rows.sample()
            found = self._gradient(sample, self._targets(sample, target))
            # Steps that shrink to nothing leave a fit, not a walk around one.
            factor = schedule_factor("cosine", torch.tensor(made), updates, 0)
            with torch.no_grad():
                optimizer.step(state, "q", found, factor)
                polyak_update(target, self.vector, TARGET_RATE)
            if progress is not None:
                progress(made + 1, updates)

    @torch.no_grad()
    def policy_values(self, obs: Tensor) -> Tensor:
        """What each member thinks the policy is worth from there on: `(members, rows)`."""
        parts = torch.split(obs, CHUNK_ROWS)
        values = [self._values(part, policy_actions(self.policy, part)) for part in parts]
        return torch.cat(values, dim=-1)

    @torch.no_grad()
    def squared_errors(self, batch: Batch) -> Tensor:
        """Of the values of the data's actions against their own targets: `(members, rows)`."""
        next_value = self.policy_values(batch.next_obs)
        target = bootstrapped_target(batch.reward, batch.discount, next_value)
        return (self._values(batch.obs, batch.action) - target).square()

    def inputs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """What the networks are told of observations and actions, `(rows, ...)`."""
        spaces = self.policy.spaces
        if spaces.discrete:
            actions = F.one_hot(actions, spaces.action_dim).float()
        return torch.cat([self._normalizer.normalize(obs), actions], dim=-1)

    def _values(self, obs: Tensor, actions: Tensor) -> Tensor:
        return self.units.to_values(self._outputs(self.inputs(obs, actions), self.vector))

    @torch.no_grad()
    def _targets(self, sample: Sample, target: Tensor) -> Tensor:
        next_value = self.units.to_values(self._outputs(sample.next_inputs, target))
        wanted = bootstrapped_target(sample.reward, sample.discount, next_value)
        return (wanted - self.units.offset) / self.units.scale

    def _gradient(self, sample: Sample, wanted: Tensor) -> Tensor:
        def loss(parameters: State) -> tuple[Tensor, Metrics]:
            errors = self._outputs(sample.inputs, parameters["q"]) - wanted
            return errors.square().mean(-1).sum(), {}

        return gradients(loss, {"q": self.vector})[0]["q"]

    def _outputs(self, inputs: Tensor, vector: Tensor) -> Tensor:
        outputs: Tensor = self._network(inputs, vector)
        return outputs.squeeze(-1)


class Sample(NamedTuple):
    """Rows for every member, each `(members, batch, ...)`."""

    inputs: Tensor
    reward: Tensor
    discount: Tensor
    next_inputs: Tensor


class _Rows:
    """Transitions as the networks take them, sampled from each member's episodes."""

    def __init__(
        self, fitted: FittedQ, dataset: OfflineDataset, generator: torch.Generator
    ) -> None:
        # The policy stays as it is, so its actions are found once.
        self._rows = torch.cat([_row_inputs(fitted, batch) for batch in batches(dataset)])
        self._generator = generator
        drawn = [_resampled(dataset, generator) for _ in range(ENSEMBLE_SIZE)]
        self._order = torch.cat(drawn)
        self._sizes = torch.tensor([[len(rows)] for rows in drawn])
        self._firsts = self._sizes.cumsum(0) - self._sizes

    def sample(self) -> Sample:
        bits = torch.empty(ENSEMBLE_SIZE, BATCH_SIZE, dtype=torch.int64)
        places = self._firsts + bits.random_(generator=self._generator) % self._sizes
        rows = self._rows.index_select(0, self._order[places.flatten()])
        rows = rows.view(ENSEMBLE_SIZE, BATCH_SIZE, -1)
        width = (rows.shape[-1] - 2) // 2
        inputs, reward, discount, next_inputs = torch.split(rows, [width, 1, 1, width], dim=-1)
        return Sample(inputs, reward.squeeze(-1), discount.squeeze(-1), next_inputs)


def _row_inputs(fitted: FittedQ, batch: Batch) -> Tensor:
    next_actions = policy_actions(fitted.policy, batch.next_obs)
    columns = [
        fitted.inputs(batch.obs, batch.action),
        batch.reward[:, None],
        batch.discount[:, None],
        fitted.inputs(batch.next_obs, next_actions),
    ]
    return torch.cat(columns, dim=-1)


def _resampled(dataset: OfflineDataset, generator: torch.Generator) -> Tensor:
    """The rows of as many episodes as there are, drawn with replacement."""
    lengths = torch.from_numpy(dataset.episode_lengths)
    number = len(lengths)
    drawn = torch.randint(number, (number,), generator=generator)
    times = drawn.bincount(minlength=number)
    return torch.arange(len(dataset)).repeat_interleave(times.repeat_interleave(lengths))
