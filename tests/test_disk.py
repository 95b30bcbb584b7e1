"""A run survives its disk: damage, failing logs, and a kill at any moment of creating or saving."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import StopAt, hashes, metric_rows, tiny
from hostile import seal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints import run_folder
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import CheckpointReader, checkpoint_folders
from rl_training.checkpoints.loading import find_checkpoint
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.data import replay_buffer
from rl_training.errors import CheckpointError, ConfigError
from rl_training.execution import execution
from rl_training.experiment.overview import list_runs
from rl_training.reporting import log_files, logging
from rl_training.runtime.workflows import resume_together
from rl_training.types import TrainResult

pytestmark = pytest.mark.usefixtures("no_pictures")
NO_SPACE = OSError(28, "No space left on device")


def trained(config: dict[str, Any], *callbacks: Callback) -> TrainResult:
    result = rl_training.train(config, callbacks=list(callbacks))
    assert isinstance(result, TrainResult)
    return result


def assert_same(one: TrainResult, other: TrainResult) -> None:
    assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)
    assert metric_rows(one.run_dir) == metric_rows(other.run_dir)


def quick(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a config that collects but does not learn."""
    algo_kwargs = {"learning_starts": 1000}
    return tiny(
        tmp_path, **{"total_timesteps": 60, "log_interval": 2, **changes}, algo_kwargs=algo_kwargs
    )


# Two lineages of replay segments


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.iterdir()}


def assert_nothing_is_shared(run: Path) -> None:
    newest, before = checkpoint_folders(run / "checkpoints")[:2]
    assert not inodes(newest) & inodes(before)
    for folder in (newest, before):
        CheckpointReader(folder).verify()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "SEGMENT_ROWS", 16)


def saving_often(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return quick(tmp_path, **{"checkpoint_interval": 10, "total_timesteps": 100, **changes})


class AfterEachSave(Callback):
    """Checks the two newest checkpoints at every step."""

    def __init__(self) -> None:
        self.linked = 0

    def on_collect_end(self, context: TrainingContext) -> None:
        kept = checkpoint_folders(context.run_dir / "checkpoints")
        if len(kept) >= 2:
            assert not inodes(kept[0]) & inodes(kept[1])
        self.linked += sum(path.stat().st_nlink > 1 for path in kept[0].iterdir())


@pytest.mark.usefixtures("small_segments")
def test_the_two_newest_checkpoints_never_share_a_file(tmp_path: Path) -> None:
    check = AfterEachSave()
    result = trained(saving_often(tmp_path, eval_interval=30), check)
    assert_nothing_is_shared(result.run_dir)
    assert check.linked  # the best checkpoint keeps the links of its lineage visible


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("stops", [(37, 64), (30, 31, 32, 33)], ids=["few", "each step"])
def test_lineages_continue_after_a_resume(tmp_path: Path, stops: Sequence[int]) -> None:
    config = saving_often(tmp_path)
    run = trained(config, StopAt(stops[0])).run_dir
    for stop in stops[1:]:
        rl_training.resume_training(run, callbacks=[StopAt(stop)])
        assert_nothing_is_shared(run)
    result = rl_training.resume_training(run)
    assert_nothing_is_shared(run)
    assert hashes(result.checkpoint_path) == hashes(trained(config).checkpoint_path)


@pytest.mark.usefixtures("small_segments")
def test_a_damaged_link_source_is_not_linked_again(tmp_path: Path) -> None:
    run = trained(saving_often(tmp_path), StopAt(64)).run_dir
    _, older = checkpoint_folders(run / "checkpoints")
    flip_a_bit(older / "replay-00000.safetensors")
    rl_training.resume_training(run)
    assert_nothing_is_shared(run)


@pytest.mark.usefixtures("small_segments")
def test_checkpoints_that_share_files_as_in_earlier_versions_are_separated(tmp_path: Path) -> None:
    run = trained(saving_often(tmp_path), StopAt(64)).run_dir
    newest, older = checkpoint_folders(run / "checkpoints")
    for name in ("replay-00000.safetensors", "replay-00001.safetensors"):
        (older / name).unlink()
        os.link(newest / name, older / name)
    rl_training.resume_training(run, callbacks=[StopAt(70)])
    assert_nothing_is_shared(run)
    rl_training.resume_training(run)
    assert_nothing_is_shared(run)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("failing_sync", range(1, 12))
def test_a_failed_save_keeps_the_lineages_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_sync: int
) -> None:
    """One sync of the save at step 50 fails; the last one fails after the rename."""
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += fails.active
        if fails.active and calls == failing_sync:
            raise NO_SPACE
        real(descriptor)

    class Fails(Callback):
        active = False

        def on_collect_end(self, context: TrainingContext) -> None:
            self.active = context.global_step == 50

    fails, check = Fails(), AfterEachSave()
    monkeypatch.setattr(os, "fsync", fsync)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = trained(saving_often(tmp_path, total_timesteps=80), fails, check)
    assert_nothing_is_shared(result.run_dir)


