"""The dashboard answers only its own page, follows runs as they change, and stops them safely."""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_up_runs import dashboard_command, evaluation_row, write_run
from starlette.testclient import TestClient

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.errors import UserError
from rl_training.report import live, tail
from rl_training.report.control import ControlRefusedError, Resumed, stop
from rl_training.report.dashboard import make_application, serve
from rl_training.report.data import page_data
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
    return [value for _, value in metrics.evaluations.values() if math.isfinite(value)]


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


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "null", '"x"']
)
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
    assert all(
        second == step / 2 for step, second in zip(series.steps, series.seconds, strict=True)
    )


def test_the_speed_is_that_of_the_last_rows(log: Path) -> None:
    slow = [row(step, **{"time/wall_seconds": step / 10}) for step in range(0, 1000, 10)]
    fast = [
        row(1000 + step, **{"time/wall_seconds": 100 + step / 500}) for step in range(0, 5000, 50)
    ]
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
    assert json.loads(versions.since("").body)["lists"]["a"] == [
        2,
        {"0": None, "1": {"b": [None, 1]}},
    ]


# Answering only the page itself


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def status(path: str = f"/?token={TOKEN}", host: str = "127.0.0.1", **headers: str) -> int:
    client = TestClient(Guard(hello, TOKEN, host, PORT), base_url=ADDRESS)
    return client.get(path, headers=headers).status_code


@pytest.mark.parametrize(
    "path",
    ["/", "/data.json", "/nothing", "/?token=", "/?token=wrong",
     "/?token=right-token&token=right-token",
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
        client = TestClient(Guard(hello, TOKEN, "::", PORT), base_url=ADDRESS)
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
    for number in (victim.pid, busy.pid, os.getpid(), os.getppid(), 1, 0, 2**30, 2**33):
        name_in(lock, number)
        with pytest.raises(ControlRefusedError):
            stop(PlainFolder(tmp_path))
    for text in (
        "",
        "-1",
        "abc",
        f"{holder.pid}",
        f"{holder.pid} x y",
        f"{holder.pid}\n{victim.pid}",
    ):
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


@pytest.mark.faults
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


# The server


class Served:
    """A dashboard of a folder, and the data that a page of it has."""

    def __init__(self, root: Path, *, allow_control: bool = False) -> None:
        guarded = Guard(make_application(root, allow_control=allow_control), TOKEN, "", PORT)
        self.client = TestClient(guarded, base_url=ADDRESS)
        self.client.headers["authorization"] = f"Bearer {TOKEN}"
        self.data: dict[str, Any] = {}
        self.tag = ""

    def poll(self) -> int:
        """Ask for changes as the page does and return the status."""
        answer = self.client.get("/data.json", headers={"if-none-match": self.tag})
        if answer.status_code == 200:
            self.data = applied(self.data, answer.json())
            self.tag = answer.headers["etag"]
        return answer.status_code

    def states(self) -> dict[str, str]:
        """Return the state of each run by name."""
        self.poll()
        return {
            run["name"]: status["state"]
            for run, status in zip(self.data["runs"], self.data["status"], strict=True)
        }

    def control(self, action: str, run: Any, **headers: str) -> tuple[int, Any]:
        own = {"x-rl-training": "control", "origin": ADDRESS, **headers}
        body = {"content": run} if isinstance(run, bytes) else {"json": {"run": run}}
        answer = self.client.post(f"/control/{action}", headers=own, **body)
        return answer.status_code, answer.json() if answer.content[:1] == b"{" else answer.text


@pytest.fixture(autouse=True)
def _refreshed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(live, name, 0.0)
    monkeypatch.setattr(live, "SEARCHING_SHARE", 1e9)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for seed in range(2):
        write_run(folder / f"sac-{seed}", seed=seed, rows=20, evaluations=10)
    return folder


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}


def test_the_page_allows_nothing_but_itself(root: Path) -> None:
    answer = Served(root).client.get("/")
    policy = answer.headers["content-security-policy"]
    nonce = re.search(r"script-src 'nonce-([\w-]+)';", policy)
    assert nonce is not None
    assert f'<script nonce="{nonce[1]}">' in answer.text
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "set-cookie" not in answer.headers
    assert TOKEN not in answer.text
    assert Served(root).client.get("/").text.count(nonce[1]) == 0  # a new one each time


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/runs/sac-0/config.yaml", "/videos/x.mp4", "/x"]
)
def test_no_path_leads_to_files(root: Path, path: str) -> None:
    answer = Served(root).client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_nothing_is_sent_while_nothing_changes_and_nothing_is_written(root: Path) -> None:
    before = snapshot(root)
    served = Served(root)
    assert [served.poll() for _ in range(3)] == [200, 304, 304]
    assert len(served.data["groups"]) == 1
    assert [run["seed"] for run in served.data["runs"]] == [0, 1]
    assert snapshot(root) == before


