"""Reading a Minari dataset: this package's reader against Minari's own.

    python benchmarks/readers.py [--repeats 3] [--episodes 1000] [--output FILE]

Both read every episode once and keep none: `open_minari(id).chunks()` here,
`minari.load_dataset(id).iterate_episodes()` there. The datasets are two that are made for the
purpose with Minari itself (1,000 steps an episode, HalfCheetah's sizes, without infos and with the
four that HalfCheetah-v5 gives) and whatever is in MINARI_DATASETS_PATH. Each read has a process of
its own, in turns; imports are done before. Seconds are the processor's, of the best read: the files
are in the page cache, and other programs count for less so. Memory is what the process's peak grew
by, the most of all reads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gymnasium as gym
import minari
import numpy as np
from minari.data_collector import EpisodeBuffer
from reporting import RESULTS, machine, print_table, process_bytes, warn_if_busy, write_results

from rl_training.data.formats.minari import local_minari_ids, minari_root, open_minari

OBS, ACTION, STEPS = 17, 6, 1000
INFOS = ("x_position", "x_velocity", "reward_forward", "reward_ctrl")
SYNTHETIC = {"synthetic/plain-v0": (), "synthetic/infos-v0": INFOS}


def read_with_ours(dataset_id: str) -> int:
    return sum(len(steps.reward) for steps in open_minari(dataset_id).chunks())


def read_with_minari(dataset_id: str) -> int:
    dataset = minari.load_dataset(dataset_id)
    return sum(len(episode.rewards) for episode in dataset.iterate_episodes())


READERS: dict[str, Callable[[str], int]] = {"ours": read_with_ours, "minari": read_with_minari}


def measure_here(reader: str, dataset_id: str) -> dict[str, float]:
    before, began = process_bytes("VmHWM"), time.process_time()
    steps = READERS[reader](dataset_id)
    seconds = time.process_time() - began
    return {"steps": steps, "seconds": seconds, "peak_bytes": process_bytes("VmHWM") - before}


def measure_apart(reader: str, dataset_id: str, root: Path) -> dict[str, float]:
    """As `measure_here`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--read", reader, dataset_id],
        env={**os.environ, "MINARI_DATASETS_PATH": str(root)},
        check=True,
        capture_output=True,
        text=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def make_synthetic(dataset_id: str, infos: tuple[str, ...], episodes: int) -> None:
    generator = np.random.default_rng(0)

    def episode() -> EpisodeBuffer:
        return EpisodeBuffer(
            observations=generator.standard_normal((STEPS + 1, OBS)),
            actions=generator.uniform(-1, 1, (STEPS, ACTION)).astype(np.float32),
            rewards=generator.standard_normal(STEPS),
            terminations=np.zeros(STEPS, np.bool_),
            truncations=np.arange(STEPS) == STEPS - 1,
            infos={name: generator.standard_normal(STEPS + 1) for name in infos} or None,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an author and a description that are not given
        minari.create_dataset_from_buffers(
            dataset_id,
            [episode() for _ in range(episodes)],
            observation_space=gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float64),
            action_space=gym.spaces.Box(-1, 1, (ACTION,), np.float32),
        )


def compare(dataset_id: str, root: Path, repeats: int) -> dict[str, Any]:
    reads: dict[str, list[dict[str, float]]] = {reader: [] for reader in READERS}
    for _ in range(repeats):
        for reader, results in reads.items():
            results.append(measure_apart(reader, dataset_id, root))
    steps = {result["steps"] for results in reads.values() for result in results}
    assert len(steps) == 1, f"{dataset_id}: the readers do not agree on its steps: {steps}"
    row: dict[str, Any] = {"dataset": dataset_id, "steps": steps.pop(), "readers": {}}
    for reader, results in reads.items():
        row["readers"][reader] = {
            "seconds": min(result["seconds"] for result in results),
            "worst_seconds": max(result["seconds"] for result in results),
            "peak_bytes": max(result["peak_bytes"] for result in results),
        }
    return row


def show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        ours, theirs = row["readers"]["ours"], row["readers"]["minari"]
        lines.append(
            [
                row["dataset"],
                f"{row['steps']:,}",
                *(f"{reader['seconds']:.3f}" for reader in (ours, theirs)),
                f"{theirs['seconds'] / ours['seconds']:.2f}x",
                *(f"{reader['peak_bytes'] / 2**20:.1f}" for reader in (ours, theirs)),
            ]
        )
    header = ["", "steps", "ours, s", "Minari, s", "ours vs Minari", "ours, MiB", "Minari, MiB"]
    print_table("Reading every episode once", header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=1000, help="of the datasets made here")
    parser.add_argument("--output", type=Path, default=RESULTS / "readers.json")
    parser.add_argument("--read", nargs=2, metavar=("READER", "ID"), help="one read, printed")
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(measure_here(*arguments.read)))
        return

    load = warn_if_busy()
    rows = [compare(local, minari_root(), arguments.repeats) for local in local_minari_ids()]
    for dataset_id, infos in SYNTHETIC.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MINARI_DATASETS_PATH"] = folder
            make_synthetic(dataset_id, infos, arguments.episodes)
            rows.append(compare(dataset_id, Path(folder), arguments.repeats))
    show(rows)
    about = machine(minari=minari.__version__, load_before=load)
    write_results(arguments.output, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
