"""The time of a run in its rows: how long it took, over all processes, and on what it was spent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import StopAt, metric_rows, tiny
from test_callback_context import replace_file

import rl_training
from rl_training.callbacks import Stopwatch
from rl_training.errors import CheckpointError
from rl_training.types import TrainResult

WALL = "time/wall_seconds"
SHARES = ("environments", "acting", "sampling", "update", "evaluation", "saving")


def train(tmp_path: Path, **changes: Any) -> TrainResult:
    callbacks = changes.pop("callbacks", ())
    config = tiny(tmp_path, eval_interval=50, checkpoint_interval=50, **changes)
    return rl_training.train(config, callbacks=callbacks, progress=False)


def wall_seconds(run_dir: Path) -> list[float]:
    return [row[WALL] for row in metric_rows(run_dir, timed=True)]


def test_every_row_has_the_time_so_far(tmp_path: Path) -> None:
    began = time.perf_counter()
    run = train(tmp_path)
    took = time.perf_counter() - began
    rows = metric_rows(run.run_dir, timed=True)
    assert [("eval/mean_reward" in row, row["step"]) for row in rows] == [
        (False, 40),
        (True, 50),
        (False, 80),
        (True, 100),
        (False, 120),
        (True, 120),
    ]
    seconds = wall_seconds(run.run_dir)
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] < took


def test_the_shares_add_up_to_at_most_the_time(tmp_path: Path) -> None:
    *_, row, _ = metric_rows(train(tmp_path).run_dir, timed=True)
    shares = [row[f"time/{name}_seconds"] for name in SHARES]
    assert min(shares) > 0
    assert 0.5 * row[WALL] < sum(shares) < row[WALL]


def test_an_offline_run_has_no_share_of_environments(tmp_path: Path) -> None:
    run = rl_training.train(
        {
            **tiny(tmp_path, algo="bc", log_interval=10, total_timesteps=20),
            "algo_kwargs": {"hidden_sizes": [16], "batch_size": 16},
            "dataset": {"kind": "random", "size": 100, "seed": 0},
        },
        progress=False,
    )
    row = metric_rows(run.run_dir, timed=True)[0]
    assert {"time/sampling_seconds", "time/update_seconds"} < row.keys()
    assert not {"time/environments_seconds", "time/acting_seconds"} & row.keys()


def test_a_resumed_run_counts_on_without_the_time_in_between(tmp_path: Path) -> None:
    stopped = train(tmp_path, callbacks=[StopAt(60)])
    # The evaluation at the end of the first process is made again where the run ends.
    *before, _ = metric_rows(stopped.run_dir, timed=True)
    saved = saved_seconds(stopped)["wall"]
    time.sleep(0.3)
    began = time.perf_counter()
    rl_training.resume_training(stopped.run_dir, progress=False)
    took = time.perf_counter() - began
    rows = metric_rows(stopped.run_dir, timed=True)
    assert rows[: len(before)] == before
    seconds = wall_seconds(stopped.run_dir)
    assert seconds == sorted(seconds)
    # The rest of the first process, after its last row, is saved too.
    assert seconds[-1] < saved + took
    logged = [row for row in rows if "time/update_seconds" in row]
    assert logged[-1]["time/update_seconds"] > logged[0]["time/update_seconds"]


def saved_seconds(run: TrainResult) -> dict[str, float]:
    state = json.loads((run.checkpoint_path / "state.json").read_text())
    found: dict[str, float] = state["callbacks"]["MetricsLog"]["seconds"]
    return found


def test_a_run_of_an_older_version_counts_on_from_its_rows(tmp_path: Path) -> None:
    """Their rows have the time since each process began."""
    stopped = train(tmp_path, callbacks=[StopAt(90)])
    path = stopped.checkpoint_path / "state.json"
    state = json.loads(path.read_text())
    log = state["callbacks"]["MetricsLog"]
    del log["seconds"]
    old = metric_rows(stopped.run_dir)
    for row, elapsed in zip(old, (100.0, None, 20.0), strict=False):
        row |= {} if elapsed is None else {"time/time_elapsed": elapsed}
    lines = "".join(json.dumps(row) + "\n" for row in old)
    log["offset"] = len(lines)
    replace_file(path, json.dumps(state).encode())
    (stopped.run_dir / "metrics.jsonl").write_text(lines)
    rl_training.resume_training(stopped.run_dir, progress=False)
    rows = metric_rows(stopped.run_dir, timed=True)
    assert rows[: len(old)] == old
    assert 120 < rows[len(old)][WALL] < rows[-1][WALL] < 150


@pytest.mark.parametrize(
    "forged", [{"wall": -1}, {"wall": "1"}, {"wall": 1e300}, {"wall": None}, {"other": 1.0}, [1]]
)
def test_forged_seconds_are_refused(run_copy: Path, forged: object) -> None:
    *_, path = sorted(run_copy.glob("checkpoints/step_*/state.json"))
    state = json.loads(path.read_text())
    state["callbacks"]["MetricsLog"]["seconds"] = forged
    replace_file(path, json.dumps(state).encode())
    with pytest.raises(CheckpointError, match="does not match this run"):
        rl_training.resume_training(path.parent, total_timesteps=121, progress=False)


def test_seeds_that_are_trained_together_have_the_same_time(tmp_path: Path) -> None:
    config = tiny(tmp_path, seeds=[0, 1], eval_interval=60)
    first, second = rl_training.train(config, progress=False)
    for one, other in zip(
        metric_rows(first.run_dir, timed=True),
        metric_rows(second.run_dir, timed=True),
        strict=True,
    ):
        assert one[WALL] <= other[WALL]
        for name in ("environments", "acting", "sampling", "update"):
            assert one.get(f"time/{name}_seconds") == other.get(f"time/{name}_seconds")


def test_a_gpu_counts_what_it_computes_together() -> None:
    stopwatch = Stopwatch(on_gpu=True)
    for share, seconds in {"acting": 1.0, "sampling": 2.0, "update": 4.0, "saving": 8.0}.items():
        stopwatch.add(share, seconds)  # type: ignore[arg-type]
    assert stopwatch.shares == {"update": 7.0, "saving": 8.0}
