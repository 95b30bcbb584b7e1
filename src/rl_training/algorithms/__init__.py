"""What is learned, and how one update changes it: one file per algorithm."""

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.ddpg import DDPG as DDPGAlgorithm
from rl_training.algorithms.dqn import DQN as DQNAlgorithm
from rl_training.algorithms.redq import REDQ as REDQAlgorithm
from rl_training.algorithms.sac import SAC as SACAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec, list_algorithm_specs
from rl_training.algorithms.td3 import TD3 as TD3Algorithm
from rl_training.algorithms.tqc import TQC as TQCAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmSpec",
    "DDPGAlgorithm",
    "DQNAlgorithm",
    "REDQAlgorithm",
    "SACAlgorithm",
    "TD3Algorithm",
    "TQCAlgorithm",
    "get_algorithm_spec",
    "list_algorithm_specs",
]
