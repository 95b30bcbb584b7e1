"""Saving: how long a checkpoint stops training, and its share of the time between two of them.

    python benchmarks/saving.py [--device cuda] [--compile on] [--rows 1000000] [--output FILE]

Two runs of SAC with default settings, on one thread: Pendulum-v1 with a nearly empty replay buffer
("small"), and HalfCheetah-v5 with a full buffer of a million rows. The steps are timed first. Then
checkpoints follow each other; before each one, a callback adds as many random rows to the buffer as
the run would have collected in `checkpoint_interval` steps, so that the save writes what it would
have written then. The share is the median stall divided by the time of that many steps and the
stall. "First" is the first save after the buffer was filled, which writes all of it. The bounds are
50 ms for the small run and 1 % with a million rows, both on a CPU. Runs are not compiled by
default; with `--compile on` steps are faster and the share is larger.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.config import TrainConfig
from rl_training.data.n_step import Transitions
from rl_training.data.replay_buffer import ReplayBuffer

INTERVAL: int = TrainConfig.model_fields["checkpoint_interval"].default
LEARNING_STARTS = 100
WARM_UP, TIMED = 150, 150
"""Steps before the timed ones, and their number"""
STEPS_BETWEEN_SAVES = 3
FULL_WRITES = 2
"""Saves that write all rows: one for each of the two lineages of links"""


class SaveRepeatedly(Callback):
    """Times steps, then requests checkpoints, each after an interval's worth of new rows."""

    def __init__(self, rows: int, saves: int) -> None:
        self.rows, self.saves = rows, saves
        self.stalls: list[float] = []
        self.step_seconds = 0.0
        self._began, self._next_save = 0.0, WARM_UP + TIMED

    def on_update_end(self, context: TrainingContext) -> None:
        step = context.global_step
        if step == WARM_UP:
            self._began = time.perf_counter()
        if step == WARM_UP + TIMED:
            self.step_seconds = (time.perf_counter() - self._began) / TIMED
            self._add(context, self.rows)
        if step < self._next_save:
            return
        if step > WARM_UP + TIMED:
            self.stalls.append(context.pauses.last["checkpoint"])
            self._add(context, min(INTERVAL, self.rows))
        if len(self.stalls) == self.saves + FULL_WRITES:
            context.request_stop("measured")
            return
        context.request_checkpoint()
        self._next_save = step + STEPS_BETWEEN_SAVES

    def _add(self, context: TrainingContext, number: int) -> None:
        replay = context._run.shared.replay  # type: ignore[attr-defined]
        if number:
            replay.add(random_rows(replay, number))


def random_rows(replay: ReplayBuffer, number: int) -> Transitions:
    obs, action, *_ = replay._widths
    generator = np.random.default_rng(number)
    return Transitions(
        *(
            generator.standard_normal(shape, dtype=np.float32)
            for shape in ((number, obs), (number, action), number, number, (number, obs))
        )
    )


def measure(
    name: str, env_id: str, rows: int, saves: int, device: str, compiled: str
) -> dict[str, Any]:
    """Train in a temporary folder on the disk of this repository, not in memory."""
    callback = SaveRepeatedly(rows, saves)
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        config = {
            "algo": "sac",
            "env_id": env_id,
            "device": device,
            "compile": compiled,
            "num_threads": 1,
            "total_timesteps": 1_000_000,
            "eval_interval": 0,
            "eval_episodes": 1,
            "checkpoint_interval": 0,
            "output_dir": folder,
            "algo_kwargs": {
                "learning_starts": LEARNING_STARTS,
                "buffer_capacity": max(rows, INTERVAL),
            },
        }
        rl_training.train(config, callbacks=[callback], progress=False)
    stalls = callback.stalls[FULL_WRITES:]
    stall = statistics.median(stalls)
    return {
        "name": name,
        "env_id": env_id,
        "rows": rows,
        "saves": len(stalls),
        "step_seconds": callback.step_seconds,
        "interval_steps": INTERVAL,
        "stall_seconds": stall,
        "worst_stall_seconds": max(stalls),
        "first_stall_seconds": max(callback.stalls[:FULL_WRITES]),
        "share_of_wall_time": stall / (INTERVAL * callback.step_seconds + stall),
    }


def show(results: list[dict[str, Any]], device: str) -> None:
    lines = [
        [
            result["name"],
            f"{result['rows']:,}",
            f"{1e3 * result['step_seconds']:.2f}",
            f"{1e3 * result['stall_seconds']:.1f}",
            f"{1e3 * result['worst_stall_seconds']:.1f}",
            f"{1e3 * result['first_stall_seconds']:.1f}",
            f"{100 * result['share_of_wall_time']:.2f} %",
        ]
        for result in results
    ]
    title = f"Saving a checkpoint every {INTERVAL:,} steps ({device})"
    header = ["SAC", "rows", "step, ms", "stall, ms", "worst, ms", "first, ms", "share"]
    print_table(title, header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", default="off", choices=["off", "on", "auto"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    name = "saving.json" if arguments.device == "cpu" else "saving_gpu.json"
    load = warn_if_busy()
    results = [
        measure(*each, arguments.saves, arguments.device, arguments.compile)
        for each in (
            ("small", "Pendulum-v1", 0),
            ("a million rows", "HalfCheetah-v5", arguments.rows),
        )
    ]
    show(results, arguments.device)
    about = machine(compile=arguments.compile, saves=arguments.saves, load_before=load)
    write_results(arguments.output or RESULTS / name, {"machine": about, "rows": results})


if __name__ == "__main__":
    main()
