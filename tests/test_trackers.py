"""Experiment trackers: they get every row once, and never stop or slow a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from helpers import StopAt, hashes, metric_rows

from rl_training import Callback, TrainingInterrupted, resume_training, train
from rl_training.callbacks import TrainingContext
from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.reporting import tracker_process, tracker_queue, trackers
from rl_training.types import TrainResult

STUB = """
import json, os, time

MODE = os.environ.get("STUB_MODE", "")
attempts = 0

def note(**values):
    with open(os.environ["STUB_LOG"], "a") as file:
        file.write(json.dumps({**values, "pid": os.getpid()}) + "\\n")

class Settings:
    model_fields = {"host": 0}
    def __init__(self, **values):
        assert values == {"host": ""}

class Run:
    def __init__(self, id):
        self.id, self.summary = id, self
    def define_metric(self, name, step_metric=None):
        pass
    def log(self, values):
        if MODE == "die":
            os._exit(3)
        note(event="log", id=self.id, values=values)
    def update(self, values):
        note(event="summary", id=self.id, values=values)
    def finish(self, exit_code=0):
        note(event="finish", id=self.id, code=exit_code)

def init(id, settings, **options):
    global attempts
    attempts += 1
    if MODE == "refuse" or (MODE == "recover" and attempts < 3):
        raise ConnectionError("no route to host")
    note(event="init", id=id, options=options)
    print("this is not an answer")
    if MODE == "hang":
        time.sleep(1000)
    return Run(id)
