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


class BC(Agent):
    """Behaviour cloning: continuous actions, from recorded data."""

    algo = "bc"


class AWAC(Agent):
    """Advantage-weighted actor-critic: continuous actions, from recorded data and on from there."""

    algo = "awac"


class IQL(Agent):
    """Implicit Q-learning: continuous actions, from recorded data and on from there."""

    algo = "iql"


class CQL(Agent):
    """Conservative Q-learning: continuous actions, from recorded data and on from there."""

    algo = "cql"


class TD3BC(Agent):
    """TD3 with behaviour cloning: continuous actions, from recorded data and on from there."""

    algo = "td3_bc"


class RLPD(Agent):
    """Reinforcement learning with prior data: continuous actions, recorded data and live steps."""

    algo = "rlpd"
