"""Run folders on disks that refuse, beside files of the user, and where there are no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny

import rl_training
from rl_training.checkpoints import files, format, run_folder
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import POLICY, checkpoint_folders, write_checkpoint
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.errors import CheckpointError, ConfigError, RunLockedError
from rl_training.types import TrainResult

pytestmark = pytest.mark.usefixtures("no_pictures")
HIDDEN = ".new-" + "0123456789abcdef" * 2


def short_run(output: Path, **changes: Any) -> TrainResult:
    result = rl_training.train(tiny(output, **{"total_timesteps": 10, **changes}))
    assert isinstance(result, TrainResult)
    return result


def fail_with(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# Folders that are being made


@pytest.mark.parametrize(
    "file",
    [
        ".new-thesis/thesis.txt",
        f"{HIDDEN}/thesis.txt",
        f"{HIDDEN}0/config.yaml",
        f"{HIDDEN}/checkpoints/thesis.txt",
        f"{HIDDEN}/checkpoints/step_000000000/thesis.txt",
    ],
)
def test_folders_of_the_user_are_not_removed(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("years of work")
    short_run(tmp_path, run_name="run")
    assert (tmp_path / file).read_text() == "years of work"
    assert [path.name for path in (tmp_path / file).parent.iterdir()] == [Path(file).name]


@pytest.mark.parametrize("entry", ["", "config.yaml", "checkpoints"])
def test_a_link_in_an_abandoned_folder_does_not_prevent_training(
    tmp_path: Path, entry: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "step_000000000").mkdir(parents=True)
    hidden = tmp_path / HIDDEN
    if entry:
        hidden.mkdir()
    (hidden / entry).symlink_to(outside)
    assert short_run(tmp_path, run_name="run").run_dir == tmp_path / "run"
    assert (hidden / entry).is_symlink()
    assert (outside / "step_000000000").is_dir()


def test_an_abandoned_copy_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    copied = short_run(tmp_path / "first").checkpoint_path
    shutil.copytree(copied, tmp_path / "runs" / HIDDEN / "checkpoints/step_000000010")
    (tmp_path / "runs" / HIDDEN / (".tmp-" + "0" * 32)).write_text("half a file")
    short_run(tmp_path / "runs", run_name="run")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_a_folder_is_removed_before_its_lock_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another process could lock it in between, and lose it."""
    existed: list[bool] = []
    close = RunFolder.close_lock

    def watched(folder: RunFolder) -> None:
        existed.append(folder._lock is not None and folder.path.exists())
        close(folder)

    monkeypatch.setattr(RunFolder, "close_lock", watched)
    monkeypatch.setattr(RunFolder, "_write_start", fail_with(errno.ENOSPC))
    with pytest.raises(ConfigError, match="No space left"):
        short_run(tmp_path)
    assert existed
    assert not any(existed)
    assert list(tmp_path.iterdir()) == []


# Locks


@pytest.fixture
def _not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_warned_without_locks", False)


@pytest.mark.usefixtures("_not_warned")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_without_locks_runs_train_and_resume_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / HIDDEN).mkdir()  # perhaps of a process that is still running
    monkeypatch.setattr(fcntl, "flock", fail_with(code))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = short_run(tmp_path, run_name="run").run_dir
        resumed = rl_training.resume_training(run, total_timesteps=20)
    assert resumed.metrics["global_step"] == 20
    assert sum("has no file locks" in str(each.message) for each in warned) == 1
    assert not RunFolder(run).is_locked()
    assert sorted(path.name for path in tmp_path.iterdir()) == [HIDDEN, "run"]


def test_an_error_of_the_lock_does_not_mean_that_the_run_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = short_run(tmp_path, run_name="run").run_dir
    monkeypatch.setattr(fcntl, "flock", fail_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        rl_training.resume_training(run, total_timesteps=20)
    with pytest.raises(ConfigError, match=r"output_dir.*Input/output error"):
        short_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_making_a_folder_ends_if_other_processes_take_it_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(folder: RunFolder) -> None:
        raise RunLockedError("locked by another process")

    monkeypatch.setattr(RunFolder, "lock", locked)
    with pytest.raises(ConfigError, match="other processes removed"):
        short_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