"""


class Stub:
    """A stand-in for the client of W&B, which writes down what it is called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "wandb.py").write_text(STUB)
        self._log, self._monkeypatch = folder / "log.jsonl", monkeypatch
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("STUB_LOG", str(self._log))

    def behave(self, mode: str) -> None:
        self._monkeypatch.setenv("STUB_MODE", mode)

    def events(self, kind: str) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        found = map(json.loads, self._log.read_text().splitlines())
        return [each for each in found if each["event"] == kind]

    @property
    def rows(self) -> list[dict[str, float]]:
        return [each["values"] for each in self.events("log")]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    monkeypatch.setattr(trackers, "check_trackers", lambda config: None)
    monkeypatch.setattr(tracker_queue, "RETRY_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(tracker_queue, "LAST_DELAY", 0.05)
    return Stub(tmp_path / "stub", monkeypatch)


class LogSquares(Callback):
    def on_collect_end(self, context: TrainingContext) -> None:
        context.log("custom/square", context.global_step**2)


def tracked(folder: Path, **changes: Any) -> dict[str, Any]:
    return tiny(folder, **{"trackers": ["wandb"], "log_interval": 20, **changes})


def train_one(config: dict[str, Any], **options: Any) -> TrainResult:
    result = train(config, **options)
    assert isinstance(result, TrainResult)
    return result


def expected_rows(run_dir: Path) -> list[dict[str, float]]:
    rows = metric_rows(run_dir, timed=True)
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def steps_of(rows: list[dict[str, float]]) -> list[float]:
    return [row["step"] for row in rows]


def without_step(rows: list[dict[str, float]], step: int) -> list[float]:
    return [each for each in steps_of(rows) if each != step]


def is_running(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_tracker_gets_every_row_and_the_result(stub: Stub, tmp_path: Path) -> None:
    config = tracked(tmp_path / "runs", tracker_project="mine", eval_interval=40)
    config["env_kwargs"] = {"g": 9.0}
    result = train_one(config, callbacks=[LogSquares()])
    assert stub.rows == expected_rows(result.run_dir)
    assert [row["custom/square"] for row in stub.rows if row["step"] == 60] == [60**2]
    (started,) = stub.events("init")
    options = started["options"]
    assert (options["project"], options["resume"]) == ("mine", "allow")
    assert options["name"] == result.run_dir.name
    assert options["config"]["algo_kwargs"]["batch_size"] == 16
    assert str(tmp_path) not in json.dumps(started)
    (summary,) = stub.events("summary")
    assert summary["values"]["final/eval_return_mean"] == result.metrics["eval_return_mean"]
    assert summary["values"]["status"] == "total_timesteps"
    assert [each["code"] for each in stub.events("finish")] == [0]


def test_trackers_change_nothing_else_in_a_run(stub: Stub, tmp_path: Path) -> None:
    plain = train_one(tiny(tmp_path / "plain", log_interval=20))
    followed = train_one(tracked(tmp_path / "followed"))
    assert metric_rows(followed.run_dir) == metric_rows(plain.run_dir)
    names = ("model.safetensors", "learner.safetensors")
    ours, theirs = hashes(followed.checkpoint_path), hashes(plain.checkpoint_path)
    assert [ours[name] for name in names] == [theirs[name] for name in names]


def test_a_resumed_run_continues_without_sending_a_row_twice(stub: Stub, tmp_path: Path) -> None:
    config = tracked(tmp_path / "runs", checkpoint_interval=40)
    result = train_one(config, callbacks=[StopAt(90)])
    before = stub.rows
    earlier = sorted((result.run_dir / "checkpoints").glob("step_*"))[0]
    assert int(earlier.name[5:]) < 90  # as after a crash: rows were sent after this checkpoint
    resumed = resume_training(earlier)
    assert stub.rows[: len(before)] == before
    assert before[-1]["step"] == 90  # the evaluation at which the run had stopped
    assert without_step(stub.rows, 90) == steps_of(expected_rows(resumed.run_dir))
    resume_training(resumed.run_dir, total_timesteps=160)
    assert without_step(stub.rows, 90)[-2:] == [140, 160, 160][-2:]
    assert len({each["id"] for each in stub.events("init")}) == 1
    assert len(stub.events("init")) == 3


def test_the_runs_of_several_seeds_form_a_group(stub: Stub, tmp_path: Path) -> None:
    results = train(tracked(tmp_path / "runs", seeds=[0, 1]))
    assert isinstance(results, list)
    started = stub.events("init")
    assert {each["options"]["name"] for each in started} == {each.run_dir.name for each in results}
    assert len({each["options"]["group"] for each in started}) == 1
    assert len({each["id"] for each in started}) == 2
    assert len({each["pid"] for each in started}) == 1  # they share a process
    for each, result in zip(started, results, strict=True):
        own = [event["values"] for event in stub.events("log") if event["id"] == each["id"]]
        assert own == expected_rows(result.run_dir)
    other = train_one(tracked(tmp_path / "other", seed=7))
    assert stub.events("init")[-1]["options"]["group"] == started[0]["options"]["group"]
    assert stub.events("init")[-1]["options"]["name"] == other.run_dir.name


# What goes wrong


def test_an_unreachable_server_is_one_warning(stub: Stub, tmp_path: Path) -> None:
    stub.behave("refuse")
    with pytest.warns(UserWarning, match="wandb") as caught:
        result = train_one(tracked(tmp_path / "runs"))
    messages = [str(each.message) for each in caught if "wandb" in str(each.message)]
    assert len(messages) == 2
    assert "ConnectionError: no route to host; training continues" in messages[0]
    number = len(expected_rows(result.run_dir))
    assert messages[1] == f"wandb: {number} rows were not sent; metrics.jsonl has all rows"
    assert result.stop_reason == "total_timesteps"


def test_rows_wait_for_a_server_that_comes_back(stub: Stub, tmp_path: Path) -> None:
    stub.behave("recover")
    with pytest.warns(UserWarning, match="no route to host"):
        result = train_one(tracked(tmp_path / "runs"))
    assert stub.rows == expected_rows(result.run_dir)


def test_a_server_that_never_answers_ends_with_the_run(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1.0)
    stub.behave("hang")
    began = time.monotonic()
    with pytest.warns(UserWarning, match="did not answer in time|rows were not sent"):
        train_one(tracked(tmp_path / "runs"))
    assert time.monotonic() - began < 20
    (started,) = stub.events("init")
    assert not is_running(started["pid"])


@pytest.mark.thorough
def test_a_signal_is_not_delayed_by_a_server_that_never_answers(stub: Stub, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 100:
                self.at = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)

    stub.behave("hang")
    stop = Stop()
    with pytest.warns(UserWarning, match="not sent"), pytest.raises(TrainingInterrupted):
        train(tracked(tmp_path / "runs"), callbacks=[stop])
    assert time.monotonic() - stop.at < 8  # of the ten seconds that clusters give


def test_a_client_that_crashes_does_not_end_the_run(stub: Stub, tmp_path: Path) -> None:
    stub.behave("die")
    with pytest.warns(UserWarning, match="its process ended; training continues, and nothing"):
        result = train_one(tracked(tmp_path / "runs"))
    assert result.stop_reason == "total_timesteps"


def test_the_queue_has_a_limit(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_queue, "MAX_WAITING_ROWS", 3)
    stub.behave("refuse")
    process = tracker_queue.TrackerProcess("wandb")
    process.open("run", {"project": None}, lambda tracker, mark: None)
    for number in range(10):
        process.log("run", (number, 1), [number, 0.0, {}])
    assert len([each for each in process._waiting if each.kind == "log"]) <= 3
    process.start_closing()
    process.close(time.monotonic() + 10)
    assert process.unsent() == 10


def test_a_run_that_was_killed_is_finished(stub: Stub, tmp_path: Path) -> None:
    run = {"id": "a" * 12, "name": "n", "group": "g", "config": {}, "project": "p"}
    requests = [
        {"kind": "open", "arguments": {"key": "k", "run": {**run, "default_project": "d"}}},
        {"kind": "log", "arguments": {"key": "k", "rows": [[5, 0.0, {"x": 1.0}]]}},
    ]
    done = subprocess.run(  # its standard input ends, as if the run's process had died
        [sys.executable, "-P", tracker_process.__file__, "wandb"],
        input="".join(json.dumps(each) + "\n" for each in requests),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "{}\n{}\n"
    assert stub.rows == [{"x": 1.0, "step": 5}]
    assert stub.events("summary")[0]["values"] == {"status": "interrupted"}
    assert len(stub.events("finish")) == 1


def test_a_missing_package_is_named_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    expected = r"trackers: trackio needs the package trackio; .*'rl-training\[trackio\]'"
    with pytest.raises(UserError, match=expected):
        train(tracked(tmp_path / "runs", trackers=["trackio"]))
    assert not (tmp_path / "runs").exists()


def test_a_folder_with_the_name_of_a_tracker_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # where W&B keeps its files
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="wandb needs the package wandb"):
        trackers.check_trackers(TrainConfig.model_validate(tracked(tmp_path, trackers=["wandb"])))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trackers": ["tensorboard"]}, "trackers"),
        ({"trackers": ["wandb", "wandb"]}, "must not repeat a tracker"),
        ({"tracker_project": "a/b"}, "tracker_project"),
    ],
)
def test_wrong_settings_are_explained(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tracked(tmp_path / "runs", **settings))


