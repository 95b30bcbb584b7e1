"""Jobs: start, continue or find finished, with equal bits after any stop, and one owner."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, tree
from helpers import StopAt, hashes, metric_rows, tiny

from rl_training import TrainingInterrupted
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints import lease as lease_module
from rl_training.checkpoints.lease import BEAT_SECONDS, Lease, LeaseLostError, LeaseWatch
from rl_training.errors import CheckpointError, ConfigError, RunLockedError
from rl_training.runtime.job_folder import EXIT_PREEMPTED, prepare_job, read_job, read_job_status
from rl_training.runtime.jobs import JobResult, run_or_resume

pytestmark = pytest.mark.usefixtures("no_pictures")
SEEDS = [0, 1]
OWNER = '{"machine": "m", "host": "h", "process": 1, "started": 1, "token": "t"}'
INFINITE = f'{{"owner": {OWNER}, "beat": Infinity, "released": false}}'.encode()


def config(**changes: Any) -> dict[str, Any]:
    values = tiny(Path("unused"), num_threads=1, eval_interval=40, checkpoint_interval=40)
    return {**values, **changes}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    """A job that was never stopped; read-only."""
    return run_or_resume(config(), SEEDS, tmp_path_factory.mktemp("jobs") / "reference")


def runs(folder: Path) -> list[Path]:
    return [folder / f"sac__seed{seed}" for seed in SEEDS]


def bits(folder: Path, step: int = 120) -> list[Any]:
    """The tensors of the last checkpoints, and all metrics, of the seeds of a job."""
    name = f"step_{step:09}"
    return [(hashes(run / "checkpoints" / name), metric_rows(run)) for run in runs(folder)]


class At(Callback):
    """Does something once, when seed 0 has reached a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action, self.done = step, action, False

    def for_seed(self, seed: int) -> Callback:
        return self

    def on_collect_end(self, context: TrainingContext) -> None:
        if not self.done and context.config.seed == 0 and context.global_step >= self.step:
            self.done = True
            self.action()


# One unit of work


def test_a_job_leaves_its_state_and_the_results_of_its_seeds(reference: JobResult) -> None:
    status = reference.status
    assert (status.state, status.step, status.total_timesteps) == ("finished", 120, 120)
    assert (status.attempt, status.exit_code, status.message) == (1, 0, "")
    assert status.process == os.getpid()
    assert status == read_job_status(reference.folder)
    assert [result.run_dir for result in reference.results] == runs(reference.folder)
    means = [
        max(r["eval/mean_reward"] for r in metric_rows(run) if "eval/mean_reward" in r)
        for run in runs(reference.folder)
    ]
    assert status.best == pytest.approx(sum(means) / 2)
    assert [result.stop_reason for result in reference.results] == ["total_timesteps"] * 2


def test_a_finished_job_is_found_finished(reference: JobResult) -> None:
    before = {path: path.stat().st_mtime_ns for path in reference.folder.rglob("*")}
    again = run_or_resume(config(), SEEDS, reference.folder)
    assert (again.status, again.results) == (reference.status, reference.results)
    assert {path: path.stat().st_mtime_ns for path in reference.folder.rglob("*")} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda each: each.name)
def test_a_preempted_job_continues_with_equal_bits(
    tmp_path: Path, reference: JobResult, number: int
) -> None:
    folder = tmp_path / "job"
    stop = At(50, lambda: signal.raise_signal(number))
    job = run_or_resume(config(), SEEDS, folder, callbacks=[stop])
    assert (job.status.state, job.status.step, job.status.exit_code) == ("preempted", 50, 75)
    assert (job.signals, job.results) == ((number,), [])
    assert read_job_status(folder).state == "preempted"
    job = run_or_resume(config(), SEEDS, folder)
    assert (job.status.state, job.status.attempt) == ("finished", 2)
    assert bits(folder) == bits(reference.folder)


