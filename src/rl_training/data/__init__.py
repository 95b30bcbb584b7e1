"""Which transitions are in a training batch, and how are they stored and sampled?"""

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