def test_a_damaged_file_gives_a_new_remote_run(stub: Stub, tmp_path: Path) -> None:
    config = tracked(tmp_path / "runs", checkpoint_interval=40)
    result = train_one(config, callbacks=[StopAt(50)])
    saved = result.run_dir / "trackers.json"
    saved.write_text(json.dumps({"id": "../../x", "group": "g", "sent": {}}))
    with pytest.warns(UserWarning, match=r"trackers\.json: is damaged"):
        resume_training(result.run_dir)
    assert len({each["id"] for each in stub.events("init")}) == 2
    saved.unlink()
    saved.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        resume_training(result.run_dir, total_timesteps=140)


def test_paths_are_left_out_of_the_settings() -> None:
    found = trackers._without_paths(
        {
            "path": "data/set.npz",
            "env_kwargs": {"xml_file": "/home/me/model.xml", "frame_skip": 5},
            "dataset": [{"dataset_id": "D4RL/door/human-v2"}],
        }
    )
    assert found == {
        "path": "set.npz",
        "env_kwargs": {"xml_file": "model.xml", "frame_skip": 5},
        "dataset": [{"dataset_id": "D4RL/door/human-v2"}],
    }


# The genuine clients, without a network. They take seconds to import.


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 240.0)


def train_twice(folder: Path, tracker: str) -> TrainResult:
    """Train, stop, and resume from a checkpoint that is older than the last row."""
    config = tracked(folder / "runs", trackers=[tracker], checkpoint_interval=40, run_name="own")
    result = train_one(config, callbacks=[StopAt(90)])
    return resume_training(sorted((result.run_dir / "checkpoints").glob("step_*"))[0])


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Read a file of W&B, which has LevelDB's format: records in blocks, some in several parts."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


@pytest.mark.faults
def test_wandb(patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    result = train_twice(tmp_path, "wandb")
    sent, ids = [], set()
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        data = file.read_bytes()
        host = socket.gethostname().encode()
        # A shorter name occurs by chance among so many random bytes.
        assert len(host) < 6 or host not in data
        assert str(tmp_path).encode() not in data
        for encoded in wandb_records(data):
            record = messages.Record.FromString(encoded)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = {(item.key or item.nested_key[0]): item for item in record.history.item}
                sent.append({"step": json.loads(items["step"].value_json)})
    assert without_step(sent, 90) == steps_of(expected_rows(result.run_dir))
    assert len(ids) == 1


@pytest.mark.faults
def test_mlflow(patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    result = train_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"file://{tmp_path}/store")
    experiment = client.get_experiment_by_name("rl_training")
    (run,) = client.search_runs([experiment.experiment_id])
    rows = [row for row in expected_rows(result.run_dir) if "train/n_updates" in row]
    sent = client.get_metric_history(run.info.run_id, "train/n_updates")
    assert [each.step for each in sent] == [row["step"] for row in rows]
    assert run.info.status == "FINISHED"
    assert run.data.params["algo_kwargs.batch_size"] == "16"
    assert run.data.metrics["final/global_step"] == 120


@pytest.mark.faults
def test_trackio(patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    result = train_twice(tmp_path, "trackio")
    code = (
        "import json, trackio; store = trackio.SQLiteStorage;"
        "(name,) = store.get_runs('rl_training');"
        "print(json.dumps([name, store.get_logs('rl_training', name)]))"
    )
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, logs = json.loads(read.stdout.splitlines()[-1])
    assert name.startswith("own-")
    sent = [row for row in logs if "final/global_step" not in row]
    assert without_step(sent, 90) == steps_of(expected_rows(result.run_dir))


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for connection, _ in kept:
            connection.close()


@pytest.mark.faults
@pytest.mark.parametrize("answers", [False, None], ids=["silent", "refuses"])
def test_a_genuine_client_without_a_server(
    answers: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 5.0)
    with silent_server() as address:
        refusing = "http://127.0.0.1:9"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address if answers is False else refusing)
        began = time.monotonic()
        with pytest.warns(UserWarning, match=r"mlflow: \d+ rows were not sent"):
            result = train_one(tracked(tmp_path / "runs", trackers=["mlflow"]))
    assert result.stop_reason == "total_timesteps"
    assert time.monotonic() - began < 60
