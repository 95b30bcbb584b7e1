"""The dashboard answers only its own page, follows runs as they change, and controls them safely."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rl_training.checkpoints.files import PlainFolder
from rl_training.errors import UserError
from rl_training.report import control, tail
from rl_training.report.control import ControlRefusedError, Resumed, stop
from rl_training.report.guard import Guard
from rl_training.report.tail import MetricsTail, Series
from rl_training.report.versions import VersionedData

TOKEN, PORT = "right-token", 7860
ADDRESS = f"http://127.0.0.1:{PORT}"


def row(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "gradient_steps": step, **values}) + "\n"


def evaluation(step: int, value: Any) -> str:
    return row(step, **{"eval/mean_reward": value, "time/wall_seconds": step / 10})


# Reading metrics as they grow


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def read_all(metrics: MetricsTail) -> list[float]:
    metrics.read()
    return [value for _, value in metrics.evaluations.values()]


def test_only_new_bytes_are_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = os.pread

    def counting(file: int, size: int, offset: int) -> bytes:
        data = pread(file, size, offset)
        read.append(len(data))
        return data

    log.write_text("".join(evaluation(step, step) for step in range(1000)))
    metrics = MetricsTail(PlainFolder(log.parent))
    assert len(read_all(metrics)) == 1000
    monkeypatch.setattr(os, "pread", counting)
    assert not metrics.read()
    assert read == []
    added = evaluation(1000, 5.0)
    with log.open("a") as file:
        file.write(added)
    assert metrics.read()
    assert metrics.evaluations[1000] == (100.0, 5.0)
    assert sum(read) <= len(added) + 512


def test_a_row_counts_once_its_line_is_complete(log: Path) -> None:
    metrics = MetricsTail(PlainFolder(log.parent))
    text = evaluation(1, 1.5)
    log.write_text(text[:20])
    assert read_all(metrics) == []
    log.write_text(text)
    assert read_all(metrics) == [1.5]
    assert metrics.problem is None


@pytest.mark.parametrize("grows_beyond", [False, True])
def test_a_log_that_a_resume_cut_and_wrote_again_is_read_again(
    log: Path, grows_beyond: bool
) -> None:
    log.write_text("".join(evaluation(step, step) for step in range(10)))
    metrics = MetricsTail(PlainFolder(log.parent))
    read_all(metrics)
    kept = log.read_text().splitlines(keepends=True)[:5]
    again = [evaluation(step, -step) for step in range(5, 20 if grows_beyond else 7)]
    with log.open("r+") as file:  # the same inode
        file.truncate(0)
        file.write("".join(kept + again))
    assert read_all(metrics) == [0, 1, 2, 3, 4, *(-step for step in range(5, 5 + len(again)))]


def test_a_log_that_disappears_and_another_in_its_place(log: Path) -> None:
    metrics = MetricsTail(PlainFolder(log.parent))
    assert read_all(metrics) == []
    log.write_text(evaluation(1, 1))
    assert read_all(metrics) == [1]
    log.unlink()
    assert metrics.read()
    assert metrics.evaluations == {}
    log.write_text(evaluation(1, 2))
    assert read_all(metrics) == [2]


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[" * 100_000 + b"\n",
        b'{"step": ' + b"9" * 5_000 + b"}\n",
        b'{"x": "' + b"a" * 10_000_000 + b'"}\n',
        b'{"x": "' + b"a" * 10_000_000,
        b"\0" * 3_000_000,
        b"\n",
    ],
    ids=["text", "deep", "digits", "long", "endless", "zeros", "empty"],
)
def test_a_damaged_line_ends_what_is_shown(log: Path, line: bytes) -> None:
    log.write_bytes(evaluation(1, 1).encode() + line + evaluation(2, 2).encode())
    metrics = MetricsTail(PlainFolder(log.parent))
    for _ in range(20):
        metrics.read()
    assert list(metrics.evaluations) == [1]
    assert "line 2" in str(metrics.problem)
    assert metrics.is_complete


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "null", '"x"'])
def test_values_that_are_not_finite_are_left_out(log: Path, value: str) -> None:
    log.write_text(f'{{"step": 1, "eval/mean_reward": {value}}}\n' + evaluation(2, 2))
    assert read_all(MetricsTail(PlainFolder(log.parent))) == [2]


@pytest.mark.parametrize("step", ["-1", "1.5", "null", "1e400", "true", str(2**60)])
def test_rows_without_a_possible_step_are_left_out(log: Path, step: str) -> None:
    log.write_text(f'{{"step": {step}, "eval/mean_reward": 1}}\n' + evaluation(2, 2))
    assert read_all(MetricsTail(PlainFolder(log.parent))) == [2]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_anything_but_a_file_is_refused(log: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text(evaluation(1, 42))
    if kind == "link":
        log.symlink_to(tmp_path / "secret")
    elif kind == "fifo":
        os.mkfifo(log)
    else:
        log.mkdir()
    metrics = MetricsTail(PlainFolder(tmp_path))
    assert read_all(metrics) == []
    assert "cannot be read" in str(metrics.problem)


def test_the_number_of_metrics_is_limited(log: Path) -> None:
    names = [f"own/{number}" for number in range(1_000)] + ["own/\u202e", "own/" + "x" * 300]
    log.write_text("".join(row(step, **{name: 1.0}) for step, name in enumerate(names)))
    metrics = MetricsTail(PlainFolder(log.parent))
    metrics.read()
    assert len(metrics.series) == tail.MAX_TAGS
    assert not any("\u202e" in name for name in metrics.last)


def test_thinning_keeps_peaks_and_order() -> None:
    series = Series()
    for step in range(100_000):
        series.add(step, step / 2, {4_321: 99.0, 77_777: -99.0}.get(step, step % 7))
    points = dict(zip(series.steps, series.values, strict=True))
    assert len(points) <= tail.POINTS
    assert len(points) >= tail.POINTS / 4
    assert (points[4_321], points[77_777]) == (99.0, -99.0)
    assert list(series.steps) == sorted(series.steps)
    assert series.steps[-1] == 99_999
    assert all(second == step / 2 for step, second in zip(series.steps, series.seconds, strict=True))


def test_the_speed_is_that_of_the_last_rows(log: Path) -> None:
    slow = [row(step, **{"time/wall_seconds": step / 10}) for step in range(0, 1000, 10)]
    fast = [row(1000 + step, **{"time/wall_seconds": 100 + step / 500}) for step in range(0, 5000, 50)]
    log.write_text("".join(slow + fast))
    metrics = MetricsTail(PlainFolder(log.parent))
    metrics.read()
    assert metrics.speed() == pytest.approx(500)
    log.write_text(row(5, **{"time/fps": 42.0}))
    metrics.read()
    assert metrics.speed() == 42.0


# Sending only what changed


def applied(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply changes as the page does."""
    data = {} if changes["complete"] else dict(data)
    for key in changes["removed"]:
        data.pop(key, None)
    data |= changes["values"]
    for key, (length, items) in changes["lists"].items():
        known = list(data.get(key, []))[:length]
        known += [None] * (length - len(known))
        for index, item in items.items():
            known[int(index)] = item
        data[key] = known
    return data


