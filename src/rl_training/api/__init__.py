"""The managed classes: an algorithm, an environment, and five verbs."""

from rl_training.api.agent import Agent
from rl_training.api.algorithms import DDPG, DQN, REDQ, SAC, TD3, TQC

__all__ = ["DDPG", "DQN", "REDQ", "SAC", "TD3", "TQC", "Agent"]