def test_the_data_are_those_of_the_report(root: Path) -> None:
    served = Served(root)
    served.poll()
    reported = page_data([root], resamples=live.RESAMPLES)
    assert served.data["groups"][0]["score"] == reported["groups"][0]["score"]
    assert served.data["groups"][0]["curve"] == reported["groups"][0]["curve"]
    assert served.data["groups"][0]["health"] == reported["groups"][0]["health"]
    assert served.data["phases"][0]["seconds"] == reported["groups"][0]["phases"]["seconds"]
    shown, whole = served.data["runs"][0] | served.data["status"][0], reported["runs"][0]
    assert {key: shown[key] for key in whole if key != "speed"} == {
        key: value for key, value in whole.items() if key != "speed"
    }


def test_runs_are_followed_as_they_train_stop_and_disappear(root: Path) -> None:
    served = Served(root)
    assert served.states() == {"sac-0": "finished", "sac-1": "finished"}
    new = write_run(
        root / "deeper" / "sac-2", seed=2, steps=500_000, total=1_000_000, finished=False
    )
    assert served.states()["sac-2"] == "stopped"
    with (new / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert served.states()["sac-2"] == "running"
        with (new / "metrics.jsonl").open("a") as file:
            file.write(evaluation_row(600_000, 1234.5))
        served.poll()
        (place,) = [i for i, run in enumerate(served.data["runs"]) if run["name"] == "sac-2"]
        assert served.data["runs"][place]["last"] == {"step": 600_000, "value": 1234.5}
        status = served.data["status"][place]
        assert (status["step"], status["total"]) == (600_000, 1_000_000)
        assert status["speed"] == pytest.approx(500, rel=0.01)
        assert status["seconds_left"] == pytest.approx(800, rel=0.01)
    assert served.states()["sac-2"] == "stopped"  # killed: the lock is gone
    shutil.rmtree(new)
    assert list(served.states()) == ["sac-0", "sac-1"]
    shutil.rmtree(root)
    assert served.states() == {}


def test_a_run_that_has_just_begun_is_no_problem(root: Path) -> None:
    new = write_run(root / "new", seed=2, evaluations=0, finished=False)
    served = Served(root)
    with (new / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert served.states()["new"] == "running"
        assert served.data["notes"] == []
    assert served.states()["new"] == "stopped"
    assert served.data["notes"] == ["new: has no evaluations"]


def test_a_running_run_can_be_locked_while_it_is_watched(root: Path) -> None:
    (root / "sac-0" / ".lock").touch()
    served = Served(root)
    for _ in range(20):
        served.poll()
        run = RunFolder(root / "sac-0")
        assert run.lock()
        run.unlock()


def test_the_folder_itself_can_be_a_run(root: Path) -> None:
    assert list(Served(root / "sac-0").states()) == ["sac-0"]


def hostile_run(root: Path) -> Path:
    return write_run(root / "hostile", rows=5, evaluations=5)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "fifo": lambda run: _replace(run / "config.yaml", os.mkfifo),
    "link": lambda run: _replace(run / "metadata.json", lambda new: new.symlink_to("/etc/passwd")),
    "lock": lambda run: os.mkfifo(run / ".lock"),
    "checkpoints": lambda run: _replace(run / "checkpoints", lambda path: path.symlink_to("/")),
    "videos": lambda run: (run / "videos").symlink_to("/tmp"),
    "yaml": lambda run: (run / "config.yaml").write_text("&a [*a, *a]\n" * 100),
    "deep": lambda run: (run / "metadata.json").write_text("[" * 100_000),
    "types": lambda run: [(run / "config.yaml").write_text("algo: [1]\nseed: {}\nenv_id: 1e999\n"),
                          shutil.rmtree(run / "checkpoints")],
    "empty": lambda run: [(run / "config.yaml").write_text(""), shutil.rmtree(run / "checkpoints")],
    "huge": lambda run: os.truncate(run / "metrics.jsonl", 2**40),
    "binary": lambda run: (run / "metrics.jsonl").write_bytes(os.urandom(100_000)),
    "numbers": lambda run: (run / "metrics.jsonl").write_text(
        "".join(evaluation(step, value) for step, value in enumerate([1e308, -1e308, 1e308, 0.0]))
    ),
    "rows": lambda run: (run / "metrics.jsonl").write_text(
        '{"step": 1, "eval/mean_reward": 1e400, "health/<b>": NaN, "time/fps": -1e308}\n' * 9
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of numbers near the largest one
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hostile_folder_does_not_hide_the_others(root: Path, damage: str) -> None:
    DAMAGES[damage](hostile_run(root))
    served = Served(root)
    states = served.states()
    assert (states["sac-0"], states["sac-1"]) == ("finished", "finished")
    assert served.poll() == 304
    assert "root:" not in json.dumps(served.data)


def test_hostile_names_reach_the_page_as_harmless_text(root: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "a\u202eb", "a\x1b[2Jb\nc", os.fsdecode(b"a\xff\xfe")]
    for number, name in enumerate(names):
        write_run(root / name, seed=10 + number, rows=5, evaluations=5)
    served = Served(root)
    shown = set(served.states())
    assert len(shown) == 6
    assert all(name.isprintable() for name in shown)
    assert names[0] in shown  # as text: the browser tests show that it does nothing
    assert "onerror" not in served.client.get("/").text


def test_a_folder_that_takes_the_place_of_another_is_another_run(root: Path) -> None:
    served = Served(root, allow_control=True)
    served.poll()
    key = served.data["status"][0]["key"]
    shutil.rmtree(root / "sac-0")
    assert served.control("stop", key)[0] == 404
    write_run(root / "sac-0", seed=5)
    assert served.control("resume", key)[0] == 404
    served.poll()
    assert served.data["status"][0]["key"] != key


def test_videos_are_served_in_parts_and_links_are_not(root: Path) -> None:
    videos = root / "sac-0" / "videos"
    videos.mkdir()
    (videos / "step_000001000_best.mp4").write_bytes(bytes(range(100)))
    (videos / "step_000001000_worst.mp4").symlink_to("/etc/passwd")
    (videos / "other.txt").write_text("no")
    served = Served(root)
    served.poll()
    (video,) = served.data["runs"][0]["videos"]
    answer = served.client.get(f"/{video['href']}")
    assert (answer.status_code, answer.content) == (200, bytes(range(100)))
    part = served.client.get(f"/{video['href']}", headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, bytes(range(10, 20)))
    assert part.headers["content-range"] == "bytes 10-19/100"
    _replace(videos / "step_000001000_best.mp4", lambda path: path.symlink_to("/etc/passwd"))
    assert served.client.get(f"/{video['href']}").status_code == 404


def test_control_is_off_unless_it_was_allowed(root: Path) -> None:
    served = Served(root)
    served.poll()
    assert served.data["control"] is False
    assert served.control("stop", served.data["status"][0]["key"])[0] == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"x-rl-training": ""},
        {"origin": "http://attacker.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1234"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_control_refuses_what_another_site_could_send(root: Path, headers: dict[str, str]) -> None:
    served = Served(root, allow_control=True)
    served.poll()
    key = served.data["status"][0]["key"]
    assert served.control("stop", key)[0] == 409  # it is not running
    assert served.control("stop", key, **headers)[0] == 403


def test_control_needs_the_token_in_a_header_and_a_post(root: Path) -> None:
    served = Served(root, allow_control=True)
    served.poll()
    key = served.data["status"][0]["key"]
    assert served.control("stop", key, authorization="Bearer wrong")[0] == 403
    assert served.client.get("/control/stop").status_code == 405
    del served.client.headers["authorization"]
    own = {"x-rl-training": "control", "origin": ADDRESS}
    answer = served.client.post(f"/control/stop?token={TOKEN}", json={"run": key}, headers=own)
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"run": 1}', b"[" * 1000, b'{"run": "' + b"a" * 5000 + b'"}']
)
def test_control_refuses_other_bodies(root: Path, body: bytes) -> None:
    served = Served(root, allow_control=True)
    assert served.control("stop", body, **{"content-type": "application/json"})[0] == 400


@pytest.mark.parametrize("run", ["", "../sac-0", "sac-0", "/etc", "0"])
def test_a_run_is_named_by_the_server_alone(root: Path, run: str) -> None:
    served = Served(root, allow_control=True)
    served.poll()
    assert served.control("stop", run)[0] == 404
    assert served.control("resume", run)[0] == 404


def test_a_run_is_stopped_by_its_button(root: Path, processes: Any) -> None:
    (root / "sac-0" / ".lock").touch()
    holder = processes(HOLD, root / "sac-0" / ".lock")
    name_in(root / "sac-0" / ".lock", holder.pid)
    served = Served(root, allow_control=True)
    assert served.states()["sac-0"] == "running"
    key = served.data["status"][0]["key"]
    assert served.control("resume", key)[0] == 409
    assert served.control("stop", key) == (
        200,
        {"done": f"process {holder.pid} was asked to save and stop"},
    )
    assert holder.wait(timeout=10) == -signal.SIGTERM
    assert served.states()["sac-0"] == "finished"


def test_why_a_run_could_not_be_resumed_is_shown(root: Path) -> None:
    problems: dict[str, str] = {}
    runs = live.LiveRuns(root, problems=lambda: problems)
    first = json.loads(runs.changes("").body)
    problems[first["lists"]["status"][1]["1"]["key"]] = "could not be resumed: add --import mine"
    changes = json.loads(runs.changes(first["version"]).body)
    assert (
        changes["lists"]["status"][1]["1"]["problem"] == "could not be resumed: add --import mine"
    )
    assert changes["lists"]["runs"] == [2, {}]  # no curve is sent again


@pytest.mark.faults
def test_a_real_run_is_stopped_and_resumed_by_its_buttons(tmp_path: Path) -> None:
    options = [
        "--set",
        f"output_dir={tmp_path}",
        "--set",
        "run_name=real",
        "--set",
        "log_interval=50",
    ]
    train = [sys.executable, "-m", "rl_training", "train", "--config", "sac/pendulum"]
    with subprocess.Popen([*train, *options, "--total-timesteps", "1M"], stdout=-3) as process:
        served = Served(tmp_path, allow_control=True)
        wait_for(
            lambda: served.states().get("real") == "running" and served.data["status"][0]["step"]
        )
        key = served.data["status"][0]["key"]
        assert served.control("stop", key)[0] == 200
        assert process.wait(timeout=60) == 130
    assert served.states() == {"real": "stopped"}
    step = served.data["status"][0]["step"]
    key = served.data["status"][0]["key"]
    assert served.control("resume", key)[0] == 200
    assert served.control("resume", key)[0] == 409
    wait_for(
        lambda: served.states()["real"] == "running" and served.data["status"][0]["step"] > step
    )
    assert served.control("stop", key)[0] == 200
    wait_for(lambda: served.states() == {"real": "stopped"})
    assert served.data["status"][0]["problem"] is None


# The command


def answer_of(address: str, **headers: str) -> int:
    return httpx.get(address, headers=headers, trust_env=False).status_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal(root: Path, number: signal.Signals) -> None:
    with dashboard_command(root, "--port", "0") as (process, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{40,}", address)
        assert answer_of(address) == 200
        assert answer_of(address.partition("?")[0]) == 403
        assert answer_of(address, Host="attacker.example") == 403
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert output.splitlines()[-1] == "dashboard stopped"
        assert "Traceback" not in output


def test_a_taken_port_is_reported_in_one_line(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: cannot be used .*another port"):
            serve(root, port)


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    with dashboard_command(tmp_path / "runs", "--port", "0") as (process, printed):
        assert process.stdout is not None
        assert "does not exist yet" in process.stdout.readline()
        page, _, token = printed.partition("/?token=")
        headers = {"authorization": f"Bearer {token}"}
        ask = functools.partial(httpx.get, f"{page}/data.json", headers=headers, timeout=60)
        assert ask().json()["lists"]["runs"] == [0, {}]
        write_run(tmp_path / "runs" / "first")
        end = time.monotonic() + 60
        while not ask().json()["lists"]["runs"][0]:
            assert time.monotonic() < end
            time.sleep(0.2)


def test_a_file_in_place_of_the_folder_and_a_wrong_host_are_reported(root: Path) -> None:
    (root / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        serve(root / "file", 0)
    with pytest.raises(UserError, match=r"--host \S+: "):
        serve(root, 0, "no..host")  # needs no name server
    with pytest.raises(UserError, match=r"--host 192\.0\.2\.1: is not an address"):
        serve(root, 0, "192.0.2.1")
    with pytest.raises(UserError, match="--port 65536: must be from 0 to 65535"):
        serve(root, 65_536)


@pytest.mark.parametrize(
    ("host", "is_open"), [("0", True), ("::", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_it_says_whether_other_computers_can_reach_it(
    root: Path,
    host: str,
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("needs IPv6")
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    serve(root, 0, host)
    output = capsys.readouterr().out
    assert ("other computers can reach it" in output) == is_open
    assert (f"http://{socket.gethostname()}:" in output) == is_open


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named(
    root: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package {package}.*rl-training\[dashboard\]"):
        serve(root, 0)
