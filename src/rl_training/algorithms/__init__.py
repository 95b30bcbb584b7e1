"""What is learned, and how one update changes it: one file per algorithm."""

from rl_training.algorithms.awac import AWAC as AWACAlgorithm
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.bc import BC as BCAlgorithm
from rl_training.algorithms.cql import CQL as CQLAlgorithm
from rl_training.algorithms.ddpg import DDPG as DDPGAlgorithm
from rl_training.algorithms.dqn import DQN as DQNAlgorithm
from rl_training.algorithms.iql import IQL as IQLAlgorithm
from rl_training.algorithms.redq import REDQ as REDQAlgorithm
from rl_training.algorithms.rlpd import RLPD as RLPDAlgorithm
from rl_training.algorithms.sac import SAC as SACAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec, list_algorithm_specs
from rl_training.algorithms.td3 import TD3 as TD3Algorithm
from rl_training.algorithms.td3_bc import TD3BC as TD3BCAlgorithm
from rl_training.algorithms.tqc import TQC as TQCAlgorithm

__all__ = [
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
