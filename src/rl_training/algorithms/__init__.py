"""What is learned, and how one update changes it: one file per algorithm.

A learner has two names: `SAC` as in its own module, and `SACAlgorithm`, for code that also imports
the managed class `rl_training.SAC`.
"""

from rl_training.algorithms.awac import AWAC
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.bc import BC
from rl_training.algorithms.cql import CQL
from rl_training.algorithms.ddpg import DDPG
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.iql import IQL
from rl_training.algorithms.redq import REDQ
from rl_training.algorithms.rlpd import RLPD
from rl_training.algorithms.sac import SAC
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec, list_algorithm_specs
from rl_training.algorithms.td3 import TD3
from rl_training.algorithms.td3_bc import TD3BC
from rl_training.algorithms.tqc import TQC

AWACAlgorithm = AWAC
BCAlgorithm = BC
CQLAlgorithm = CQL
DDPGAlgorithm = DDPG
DQNAlgorithm = DQN
IQLAlgorithm = IQL
REDQAlgorithm = REDQ
RLPDAlgorithm = RLPD
SACAlgorithm = SAC
TD3Algorithm = TD3
TD3BCAlgorithm = TD3BC
TQCAlgorithm = TQC

__all__ = [
    "AWAC",
    "BC",
    "CQL",
    "DDPG",
    "DQN",
    "IQL",
    "REDQ",
    "RLPD",
    "SAC",
    "TD3",
    "TD3BC",
    "TQC",
    "Algorithm",
    "AlgorithmSpec",
    "AWACAlgorithm",
    "BCAlgorithm",
    "CQLAlgorithm",
    "DDPGAlgorithm",
    "DQNAlgorithm",
    "IQLAlgorithm",
    "REDQAlgorithm",
    "RLPDAlgorithm",
    "SACAlgorithm",
    "TD3Algorithm",
    "TD3BCAlgorithm",
    "TQCAlgorithm",
    "get_algorithm_spec",
    "list_algorithm_specs",
]
