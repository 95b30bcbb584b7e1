"""The controls that every trainer has: evaluation cadence, best policy, early stopping."""

from rl_training.training.controls import build_control_callbacks

__all__ = ["build_control_callbacks"]
