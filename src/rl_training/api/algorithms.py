"""One managed class per algorithm."""

from rl_training.api.agent import Agent


class SAC(Agent):
    """Soft actor-critic: continuous actions, online."""

    algo = "sac"


class DQN(Agent):
    """Deep Q-network: discrete actions, online."""

    algo = "dqn"


class DDPG(Agent):
    """Deep deterministic policy gradient: continuous actions, online."""

    algo = "ddpg"


class TD3(Agent):
    """Twin delayed DDPG: continuous actions, online."""

    algo = "td3"


class TQC(Agent):
    """Truncated quantile critics: continuous actions, online."""

    algo = "tqc"


class REDQ(Agent):
    """Randomised ensembled double Q-learning: continuous actions, online."""

    algo = "redq"
