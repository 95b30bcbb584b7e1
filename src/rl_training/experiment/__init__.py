"""Experiments with several seeds, the algorithm registry, and overviews of runs."""

from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import (
    AlgorithmSpec,
    get_algorithm_spec,
    list_algorithm_specs,
    register_algorithm,
)

__all__ = [
    "AlgorithmSpec",
    "ExperimentManager",
    "get_algorithm_spec",
    "list_algorithm_specs",
    "register_algorithm",
]
