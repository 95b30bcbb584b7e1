"""Run folders on disks that refuse, beside files of the user, and where there are no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from helpers import tiny

import rl_training
from rl_training import SAC
from rl_training.checkpoints import run_folder
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import MODEL, POLICY, checkpoint_folders, write_checkpoint
from rl_training.checkpoints.loading import find_checkpoint
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.errors import CheckpointError, ConfigError, RunLockedError, UserError
from rl_training.runtime.workflows import resume_together
from rl_training.types import TrainResult

pytestmark = pytest.mark.usefixtures("no_pictures")
HIDDEN = ".new-" + "0123456789abcdef" * 2
KilledAfter = Callable[[dict[str, Any], int], None]


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


@pytest.mark.parametrize("problem", [KeyboardInterrupt, CheckpointError])
def test_a_lock_is_released_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: type[BaseException]
) -> None:
    def fail(_: Path) -> None:
        raise problem

    folder = RunFolder(tmp_path)
    folder.lock()
    monkeypatch.setattr(run_folder, "remove_leftovers", fail)
    if problem is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            folder.unlock()
    else:
        folder.unlock()
    assert not RunFolder(tmp_path).is_locked()


# Checkpoints that are missing, unreadable or named from inside the run folder


@pytest.mark.parametrize("keep_folder", [False, True])
def test_a_run_whose_checkpoints_were_removed_is_not_started_again(
    tmp_path: Path, keep_folder: bool
) -> None:
    run = short_run(tmp_path, log_interval=2).run_dir
    rows = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    if keep_folder:
        (run / "checkpoints").mkdir()
    for use in (rl_training.resume_training, rl_training.evaluate_checkpoint):
        with pytest.raises(CheckpointError, match="checkpoints of this run are missing"):
            use(run)
    assert (run / "metrics.jsonl").read_bytes() == rows


@pytest.mark.parametrize("name", ["learner.safetensors", "state.json", "MANIFEST.json"])
def test_an_older_checkpoint_is_used_if_the_newest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = short_run(tmp_path, total_timesteps=20, checkpoint_interval=10).run_dir
    newest, older = checkpoint_folders(run / "checkpoints")
    bad, real = (newest / name).stat().st_ino, PlainFolder.open

    class BadSector:
        """A file whose content cannot be read."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> BadSector:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def fileno(self) -> int:
            return self._file.fileno()

        def readable(self) -> bool:
            return True

        read = readinto = fail_with(errno.EIO)

    def opened(folder: PlainFolder, file_name: str, mode: str = "rb") -> Any:
        file = real(folder, file_name, mode)
        return BadSector(file) if os.fstat(file.fileno()).st_ino == bad else file

    monkeypatch.setattr(PlainFolder, "open", opened)
    with pytest.warns(UserWarning, match=f"{name} cannot be read .Input/output error"):
        assert RunFolder(run).latest_checkpoint().folder == older


@pytest.mark.parametrize("inside", ["checkpoints", "."])
def test_a_checkpoint_named_from_inside_its_run_continues_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    result = short_run(tmp_path)
    monkeypatch.chdir(result.run_dir / inside)
    path = result.checkpoint_path.relative_to(Path.cwd())
    resumed = rl_training.resume_training(path, total_timesteps=20)
    assert resumed.run_dir == result.run_dir


# Files


def test_a_new_folder_is_flushed_in_the_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (flushed.append(os.fstat(file).st_ino), real(file))
    )
    PlainFolder(tmp_path / "runs/checkpoints").make()
    assert flushed == [path.stat().st_ino for path in (tmp_path, tmp_path / "runs")]


