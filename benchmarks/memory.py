"""Memory: what a replay buffer takes beyond its data, and whether a long run grows.

    python benchmarks/memory.py [--updates 100000] [--compile off] [--rows 1000000] [--output FILE]

Replay: a buffer of HalfCheetah's sizes is filled; its tensors and the growth of the process's
resident memory are compared with the bytes of the data (obs, next_obs, action, reward and
discount as float32). Growth: a small run (SAC, Pendulum-v1, two layers of 32) is sampled ten times
by a callback; its buffer is full before the first sample, so memory should stay where it was then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from reporting import RESULTS, machine, print_table, process_bytes, warn_if_busy, write_results

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.data.n_step import Transitions
from rl_training.data.replay_buffer import ReplayBuffer

OBS, ACTION = 17, 6
BLOCK = 10_000
LEARNING_STARTS = 100


def measure_replay(rows: int) -> dict[str, float]:
    """Bytes of a full buffer, and their ratio to those of the data."""
    generator = np.random.default_rng(0)
    block = Transitions(
        *(
            generator.standard_normal(shape, dtype=np.float32)
            for shape in ((BLOCK, OBS), (BLOCK, ACTION), BLOCK, BLOCK, (BLOCK, OBS))
        )
    )
    ReplayBuffer(BLOCK, OBS, ACTION).add(block)  # what the first use of all this loads
    before = process_bytes("VmRSS")
    buffer = ReplayBuffer(rows, OBS, ACTION)
    while len(buffer) < rows:
        buffer.add(block)
    resident = process_bytes("VmRSS") - before
    tensors = [value for value in vars(buffer).values() if isinstance(value, torch.Tensor)]
    storage = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    raw = rows * 4 * (2 * OBS + ACTION + 2)
    return {
        "rows": rows,
        "raw_bytes": raw,
        "storage_bytes": storage,
        "resident_bytes": resident,
        "storage_ratio": storage / raw,
        "resident_ratio": resident / raw,
    }


class MemorySamples(Callback):
    """Notes memory each time so many further updates are done."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.samples: list[dict[str, int]] = []

    def on_update_end(self, context: TrainingContext) -> None:
        if context.gradient_steps < self._interval * (len(self.samples) + 1):
            return
        sample = {"updates": context.gradient_steps, "resident_bytes": process_bytes("VmRSS")}
        if torch.cuda.is_available():
            sample["cuda_bytes"] = torch.cuda.memory_allocated()
        self.samples.append(sample)


def measure_growth(updates: int, compile_mode: str) -> list[dict[str, int]]:
    """Memory after each tenth of a run."""
    callback = MemorySamples(max(1, updates // 10))
    with tempfile.TemporaryDirectory() as folder:
        rl_training.train(
            {
                "algo": "sac",
                "env_id": "Pendulum-v1",
                "compile": compile_mode,
                "total_timesteps": LEARNING_STARTS + updates,
                "eval_interval": 0,
                "eval_episodes": 1,
                "checkpoint_interval": 0,
                "output_dir": folder,
                "algo_kwargs": {
                    "learning_starts": LEARNING_STARTS,
                    "buffer_capacity": max(100, updates // 20),
                    "batch_size": 32,
                    "hidden_sizes": [32, 32],
                },
            },
            callbacks=[callback],
            progress=False,
        )
    return callback.samples


def show(replay: dict[str, float], samples: list[dict[str, int]]) -> None:
    sizes = {kind: replay[f"{kind}_bytes"] for kind in ("raw", "storage", "resident")}
    rows = [
        [kind, f"{size / 2**20:.1f}", f"{size / sizes['raw']:.3f}x"] for kind, size in sizes.items()
    ]
    title = f"Replay of {replay['rows']:,} rows (HalfCheetah: obs {OBS}, action {ACTION})"
    print_table(title, ["", "MiB", "of raw"], rows)
    header, lines = ["updates"], [[f"{sample['updates']:,}"] for sample in samples]
    for kind in ("resident", "cuda"):
        taken = [sample[f"{kind}_bytes"] for sample in samples if f"{kind}_bytes" in sample]
        if not taken:
            continue
        header += [f"{kind}, MiB", "grown, KiB"]
        for line, size in zip(lines, taken, strict=True):
            line += [f"{size / 2**20:.1f}", f"{(size - taken[0]) / 2**10:+.0f}"]
    print_table("Memory over a run (SAC, Pendulum-v1, two layers of 32)", header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--compile", choices=["on", "off"], default="off")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    arguments = parser.parse_args()

    load = warn_if_busy()
    replay = measure_replay(arguments.rows)
    samples = measure_growth(arguments.updates, arguments.compile)
    show(replay, samples)
    about = machine(compile=arguments.compile, load_before=load)
    write_results(arguments.output, {"machine": about, "replay": replay, "growth": samples})


if __name__ == "__main__":
    main()
