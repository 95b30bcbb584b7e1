"""Which transitions are in a training batch, and how are they stored and sampled?

Names are imported on first use, because the scales of scores do not need PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training.lazy import lazy_names

if TYPE_CHECKING:
    from rl_training.data.fingerprint import fingerprint_difference
    from rl_training.data.formats.columns import array_recording
    from rl_training.data.loading import DatasetPart, RewardOptions, load_dataset
    from rl_training.data.mixture import Mixture
    from rl_training.data.n_step import NStepAccumulator, Transitions
    from rl_training.data.offline_dataset import OfflineDataset
    from rl_training.data.replay_buffer import ReplayBuffer
    from rl_training.data.source import Source
    from rl_training.data.transforms import ObservationNormalizer

__all__ = [
    "DatasetPart",
    "Mixture",
    "NStepAccumulator",
    "ObservationNormalizer",
    "OfflineDataset",
    "ReplayBuffer",
    "RewardOptions",
    "Source",
    "Transitions",
    "array_recording",
    "fingerprint_difference",
    "load_dataset",
]

if not TYPE_CHECKING:  # else type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "DatasetPart": "rl_training.data.loading:DatasetPart",
            "Mixture": "rl_training.data.mixture:Mixture",
            "NStepAccumulator": "rl_training.data.n_step:NStepAccumulator",
            "ObservationNormalizer": "rl_training.data.transforms:ObservationNormalizer",
            "OfflineDataset": "rl_training.data.offline_dataset:OfflineDataset",
            "ReplayBuffer": "rl_training.data.replay_buffer:ReplayBuffer",
            "RewardOptions": "rl_training.data.loading:RewardOptions",
            "Source": "rl_training.data.source:Source",
            "Transitions": "rl_training.data.n_step:Transitions",
            "array_recording": "rl_training.data.formats.columns:array_recording",
            "fingerprint_difference": "rl_training.data.fingerprint:fingerprint_difference",
            "load_dataset": "rl_training.data.loading:load_dataset",
        },
    )


def __dir__() -> list[str]:
    return sorted(__all__)