def test_changes_lead_from_any_version_to_the_last_one() -> None:
    versions = VersionedData()
    steps: list[dict[str, Any]] = [
        {"title": "a", "runs": [{"id": 1}, {"id": 2}], "x": 1},
        {"title": "a", "runs": [{"id": 1}, {"id": 2, "new": True}, {"id": 3}], "x": 1},
        {"title": "b", "runs": [{"id": 3}]},
        {"title": "b", "runs": [{"id": 3}, {"id": 2}], "x": 2},
    ]
    known = []
    for data in steps:
        versions.update(data)
        known.append((versions.version, data))
    for version, data in [("", {}), ("other-1", {}), *known]:
        changes = json.loads(versions.since(version).body)
        assert applied(data, changes) == steps[-1]
    assert len({version for version, _ in known}) == 4


def test_equal_data_keep_the_version_and_new_data_are_sent_alone() -> None:
    versions = VersionedData()
    versions.update({"runs": [{"points": list(range(1000))} for _ in range(10)]})
    first = versions.version
    versions.update({"runs": [{"points": list(range(1000))} for _ in range(10)]})
    assert versions.version == first
    versions.update({"runs": [{"points": list(range(1000 + (run == 3)))} for run in range(10)]})
    assert len(versions.since(first).body) < len(versions.since("").body) / 8


def test_values_that_json_lacks_become_null() -> None:
    versions = VersionedData()
    versions.update({"a": [float("nan"), {"b": (float("inf"), 1)}]})
    assert json.loads(versions.since("").body)["lists"]["a"] == [2, {"0": None, "1": {"b": [None, 1]}}]


# Answering only the page itself


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def status(path: str = f"/?token={TOKEN}", host: str = "127.0.0.1", **headers: str) -> int:
    client = TestClient(Guard(hello, TOKEN, host, PORT), base_url=ADDRESS)
    return client.get(path, headers=headers).status_code


@pytest.mark.parametrize(
    "path",
    ["/", "/data.json", "/nothing", "/?token=", "/?token=wrong", "/?token=right-token&token=right-token",
     "/?token=right-token%00", "/?token=%ff", "/?token[]=right-token", "/?TOKEN=right-token",
     "/" + "?a=1" + "&a=1" * 100 + f"&token={TOKEN}"],
)  # fmt: skip
def test_without_the_token_everything_is_forbidden(path: str) -> None:
    assert status(path) == 403
    assert status() == 200


