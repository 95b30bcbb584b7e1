"""Finds and loads the checkpoint or saved policy at a path."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.completeness import (
    EVALUATION_FILES,
    MODEL_FILES,
    check_contents,
    check_listed,
)
from rl_training.checkpoints.format import (
    LEARNER,
    MANIFEST,
    MODEL,
    POLICY,
    RUN_FOLDERS,
    STATE,
    CheckpointReader,
    checkpoint_folders,
    plain_folder,
    replaced_folder,
    step_of,
)
from rl_training.checkpoints.run_folder import BEST, RUN, RunFolder
from rl_training.config import TrainConfig, read_wrappers
from rl_training.envs import (
    EnvironmentFactory,
    EnvironmentSource,
    are_module_names,
    environment_factory,
    untrusted,
)
from rl_training.errors import CheckpointError, ConfigError, UntrustedModuleError, brief
from rl_training.execution.policy import Policy, PolicyDescription
from rl_training.models.custom_networks import current_networks
from rl_training.observations import NumberTypes
from rl_training.types import Json
from rl_training.validation import user_path

__all__ = [
    "EVALUATION_FILES",
    "MODEL_FILES",
    "cached_policy",
    "check_algorithm",
    "find_checkpoint",
    "find_run",
    "load_policy",
    "restore_learned",
    "saved_config",
    "saved_factory",
    "saved_modules",
]


def find_checkpoint(
    path: str | Path, *, best: bool = False, names: Iterable[str] | None = None
) -> CheckpointReader:
    """Return the checkpoint or saved policy at `path`; for a run folder, the newest (or best) one.

    Only the files in `names` are verified, or all files if it is None. A checkpoint that is not
    complete is not used. Raises `CheckpointError` if there is none.
    """
    path = _plain(path)
    if not _exists(path):
        raise CheckpointError(f"{path}: no such run folder, checkpoint or saved policy")
    check = partial(_check, names=None if names is None else tuple(names))
    run = _run_at(path)
    if run is not None:
        return _best_of(run, check) if best else run.latest_checkpoint(check)
    if best:
        raise CheckpointError(f"{path}: only a run folder has a best checkpoint")
    if not path.is_dir() or plain_folder(path).mode(MANIFEST) is None:
        if (inside := _run_in(path)) is not None:
            raise CheckpointError(f"{path}: a folder of runs; name one of them, such as {inside}")
        raise CheckpointError(
            f"{path}: not a run folder, checkpoint or saved policy: {MANIFEST} is missing; "
            "the checkpoint may be incomplete because writing it was interrupted"
        )
    reader = CheckpointReader(path)
    check(reader)
    return reader


def find_run(path: str | Path) -> RunFolder | None:
    """Return the run of a run folder or checkpoint; None for a checkpoint copied elsewhere."""
    path = _plain(path)
    run = _run_at(path)
    if step_of(path) is not None and path.parent.name == "checkpoints":
        run = RunFolder(path.parent.parent)
    # A name alone proves nothing: copies of checkpoints may be in a folder of any name.
    return run if run is not None and run.has_settings() else None


def load_policy(reader: CheckpointReader, device: str = "cpu") -> Policy:
    """Load the policy of a checkpoint or saved policy whose files were verified."""
    check_algorithm(reader)
    return Policy.from_parts(reader.json(POLICY), reader.tensors(MODEL), device)


def saved_number_types(reader: CheckpointReader) -> NumberTypes:
    """The types in which the observations of a policy are stored."""
    try:
        spaces = PolicyDescription.of(reader.json(POLICY)).spaces()
    except ValueError as error:
        raise CheckpointError(f"{POLICY}: not a valid policy: {brief(error)}") from None
    return spaces.observation.number_types


def check_algorithm(reader: CheckpointReader) -> None:
    """Raise `UntrustedModuleError` if one of the run's modules may register its algorithm."""
    description = reader.json(POLICY)
    check_algorithm_name(description.get("algo"), description.get("environment"), reader.folder)


def check_algorithm_name(name: object, environment: object, folder: Path) -> None:
    """Raise `UntrustedModuleError` if a module of the environment may register the algorithm."""
    if not isinstance(environment, dict) or not environment.get("modules"):
        return
    missing = untrusted(saved_modules(environment))
    if not missing:
        return
    try:
        get_algorithm_spec(str(name))
    except ConfigError as error:
        raise UntrustedModuleError(f"{folder}: {brief(error)}", missing) from None


