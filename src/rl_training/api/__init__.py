"""The managed classes: an algorithm, an environment, and five verbs."""

from rl_training.api.agent import Agent
from rl_training.api.algorithms import (
    AWAC,
    BC,
    CQL,
    DDPG,
    DQN,
    IQL,
    REDQ,
    RLPD,
    SAC,
    TD3,
    TD3BC,
    TQC,
)

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
    "Agent",
]