def test_links_are_refused_although_a_tool_has_replaced_open(tmp_path: Path) -> None:
    program = (
        "import os; real = os.open; os.open = lambda *a, **k: real(*a, **k)\n"
        "from rl_training.checkpoints import files; print(files._RELATIVE)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n"


def killed_while_saving_again(policy: Path, contents: dict[str, Any]) -> None:
    """Save a policy in a process that ends between the two renames."""
    process = os.fork()
    if process == 0:
        real = PlainFolder.rename

        def rename(folder: PlainFolder, *arguments: Any) -> None:
            real(folder, *arguments)
            os._exit(9)

        PlainFolder.rename = rename  # type: ignore[method-assign]
        write_checkpoint(policy, contents)
    os.waitpid(process, 0)


def test_a_policy_survives_a_kill_while_it_is_saved_again(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(short_run(tmp_path / "runs").run_dir)
    contents: dict[str, Any] = {POLICY: checkpoint.json(POLICY), MODEL: checkpoint.tensors(MODEL)}
    policy = tmp_path / "saved/policy"
    write_checkpoint(policy, contents)
    killed_while_saving_again(policy, contents)
    assert not policy.exists()
    observation = [[1.0, 0.0, 0.0]]
    expected = rl_training.predict_checkpoint(checkpoint.folder, observation)
    assert rl_training.predict_checkpoint(policy, observation) == expected
    killed_while_saving_again(policy, contents)
    assert rl_training.predict_checkpoint(policy, observation) == expected
    write_checkpoint(policy, contents)
    assert find_checkpoint(policy).folder == policy
    assert not (tmp_path / "saved/.replaced-policy").exists()


def test_a_folder_of_the_user_is_not_removed_by_saving_a_policy(tmp_path: Path) -> None:
    (tmp_path / ".replaced-policy").mkdir()
    (tmp_path / ".replaced-policy/thesis.txt").write_text("years of work")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            write_checkpoint(tmp_path / "policy", {POLICY: {}})
    assert [path.name for path in tmp_path.iterdir()] == [".replaced-policy"]


# Folders that have the name of a folder of checkpoints


def test_a_run_in_a_folder_called_checkpoints_continues_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("of the user\n")
    short_run(Path("checkpoints"), run_name="run")
    result = rl_training.resume_training("checkpoints/run", total_timesteps=20)
    assert result.run_dir.resolve() == tmp_path / "checkpoints" / "run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "of the user\n"


@pytest.mark.parametrize("name", ["checkpoints", "superseded", "tensorboard"])
def test_a_run_cannot_have_the_name_of_a_folder_inside_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"run_name = '{name}'"):
        short_run(tmp_path, run_name=name)


def test_copies_of_checkpoints_in_a_folder_called_checkpoints_stay(tmp_path: Path) -> None:
    run = short_run(tmp_path / "runs", total_timesteps=30, checkpoint_interval=10).run_dir
    copies = tmp_path / "home" / "checkpoints"
    shutil.copytree(run / "checkpoints", copies)
    before = sorted(path.name for path in copies.rglob("*"))
    result = rl_training.resume_training(copies / "step_000000030", total_timesteps=40)
    assert sorted(path.name for path in copies.rglob("*")) == before
    assert sorted(path.name for path in copies.parent.iterdir()) == ["checkpoints"]
    assert result.run_dir.parent == tmp_path / "runs"


# Populations


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> KilledAfter:
    """Train, and stop as if by a kill when this number of run folders has been renamed."""

    class Killed(BaseException):
        pass

    def train(config: dict[str, Any], number: int) -> None:
        rename, renamed = RunFolder._rename, []

        def die(folder: RunFolder, destination: Path) -> None:
            if len(renamed) == number:
                raise Killed
            renamed.append(destination)
            rename(folder, destination)

        with monkeypatch.context() as patched:
            patched.setattr(RunFolder, "_rename", die)
            patched.setattr(run_folder, "_discard", RunFolder.close_lock)
            with pytest.raises(Killed):
                rl_training.train(config)

    return train


def test_a_population_killed_between_two_renames_loses_no_seed(
    tmp_path: Path, killed_after: KilledAfter
) -> None:
    config = tiny(tmp_path, total_timesteps=10, seeds=[0, 1], run_name="run")
    killed_after(config, 1)
    assert {path.name[:5] for path in tmp_path.iterdir()} == {".new-", "run__"}
    results = resume_together([tmp_path / "run__seed0", tmp_path / "run__seed1"])
    assert [result.metrics["global_step"] for result in results] == [10, 10]
    assert {path.name for path in tmp_path.iterdir()} == {"run__seed0", "run__seed1"}


def test_a_population_killed_before_the_first_rename_can_be_trained_again(
    tmp_path: Path, killed_after: KilledAfter
) -> None:
    config = tiny(tmp_path, total_timesteps=10, seeds=[0, 1], run_name="run")
    killed_after(config, 0)
    results = rl_training.train(config)
    assert [result.metrics["global_step"] for result in results] == [10, 10]
    assert {path.name for path in tmp_path.iterdir()} == {"run__seed0", "run__seed1"}


def test_training_a_partly_created_population_again_keeps_all_its_seeds(
    tmp_path: Path, killed_after: KilledAfter
) -> None:
    config = tiny(tmp_path, total_timesteps=10, seeds=[0, 1], run_name="run")
    killed_after(config, 1)
    with pytest.raises(ConfigError, match="already exists"):
        rl_training.train(config)
    assert {path.name for path in tmp_path.iterdir()} == {"run__seed0", "run__seed1"}


# What is left over


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    run = short_run(tmp_path).run_dir
    left, of_user = run / f".tmp-{'0' * 32}", run / ".tmp-notes"
    left.touch()
    of_user.touch()
    rl_training.resume_training(run, total_timesteps=20)
    assert (left.exists(), of_user.exists()) == (False, True)


def test_only_the_newest_checkpoints_are_tried(tmp_path: Path) -> None:
    run = short_run(tmp_path).run_dir
    for step in range(100, 130):
        (run / "checkpoints" / f"step_{step:09d}").mkdir()
    with pytest.raises(CheckpointError, match="no usable checkpoint") as refused:
        find_checkpoint(run)
    assert str(refused.value).count("MANIFEST.json is missing") == run_folder.MOST_TRIED


def test_saving_a_policy_keeps_other_files_and_names_what_is_wrong(tmp_path: Path) -> None:
    agent = SAC.load(short_run(tmp_path).run_dir)
    agent.save(tmp_path / "policy")
    agent.save(tmp_path / "policy")
    (tmp_path / "policy" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="has other files too"):
        agent.save(tmp_path / "policy")
    assert (tmp_path / "policy" / "notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="cannot be"):
        agent.save(tmp_path / "policy" / "notes.txt" / "x")


def test_names_of_folders_cannot_control_the_terminal(tmp_path: Path, rl: Command) -> None:
    run = short_run(tmp_path).run_dir
    run.rename(tmp_path / "\x1b[31mred\n")
    done = rl("runs", tmp_path)
    assert "\x1b" not in done.out
    assert "red\\n" in done.out
