"""Where batches come from."""

from rl_training.data.n_step import NStepAccumulator, Transitions
from rl_training.data.normalization import ObservationNormalizer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.source import Source

__all__ = ["NStepAccumulator", "ObservationNormalizer", "ReplayBuffer", "Source", "Transitions"]
