"""Measure the time of one update of this package, without environments.

    python ours_update.py [--algo sac] [--settings JSON] [--seeds 1 8 32] [--precision highest high]
        [--mode on] [--kernels]

Prints one JSON line for each number of seeds and precision. With `--kernels`, also prints how often
each kernel runs in an update and how long it takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from rl_training.algorithms import get_algorithm_spec
from rl_training.data import ReplayBuffer
from rl_training.data.n_step import Transitions
from rl_training.execution.execution import Execution
from rl_training.execution.learner import Learner
from rl_training.execution.programs import Population

OBS, ACTION, ROWS = 17, 6, 100_000
CHUNK, CHUNKS, WARM_UP = 100, 10, 2


def build_learner(
    algo: str, settings: dict[str, Any], seeds: int, precision: str, mode: str, device: str
) -> Learner:
    """A population with the sizes of HalfCheetah and a full replay buffer for each seed."""
    on_cuda, compiled = device.startswith("cuda"), mode == "on"
    execution = Execution(
        device, compiled, torch.get_num_threads(), precision, graphed=compiled and on_cuda
    )
    execution.apply()
    kind = get_algorithm_spec(algo).algorithm
    population = Population(seeds, tuple(range(seeds)))
    replay = ReplayBuffer(ROWS, OBS, ACTION, device=device, slots=population.slots, width=seeds)
    for seed in range(seeds):
        replay.add(random_transitions(seed), np.full(ROWS, seed))
    return Learner(
        [kind(OBS, ACTION, settings, seed=seed, device=device) for seed in range(seeds)],
        replay,
        execution,
        population=population,
        generators=[torch.Generator(device).manual_seed(seed) for seed in range(seeds)],
    )


def random_transitions(seed: int) -> Transitions:
    stream = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return stream.standard_normal(shape, dtype=np.float32)

    discount = np.full(ROWS, 0.99, dtype=np.float32)
    return Transitions(
        normal(ROWS, OBS), np.tanh(normal(ROWS, ACTION)), normal(ROWS), discount, normal(ROWS, OBS)
    )


def time_updates(learner: Learner, device: str) -> list[float]:
    """Milliseconds per update of all seeds together, per chunk, without the first chunks.

    For each seed, an update draws noise and a minibatch of 256 rows from the seed's replay buffer
    on the device. For SAC, this is the same work as in `jax_sac.py`.
    """
    times = []
    for chunk in range(WARM_UP + CHUNKS):
        synchronize(device)
        start = time.perf_counter()
        learner.update(chunk * CHUNK, CHUNK)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start) / CHUNK)
    return times[WARM_UP:]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def kernels(learner: Learner, updates: int = 10) -> list[dict[str, Any]]:
    """The kernels of one update: name, count, and total microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        learner.update(0, updates)
        torch.cuda.synchronize()
    found = [
        {
            "kernel": event.key,
            "count": event.count / updates,
            "microseconds": event.self_device_time_total / updates,
        }
        for event in recorded.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda entry: -entry["microseconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algo", default="sac")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--precision", nargs="+", default=["highest", "high"])
    parser.add_argument("--mode", default="on", choices=["on", "off"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    for precision in arguments.precision:
        for seeds in arguments.seeds:
            learner = build_learner(
                arguments.algo,
                arguments.settings,
                seeds,
                precision,
                arguments.mode,
                arguments.device,
            )
            times = time_updates(learner, arguments.device)
            entry = {
                "algo": arguments.algo,
                "device": arguments.device,
                "seeds": seeds,
                "precision": precision,
                "mode": arguments.mode,
                "best_ms": min(times),
                "median_ms": statistics.median(times),
            }
            if arguments.kernels:
                entry["kernels"] = kernels(learner)
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
