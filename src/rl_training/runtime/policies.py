"""Read, build and save policies outside a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.format import (
    MANIFEST,
    MODEL,
    POLICY,
    STATE,
    plain_folder,
    write_checkpoint,
)
from rl_training.checkpoints.loading import (
    EVALUATION_FILES,
    MODEL_FILES,
    find_checkpoint,
    load_policy,
    saved_config,
)
from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentSource
from rl_training.errors import CheckpointError, UserError, brief
from rl_training.execution.execution import Execution, resolve_execution
from rl_training.execution.policy import Policy
from rl_training.models.custom_networks import given_networks
from rl_training.training.assembly import build_policy
from rl_training.training.engine import planned_updates
from rl_training.training.inputs import (
    config_factory,
    describe_environment,
    run_factory,
    spaces_of,
)
from rl_training.training.needs import memory_checked
from rl_training.training.saved_run import checked_fields
from rl_training.training.saver import policy_description
from rl_training.types import FINISHED, Json
from rl_training.validation import user_path


@dataclass(frozen=True)
class SavedPolicy:
    """A policy read from disk, with what its folder says about its origin."""

    policy: Policy
    environment: Json
    """Id, keyword arguments and label of the environment that it was trained in"""
    config: TrainConfig | None
    """The config of its run; None for an exported policy"""


@dataclass(frozen=True)
class RunStatus:
    """How far a run has come, according to the checkpoint from which it would be resumed."""

    step: int
    total_timesteps: int
    is_finished: bool
    execution: str
    """How its updates run, such as `cpu, compiled`"""


def open_policy(path: str | Path, *, networks: object = None) -> SavedPolicy:
    """Read the policy of a run folder, a checkpoint or an exported policy."""
    with given_networks(networks):
        reader = find_checkpoint(path, names=EVALUATION_FILES)
        return SavedPolicy(
            load_policy(reader), reader.json(POLICY).get("environment") or {}, saved_config(reader)
        )


def read_policy(path: str | Path, *, networks: object = None) -> Policy:
    """Read only the policy, so that nothing else at `path` has to be intact."""
    with given_networks(networks):
        return load_policy(find_checkpoint(path, names=MODEL_FILES))


def read_status(path: str | Path) -> RunStatus:
    """Read the progress of a run folder or checkpoint, but none of its tensors."""
    reader = find_checkpoint(path, names=[STATE])
    state = reader.json(STATE)
    try:
        return RunStatus(
            step=int(state["progress"]["global_step"]),
            total_timesteps=int(state["config"]["total_timesteps"]),
            is_finished=state["progress"]["stop_reason"] in FINISHED,
            execution=checked_fields(Execution(**state["execution"])).describe(),
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{reader.folder}: cannot be resumed ({brief(error)})") from None


def planned_execution(config: TrainConfig) -> str:
    """Describe how the updates of a new run would be executed, such as `cpu, compiled`."""
    return resolve_execution(config, planned_updates(config)).describe()


def untrained_policy(
    config: TrainConfig, env: EnvironmentSource | None = None, *, networks: object = None
) -> Policy:
    """Build the policy that a run with this config starts from."""
    spaces = spaces_of(config_factory(config, env), config)
    with memory_checked([config], spaces, "cpu", online=False), given_networks(networks):
        return build_policy(config, spaces, "cpu", planned_updates(config))


def save_policy(
    policy: Policy,
    destination: str | Path,
    *,
    environment: Json | None = None,
    config: TrainConfig,
    env: EnvironmentSource | None = None,
) -> Path:
    """Write a policy without its run to a folder that evaluate, predict and load accept.

    `environment` is the description of its environment, by default that of the config or `env`.
    """
    destination = user_path(destination)
    if destination.exists() and not _is_policy(destination):
        raise UserError(
            f"{destination}: exists and is not a saved policy, or has other files too; choose "
            "another name"
        )
    if environment is None:
        environment = describe_environment(run_factory(config, env), config)
    description = policy_description(policy.describe(), environment)
    if (wrong := policy.first_not_finite()) is not None:
        raise UserError(f"the policy cannot be saved: {wrong} is not finite")
    try:
        write_checkpoint(destination, {POLICY: description, MODEL: policy.tensors()})
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from error
    return destination


def _is_policy(folder: Path) -> bool:
    return folder.is_dir() and plain_folder(folder).entries().keys() == {MANIFEST, MODEL, POLICY}
