"""Sweeps on one machine: their tables, and that no kill changes them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from sweep_helpers import (
    GRID,
    RANDOM,
    TINY,
    children,
    evaluations,
    kill_seeds,
    kill_something_local,
    require_same,
    run_sweep_command,
    run_with_kills,
    start_sweep,
    sweep_file,
    table,
)

from rl_training.sweeps.file import read_sweep
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.results import read_results
from rl_training.sweeps.run import run_winner
from rl_training.sweeps.worker import Board, work

SHORT = {**TINY, "total_timesteps": 300, "eval_interval": 100, "checkpoint_interval": 100}
SMALL = {**GRID, "set": SHORT, "grid": {"learning_rate": [1e-4, 1e-3]}, "seeds": "0-1"}


def run_here(values: dict, output: Path) -> Board:
    """Run a sweep in this process."""
    sweep, folder = read_sweep(values), SweepFolder(output)
    folder.open(sweep)
    board = Board(folder, sweep)
    assert work(board, folder, sweep, lambda line: None)
    return board


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that has ended."""
    output = tmp_path_factory.mktemp("small") / "sweep"
    run_here(SMALL, output)
    return output


def test_a_grid_runs_every_combination_once_and_judges_it_by_its_seeds(small: Path) -> None:
    found, rows = table(small), evaluations(small)
    assert [row["params"] for row in found["trials"]] == [
        {"learning_rate": 1e-4},
        {"learning_rate": 1e-3},
    ]
    for row in found["trials"]:
        seeds = [rows[f"trial_{row['trial']:04}/sac__seed{seed}"] for seed in (0, 1)]
        assert row["scores"] == [each[-1][1] for each in seeds]
        assert row["value"] == sum(row["scores"]) / 2  # the interquartile mean of two
    assert found["best"] == max(found["trials"], key=lambda row: row["value"])["trial"]


def test_a_second_call_finds_everything_done(small: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.glob("trials/**/*")}

    run_here(SMALL, small)

    assert {path: path.stat().st_mtime_ns for path in small.glob("trials/**/*")} == before


def test_reports_of_all_seeds_reach_the_study(small: Path) -> None:
    rows = evaluations(small)
    for trial in read_results(SweepFolder(small)).trials:
        seeds = [dict(rows[f"trial_{trial.number:04}/sac__seed{seed}"]) for seed in (0, 1)]
        assert trial.reports == {step: (seeds[0][step] + seeds[1][step]) / 2 for step in seeds[0]}
        assert list(trial.reports) == [100, 200, 300]


@pytest.mark.thorough
def test_pruned_trials_stop_early_and_are_never_the_best(tmp_path: Path) -> None:
    values = {
        **SMALL,
        "grid": None,
        "search": {"learning_rate": {"log": [1e-4, 1e-3]}},
        "trials": 6,
        "prune": {"asha": {"grace": 100, "factor": 2}},
        "seeds": [0],
    }
    del values["grid"]

    run_here(values, tmp_path / "sweep")

    found = table(tmp_path / "sweep")
    states = [row["state"] for row in found["trials"]]
    assert states.count("pruned") >= 1
    assert states.count("finished") >= 1
    assert found["trials"][found["best"]]["state"] == "finished"
    assert found["exact"] is False
    rows = evaluations(tmp_path / "sweep")
    for row in found["trials"]:
        steps = [step for step, _ in rows[f"trial_{row['trial']:04}/sac__seed0"]]
        assert (steps[-1] == 300) == (row["state"] == "finished")


def test_a_trial_that_cannot_be_trained_fails_and_the_others_go_on(tmp_path: Path) -> None:
    diverges = {**SMALL, "grid": {"learning_rate": [1e30, 1e-3]}, "seeds": [0]}

    run_here(diverges, tmp_path / "sweep")

    failed, finished = table(tmp_path / "sweep")["trials"]
    assert failed["state"] == "failed"
    assert "not finite" in failed["message"]
    assert finished["state"] == "finished"


def test_the_winner_is_trained_with_seeds_that_the_search_has_not_seen(small: Path) -> None:
    job = run_winner(read_results(SweepFolder(small)))

    assert sorted(result.run_dir.name for result in job.results) == ["sac__seed2", "sac__seed3"]
    assert {result.run_dir.parent for result in job.results} == {small / "winner"}


@pytest.mark.thorough
def test_workers_stop_with_checkpoints_when_the_sweep_is_killed(tmp_path: Path) -> None:
    file, output = sweep_file(tmp_path, GRID), tmp_path / "sweep"
    process = start_sweep(file, output, "--workers", "1")
    workers = wait_for(lambda: children(process.pid, "sweep-worker"))
    wait_for(lambda: list(output.glob("trials/*/*/checkpoints/step_*")))

    process.kill()
    process.wait()

    wait_for(lambda: not any(worker.is_running() for worker in workers))
    status = json.loads((output / "trials" / "trial_0000" / "status.json").read_text())
    assert status["state"] == "preempted"


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_trials_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    few = {**GRID, "grid": {"learning_rate": [1e-4, 1e-3]}}
    file, output = sweep_file(tmp_path, few), tmp_path / "sweep"
    process = start_sweep(file, output, "--workers", "2")
    wait_for(lambda: list(output.glob("trials/*/*/checkpoints/step_*")))

    process.send_signal(number)

    assert process.wait(60) == (130 if number == signal.SIGINT else 75)
    run_sweep_command(file, output)
    run_here(few, tmp_path / "alone")
    assert table(output) == table(tmp_path / "alone")


@pytest.mark.faults
@pytest.mark.parametrize("values", [GRID, RANDOM], ids=["grid", "random"])
def test_random_kills_do_not_change_the_table(tmp_path: Path, values: dict) -> None:
    left_alone = tmp_path / "alone"
    run_sweep_command(sweep_file(tmp_path, values), left_alone)
    file = sweep_file(tmp_path, values)
    for seed in kill_seeds():
        output = tmp_path / f"killed-{seed}"

        def start(output: Path = output) -> subprocess.Popen[bytes]:
            return start_sweep(file, output)

        run_with_kills(start, kill_something_local, seed=seed, times=8)

        require_same(output, left_alone)
        assert [row["trial"] for row in table(output)["trials"]] == list(range(12))


@pytest.mark.parametrize(
    "code", ["import rl_training", "import rl_training.cli, rl_training.sweeps"]
)
def test_neither_ray_nor_optuna_is_imported_without_need(code: str) -> None:
    check = "import sys; assert not {'ray', 'optuna', 'submitit'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def wait_for(found, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")
