"""Experiments with several seeds, the algorithm registry, and overviews of runs.

Names are imported on first use, because an overview of runs does not need PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training.lazy import lazy_names

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # else type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "ExperimentManager": "rl_training.experiment.manager:ExperimentManager",
            "AlgorithmSpec": "rl_training.experiment.registry:AlgorithmSpec",
            "get_algorithm_spec": "rl_training.experiment.registry:get_algorithm_spec",
            "list_algorithm_specs": "rl_training.experiment.registry:list_algorithm_specs",
            "register_algorithm": "rl_training.experiment.registry:register_algorithm",
        },
    )


def __dir__() -> list[str]:
    return sorted(__all__)