@pytest.mark.usefixtures("small_segments")
def test_without_hard_links_segments_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = trained(saving_often(tmp_path))

    def no_links(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    copied = trained(saving_often(tmp_path))
    assert hashes(linked.checkpoint_path) == hashes(copied.checkpoint_path)
    assert_nothing_is_shared(copied.run_dir)


@pytest.mark.usefixtures("small_segments")
def test_each_seed_of_a_population_has_two_lineages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = saving_often(tmp_path, seeds=[0, 1], total_timesteps=70)
    stopped = rl_training.train(config, callbacks=[StopAt(45)])
    for result in resume_together([each.run_dir for each in stopped]):
        assert_nothing_is_shared(result.run_dir)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_resumes_whichever_file_is_damaged(tmp_path: Path) -> None:
    """More rows than one segment has, in segments of the real size."""
    rows = replay_buffer.SEGMENT_ROWS
    config = tiny(
        tmp_path,
        env_id="CartPole-v1",
        algo="dqn",
        num_envs=64,
        total_timesteps=rows + 4_000,
        checkpoint_interval=5_000,
        log_interval=10_000,
        algo_kwargs={"learning_starts": 10**6, "buffer_capacity": 2 * rows},
    )
    run = trained(config, StopAt(rows + 3_000)).run_dir
    newest, before = checkpoint_folders(run / "checkpoints")
    assert_nothing_is_shared(run)
    assert (newest / "replay-00001.safetensors").exists()
    for damaged, intact in ((newest, before), (before, newest)):
        for path in damaged.iterdir():
            data = path.read_bytes()
            flip_a_bit(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert find_checkpoint(run).folder == intact
            path.write_bytes(data)
    flip_a_bit(newest / "replay-00000.safetensors")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        result = rl_training.resume_training(run)
    assert result.metrics["global_step"] >= rows + 4_000


# Logs


class BadDisk(Callback):
    """Lets writes to the files of a run's logs fail between two steps, half-way through a row."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, last: int, call: str = "write"):
        self.active, self._first, self._last = first == 0, first, last
        real = getattr(os, call)

        def failing(*arguments: Any, **options: Any) -> Any:
            if not self.active or not self._is_log(arguments[0]):
                return real(*arguments, **options)
            if call == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise NO_SPACE

        patch.setattr(os, call, failing)

    @staticmethod
    def _is_log(file: int | Path) -> bool:
        path = str(file)
        if isinstance(file, int):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{file}")
        return path.endswith("metrics.jsonl") or "tfevents" in path

    def for_seed(self, seed: int) -> Callback:
        return self

    def on_collect_end(self, context: TrainingContext) -> None:
        self.active = self._first <= context.global_step < self._last


def events(run: Path) -> list[tuple[str, int, float]]:
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return [
        (tag, event.step, event.value)
        for tag in found.Tags()["scalars"]
        if not tag.startswith("time/")
        for event in found.Scalars(tag)
    ]


def log_warnings(warned: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in warned if ".jsonl" in str(w.message)]


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield warned


@pytest.mark.parametrize("call", ["open", "write", "ftruncate", "lseek"])
@pytest.mark.parametrize(("first", "last"), [(0, 30), (15, 45)], ids=["at the start", "later"])
def test_rows_are_complete_after_the_disk_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, first: int, last: int
) -> None:
    config = quick(tmp_path, eval_interval=20)
    healthy = trained(config)
    with recorded() as warned:
        result = trained(config, BadDisk(monkeypatch, first, last, call))
    monkeypatch.undo()
    assert metric_rows(result.run_dir) == metric_rows(healthy.run_dir)
    assert events(result.run_dir) == events(healthy.run_dir)
    if call in ("write", "lseek") or first == 0:  # an open file is not opened or cut again
        failed, recovered = log_warnings(warned)
        assert "training continues" in failed
        assert "can be written again" in recovered


def test_failing_logs_stop_no_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick(tmp_path, seeds=[0, 1, 2])
    healthy = rl_training.train(config)
    with recorded() as warned:
        results = rl_training.train(config, callbacks=[BadDisk(monkeypatch, 20, 40)])
    assert len(log_warnings(warned)) == 2 * 3
    for one, other in zip(results, healthy, strict=True):
        assert metric_rows(one.run_dir) == metric_rows(other.run_dir)


def test_waiting_rows_are_part_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(tmp_path, eval_interval=20, checkpoint_interval=10)
    healthy = trained(config)
    with recorded() as warned:
        stopped = trained(config, BadDisk(monkeypatch, 30, 1000), StopAt(46))
    _, last = log_warnings(warned)
    assert "rows could not be written" in last
    assert f"rl-training resume {stopped.run_dir}" in last
    lines = (stopped.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 28  # no partial row
    monkeypatch.undo()
    result = rl_training.resume_training(stopped.run_dir)
    assert metric_rows(result.run_dir) == metric_rows(healthy.run_dir)
    assert events(result.run_dir) == events(healthy.run_dir)


def test_rows_of_a_finished_run_are_written_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(tmp_path, eval_interval=20)
    healthy = trained(config)
    with recorded():
        result = trained(config, BadDisk(monkeypatch, 30, 1000))
    monkeypatch.undo()
    rl_training.resume_training(result.run_dir)
    assert metric_rows(result.run_dir) == metric_rows(healthy.run_dir)


def test_the_buffer_of_waiting_rows_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MAX_WAITING_BYTES", 2_000)
    config = quick(tmp_path)
    healthy = trained(config)
    with recorded() as warned:
        result = trained(config, BadDisk(monkeypatch, 4, 56))
    assert "older rows did not fit" in log_warnings(warned)[1]
    rows, complete = metric_rows(result.run_dir), metric_rows(healthy.run_dir)
    assert len(rows) < len(complete)
    assert rows == [row for row in complete if row in rows]


REFUSED = (TypeError, ValueError, LookupError, AttributeError)
"""What the loading of a checkpoint turns into a `CheckpointError`"""


@pytest.mark.parametrize(
    "waiting",
    [
        3,
        [3],
        [[1, 2]],
        [[1, 2, 3]],
        [[1, 2, {"a": "b"}]],
        [[1, 2, {"a": [3]}]],
        None,
        [[10**30, 0, {"a": 1}]],
        [[-1, 0, {"a": 1}]],
        [[1.5, 0, {"a": 1}]],
        [[1, math.inf, {"a": 1}]],
        [[1, 10**400, {"a": 1}]],
        [[1, 2, {"a": 10**400}]],
        [[1, 2, {"a": math.nan}]],
        [[1, 2, {"a": True}]],
        [[1, 2, {"\ud800": 1}]],
        [[1, 2, {"\x1b[2J": 1}]],
        [[1, 2, {"": 1}]],
        [[1, 2, {"a" * 201: 1}]],
    ],
)
@pytest.mark.parametrize("file", ["metrics", "tensorboard"])
def test_forged_waiting_rows_are_refused(file: str, waiting: Any, tmp_path: Path) -> None:
    log = logging.MetricsLog(RunFolder(tmp_path), 2)
    state = log.state_dict()
    state[file]["waiting"] = waiting
    with pytest.raises(REFUSED):
        log.load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", -1),
        ("offset", 10**400),
        ("offset", 1.5),
        ("offset", "1"),
        ("logged", {"\ud800": 1.0}),
        ("logged", {"a\n": 1.0}),
        ("logged", {"a" * 201: 1.0}),
        ("logged", {"a": math.inf}),
        ("logged", {"a": "nan"}),
        ("logged", {"a": 10**400}),
        ("metrics", {"waiting": [], "dropped": 10**400}),
        ("metrics", {"waiting": [], "dropped": -1}),
    ],
)
def test_forged_states_of_the_logs_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    log = logging.MetricsLog(RunFolder(tmp_path), 2)
    with pytest.raises(REFUSED):
        log.load_state_dict({**log.state_dict(), key: value})


def test_every_name_that_can_be_logged_can_be_resumed(tmp_path: Path) -> None:
    log = logging.MetricsLog(RunFolder(tmp_path), 2)
    for name in ("height", "custom/größe-1.0", "a" * 200):
        log.add(name, 1.0)
    logging.MetricsLog(RunFolder(tmp_path), 2).load_state_dict(log.state_dict())


def test_a_checkpoint_without_waiting_rows_is_accepted(tmp_path: Path) -> None:
    """Checkpoints of earlier versions have none."""
    log = logging.MetricsLog(RunFolder(tmp_path), 2)
    log.load_state_dict({"last": 4, "offset": 0})
    assert log.state_dict()["metrics"] == {"waiting": [], "dropped": 0}


def in_child(action: Callable[[], object]) -> int:
    """Run an action in a forked process; return its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 99
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# TensorBoard after a resume


class KillAt(Callback):
    """Ends the process at a step, as `kill -9` does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)


class LogsSteps(Callback):
    """Logs a value at every step, so that a stop writes a row of its own."""

    def for_seed(self, seed: int) -> Callback:
        return LogsSteps()

    def on_collect_end(self, context: TrainingContext) -> None:
        context.log("custom/step", context.global_step)


def assert_same_events(run: Path, healthy: Path) -> None:
    assert events(run) == events(healthy)
    assert metric_rows(run) == metric_rows(healthy)


@pytest.mark.parametrize("first", [0, 30], ids=["from the start", "later"])
def test_rows_that_waited_in_a_checkpoint_are_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """They were written after the checkpoint, by a process that was then killed."""
    config = quick(tmp_path, total_timesteps=90, checkpoint_interval=40)
    healthy = trained(config)
    with recorded():
        disk = BadDisk(monkeypatch, first, 50)
        assert in_child(lambda: trained({**config, "run_name": "killed"}, disk, KillAt(70))) == -9
    monkeypatch.undo()
    rl_training.resume_training(tmp_path / "killed")
    assert_same_events(tmp_path / "killed", healthy.run_dir)


def test_resuming_a_finished_run_writes_no_evaluation_twice(tmp_path: Path) -> None:
    config = quick(tmp_path, eval_interval=25)
    healthy, run = trained(config).run_dir, trained(config).run_dir
    for _ in range(2):
        with recorded():
            rl_training.resume_training(run)
        assert_same_events(run, healthy)


def test_a_row_at_the_stop_is_removed_by_resume(tmp_path: Path) -> None:
    config = quick(tmp_path, log_interval=10, eval_interval=20)
    healthy = trained(config, LogsSteps()).run_dir
    run = trained(config, LogsSteps(), StopAt(25)).run_dir
    assert ("custom/step", 25, 25.0) in events(run)
    rl_training.resume_training(run, callbacks=[LogsSteps(), StopAt(47)])
    rl_training.resume_training(run, callbacks=[LogsSteps()])
    assert_same_events(run, healthy)


def test_an_earlier_checkpoint_takes_later_events_away(tmp_path: Path) -> None:
    config = quick(tmp_path, checkpoint_interval=20)
    healthy, run = trained(config).run_dir, trained(config, StopAt(50)).run_dir
    rl_training.resume_training(run)
    with recorded():
        rl_training.resume_training(checkpoint_folders(run / "checkpoints")[1])
    assert_same_events(run, healthy)


def test_files_of_others_beside_the_event_files_are_kept(tmp_path: Path) -> None:
    run = trained(quick(tmp_path), StopAt(30)).run_dir
    others = [
        run / "tensorboard" / name
        for name in ("events.out.tfevents.17.host.2", "notes.rl_training", "profile.txt")
    ]
    for path in others:
        path.write_bytes(b"mine")
    stale = run / "tensorboard" / "events.out.tfevents.17.host.2.rl_training"
    stale.write_bytes(b"of a process that saved nothing afterwards")
    rl_training.resume_training(run)
    assert [path.read_bytes() for path in others] == [b"mine"] * 3
    assert not stale.exists()


def test_event_files_are_kept_if_the_checkpoint_does_not_list_them(tmp_path: Path) -> None:
    """Checkpoints of older versions list none."""
    config = quick(tmp_path)
    healthy, run = trained(config).run_dir, trained(config, StopAt(30)).run_dir
    for checkpoint in checkpoint_folders(run / "checkpoints"):
        state = json.loads((checkpoint / "state.json").read_text())
        del state["callbacks"]["MetricsLog"]["tensorboard"]["files"]
        (checkpoint / "state.json").write_text(json.dumps(state))
        seal(checkpoint)
    rl_training.resume_training(run)
    assert set(events(run)) >= set(events(healthy))


@pytest.mark.parametrize(
    "files",
    [
        {"../../metrics.jsonl": 0},
        {"../events.out.tfevents.1.rl_training": 0},
        {"profile.txt": 0},
        {"events.out.tfevents.1.host.2": 0},
        {"events.out.tfevents.1.rl_training": -1},
        {"events.out.tfevents.1.rl_training": 10**400},
        {"events.out.tfevents.1.rl_training": None},
        ["events.out.tfevents.1.rl_training"],
        3,
    ],
)
def test_forged_event_files_are_refused(files: Any, tmp_path: Path) -> None:
    log = logging.MetricsLog(RunFolder(tmp_path), 2)
    state = log.state_dict()
    state["tensorboard"]["files"] = files
    with pytest.raises(REFUSED):
        log.load_state_dict(state)


class FileSizeLimit(Callback):
    """Limits the size of files between two steps, so that the kernel refuses to write more."""

    def on_collect_end(self, context: TrainingContext) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        limit = 2_000 if 10 <= context.global_step < 50 else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


def test_rows_are_complete_after_real_write_errors(tmp_path: Path) -> None:
    config = quick(tmp_path)
    healthy = trained(config)
    limited = {**config, "run_name": "limited"}
    assert in_child(lambda: trained(limited, FileSizeLimit())) == 0
    assert metric_rows(tmp_path / "limited") == metric_rows(healthy.run_dir)
    assert events(tmp_path / "limited") == events(healthy.run_dir)


def test_metadata_that_cannot_be_written_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NO_SPACE

    monkeypatch.setattr(run_folder, "describe_machine", fail)
    with pytest.warns(UserWarning, match="metadata.json could not be written"):
        result = trained(quick(tmp_path))
    (overview,) = list_runs(tmp_path)
    assert (overview.path, overview.state) == (result.run_dir, "finished")


# Runs without a checkpoint


class Killed(BaseException):
    """Raised in place of a kill."""


@pytest.fixture
def created_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Return a function that starts runs and ends as soon as their folders exist."""

    def create(config: dict[str, Any], **arguments: Any) -> list[Path]:
        made: list[Path] = []

        def crash(parts: Any, settings: Any) -> None:
            made.extend(each.folder.path for each in settings)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr("rl_training.training.run.assemble", crash)
            with pytest.raises(Killed):
                rl_training.train(config, **arguments)
        return made

    return create


CreatedOnly = Callable[..., list[Path]]
RANDOM_DATA = {"kind": "random", "size": 200, "seed": 0}
STARTS: dict[str, dict[str, Any]] = {
    "online": {},
    "several environments": {"num_envs": 2, "normalize_observations": True},
    "offline": {"algo": "iql", "dataset": RANDOM_DATA},
    "mixed": {
        "algo": "rlpd",
        "dataset": RANDOM_DATA,
        "algo_kwargs": {"num_critics": 3, "offline_pretrain_updates": 20},
    },
}


@pytest.mark.parametrize("changes", STARTS.values(), ids=STARTS.keys())
def test_a_run_without_a_checkpoint_resumes_from_the_beginning(
    tmp_path: Path, created_only: CreatedOnly, changes: dict[str, Any]
) -> None:
    config = tiny(tmp_path, total_timesteps=80, **changes)
    if changes.get("algo") == "iql":
        config["algo_kwargs"] = {"hidden_sizes": [16, 16], "batch_size": 16}
    (run,) = created_only({**config, "run_name": "killed"})
    assert not (run / "checkpoints").exists()
    (overview,) = list_runs(tmp_path)
    assert (overview.state, overview.step) == ("stopped", 0)
    assert "can be resumed" in overview.detail
    with pytest.raises(ConfigError, match=f"rl-training resume {run}"):
        rl_training.train({**config, "run_name": "killed"})
    with pytest.raises(CheckpointError, match=f"no checkpoint yet; `rl-training resume {run}`"):
        rl_training.evaluate_checkpoint(run)
    result = rl_training.resume_training(run)
    assert result.run_dir == run
    assert_same(result, trained(config))


@pytest.mark.thorough
def test_a_run_without_a_checkpoint_starts_from_the_same_policy(
    tmp_path: Path, created_only: CreatedOnly
) -> None:
    first = trained(tiny(tmp_path))
    config = tiny(tmp_path, init_from=str(first.run_dir))
    kept, changed = (created_only({**config, "run_name": name})[0] for name in ("kept", "changed"))
    assert_same(rl_training.resume_training(kept), trained(config))
    rl_training.resume_training(first.run_dir, total_timesteps=130)
    with pytest.raises(CheckpointError, match="has changed since this run was created"):
        rl_training.resume_training(changed)


@pytest.mark.parametrize("batched", [False, True], ids=["in turn", "batched"])
def test_seeds_without_a_checkpoint_resume_with_their_population(
    tmp_path: Path, created_only: CreatedOnly, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    """One seed has a checkpoint at its start, two have none; or one is resumed alone."""
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = tiny(tmp_path, seeds=[3, 1, 4], total_timesteps=80)
    uninterrupted = rl_training.train(config)
    alone = created_only({**config, "run_name": "alone"})[1]
    assert_same(rl_training.resume_training(alone), uninterrupted[1])
    together = created_only({**config, "run_name": "together"})
    saves = 0

    def second_save_fails(*_: Any, **__: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            raise Killed
        real(*_, **__)

    from rl_training.training.saver import CheckpointSaver

    real = CheckpointSaver.save
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "save", second_save_fails)
        with pytest.raises(Killed):
            resume_together(together)
    assert [len(checkpoint_folders(run / "checkpoints")) for run in together] == [1, 0, 0]
    for one, other in zip(resume_together(together), uninterrupted, strict=True):
        assert_same(one, other)


def test_a_seed_without_a_checkpoint_does_not_block_the_others(
    tmp_path: Path, created_only: CreatedOnly
) -> None:
    config = tiny(tmp_path, seeds=[0, 1], total_timesteps=80)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train({**config, "run_name": "one"}, callbacks=[StopAt(60)])
    fresh = created_only({**config, "run_name": "other"})
    results = resume_together([stopped[0].run_dir, fresh[1]])
    for one, other in zip(results, uninterrupted, strict=True):
        assert_same(one, other)


def test_a_run_whose_checkpoints_are_damaged_or_gone_does_not_start_again(tmp_path: Path) -> None:
    run = trained(quick(tmp_path, eval_interval=40)).run_dir
    rows = (run / "metrics.jsonl").read_bytes()
    for folder in checkpoint_folders(run / "checkpoints"):
        flip_a_bit(folder / "state.json")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        rl_training.resume_training(run)
    for folder in checkpoint_folders(run / "checkpoints"):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="the checkpoints of this run are missing"):
        rl_training.resume_training(run)
    assert (run / "metrics.jsonl").read_bytes() == rows


@pytest.mark.parametrize("damage", [flip_a_bit, lambda path: os.truncate(path, 100)])
def test_a_damaged_description_is_refused(
    tmp_path: Path, created_only: CreatedOnly, damage: Callable[[Path], None]
) -> None:
    (run,) = created_only(tiny(tmp_path))
    damage(run / "run.json")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        rl_training.resume_training(run)


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_folder_of_an_earlier_version_without_a_checkpoint_is_explained(
    tmp_path: Path, created_only: CreatedOnly, has_folder: bool
) -> None:
    (run,) = created_only(tiny(tmp_path))
    (run / "run.json").unlink()
    if has_folder:
        (run / "checkpoints/.tmp-0").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"rl-training train --config {run}/config.yaml"):
        rl_training.resume_training(run)


def test_unfinished_folders_are_removed_unless_a_process_is_making_them(tmp_path: Path) -> None:
    busy, dead, empty = (tmp_path / f".new-{digit * 32}" for digit in "abc")
    for path in (busy, dead, empty):
        path.mkdir()
    made = RunFolder(busy)
    made.lock()
    (dead / ".lock").touch()
    trained(tiny(tmp_path, total_timesteps=10, run_name="run"))
    made.unlock()
    assert {path.name for path in tmp_path.iterdir()} == {busy.name, "run"}


def test_a_folder_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NO_SPACE

    monkeypatch.setattr(PlainFolder, "sync", fail)
    with pytest.raises(ConfigError, match=r"cannot be written.*No space left"):
        rl_training.train(tiny(tmp_path, seeds=[0, 1]))
    assert list(tmp_path.iterdir()) == []


# Copied checkpoints


@pytest.mark.parametrize("step", [40, 77, 80, 120], ids=str)
def test_a_copied_checkpoint_resumes_exactly(tmp_path: Path, step: int) -> None:
    """The copies have an evaluation at their step, none, or are the best or the last one."""
    config = tiny(tmp_path, eval_interval=40)
    uninterrupted = trained(config)
    source = trained(config, StopAt(step)).checkpoint_path
    copy = shutil.copytree(source, tmp_path / "copies" / "mine")
    result = rl_training.resume_training(copy)
    assert hashes(result.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    best = result.best_checkpoint_path
    assert best is not None
    assert (best / "MANIFEST.json").is_file()
    assert best.parent.parent == result.run_dir
    for folder in checkpoint_folders(result.run_dir / "checkpoints"):
        assert not inodes(copy) & inodes(folder)
    again = rl_training.resume_training(result.run_dir, total_timesteps=125)
    assert again.metrics["global_step"] == 125


def test_copied_checkpoints_of_a_population_resume_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = tiny(tmp_path, seeds=[3, 1], eval_interval=40)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(80)])
    copies = [
        shutil.copytree(each.checkpoint_path, tmp_path / f"copy{index}")
        for index, each in enumerate(stopped)
    ]
    for one, other in zip(resume_together(copies), uninterrupted, strict=True):
        assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)


# Kills between any two system calls

CALLS = ("fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "open")


def kill_at(number: int) -> None:
    """End this process before the given call that changes a disk."""
    calls = itertools.count(1)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os._exit(77)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.faults
def test_a_run_killed_between_any_two_calls_of_creating_and_saving_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save links segments, and marks the best checkpoint."""
    monkeypatch.setattr(replay_buffer, "SEGMENT_ROWS", 2)
    config = quick(tmp_path, total_timesteps=6, checkpoint_interval=2, eval_interval=6)
    complete = trained(config)

    def start(number: int) -> None:
        kill_at(number)
        trained({**config, "run_name": f"killed{number}"})

    number, killed = 0, 77
    while killed == 77:
        number += 1
        killed = in_child(lambda number=number: start(number))
        run = tmp_path / f"killed{number}"
        result = rl_training.resume_training(run) if run.exists() else None
        if result is None:  # killed before the folder appeared
            result = trained({**config, "run_name": run.name})
        assert hashes(result.checkpoint_path) == hashes(complete.checkpoint_path)
        assert metric_rows(run) == metric_rows(complete.run_dir)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        shutil.rmtree(run)
    assert killed == 0
    assert number > 100
