"""How are environments made, vectorized, scaled and saved?"""

from rl_training.envs.make import (
    EnvironmentFactory,
    EnvironmentSource,
    EvaluationFactory,
    check_environment,
    check_environment_id,
    check_environment_packages,
    environment_factory,
)
from rl_training.envs.snapshots.snapshot import (
    SnapshotUnsupported,
    probe_resume_level,
    restore_environment,
    snapshot_environment,
)
from rl_training.envs.spaces import ActionScaler, describe_spaces
from rl_training.envs.vector.backends import (
    measure_step_seconds,
    suitable_backend,
)
from rl_training.envs.vector.environment import VectorEnvironment
from rl_training.envs.vector.step_arrays import EpisodeEnd, StepResult
from rl_training.envs.wrapping import (
    TRUSTED_MODULES,
    are_module_names,
    trust_modules,
    untrusted,
)

__all__ = [
    "TRUSTED_MODULES",
    "ActionScaler",
    "EnvironmentFactory",
    "EnvironmentSource",
    "EpisodeEnd",
    "EvaluationFactory",
    "SnapshotUnsupported",
    "StepResult",
    "VectorEnvironment",
    "are_module_names",
    "check_environment",
    "check_environment_id",
    "check_environment_packages",
    "describe_spaces",
    "environment_factory",
    "measure_step_seconds",
    "probe_resume_level",
    "restore_environment",
    "snapshot_environment",
    "suitable_backend",
    "trust_modules",
    "untrusted",
]
