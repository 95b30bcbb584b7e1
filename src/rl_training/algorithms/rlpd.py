"""Reinforcement learning with prior data (2302.02948).

REDQ's ensemble and number of updates per step, on minibatches of which one half is prior data and
the other half is online experience. LayerNorm bounds the critics' values for actions that neither
half contains, so that no pessimism and no pretraining is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rl_training.algorithms.hyperparameters import ChunkedHyperparameters, MixedHyperparameters
from rl_training.algorithms.redq import REDQ, REDQHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec


class RLPDHyperparameters(REDQHyperparameters, MixedHyperparameters, ChunkedHyperparameters):
    """The authors' defaults: ten critics, two of them in a target, twenty updates per step.

    For some tasks with sparse rewards they set `entropy_in_target: false`.
    """

    symbols: ClassVar[Mapping[str, str]] = {
        "num_critics": "E",
        "subset_size": "Z",
        "batch_size": "N",
    }

    critic_layer_norm: bool = True


class RLPD(REDQ):
    """Reinforcement learning with prior data."""

    hyperparameters_type = RLPDHyperparameters
    hyperparameters: RLPDHyperparameters
    entropy_per_action = -0.5


rlpd_loss = RLPD.total_loss
"""The sum of RLPD's losses and their metrics: `rlpd_loss(rlpd, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="rlpd",
    title="Reinforcement Learning with Prior Data",
    reference="arXiv:2302.02948",
    use_when="an environment and recorded data together",
    algorithm=RLPD,
    regimes=("mixed", "online", "offline"),
)
