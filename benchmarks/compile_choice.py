"""Check that `compile: auto` chooses the faster mode for short, medium and long runs.

    python benchmarks/compile_choice.py [--updates 1000 10000 100000] [--full] [--output FILE]

Trains on HalfCheetah-v5 with one update per step, each time in a new process that is timed from its
start to its end: eager, compiled with an empty cache, and compiled with the cache of the previous
run. Runs of up to 10,000 updates are measured completely, longer ones only with `--full`. Otherwise
their time is computed as start-up plus time per update from the two longest measured runs, and
marked as computed. All runs use the precision that `auto` chooses for long runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from processes import timed_run
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

from rl_training.config import TrainConfig
from rl_training.execution.execution import resolve_execution

LEARNING_STARTS = 1_000
MEASURED_UP_TO = 10_000
MODES = ("eager", "compiled, cold", "compiled, cached")


def run_config(updates: int, mode: str, device: str) -> dict[str, Any]:
    """The config of a run with this number of updates and little other work."""
    return {
        "algo": "sac",
        "env_id": "HalfCheetah-v5",
        "compile": mode,
        "device": device,
        "total_timesteps": LEARNING_STARTS + updates,
        "eval_interval": 0,
        "eval_episodes": 1,
        "checkpoint_interval": 0,
        "algo_kwargs": {"learning_starts": LEARNING_STARTS, "buffer_capacity": 100_000},
    }


def measure_whole(updates: int, device: str) -> dict[str, float]:
    """Seconds from process start to process end, by mode."""
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:  # empty for the first compiled run only
        for mode in MODES:
            print(f"{updates:,} updates, {mode} ...", flush=True)
            compile_mode = "off" if mode == "eager" else "on"
            run = timed_run(run_config(updates, compile_mode, device), {}, cache=cache)
            seconds[mode] = run.end
    return seconds


def extrapolate(measured: dict[int, dict[str, float]], updates: int) -> dict[str, float] | None:
    """Compute the time as start-up plus time per update, both from the two longest measured runs.

    Returns None if they give no time per update: too few runs, or a disturbed one.
    """
    if len(measured) < 2:
        return None
    shorter, longer = sorted(measured)[-2:]
    per_update = {
        mode: (measured[longer][mode] - measured[shorter][mode]) / (longer - shorter)
        for mode in MODES
    }
    if min(per_update.values()) <= 0:
        return None
    return {mode: measured[longer][mode] + per_update[mode] * (updates - longer) for mode in MODES}


def choice(updates: int, device: str) -> str:
    """The mode that `compile: auto` chooses for a run of this length."""
    config = TrainConfig(**run_config(updates, "auto", device))
    return "compiled" if resolve_execution(config, updates).compiled else "eager"


def compare(lengths: list[int], full: bool, device: str) -> list[dict[str, Any]]:
    """One entry per length, shortest first."""
    measured: dict[int, dict[str, float]] = {}
    entries = []
    for updates in sorted(lengths):
        whole = full or updates <= MEASURED_UP_TO
        if whole:
            measured[updates] = measure_whole(updates, device)
        seconds = measured[updates] if whole else extrapolate(measured, updates)
        if seconds is None:
            print(f"{updates:,} updates: cannot be computed from the runs measured; use --full")
            continue
        compiled_pays = seconds["compiled, cold"] < seconds["eager"]
        entries.append(
            {
                "updates": updates,
                "seconds": seconds,
                "how": "measured" if whole else "computed",
                "faster_from_cold": "compiled" if compiled_pays else "eager",
                "auto": choice(updates, device),
            }
        )
    return entries


def show(entries: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{entry['updates']:,}",
            *(f"{entry['seconds'][mode]:.1f}" for mode in MODES),
            entry["how"],
            entry["faster_from_cold"],
            entry["auto"],
        ]
        for entry in entries
    ]
    header = ["updates", *MODES, "", "faster from cold", "auto takes"]
    print_table("Seconds from process start to end (SAC, HalfCheetah-v5)", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--full", action="store_true", help="measure long runs completely too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS / "compile_choice.json")
    arguments = parser.parse_args()

    load = warn_if_busy()
    entries = compare(arguments.updates, arguments.full, arguments.device)
    show(entries)
    about = machine(device=arguments.device, load_before=load)
    write_results(arguments.output, {"machine": about, "runs": entries})


if __name__ == "__main__":
    main()
