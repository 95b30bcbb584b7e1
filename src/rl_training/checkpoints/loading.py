"""From a path that the user gives to the checkpoint or policy that is meant."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.checkpoints.format import (
    LEARNER,
    MANIFEST,
    MODEL,
    POLICY,
    CheckpointReader,
    checkpoint_folders,
)
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.errors import CheckpointError
from rl_training.execution.policy import Policy

MODEL_FILES = (MODEL, POLICY)


def find_checkpoint(
    path: str | Path, *, best: bool = False, names: Iterable[str] | None = None
) -> CheckpointReader:
    """The checkpoint at `path`: a run folder's newest (or best), a checkpoint, a saved policy.

    Only the files in `names` are verified, all of them where it is None.
    """
    path = _plain(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such run folder, checkpoint or saved policy")
    run = _run_at(path)
    if run is not None:
        return _in_run(run, best, names)
    if best:
        raise CheckpointError(f"{path}: only a run folder has a best checkpoint")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: not a run folder, checkpoint or saved policy (no {MANIFEST} in it); "
            "a checkpoint that was cut short while being written looks like this"
        )
    return CheckpointReader(path).verify(names)


def find_run(path: str | Path) -> RunFolder | None:
    """The run that a path is or is a checkpoint of; None for a checkpoint copied elsewhere."""
    path = _plain(path)
    if path.parent.name == "checkpoints":
        return RunFolder(path.parent.parent)
    return _run_at(path)


def load_policy(reader: CheckpointReader, device: str = "cpu") -> Policy:
    """The policy of a checkpoint or saved policy whose files were verified."""
    return Policy.from_parts(reader.json(POLICY), reader.tensors(MODEL), device)


def restore_learned(algorithm: Algorithm, reader: CheckpointReader) -> bool:
    """Beside the networks, which it has, give an algorithm the rest of what it learned.

    An exported policy lacks them: targets then equal the networks, and the answer is False.
    """
    algorithm.load_state({**algorithm.state, **algorithm.initial_state()})
    if LEARNER not in reader.files:
        return False
    saved = reader.verify([LEARNER]).tensors(LEARNER)
    settings = algorithm.extra_state().keys() - algorithm.optimizers().keys()
    learned = {
        name: tensor
        for name, tensor in saved.items()
        # What this run has fixed, such as a temperature, stays; so does what is beyond learning.
        if name in algorithm.state and name not in settings | {"updates"} and _is_finite(tensor)
    }
    algorithm.load_state({**algorithm.state, **learned})
    return True


def cached_policy(path: str | Path) -> Policy:
    """The policy at `path`, read and verified only when it is new."""
    path = _plain(path)
    run = _run_at(path) if path.exists() else None
    newest = checkpoint_folders(run.checkpoints)[:1] if run is not None else [path]
    if not newest or not (newest[0] / MANIFEST).is_file():
        return load_policy(find_checkpoint(path, names=MODEL_FILES))
    stamp = (newest[0] / MANIFEST).stat()
    return _cached_policy(path, newest[0].resolve(), stamp.st_mtime_ns, stamp.st_ino)


@lru_cache(maxsize=8)
def _cached_policy(path: Path, newest: Path, modified: int, inode: int) -> Policy:
    return load_policy(find_checkpoint(path, names=MODEL_FILES))


def _plain(path: str | Path) -> Path:
    path = Path(path).expanduser()
    # Of `.` and `..` the name must be known to tell what they are.
    return path.resolve() if path.name in ("", "..") else path


def _run_at(path: Path) -> RunFolder | None:
    if path.name == "checkpoints" and path.is_dir():
        return RunFolder(path.parent)
    return RunFolder(path) if (path / "checkpoints").is_dir() else None


def _in_run(run: RunFolder, best: bool, names: Iterable[str] | None) -> CheckpointReader:
    if not best:
        return run.latest_checkpoint(names)
    folder = run.best_checkpoint()
    if folder is None:
        raise CheckpointError(f"{run.path}: has no best checkpoint yet (no evaluation was made)")
    return CheckpointReader(folder).verify(names)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
