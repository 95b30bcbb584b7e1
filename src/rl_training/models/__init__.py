"""What networks look like: vectors of parameters, and models that give them meaning."""

from rl_training.models.mlp import MLP
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.models.parameters import ParameterLayout

__all__ = ["MLP", "MLPSACModel", "ParameterLayout"]
