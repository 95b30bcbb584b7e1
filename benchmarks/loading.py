"""Loading recorded data: processor time and peak memory for each file format.

    python benchmarks/loading.py [--repeats 5] [--rows 1000000] [--output FILE]

Random data with HalfCheetah's dimensions, in episodes of 1,000 steps, is written as `.npz`, HDF5
and Minari, as `rl-training dataset convert` writes it. `load_dataset` then loads each file with
`n_step` 1 and 3. Every load runs in a new process with one thread, after all imports. The table
shows the processor time of the fastest and the slowest load, and the largest peak of the resident
memory above its level before the load, also as a multiple of the raw size of the data (obs, action,
reward, discount and next_obs as float32).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import h5py
import numpy as np
import torch
from reporting import RESULTS, machine, print_table, process_bytes, warn_if_busy, write_results

from rl_training.data import DatasetPart, array_recording, load_dataset
from rl_training.data.formats.writing import Format, write_recording
from rl_training.datasets.workflows import open_source

OBS, ACTION, EPISODE_STEPS = 17, 6, 1000
DATASET_ID = "synthetic/plain-v0"
DESTINATIONS: dict[Format, str] = {"npz": "data.npz", "hdf5": "data.hdf5", "minari": "minari"}
N_STEPS = (1, 3)
RAW_BYTES_PER_ROW = 4 * (2 * OBS + ACTION + 2)


def make_arrays(rows: int) -> dict[str, np.ndarray]:
    """Random steps in D4RL's layout."""
    generator = np.random.default_rng(0)
    obs = generator.standard_normal((rows + 1, OBS), dtype=np.float32)
    return {
        "observations": obs[:-1],
        "next_observations": obs[1:],
        "actions": generator.uniform(-1, 1, (rows, ACTION)).astype(np.float32),
        "rewards": generator.standard_normal(rows, dtype=np.float32),
        "terminals": np.zeros(rows, np.bool_),
        "timeouts": np.arange(1, rows + 1) % EPISODE_STEPS == 0,
        "action_low": -np.ones(ACTION, np.float32),
        "action_high": np.ones(ACTION, np.float32),
    }


def write_files(folder: Path, rows: int) -> dict[str, Path]:
    """The path of the data in each format."""
    recording = array_recording(make_arrays(rows))
    return {
        data_format: write_recording(
            recording,
            folder / name,
            data_format,
            dataset_id=DATASET_ID if data_format == "minari" else None,
        )
        for data_format, name in DESTINATIONS.items()
    }


def measure_here(path: str, n_step: int) -> dict[str, float]:
    torch.set_num_threads(1)
    before, began = process_bytes("VmRSS"), time.process_time()
    dataset = load_dataset([DatasetPart(open_source(path))], n_step=n_step)
    seconds = time.process_time() - began
    grown = process_bytes("VmHWM") - before
    return {"rows": len(dataset), "seconds": seconds, "peak_bytes": grown}


def measure_in_new_process(path: Path, n_step: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--load", str(path), str(n_step)],
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(paths: dict[str, Path], rows: int, repeats: int) -> list[dict[str, Any]]:
    """One entry for each format and `n_step`; the loads of one round alternate between them."""
    loads: dict[tuple[str, int], list[dict[str, float]]] = {
        (data_format, n_step): [] for data_format in paths for n_step in N_STEPS
    }
    for _ in range(repeats):
        for (data_format, n_step), results in loads.items():
            results.append(measure_in_new_process(paths[data_format], n_step))
    found = []
    for (data_format, n_step), results in loads.items():
        assert all(result["rows"] == rows for result in results), f"{data_format}: rows are missing"
        peak = max(result["peak_bytes"] for result in results)
        found.append(
            {
                "format": data_format,
                "n_step": n_step,
                "rows": rows,
                "seconds": min(result["seconds"] for result in results),
                "worst_seconds": max(result["seconds"] for result in results),
                "peak_bytes": peak,
                "peak_ratio": peak / (rows * RAW_BYTES_PER_ROW),
            }
        )
    return found


def show(results: list[dict[str, Any]]) -> None:
    lines = [
        [
            result["format"],
            str(result["n_step"]),
            f"{result['seconds']:.2f}",
            f"{result['worst_seconds']:.2f}",
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{result['peak_ratio']:.2f}x",
        ]
        for result in results
    ]
    rows = results[0]["rows"]
    raw = rows * RAW_BYTES_PER_ROW / 2**20
    title = f"Loading {rows:,} rows (HalfCheetah: obs {OBS}, action {ACTION}; raw {raw:.0f} MiB)"
    header = ["", "n_step", "best, s", "worst, s", "peak, MiB", "of raw"]
    print_table(title, header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=RESULTS / "loading.json")
    parser.add_argument("--load", nargs=2, metavar=("PATH", "N_STEP"), help="load once and print")
    arguments = parser.parse_args()
    if arguments.load:
        path, n_step = arguments.load
        print(json.dumps(measure_here(path, int(n_step))))
        return

    load = warn_if_busy()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), arguments.rows)
        results = measure(paths, arguments.rows, arguments.repeats)
    show(results)
    about = machine(h5py=h5py.__version__, repeats=arguments.repeats, load_before=load)
    write_results(arguments.output, {"machine": about, "rows": results})


if __name__ == "__main__":
    main()
