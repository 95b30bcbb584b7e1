"""What is learned, and how one update changes it: one file per algorithm."""

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.sac import SAC as SACAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec, list_algorithm_specs

__all__ = [
    "Algorithm",
    "AlgorithmSpec",
    "SACAlgorithm",
    "get_algorithm_spec",
    "list_algorithm_specs",
]
