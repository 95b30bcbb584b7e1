"""The managed classes: an algorithm, an environment, and five verbs."""

from rl_training.api.agent import Agent
from rl_training.api.algorithms import SAC

__all__ = ["SAC", "Agent"]
