"""From a path that the user gives to the checkpoint or policy that is meant."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from rl_training.errors import CheckpointError
from rl_training.runtime.checkpointing import MANIFEST, MODEL, POLICY, CheckpointReader
from rl_training.runtime.policy import Policy
from rl_training.runtime.run_folder import RunFolder

MODEL_FILES = (MODEL, POLICY)


def find_checkpoint(
    path: str | Path, *, best: bool = False, names: Iterable[str] | None = None
) -> CheckpointReader:
    """The checkpoint at `path`: a run folder's newest (or best), a checkpoint, a saved policy.

    Only the files in `names` are verified, all of them where it is None.
    """
    path = Path(path).expanduser()
    if path.name in ("", ".."):  # such as `.`, whose place must be known
        path = path.resolve()
    if not path.exists():
        raise CheckpointError(f"{path}: no such run folder, checkpoint or saved policy")
    if path.name == "checkpoints" and path.is_dir():
        path = path.parent
    if (path / "checkpoints").is_dir():
        return _in_run(RunFolder(path), best, names)
    if best:
        raise CheckpointError(f"{path}: only a run folder has a best checkpoint")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: not a run folder, checkpoint or saved policy (no {MANIFEST} in it); "
            "a checkpoint that was cut short while being written looks like this"
        )
    return CheckpointReader(path).verify(names)


def load_policy(path: str | Path, *, best: bool = False, device: str = "cpu") -> Policy:
    """The policy at `path`; loaded once, however often it is asked for, until it changes."""
    folder = find_checkpoint(path, best=best, names=MODEL_FILES).folder.resolve()
    stamp = (folder / MANIFEST).stat()
    return _load_policy(folder, stamp.st_mtime_ns, stamp.st_ino, device)


def _in_run(run: RunFolder, best: bool, names: Iterable[str] | None) -> CheckpointReader:
    if not best:
        return run.latest_checkpoint(names)
    folder = run.best_checkpoint()
    if folder is None:
        raise CheckpointError(f"{run.path}: has no best checkpoint yet (no evaluation was made)")
    return CheckpointReader(folder).verify(names)


@lru_cache(maxsize=8)
def _load_policy(folder: Path, modified: int, inode: int, device: str) -> Policy:
    reader = CheckpointReader(folder)
    return Policy.from_parts(reader.json(POLICY), reader.tensors(MODEL), device)