def test_the_token_can_be_a_header() -> None:
    assert status("/", authorization=f"Bearer {TOKEN}") == 200
    assert status("/", authorization="Bearer wrong") == 403
    assert status(authorization="Bearer wrong") == 403


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1:7860", 200),
        ("localhost:7860", 200),
        ("LOCALHOST:7860", 200),
        ("[::1]:7860", 200),
        ("127.0.0.1", 403),
        ("127.0.0.1:7861", 403),
        ("attacker.example:7860", 403),
        ("127.0.0.1.attacker.example:7860", 403),
        ("localhost:7860@attacker.example", 403),
        ("192.168.1.5:7860", 403),
        ("localhost:7860, attacker.example", 403),
    ],
)
def test_the_host_must_be_this_server(host: str, answer: int) -> None:
    assert status(**{"Host": host}) == answer


def test_two_hosts_are_refused() -> None:
    client = TestClient(Guard(hello, TOKEN, "127.0.0.1", PORT), base_url=ADDRESS)
    hosts = [("host", "127.0.0.1:7860"), ("host", "attacker.example")]
    assert client.get(f"/?token={TOKEN}", headers=hosts).status_code == 403


def test_on_all_addresses_names_of_others_are_still_refused() -> None:
    def answer(host: str) -> int:
        client = TestClient(Guard(hello, TOKEN, "0.0.0.0", PORT), base_url=ADDRESS)
        return client.get(f"/?token={TOKEN}", headers={"host": host}).status_code

    assert answer("192.168.1.5:7860") == 200
    assert answer(f"{socket.gethostname()}:7860") == 200
    assert answer("attacker.example:7860") == 403


# Stopping and resuming

HOLD = """
import fcntl, os, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def processes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python programs and end them after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / ".lock"
    file.touch()
    return file


def name_in(lock: Path, process: int, host: str | None = None) -> None:
    lock.write_text(f"{process} {platform.node() if host is None else host}")


def test_the_holder_of_the_lock_is_asked_to_stop(lock: Path, processes: Any) -> None:
    holder = processes(HOLD, lock)
    name_in(lock, holder.pid)
    assert stop(PlainFolder(lock.parent)) == holder.pid
    assert holder.wait(timeout=10) == -signal.SIGTERM
    with pytest.raises(ControlRefusedError, match="no process is training"):
        stop(PlainFolder(lock.parent))


def test_a_process_that_does_not_hold_the_lock_is_never_signaled(
    lock: Path, tmp_path: Path, processes: Any
) -> None:
    """A stranger can write any number into the file, and hold the lock in another process."""
    sleeper = "import sys, time; f = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    victim, holder = processes(sleeper, lock), processes(HOLD, lock)
    other = tmp_path / "other"
    other.touch()
    busy = processes(HOLD, other)  # holds a lock, but not this one
    for number in (victim.pid, busy.pid, os.getpid(), os.getppid(), 1, 0, 2**30):
        name_in(lock, number)
        with pytest.raises(ControlRefusedError):
            stop(PlainFolder(tmp_path))
    for text in ("", "-1", "abc", f"{holder.pid}", f"{holder.pid} x y", f"{holder.pid}\n{victim.pid}"):
        lock.write_text(text)
        with pytest.raises(ControlRefusedError):
            stop(PlainFolder(tmp_path))
    name_in(lock, holder.pid, "another-machine")
    with pytest.raises(ControlRefusedError, match="another machine"):
        stop(PlainFolder(tmp_path))
    time.sleep(0.1)
    assert [process.poll() for process in (victim, holder, busy)] == [None] * 3


def test_a_named_process_is_not_signaled_without_a_lock(lock: Path, processes: Any) -> None:
    sleeper = processes("import time; print(flush=True); time.sleep(60)")
    name_in(lock, sleeper.pid)
    with pytest.raises(ControlRefusedError, match="no process is training"):
        stop(PlainFolder(lock.parent))
    assert sleeper.poll() is None


@pytest.mark.parametrize("kind", ["missing", "link", "fifo"])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, kind: str, processes: Any) -> None:
    real = tmp_path / "real"
    real.touch()
    holder = processes(HOLD, real)
    name_in(real, holder.pid)
    if kind == "link":
        (tmp_path / ".lock").symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ControlRefusedError):
        stop(PlainFolder(tmp_path))
    assert holder.poll() is None


def test_a_process_of_another_user_is_refused(
    lock: Path, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = processes(HOLD, lock)
    name_in(lock, holder.pid)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ControlRefusedError, match="another user"):
        stop(PlainFolder(lock.parent))
    assert holder.poll() is None


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def test_a_run_is_resumed_without_modules_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is that of the package, and no module is taken from the current folder."""
    (tmp_path / "config.yaml").write_text("algo: sac\n")
    (tmp_path / "typer.py").write_text("open('imported', 'w')")
    (tmp_path / "rl_training").mkdir()
    (tmp_path / "rl_training/__main__.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    resumed = Resumed()
    resumed.start("id", PlainFolder(tmp_path))
    with pytest.raises(ControlRefusedError, match="already"):
        resumed.start("id", PlainFolder(tmp_path))
    message = wait_for(resumed.problems)["id"]
    assert "could not be resumed" in message
    assert "checkpoint" in message
    assert not (tmp_path / "imported").exists()
