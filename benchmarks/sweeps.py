"""Measure what a sweep costs beyond its training: time per trial, files, and the journal.

    python benchmarks/sweeps.py [--trials 13] [--output FILE]

Trials of a few steps of Pendulum take almost no time by themselves. A sweep of one trial shows the
time from the command to its end, and each further trial the overhead of a trial: planning, the job
and its run folder, environment, networks, checkpoints, a final evaluation, and storing the result.
The same trials without a sweep, in one process, are the baseline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

REPORTS = 20
STEPS = {
    "total_timesteps": 20 * REPORTS,
    "eval_interval": 20,
    "eval_episodes": 1,
    "checkpoint_interval": 0,
    "learning_starts": 10_000,
    "hidden_sizes": [16],
    "buffer_capacity": 1_000,
    "health": False,
}
PLACES = {"local": [], "ray": ["--on", "ray"]}


def sweep_values(trials: int) -> dict[str, Any]:
    return {
        "base": "sac/pendulum",
        "set": STEPS,
        "search": {"tau": {"uniform": [0.001, 0.1]}},
        "sampler": "random",
        "trials": trials,
        "seeds": [0],
    }


def run_sweep(trials: int, options: list[str], folder: Path) -> float:
    """Seconds of a sweep with one worker."""
    import yaml

    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep_values(trials)))
    command = [sys.executable, "-m", "rl_training", "sweep", str(file), "--workers", "1"]
    command += ["--output-dir", str(folder / "sweep"), *options]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure_sweeps(trials: int) -> dict[str, dict[str, float]]:
    found = {}
    for place, options in PLACES.items():
        times = []
        for number in (1, trials):
            print(f"{place}: {number} trials ...", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                times.append(run_sweep(number, options, Path(folder)))
                sizes = measure_sizes(Path(folder) / "sweep", number)
        found[place] = {
            "seconds_of_one_trial": times[0],
            "seconds_per_further_trial": (times[1] - times[0]) / (trials - 1),
            **sizes,
        }
    return found


def measure_sizes(sweep: Path, trials: int) -> dict[str, float]:
    files = [path for path in (sweep / "trials").rglob("*") if path.is_file()]
    return {
        "journal_bytes_per_trial": (sweep / "journal.log").stat().st_size / trials,
        "files_per_run": len(files) / trials,
        "bytes_per_run": sum(path.stat().st_size for path in files) / trials,
    }


def measure_baseline(trials: int) -> float:
    """Seconds of each further run that is trained in one process, without a sweep."""
    from rl_training import train

    times = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(trials):
            overrides = {**STEPS, "output_dir": folder, "seed": number}
            settings = {
                "algo": "sac",
                "env_id": "Pendulum-v1",
                "algo_kwargs": {
                    key: overrides.pop(key)
                    for key in ("learning_starts", "hidden_sizes", "buffer_capacity")
                },
                **overrides,
            }
            began = time.perf_counter()
            train(settings, progress=False)
            times.append(time.perf_counter() - began)
    return sum(times[1:]) / (trials - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=13)
    parser.add_argument("--output", type=Path, default=RESULTS / "sweeps.json")
    arguments = parser.parse_args()

    load = warn_if_busy()
    found = measure_sweeps(arguments.trials)
    baseline = measure_baseline(arguments.trials)
    rows = [
        [
            place,
            f"{each['seconds_of_one_trial']:.1f}",
            f"{each['seconds_per_further_trial']:.2f}",
            f"{each['journal_bytes_per_trial']:,.0f}",
            f"{each['files_per_run']:.0f}",
            f"{each['bytes_per_run'] / 1024:,.0f}",
        ]
        for place, each in found.items()
    ]
    rows.append(["no sweep, one process", "", f"{baseline:.2f}", "", "", ""])
    header = ["", "one trial, s", "each further, s", "journal B/trial", "files/run", "KiB/run"]
    print_table(f"Trials of {STEPS['total_timesteps']} steps with {REPORTS} reports", header, rows)
    about = machine(trials=arguments.trials, reports=REPORTS, load_before=load)
    values = {"machine": about, "places": found, "seconds_per_run_without_sweep": baseline}
    write_results(arguments.output, values)


if __name__ == "__main__":
    main()
