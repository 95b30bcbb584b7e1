"""Memory of a replay buffer of stacked frames, against one that stores observations as they are.

    python benchmarks/frame_memory.py [--rows 10000] [--output FILE]

Transitions of stacks of four 84x84 frames, in episodes of 200 steps, are added to both buffers. The
growth of the process's resident memory is measured, and for a million transitions the bytes are
computed. The batches of both buffers are compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from reporting import RESULTS, machine, print_table, process_bytes, warn_if_busy, write_results

from rl_training.data.n_step import Transitions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.storage.stacks import FrameLayout
from rl_training.internals import keep_freed_memory
from rl_training.observations import ObservationLeaf, ObservationSpec
from rl_training.types import ActionSpec

FRAMES, SIDE, EPISODE = 4, 84, 200
SPEC = ObservationSpec((ObservationLeaf("", "image", (FRAMES, SIDE, SIDE)),))
ACTIONS = ActionSpec("discrete", 6)
BATCH, BATCHES, MILLION = 32, 200, 1_000_000


def transitions(rows: int) -> Iterator[Transitions]:
    """Yield single transitions of one environment."""
    generator = np.random.default_rng(0)
    for step in range(rows):
        if step % EPISODE == 0:
            first = generator.integers(0, 256, (1, SIDE, SIDE), dtype=np.uint8)
            stack = np.repeat(first, FRAMES, axis=0)
        new = generator.integers(0, 256, (1, SIDE, SIDE), dtype=np.uint8)
        following = np.concatenate([stack[1:], new])
        obs, next_obs = (image.reshape(1, -1).view(np.float32) for image in (stack, following))
        number = np.array([step % 6])
        yield Transitions(obs, number, number.astype(np.float32), np.ones(1, np.float32), next_obs)
        stack = following


def measure(rows: int, layout: FrameLayout | None) -> tuple[dict[str, float], torch.Tensor]:
    """Fill a buffer; return its memory and times, and the bits of a batch."""
    before = process_bytes("VmRSS")
    buffer = ReplayBuffer(rows, SPEC, ACTIONS, frames=layout)
    seconds = 0.0
    for row in transitions(rows):
        began = time.perf_counter()
        buffer.add(row)
        seconds += time.perf_counter() - began
    resident = process_bytes("VmRSS") - before
    bits = torch.randint(0, 2**62, (BATCH,), generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for _ in range(BATCHES):
        batch = buffer.draw(bits)
    sampling = (time.perf_counter() - began) / BATCHES
    of_million = ReplayBuffer.row_bytes(SPEC, ACTIONS, frames=layout) * MILLION
    of_million += 0 if layout is None else layout.bytes_of(MILLION)
    figures = {
        "rows": rows,
        "resident_bytes": resident,
        "resident_bytes_per_row": resident / rows,
        "bytes_of_a_million_rows": of_million,
        "add_microseconds": 1e6 * seconds / rows,
        "sample_microseconds": 1e6 * sampling,
    }
    return figures, torch.cat([batch.obs, batch.next_obs], dim=1).view(torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=RESULTS / "frame_memory.json")
    arguments = parser.parse_args()

    load = warn_if_busy()
    keep_freed_memory()  # as in a run
    torch.set_num_threads(1)
    frames, framed_batch = measure(arguments.rows, FrameLayout(SPEC))
    plain, plain_batch = measure(arguments.rows, None)
    if not torch.equal(framed_batch, plain_batch):
        raise SystemExit("the batches differ")
    rows = [
        [
            name,
            f"{figures['resident_bytes'] / 2**20:.0f}",
            f"{figures['bytes_of_a_million_rows'] / 1e9:.2f}",
            f"{figures['add_microseconds']:.0f}",
            f"{figures['sample_microseconds']:.0f}",
        ]
        for name, figures in (("each frame once", frames), ("observations as they are", plain))
    ]
    header = ["", "MiB, measured", "GB of a million", "us to add", f"us to sample {BATCH}"]
    print_table(f"Replay of {arguments.rows:,} transitions of {FRAMES} frames", header, rows)
    ratio = plain["resident_bytes"] / frames["resident_bytes"]
    print(f"{ratio:.1f} times less memory; batches are equal bit by bit")
    results = {"machine": machine(load_before=load), "ratio": ratio}
    for name, figures in (("frames", frames), ("plain", plain)):
        # Memory does not depend on what else the machine does; times do.
        kept = {key: value for key, value in figures.items() if "microseconds" not in key}
        results[name] = kept
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()
