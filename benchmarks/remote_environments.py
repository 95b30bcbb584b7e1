"""Measure environments in Ray actors beside local processes, with environments that sleep.

    python benchmarks/remote_environments.py [--quick] [--output FILE]

*rounds*: milliseconds of a round of two workers whose steps take no time: what workers cost.
*scaling*: steps per second of 1 to 16 workers with one environment each, whose steps take 10 ms.
The efficiency is the rate per worker, relative to the 100 steps per second that such an environment
makes alone. *uneven*: steps take 10 ms on average, but one of ten takes about ten times as long as
the others. Lock-step rounds wait for the slowest environment, asynchronous ones for half of them.

Steps only sleep, so that 16 workers do not compete for the cores of a small machine. With an
environment that computes, no more workers than cores can be busy, wherever they run. Neither policy
nor learner runs. All workers are on this machine: a network adds its round trip to every round.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parent))

from reporting import RESULTS, machine, warn_if_busy, write_results

from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.envs.cores import available_cores
from rl_training.envs.vector.backends import Backend, Placement
from rl_training.ray_session import ray_session

STEP_SECONDS = 0.01
SLOW_SHARE, SLOW_FACTOR = 0.1, 10.0
WORKERS = (1, 2, 4, 8, 16)
UNEVEN_WORKERS = 16
SCALING: tuple[Backend, ...] = ("async", "ray")
UNEVEN: tuple[Backend, ...] = ("async", "ray", "ray-async")


class Sleeping(gym.Env[np.ndarray, np.ndarray]):
    """Steps that take `seconds` each, or on average if they are uneven."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (17,))
    action_space = gym.spaces.Box(-1.0, 1.0, (6,))

    def __init__(self, seconds: float = STEP_SECONDS, uneven: bool = False) -> None:
        self.seconds, self.uneven = seconds, uneven

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(17, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        if self.seconds:
            time.sleep(self._duration())
        return np.zeros(17, np.float32), 0.0, False, False, {}

    def _duration(self) -> float:
        if not self.uneven:
            return self.seconds
        usual = self.seconds / (1 - SLOW_SHARE + SLOW_SHARE * SLOW_FACTOR)
        return usual * (SLOW_FACTOR if self.np_random.random() < SLOW_SHARE else 1.0)


def steps_per_second(backend: Backend, workers: int, duration: float, **settings: Any) -> float:
    """The rate of `workers` environments with a worker each, measured for some seconds."""
    placement = Placement(None if backend == "ray-async" else workers, cpus=0.0)
    factory = EnvironmentFactory(Sleeping, settings)
    actions = np.zeros((workers, 6), np.float32)
    with VectorEnvironment(
        factory, workers, 0, backend=backend, seed_every_reset=True, placement=placement
    ) as environment:
        environment.reset()
        for _ in range(10):
            environment.step(actions)
        rounds, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < duration:
            environment.step(actions)
            rounds += 1
        return rounds * environment.steps_per_round / took


def measure_rounds(seconds: float) -> dict[str, float]:
    """Milliseconds per round of two workers that do nothing."""
    rates = {each: steps_per_second(each, 2, seconds, seconds=0.0) for each in SCALING}
    rounds = {each: 2e3 / rate for each, rate in rates.items()}
    shown = ", ".join(f"{value:.2f} ms ({name})" for name, value in rounds.items())
    print(f"a round of two workers: {shown}", flush=True)
    return rounds


def measure_scaling(seconds: float, workers: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    print(f"steps of {1e3 * STEP_SECONDS:g} ms: steps per second, and efficiency")
    print(f"{'workers':>8}" + "".join(f"{each:>18}" for each in SCALING))
    for number in workers:
        row: dict[str, Any] = {"workers": number}
        for backend in SCALING:
            rate = steps_per_second(backend, number, seconds)
            efficiency = rate * STEP_SECONDS / number
            row[backend] = {"steps_per_second": rate, "efficiency": efficiency}
        shown = (f"{row[each]['steps_per_second']:>11,.0f}" for each in SCALING)
        shares = (f"{row[each]['efficiency']:>7.0%}" for each in SCALING)
        cells = "".join(a + b for a, b in zip(shown, shares, strict=True))
        print(f"{number:>8}{cells}", flush=True)
        rows.append(row)
    return rows


def measure_uneven(seconds: float, workers: int) -> dict[str, Any]:
    rates = {each: steps_per_second(each, workers, seconds, uneven=True) for each in UNEVEN}
    print(f"uneven steps of {1e3 * STEP_SECONDS:g} ms on average, {workers} workers:")
    for backend, rate in rates.items():
        print(f"{backend:>12}{rate:>10,.0f} steps per second", flush=True)
    return {
        "workers": workers,
        "slow_share": SLOW_SHARE,
        "slow_factor": SLOW_FACTOR,
        "steps_per_second": rates,
        "asynchronous_to_lock_step": rates["ray-async"] / rates["ray"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="test the benchmark")
    parser.add_argument("--output", type=Path, default=RESULTS / "remote_environments.json")
    arguments = parser.parse_args()
    seconds, workers, uneven = (
        (1.0, (1, 2), 3) if arguments.quick else (20.0, WORKERS, UNEVEN_WORKERS)
    )
    load = warn_if_busy()
    with ray_session() as session:
        print(f"{session.where}, {available_cores()} cores")
        rounds = measure_rounds(seconds)
        rows = measure_scaling(seconds, workers)
        comparison = measure_uneven(seconds, uneven)
    about = machine(cores=available_cores(), load_before=load, ray=ray.__version__)
    results = {
        "machine": about,
        "step_seconds": STEP_SECONDS,
        "environments": "sleep; no policy and no learner; all workers on this machine",
        "round_milliseconds": rounds,
        "scaling": rows,
        "uneven": comparison,
    }
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()
