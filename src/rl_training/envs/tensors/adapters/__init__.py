"""Environments of other packages, which give and take tensors, as tensor environments.

`VecEnvWorlds` adapts the `VecEnv` of rsl_rl, which Isaac Lab and mjlab have too. `VectorWorlds`
adapts vector environments of Gymnasium that return tensors, such as ManiSkill's. `JaxWorlds` adapts
functions of JAX, and `brax_worlds` makes them for environments of Brax and MuJoCo Playground. None
of them can save its simulator: a resumed run starts new episodes.

Where a package does not tell what the last step of a truncated episode led to, that transition
cannot be learned from, because its value after the step is unknown, and is left out. A terminated
episode has no value after it, so that none of its transitions is.
"""

from rl_training.envs.tensors.adapters.jax_functions import JaxWorlds, brax_worlds
from rl_training.envs.tensors.adapters.vec_env import VecEnvWorlds
from rl_training.envs.tensors.adapters.vector_env import VectorWorlds

__all__ = ["JaxWorlds", "VecEnvWorlds", "VectorWorlds", "brax_worlds"]
