"""Measure what a sweep costs beyond its training: time per trial, files, and the journal.

    python benchmarks/sweeps.py [--trials 13] [--output FILE]

Trials of a few steps of Pendulum take almost no time by themselves, so their time is that of a
trial's other parts: planning, the job and its run folder, environment, networks, checkpoints,
20 evaluations, and storing the result. The same trials without a sweep, in one process, are the
baseline. The first trial also waits for processes to start. *To first step* is the time from the
start of the command, or from the moment at which a further trial is taken, to the trial's first
step in its environment. Times of further trials are medians.

*Sizes* are those of a run of `examples/sweeps/pendulum.yaml`, which is trained, and those of
`examples/sweeps/hopper.yaml`, which are calculated as a sweep does before it starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from reporting import RESULTS, machine, print_table, warn_if_busy, write_results
from timed_environment import ENVIRONMENT, NOTES

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "sweeps"
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
        "set": {**STEPS, "env_id": ENVIRONMENT},
        "search": {"tau": {"uniform": [0.001, 0.1]}},
        "sampler": "random",
        "trials": trials,
        "seeds": [0],
    }


def run_sweep(values: dict[str, Any], options: list[str], folder: Path) -> float:
    """Run a sweep with one worker; return when it began."""
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "rl_training", "sweep", str(file), "--workers", "1"]
    command += ["--output-dir", str(folder / "sweep"), "--import", "timed_environment", *options]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    notes = {NOTES: str(folder / "first_steps"), "PYTHONPATH": os.pathsep.join(paths)}
    began = time.time()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, cwd=HERE, env={**os.environ, **notes}
    )
    return began


def measure_sweeps(trials: int) -> dict[str, dict[str, float]]:
    found = {}
    for place, options in PLACES.items():
        print(f"{place}: {trials} trials ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            began = run_sweep(sweep_values(trials), options, Path(folder))
            journal = Path(folder) / "sweep" / "journal.log"
            found[place] = {
                **times_of_trials(journal, Path(folder) / "first_steps", began),
                "journal_bytes_per_trial": journal.stat().st_size / trials,
            }
    return found


def times_of_trials(journal: Path, noted: Path, began: float) -> dict[str, float]:
    """What the first trial waits for, and medians over the trials after it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    trials: list[Any] = optuna.load_study(study_name="sweep", storage=storage).trials
    starts = [each.datetime_start.timestamp() for each in trials]
    ends = [each.datetime_complete.timestamp() for each in trials]
    notes = sorted(map(float, noted.read_text().split()))
    steps = [min(each for each in notes if each > start) for start in starts]
    waits = [step - start for step, start in zip(steps, starts, strict=True)]
    return {
        "seconds_to_first_step": steps[0] - began,
        "seconds_to_first_step_of_further_trials": median(waits[1:]),
        "seconds_per_further_trial": median(b - a for a, b in pairwise(ends)),
    }


def measure_sizes() -> dict[str, dict[str, float]]:
    """Files and bytes of a run of the examples."""
    print("sizes ...", flush=True)
    values = {**yaml.safe_load((EXAMPLES / "pendulum.yaml").read_text()), "trials": 1, "rounds": 1}
    with tempfile.TemporaryDirectory() as folder:
        run_sweep({**values, "seeds": 0}, [], Path(folder))
        run = next((Path(folder) / "sweep" / "trials").glob("*/*__seed*"))
        files = [path.stat().st_size for path in run.rglob("*") if path.is_file()]
    return {
        "pendulum": {"files_per_run": len(files), "bytes_per_run": sum(files)},
        "hopper": {"bytes_per_run": calculated_bytes(EXAMPLES / "hopper.yaml")},
    }


def calculated_bytes(file: Path) -> float:
    from rl_training.runtime.job_needs import job_needs
    from rl_training.sweeps.file import read_sweep

    sweep = read_sweep(file)
    return job_needs(sweep.config(next(sweep.examples())).with_changes(seeds=[0])).disk


def measure_baseline(trials: int) -> float:
    """Seconds of each further run that is trained in one process, without a sweep."""
    from rl_training import train
    from rl_training.config_files import load_config

    times = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(trials):
            changes = {**sweep_values(1)["set"], "output_dir": folder, "seed": number}
            config = load_config("sac/pendulum", [f"{k}={v}" for k, v in changes.items()])
            began = time.perf_counter()
            train(config, progress=False)
            times.append(time.perf_counter() - began)
    return median(times[1:])


def show(found: dict[str, dict[str, float]], baseline: float) -> None:
    rows = [
        [
            place,
            f"{each['seconds_to_first_step']:.1f}",
            f"{each['seconds_to_first_step_of_further_trials']:.2f}",
            f"{each['seconds_per_further_trial']:.2f}",
            f"{each['journal_bytes_per_trial']:,.0f}",
        ]
        for place, each in found.items()
    ]
    rows.append(["no sweep, one process", "", "", f"{baseline:.2f}", ""])
    header = ["", "first step, s", "further: to step, s", "to end, s", "journal B/trial"]
    print_table(f"Trials of {STEPS['total_timesteps']} steps with {REPORTS} reports", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=13)
    parser.add_argument("--output", type=Path, default=RESULTS / "sweeps.json")
    arguments = parser.parse_args()

    load = warn_if_busy()
    found = measure_sweeps(arguments.trials)
    baseline = measure_baseline(arguments.trials)
    show(found, baseline)
    sizes = measure_sizes()
    for name, each in sizes.items():
        print(f"a run of {name}: {each}")
    about = machine(trials=arguments.trials, reports=REPORTS, load_before=load)
    values = {
        "machine": about,
        "places": found,
        "seconds_per_run_without_sweep": baseline,
        "sizes": sizes,
    }
    write_results(arguments.output, values)


if __name__ == "__main__":
    main()
