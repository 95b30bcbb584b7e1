"""Fitted Q evaluation (1903.08738): estimate the value of a policy from recorded data only.

New Q-networks are fitted to `reward + discount * Q(next_obs, policy(next_obs))`. Each member of the
ensemble is fitted to episodes drawn with replacement (2102.03607). The spread of the members
estimates how much the result depends on the sample of episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.functional import (
    Adam,
    bootstrapped_target,
    gradients,
    polyak_update,
    schedule_factor,
)
from rl_training.data.formats.recording import ProgressListener
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.transforms import ObservationNormalizer
from rl_training.evaluation.diagnostics import CHUNK_ROWS, batches, policy_actions
from rl_training.execution.policy import Policy
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ALL_FLOAT32
from rl_training.types import Batch, Metrics, SpaceInfo, State

ENSEMBLE_SIZE = 5
HIDDEN_SIZES = (128, 128)
BATCH_SIZE = 128
LEARNING_RATE = 1e-3
TARGET_RATE = 0.05
"""Ten times the usual rate of actor-critics: values must propagate over complete episodes in few
updates, and there is no policy that could exploit errors of the critic"""


@dataclass(frozen=True)
class Units:
    """Scale of the network outputs: `output = (value - offset) / scale`."""

    offset: float
    scale: float
    low: float
    """Lower bound of the value of any policy; `high` is the upper bound"""
    high: float

    @classmethod
    def of(cls, dataset: OfflineDataset, gamma: float) -> Units:
        """Choose units so that the fit starts at the best constant, with errors of about 1."""
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
    """An ensemble of Q-networks of one policy; each member is fitted to resampled episodes."""

    def __init__(self, policy: Policy, dataset: OfflineDataset, seed: int) -> None:
        """`dataset` is the data for `fit`; only its statistics are used here."""
        spaces = policy.spaces
        self.policy = policy
        # Statistics of this data: the policy's may come from other data, or it may have none.
        self._normalizer = None
        observation = spaces.observation
        if observation.is_numeric:  # encoders scale images
            self._normalizer = ObservationNormalizer(sum(x.numbers for x in observation.leaves))
            dataset.fit(self._normalizer)
            observation = observation.stored_as(ALL_FLOAT32)
        self.units = Units.of(dataset, policy.algorithm.hyperparameters.gamma)
        self._generator = torch.Generator().manual_seed(seed)
        self._network = NetworkPlan(observation).build(
            "critic",
            HIDDEN_SIZES,
            1,
            other_inputs=_action_inputs(spaces),
            ensemble=ENSEMBLE_SIZE,
            generator=self._generator,
        )
        self.vector = self._network.vector.data
        """Parameters of all ensemble members"""

    def fit(
        self, dataset: OfflineDataset, updates: int, progress: ProgressListener | None = None
    ) -> None:
        """Fit every ensemble member with `updates` gradient steps."""
        rows = _Rows(self, dataset, self._generator)
        optimizer = Adam(LEARNING_RATE)
        state: State = {"q": self.vector, **optimizer.initial_state("q", self.vector)}
        target = self.vector.clone()
        for update in range(updates):
            sample = rows.sample()
            gradient = self._gradient(sample, self._targets(sample, target))
            # With a constant learning rate the parameters would keep moving around the solution.
            factor = schedule_factor("cosine", torch.tensor(update), updates, 0)
            with torch.no_grad():
                optimizer.step(state, "q", gradient, factor)
                polyak_update(target, self.vector, TARGET_RATE)
            if progress is not None:
                progress(update + 1, updates)

    @torch.no_grad()
    def policy_values(self, obs: Tensor) -> Tensor:
        """Value of the policy in each state, by each member: `(ensemble, rows)`."""
        parts = torch.split(obs, CHUNK_ROWS)
        values = [self._values(part, policy_actions(self.policy, part)) for part in parts]
        return torch.cat(values, dim=-1)

    @torch.no_grad()
    def squared_errors(self, batch: Batch) -> Tensor:
        """Squared Bellman errors of the recorded actions: `(ensemble, rows)`."""
        next_value = self.policy_values(batch.next_obs)
        target = bootstrapped_target(batch.reward, batch.discount, next_value)
        return (self._values(batch.obs, batch.action) - target).square()

    def inputs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Network inputs for observations and actions, `(rows, ...)`."""
        spaces = self.policy.spaces
        if not spaces.is_continuous:
            parts = actions[:, None] if actions.dim() == 1 else actions
            chosen = zip(parts.unbind(-1), spaces.actions.num_choices, strict=True)
            actions = torch.cat([F.one_hot(part, number) for part, number in chosen], -1).float()
        if self._normalizer is not None:
            obs = self._normalizer.normalize(spaces.observation.numbers_of(obs))
        return torch.cat([obs, actions], dim=-1)

    def _values(self, obs: Tensor, actions: Tensor) -> Tensor:
        return self.units.to_values(self._outputs(self.inputs(obs, actions), self.vector))

    @torch.no_grad()
    def _targets(self, sample: Sample, target: Tensor) -> Tensor:
        next_value = self.units.to_values(self._outputs(sample.next_inputs, target))
        values = bootstrapped_target(sample.reward, sample.discount, next_value)
        return (values - self.units.offset) / self.units.scale

    def _gradient(self, sample: Sample, targets: Tensor) -> Tensor:
        def loss(parameters: State) -> tuple[Tensor, Metrics]:
            errors = self._outputs(sample.inputs, parameters["q"]) - targets
            return errors.square().mean(-1).sum(), {}

        return gradients(loss, {"q": self.vector})[0]["q"]

    def _outputs(self, inputs: Tensor, vector: Tensor) -> Tensor:
        outputs: Tensor = self._network(inputs, vector)
        return outputs.squeeze(-1)


def _action_inputs(spaces: SpaceInfo) -> int:
    """Number of network inputs that represent an action: choices are one-hot."""
    return spaces.action_dim if spaces.is_continuous else sum(spaces.actions.num_choices)


class Sample(NamedTuple):
    """Rows for every ensemble member, each `(ensemble, batch, ...)`."""

    inputs: Tensor
    reward: Tensor
    discount: Tensor
    next_inputs: Tensor


class _Rows:
    """Transitions as network inputs, sampled from the resampled episodes of each member."""

    def __init__(
        self, fitted: FittedQ, dataset: OfflineDataset, generator: torch.Generator
    ) -> None:
        # The policy does not change, so its actions are computed once.
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
    """Rows of a bootstrap sample: the same number of episodes, drawn with replacement."""
    lengths = torch.from_numpy(dataset.episode_lengths)
    number = len(lengths)
    drawn = torch.randint(number, (number,), generator=generator)
    times = drawn.bincount(minlength=number)
    return torch.arange(len(dataset)).repeat_interleave(times.repeat_interleave(lengths))
