"""What networks look like: vectors of parameters, and models that give them meaning."""

from rl_training.models.mlp import MLP, ParameterLayout
from rl_training.models.mlp_bc import MLPBCModel
from rl_training.models.mlp_dqn import MLPDQNModel
from rl_training.models.mlp_iql import MLPIQLModel
from rl_training.models.mlp_sac import MLPREDQModel, MLPSACModel
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.models.mlp_tqc import MLPTQCModel

__all__ = [
    "MLP",
    "MLPBCModel",
    "MLPDQNModel",
    "MLPIQLModel",
    "MLPREDQModel",
    "MLPSACModel",
    "MLPTD3Model",
    "MLPTQCModel",
    "ParameterLayout",
]