def test_ctrl_c_raises_and_the_job_continues(tmp_path: Path, reference: JobResult) -> None:
    folder = tmp_path / "job"
    stop = At(50, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(TrainingInterrupted):
        run_or_resume(config(), SEEDS, folder, callbacks=[stop])
    assert read_job_status(folder).state == "preempted"
    run_or_resume(config(), SEEDS, folder)
    assert bits(folder) == bits(reference.folder)


def test_a_seed_that_stopped_alone_is_finished(tmp_path: Path) -> None:
    class StopOne(StopAt):
        def for_seed(self, seed: int) -> Callback:
            return self if seed == 1 else Callback()

    job = run_or_resume(config(), SEEDS, tmp_path / "job", callbacks=[StopOne(60, "enough")])
    assert [result.stop_reason for result in job.results] == ["total_timesteps", "enough"]
    assert run_or_resume(config(), SEEDS, tmp_path / "job").results == job.results


def test_a_failed_job_says_why_and_is_tried_again(tmp_path: Path, reference: JobResult) -> None:
    def fail() -> None:
        raise ValueError("the robot fell over\nand broke")

    folder = tmp_path / "job"
    with pytest.raises(ValueError, match="fell over"):
        run_or_resume(config(), SEEDS, folder, callbacks=[At(50, fail)])
    status = read_job_status(folder)
    assert (status.state, status.exit_code) == ("failed", 1)
    assert status.message == "ValueError: and broke"
    run_or_resume(config(), SEEDS, folder)
    assert bits(folder) == bits(reference.folder)


def test_a_running_job_has_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)
    folder, seen = tmp_path / "job", []

    def look() -> None:
        first = read_job_status(folder)
        deadline = time.monotonic() + 20
        while read_job_status(folder).step not in (59, 60):
            assert time.monotonic() < deadline, "no heartbeat"
            time.sleep(0.01)
        seen.extend([first, read_job_status(folder)])

    run_or_resume(config(), [0], folder, callbacks=[At(60, look)])
    first, second = seen
    assert (first.state, second.state) == ("running", "running")
    assert 0 < second.heartbeat - first.heartbeat < 60
    assert second.best is not None
    assert second.host


def test_a_prepared_job_is_queued(tmp_path: Path) -> None:
    prepare_job(config(), SEEDS, tmp_path / "job")
    status = read_job_status(tmp_path / "job")
    assert (status.state, status.attempt, status.process) == ("queued", 0, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"state": "running", "step": 1',
        "{}",
        '{"state": ["running"]}',
        '{"state": "resting"}',
        '{"state": "running", "step": "x"}',
        '{"state": "finished", "best": "good"}',
        '{"state": "running", "total_timesteps": -1}',
    ],
)
def test_a_damaged_status_is_not_the_end(tmp_path: Path, reference: JobResult, text: str) -> None:
    folder = tmp_path / "job"
    run_or_resume(config(), SEEDS, folder, callbacks=[At(50, stop_softly)])
    (folder / "status.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"status\.json"):
        read_job_status(folder)
    run_or_resume(config(), SEEDS, folder)
    assert bits(folder) == bits(reference.folder)


@pytest.mark.parametrize("untrained", [[], [1]])
def test_a_status_that_was_lost_is_found_again(
    tmp_path: Path, reference: JobResult, untrained: list[int]
) -> None:
    """A process is killed after the last seed has ended, or one seed is behind the others."""
    folder = tmp_path / "job"
    shutil.copytree(reference.folder, folder)
    (folder / "status.json").unlink()
    for seed in untrained:
        shutil.rmtree(folder / f"sac__seed{seed}" / "checkpoints" / "step_000000120")
    status = run_or_resume(config(), SEEDS, folder).status
    assert (status.state, status.step) == ("finished", 120)
    assert status.best == pytest.approx(reference.status.best)
    assert bits(folder) == bits(reference.folder)


def test_a_job_that_was_killed_while_its_folder_was_created_starts(tmp_path: Path) -> None:
    (tmp_path / f".tmp-{'0' * 32}").write_text("{")
    assert prepare_job(config(), SEEDS, tmp_path).seeds == SEEDS


def stop_softly() -> None:
    signal.raise_signal(signal.SIGTERM)


# What the bits depend on


def test_settings_of_the_machine_are_resolved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    automatic = config(
        num_threads=None, compile="auto", overlap="auto", float32_precision="auto", device="auto"
    )
    stored = prepare_job(automatic, SEEDS, tmp_path / "job")
    values = json.loads((tmp_path / "job" / "job.json").read_text())["config"]
    for key in ("num_threads", "compile", "overlap", "float32_precision", "device"):
        assert values[key] not in ("auto", None), key
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert prepare_job(automatic, SEEDS, tmp_path / "job") == stored
    other = prepare_job(automatic, SEEDS, tmp_path / "other")
    assert other.num_threads == stored.num_threads


@pytest.mark.thorough
def test_another_number_of_threads_in_the_environment_changes_no_bits(
    tmp_path: Path, reference: JobResult
) -> None:
    folder = tmp_path / "job"
    script = (
        "import sys, json\n"
        "from rl_training.runtime.jobs import run_or_resume\n"
        "run_or_resume(json.loads(sys.argv[1]), [0, 1], sys.argv[2])\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, json.dumps(config()), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=True,
    )
    assert bits(folder) == bits(reference.folder)


@pytest.mark.parametrize(
    ("changes", "seeds", "key"),
    [
        ({"total_timesteps": 160}, SEEDS, "total_timesteps"),
        ({"env_id": "MountainCarContinuous-v0"}, SEEDS, "env_id"),
        ({"num_threads": 2}, SEEDS, "num_threads"),
        ({"algo_kwargs": {**config()["algo_kwargs"], "tau": 0.5}}, SEEDS, r"algo_kwargs\.tau"),
        ({}, [0, 2], "seeds"),
        ({}, [0], "seeds"),
    ],
)
def test_another_job_in_the_same_folder_is_refused(
    tmp_path: Path, changes: dict[str, Any], seeds: list[int], key: str
) -> None:
    prepare_job(config(), SEEDS, tmp_path / "job")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=rf"has another job \({key} = .* choose another folder"):
        run_or_resume(config(**changes), seeds, tmp_path / "job")
    assert tree(tmp_path) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"is not empty and has no job\.json"):
        run_or_resume(config(), SEEDS, tmp_path)
    assert tree(tmp_path) == {"thesis.txt"}


