"""The algorithm registry. `register_algorithm` adds an algorithm from outside the package."""

from rl_training.algorithms.spec import (
    AlgorithmSpec,
    AlgorithmSummary,
    get_algorithm_spec,
    list_algorithm_specs,
    list_algorithm_summaries,
    register_algorithm,
)

__all__ = [
    "AlgorithmSpec",
    "AlgorithmSummary",
    "get_algorithm_spec",
    "list_algorithm_specs",
    "list_algorithm_summaries",
    "register_algorithm",
]
