"""Measure steps per second of the complete loop, for one seed or a population.

    python ours_loop.py [--algo sac] [--settings JSON] [--seeds 1 8] [--precision highest]
        [--env HalfCheetah-v5] [--device cuda] [--warm 3000] [--steps 10000]

Trains through the public API, with one update per step unless the settings say otherwise. An
offline algorithm learns from recorded rows of the same sizes, and its steps are updates; a mixed
algorithm learns from both. Time is measured from step `warm` of every seed to the last step, and
the steps of all seeds are counted together. Prints one JSON line for each precision and number of
seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from offline_rows import offline_rows

import rl_training
from rl_training.algorithms import get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext

LEARNING_STARTS, ROWS = 1_000, 100_000
COLLECTING = {"learning_starts": LEARNING_STARTS, "buffer_capacity": ROWS}


class StepsPerSecond(Callback):
    """Measures the time between two step counts, over all seeds that share this callback."""

    def __init__(self, first: int, last: int, *, offline: bool) -> None:
        """With `offline`, nothing is collected and a step is an update."""
        self._first, self._last, self._steps = first, last, 0
        self._offline = offline
        self._clock: dict[int, float] = {}

    def for_seed(self, seed: int) -> StepsPerSecond:
        """Return the same object for every seed: all events occur in one thread."""
        return self

    def on_collect_end(self, context: TrainingContext) -> None:
        self._count(context.config.num_envs)

    def on_update_end(self, context: TrainingContext) -> None:
        if self._offline:
            self._count(1)

    def _count(self, steps: int) -> None:
        before = self._steps
        self._steps += steps
        for mark in (self._first, self._last):
            if before < mark <= self._steps:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self._clock[self._steps] = time.perf_counter()

    @property
    def rate(self) -> float:
        (first, start), (last, end) = self._clock.items()
        return (last - first) / (end - start)


def measure(options: argparse.Namespace, seeds: int, precision: str) -> dict[str, Any]:
    """Steps of all seeds together per second."""
    regime = get_algorithm_spec(options.algo).regimes[0]
    offline = regime == "offline"
    callback = StepsPerSecond(options.warm * seeds, options.steps * seeds, offline=offline)
    chosen = {"seed": 0} if seeds == 1 else {"seeds": list(range(seeds))}
    with tempfile.TemporaryDirectory() as folder:
        rl_training.train(
            {
                "algo": options.algo,
                "env_id": None if offline else options.env,
                **chosen,
                "device": options.device,
                "compile": "on",
                "float32_precision": precision,
                "total_timesteps": options.steps,
                "eval_interval": 0,
                "eval_episodes": 1,
                "checkpoint_interval": 0,
                "output_dir": folder,
                "algo_kwargs": {**({} if offline else COLLECTING), **options.settings},
            },
            callbacks=[callback],
            progress=False,
            dataset=None if regime == "online" else offline_rows(ROWS),
        )
    return {
        "algo": options.algo,
        "environment": None if offline else options.env,
        "seeds": seeds,
        "precision": precision,
        "device": options.device,
        "steps_per_second": callback.rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algo", default="sac")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--precision", nargs="+", default=["highest"])
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warm", type=int, default=3_000)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    if not LEARNING_STARTS < arguments.warm < arguments.steps:
        parser.error(f"needs {LEARNING_STARTS:,} random steps < --warm < --steps")
    for seeds in arguments.seeds:
        for precision in arguments.precision:
            print(json.dumps(measure(arguments, seeds, precision)), flush=True)


if __name__ == "__main__":
    main()
