"""The algorithm registry. `register_algorithm` adds an algorithm from outside the package."""

from rl_training.algorithms.spec import (
    AlgorithmSpec,
    get_algorithm_spec,
    list_algorithm_specs,
    register_algorithm,
)

__all__ = ["AlgorithmSpec", "get_algorithm_spec", "list_algorithm_specs", "register_algorithm"]
