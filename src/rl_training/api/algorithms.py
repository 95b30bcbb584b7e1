"""One managed class per algorithm."""

from rl_training.api.agent import Agent


class SAC(Agent):
    """Soft actor-critic: continuous actions, online."""

    algo = "sac"