def saved_config(reader: CheckpointReader) -> TrainConfig | None:
    """The config of a checkpoint's run; None for an exported policy."""
    if STATE not in reader.files:
        return None
    try:
        return TrainConfig.from_saved(reader.json(STATE)["config"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{reader.folder}: its config is damaged ({brief(error)})") from None


def saved_factory(environment: Json, source: EnvironmentSource | None = None) -> EnvironmentFactory:
    """The factory of the environments that a policy was trained in, as `policy.json` describes.

    `source` is another environment to use, in the same wrappers. Nothing is imported because of the
    description.
    """
    known, kwargs = environment.get("id"), environment.get("kwargs") or {}
    if not (isinstance(known, str | None) and isinstance(kwargs, dict)):
        raise CheckpointError(f"{POLICY}: the description of the environment is damaged")
    wrappers = [section.model_dump() for section in read_wrappers(environment.get("wrappers", []))]
    return environment_factory(
        known,
        kwargs,
        source,
        wrappers=wrappers,
        modules=saved_modules(environment),
        observation_keys=saved_keys(environment),
        action_range=_saved_action_range(environment),
    )


def _saved_action_range(environment: Json) -> tuple[float, float] | None:
    match environment.get("action_range"):
        case None:
            return None
        case [int() | float() as low, int() | float() as high] if -math.inf < low < high < math.inf:
            return float(low), float(high)
    raise CheckpointError(f"{POLICY}: the action_range of the environment must be [low, high]")


def saved_keys(environment: Json) -> list[str] | None:
    """The `observation_keys` that a policy was trained with."""
    keys = environment.get("observation_keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(k, str) for k in keys)):
        raise CheckpointError(f"{POLICY}: observation_keys must be a list of names")
    return keys


def saved_modules(environment: Json) -> list[str]:
    """The names of the modules that a policy was trained with."""
    modules = environment.get("modules", [])
    if not are_module_names(modules):
        raise CheckpointError(f"{POLICY}: the modules of the environment must be a list of names")
    names: list[str] = modules
    return names


def restore_learned(algorithm: Algorithm, reader: CheckpointReader) -> bool:
    """Restore learned values other than the policy's networks, such as target networks.

    Returns False for an exported policy, which does not contain them; target networks are then
    copies of the networks.
    """
    algorithm.load_state({**algorithm.state, **algorithm.initial_state()})
    if LEARNER not in reader.files:
        return False
    saved = reader.verify([LEARNER]).tensors(LEARNER)
    settings = algorithm.extra_state().keys() - algorithm.optimizers().keys()
    learned = {
        name: tensor
        for name, tensor in saved.items()
        # Not restored: values that this run has fixed, such as a temperature, and non-finite ones.
        if name in algorithm.state and name not in settings | {"updates"} and _is_finite(tensor)
    }
    algorithm.load_state({**algorithm.state, **learned})
    return True


def cached_policy(path: str | Path) -> Policy:
    """Load the policy at `path`, or return it from a cache if its files have not changed."""
    path = _plain(path)
    run = _run_at(path) if _exists(path) else None
    newest = checkpoint_folders(run.checkpoints)[:1] if run is not None else [path]
    is_folder = bool(newest) and newest[0].is_dir()
    stamp = plain_folder(newest[0]).stamp(MANIFEST) if is_folder else None
    if stamp is None:
        return load_policy(find_checkpoint(path, names=MODEL_FILES))
    return _cached_policy(path, newest[0].resolve(), *stamp, current_networks())


@lru_cache(maxsize=8)
def _cached_policy(path: Path, newest: Path, modified: int, inode: int, networks: object) -> Policy:
    return load_policy(find_checkpoint(path, names=MODEL_FILES))


def _plain(path: str | Path) -> Path:
    path = user_path(path)
    try:
        # Folders are recognized by their names, so that `.` and `..` are resolved, and a path must
        # not begin inside of a run folder.
        if path.name == "" or ".." in path.parts:
            path = path.resolve()
        elif path.parts[0] in RUN_FOLDERS or (len(path.parts) == 1 and step_of(path) is not None):
            path = path.absolute()
        return _replaced_policy(path) or path
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: no such run folder, checkpoint or saved policy") from error


def _replaced_policy(path: Path) -> Path | None:
    """Return where a policy is if a process was killed while it saved another one at `path`."""
    if not path.name or _exists(path):
        return None
    replaced = replaced_folder(path)
    with contextlib.suppress(OSError):
        return replaced if plain_folder(replaced).has_file(MANIFEST) else None
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # not permitted, too long, or with a null character
        return False


def _run_at(path: Path) -> RunFolder | None:
    if (path / "checkpoints").is_dir() or (path / RUN).is_file():
        return RunFolder(path)
    return RunFolder(path.parent) if path.name == "checkpoints" and path.is_dir() else None


def _run_in(folder: Path) -> Path | None:
    """Return the first run inside a folder of runs; None if it is another folder or a file."""
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return None
    return next((path for path in inside if RunFolder(path).has_settings()), None)


def _check(reader: CheckpointReader, names: tuple[str, ...] | None) -> None:
    check_listed(reader)
    check_algorithm(reader)
    check_contents(reader, names)


def _best_of(run: RunFolder, check: Callable[[CheckpointReader], None]) -> CheckpointReader:
    folder = run.best_checkpoint()
    if folder is None:
        if plain_folder(run.checkpoints).mode(BEST) is not None:
            raise CheckpointError(
                f"{run.path}: checkpoints/best.json is damaged, or the checkpoint that it names is "
                "missing; leave out --best (best=True) to use the newest checkpoint"
            )
        raise CheckpointError(f"{run.path}: no best checkpoint yet (the run was never evaluated)")
    try:
        reader = CheckpointReader(folder)
        check(reader)
    except CheckpointError as error:
        raise CheckpointError(
            f"the best checkpoint cannot be used: {error}; leave out --best (best=True) to use the "
            "newest checkpoint"
        ) from None
    return reader


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