def test_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one seed"):
        run_or_resume(config(), [], tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_a_job_may_be_moved(tmp_path: Path, reference: JobResult) -> None:
    run_or_resume(config(), SEEDS, tmp_path / "here", callbacks=[At(50, stop_softly)])
    (tmp_path / "here").rename(tmp_path / "there")
    assert Path(read_job(tmp_path / "there").output_dir) == tmp_path / "there"
    run_or_resume(config(), SEEDS, tmp_path / "there")
    assert bits(tmp_path / "there") == bits(reference.folder)
    assert not (tmp_path / "here").exists()


# The owner


def test_a_second_process_is_refused_and_names_the_owner(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with other_process_owning(folder) as owner:
        before = tree(tmp_path)
        began = time.monotonic()
        with pytest.raises(RunLockedError, match=rf"being trained by process {owner.pid};"):
            run_or_resume(config(), SEEDS, folder, patience=0.0)
        assert time.monotonic() - began < 20
        assert tree(tmp_path) == before


def test_a_second_process_waits_for_the_first_one_to_end(
    tmp_path: Path, reference: JobResult
) -> None:
    folder = tmp_path / "job"
    prepare_job(config(), SEEDS, folder)
    first = Lease.acquire(folder)
    threading.Timer(1.0, first.release).start()
    job = run_or_resume(config(), SEEDS, folder, patience=30.0)
    assert job.status.attempt == 2
    assert bits(folder) == bits(reference.folder)


def test_the_lease_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    with other_process_owning(tmp_path) as owner:
        owner.kill()
        owner.wait()
        began = time.monotonic()
        with Lease.acquire(tmp_path) as lease:
            assert lease.number == 2
        assert time.monotonic() - began < 5


def test_the_lease_of_a_silent_process_is_taken_over_after_the_limit(tmp_path: Path) -> None:
    with other_process_owning(tmp_path) as owner:
        owner.send_signal(signal.SIGSTOP)
        watch = LeaseWatch(tmp_path, stale_seconds=1.0)
        began = time.monotonic()
        assert not watch.is_free()
        assert Lease.of_free(watch) is None
        with Lease.acquire(tmp_path, stale_seconds=1.0) as lease:
            assert 1.0 < time.monotonic() - began < 20
            assert lease.number == 2
            owner.send_signal(signal.SIGCONT)
            assert owner.wait(30) == 3, "the owner that was paused finds that it has lost"
            lease.check()


def test_a_living_process_on_another_machine_is_recognized_by_its_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)
    with Lease.acquire(tmp_path):
        monkeypatch.setattr(lease_module, "_machine", lambda: "another machine")
        watch = LeaseWatch(tmp_path, stale_seconds=0.5)
        for _ in range(10):
            assert not watch.is_free()
            time.sleep(0.1)
    assert watch.is_free()


def test_a_restarted_machine_has_no_old_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_process_owning(tmp_path) as owner:
        path = tmp_path / ".lease-000001"
        values = json.loads(path.read_text())
        owner.kill()
        owner.wait()
        values["owner"] |= {"process": os.getpid(), "started": 1}
        path.write_text(json.dumps(values))
        assert LeaseWatch(tmp_path).is_free(), "the same number belongs to another process now"


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff", b'{"owner": {}}', INFINITE])
def test_a_damaged_lease_is_free_after_the_limit(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ".lease-000007").write_bytes(damage)
    watch = LeaseWatch(tmp_path, stale_seconds=0.3)
    assert not watch.is_free()
    with Lease.acquire(tmp_path, stale_seconds=0.3) as lease:
        assert lease.number == 8


def test_only_one_of_many_gets_a_free_folder(tmp_path: Path) -> None:
    found: list[Lease] = []
    ready = threading.Barrier(8)

    def take() -> None:
        watch = LeaseWatch(tmp_path)
        watch.is_free()
        ready.wait()
        if (lease := Lease._try(tmp_path, watch.claim)) is not None:
            found.append(lease)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    found[0].release()


def taken_over(folder: Path) -> Lease:
    """The lease of a job that was taken from its owner, which has had time to notice."""
    watch = LeaseWatch(folder)
    watch.is_free()
    lease = Lease._try(folder, watch.claim)
    assert lease is not None
    time.sleep(0.5)
    return lease


class AtEvaluation(Callback):
    """Does something at the end of each evaluation, before its row is written."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def on_evaluation_end(self, context: TrainingContext) -> None:
        self.action()


def test_a_job_that_was_taken_over_during_an_evaluation_writes_no_row_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)
    folder = tmp_path / "job"
    stop = AtEvaluation(lambda: taken_over(folder).release())
    with pytest.raises(LeaseLostError):
        run_or_resume(config(), [0], folder, callbacks=[stop])
    [run] = folder.glob("sac__seed*")
    assert not [row for row in metric_rows(run) if "eval/mean_reward" in row]


def test_a_job_that_was_taken_over_stops_without_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: JobResult
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)
    folder = tmp_path / "job"
    others: list[Lease] = []
    stop = At(50, lambda: others.append(taken_over(folder)))
    with pytest.raises(LeaseLostError, match="the other one continues"):
        run_or_resume(config(), SEEDS, folder, callbacks=[stop])
    saved = [path.name for run in runs(folder) for path in (run / "checkpoints").glob("step_*")]
    assert max(saved) == "step_000000040"
    assert read_job_status(folder).state == "running", "the status belongs to the new owner"
    others[0].release()
    run_or_resume(config(), SEEDS, folder)
    assert bits(folder) == bits(reference.folder)


@contextmanager
def other_process_owning(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a lease of a folder; it exits with 3 when it has lost it."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rl_training.checkpoints import lease\n"
        "from rl_training.runtime.job_folder import prepare_job\n"
        "import json\n"
        "lease.BEAT_SECONDS = 0.2\n"
        "folder = Path(sys.argv[1])\n"
        "if sys.argv[2]: prepare_job(json.loads(sys.argv[2]), [0, 1], folder)\n"
        "owned = lease.Lease.acquire(folder)\n"
        "print('owned', flush=True)\n"
        "try:\n"
        "    while True: time.sleep(0.05); owned.check()\n"
        "except lease.LeaseLostError: sys.exit(3)\n"
    )
    given = "" if folder.exists() else json.dumps(config())
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder), given], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
    finally:
        process.kill()
        process.wait()


# The command


@pytest.fixture
def base(work: Path) -> Path:
    values = config(total_timesteps=1500, checkpoint_interval=300, eval_interval=500)
    del values["output_dir"]
    (work / "base.yaml").write_text(json.dumps(values))
    return work / "base.yaml"


def test_the_command_runs_a_job_once(rl: Command, work: Path, base: Path) -> None:
    command = ["run", "--config", "base.yaml", "--folder", "job", "--seeds", "0-1"]
    ended = rl(*command, "--total-timesteps", "120")
    assert ended.code == 0
    assert "finished at step 120 of 120, best " in ended.out
    again = rl(*command, "--total-timesteps", "120")
    assert (again.code, again.out.splitlines()[-1]) == (0, ended.out.splitlines()[-1])
    other = rl(*command, "--total-timesteps", "240")
    assert other.code == 2
    assert "has another job (total_timesteps = 120 there, 240 now)" in other.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "missing.yaml", "--folder", "job"],
        ["--config", "base.yaml", "--folder", "job", "--seeds", "2-0"],
        ["--config", "base.yaml", "--folder", "job", "--set", "tauu=1"],
        ["--config", "base.yaml", "--folder", "base.yaml"],
        ["--config", "base.yaml"],
    ],
)
def test_wrong_input_exits_with_2_and_creates_nothing(
    rl: Command, work: Path, base: Path, arguments: list[str]
) -> None:
    assert rl("run", *arguments).code == 2
    assert tree(work) == {"base.yaml"}


def start(folder: Path, base: Path) -> subprocess.Popen[str]:
    command = ["run", "--config", str(base), "--folder", str(folder), "--seeds", "0-1"]
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def in_training(folder: Path) -> bool:
    return all((run / "metrics.jsonl").exists() for run in runs(folder))


def when_training(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not in_training(folder):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGUSR1, EXIT_PREEMPTED), (signal.SIGINT, 130)],
    ids=["SIGTERM", "SIGUSR1", "SIGINT"],
)
def test_exit_codes_after_signals(work: Path, base: Path, number: int, code: int) -> None:
    process = start(work / "job", base)
    when_training(work / "job", process)
    process.send_signal(number)
    printed = process.communicate()[0]
    assert process.returncode == code, printed
    assert read_job_status(work / "job").state == "preempted"


@pytest.mark.faults
def test_an_error_of_the_run_exits_with_1(work: Path, base: Path) -> None:
    values = json.loads(base.read_text())
    values["algo_kwargs"] |= {"learning_rate": 1e30}
    base.write_text(json.dumps(values))
    process = start(work / "job", base)
    printed = process.communicate()[0]
    assert process.returncode == 1, printed
    status = read_job_status(work / "job")
    assert status.state == "failed"
    assert status.message


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(3))
def test_random_signals_and_kills_change_no_bits(work: Path, base: Path, seed: int) -> None:
    chance = random.Random(seed)
    run_or_resume(str(base), SEEDS, work / "alone")
    deadline = time.monotonic() + 400
    attempts = 0
    while True:
        assert time.monotonic() < deadline
        process = start(work / "job", base)
        attempts += 1
        if attempts <= 4:
            when_training_or_done(work / "job", process)
            time.sleep(chance.uniform(0.0, 1.5))
            number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL, signal.SIGKILL])
            process.send_signal(number)
        printed = process.communicate()[0]
        if process.returncode == 0:
            break
        assert process.returncode in (EXIT_PREEMPTED, -signal.SIGKILL), printed
    assert bits(work / "job", 1500) == bits(work / "alone", 1500)


def when_training_or_done(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a process owns a job, or has ended."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            status = read_job_status(folder)
        except CheckpointError:
            status = None
        if status is not None and status.process == process.pid and status.state == "running":
            return
        time.sleep(0.05)


@pytest.mark.faults
def test_a_paused_owner_loses_its_job_and_saves_nothing_more(work: Path, base: Path) -> None:
    """A process is paused for longer than the limit, as on a machine that is suspended."""
    run_or_resume(str(base), SEEDS, work / "alone")
    first = start(work / "job", base)
    when_training(work / "job", first)
    first.send_signal(signal.SIGSTOP)
    try:
        # Longer than the pause after which the owner asks whether it still is one.
        Lease.acquire(work / "job", stale_seconds=2 * BEAT_SECONDS + 1).release()
        saved = checkpoints(work / "job")
        # On the same machine, the paused process also has the locks of its runs.
        with pytest.raises(RunLockedError, match=f"process {first.pid}"):
            run_or_resume(str(base), SEEDS, work / "job")
        assert read_job_status(work / "job").state == "preempted"
    finally:
        first.send_signal(signal.SIGCONT)
    printed = first.communicate(timeout=120)[0]
    assert first.returncode == 1, printed
    assert "was taken over by another process" in printed
    assert checkpoints(work / "job") == saved
    assert read_job_status(work / "job").state == "preempted"
    run_or_resume(str(base), SEEDS, work / "job")
    assert bits(work / "job", 1500) == bits(work / "alone", 1500)


def checkpoints(folder: Path) -> set[Path]:
    return set(folder.glob("*/checkpoints/step_*"))
