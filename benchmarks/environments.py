"""Compare environment steps per second of both backends with Gymnasium's vector environments.

    python benchmarks/environments.py [--quick] [--one-process] [--chunks 9] [--output FILE]

All contestants of a row play the same random actions and start a new episode in the step in which
one ends. They run in turns, one chunk of steps each, so that other load on the machine affects all
of them equally. The best chunk of each counts, and its ratio to the faster of Gymnasium's two
backends. *bare* is this package's loop over the environments of one process. It makes the same
copies as Gymnasium's sync backend and leaves out what `VectorEnvironment` adds: action scaling,
checks for finite values, float32 observations and episode statistics.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

sys.path.insert(0, str(Path(__file__).parent))

from reporting import RESULTS, machine, write_results

from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.envs.cores import available_cores
from rl_training.envs.vector.sequential import SequentialVector
from rl_training.envs.vector.step_arrays import NO_SEED

ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5")
NUMBERS = (1, 4, 16)
GYMNASIUM = {"gymnasium sync": SyncVectorEnv, "gymnasium async": AsyncVectorEnv}
OURS = {"ours sync": "sync", "ours async": "async"}
BARE = "ours bare"

Step = Callable[[np.ndarray], Any]


def ours(name: str, number: int, backend: Any, stack: ExitStack) -> Step:
    environment = VectorEnvironment(EnvironmentFactory(name), number, 0, backend=backend)
    stack.callback(environment.close)
    environment.reset()
    return environment.step


def bare(name: str, number: int, stack: ExitStack) -> Step:
    vector, _ = SequentialVector.make(EnvironmentFactory(name), number)
    stack.callback(vector.close)
    arrays = vector.arrays
    arrays.active[:], arrays.seeds[:] = True, range(number)
    vector.reset()
    arrays.seeds[:] = NO_SEED

    def step(actions: np.ndarray) -> tuple[np.ndarray, ...]:
        arrays.actions[...] = actions
        vector.start(masked=False)
        _, errors = vector.finish()
        assert not errors
        results = (arrays.obs, arrays.reward, arrays.terminated, arrays.truncated)
        return tuple(result.copy() for result in results)

    return step


def gymnasiums(name: str, number: int, vector: Any, stack: ExitStack) -> Step:
    makers = [EnvironmentFactory(name)] * number
    environment = vector(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    stack.callback(environment.close)
    environment.reset(seed=0)
    step: Step = environment.step
    return step


def random_actions(name: str, number: int, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The same actions twice: in [-1, 1] for this package, in environment units for Gymnasium."""
    rng = np.random.default_rng(0)
    space = EnvironmentFactory(name)().action_space
    if isinstance(space, gym.spaces.Discrete):
        choices = list(rng.integers(0, space.n, (count, number)))
        return choices, choices
    assert isinstance(space, gym.spaces.Box)
    unit = rng.uniform(-1, 1, (count, number, *space.shape)).astype(np.float32)
    return list(unit), list(unit * space.high)


def seconds_per_step(step: Step, actions: list[np.ndarray]) -> float:
    began = time.perf_counter()
    for action in actions:
        step(action)
    return (time.perf_counter() - began) / len(actions)


def measure(
    name: str, number: int, chunks: int, chunk_seconds: float, one_process: bool
) -> dict[str, list[float]]:
    """Seconds per vector step of each contestant, one value per chunk."""
    unit, own = random_actions(name, number, 1000)
    with ExitStack() as stack:
        steps: dict[str, tuple[Step, list[np.ndarray]]] = {}
        for contestant, backend in OURS.items():
            steps[contestant] = ours(name, number, backend, stack), unit
        steps[BARE] = bare(name, number, stack), own
        for contestant, vector in GYMNASIUM.items():
            steps[contestant] = gymnasiums(name, number, vector, stack), own
        if one_process:
            steps = {name: steps[name] for name in ("ours sync", BARE, "gymnasium sync")}
        lengths = {}
        for contestant, (step, actions) in steps.items():
            pace = seconds_per_step(step, actions[:50])
            lengths[contestant] = max(20, min(len(actions), int(chunk_seconds / pace)))
        times: dict[str, list[float]] = {contestant: [] for contestant in steps}
        for _ in range(chunks):
            for contestant, (step, actions) in steps.items():
                times[contestant].append(seconds_per_step(step, actions[: lengths[contestant]]))
    return times


def summarize(name: str, number: int, times: dict[str, list[float]]) -> dict[str, Any]:
    best = {contestant: min(chunks) for contestant, chunks in times.items()}
    gymnasium_best = min(best[contestant] for contestant in GYMNASIUM if contestant in best)
    return {
        "environment": name,
        "num_envs": number,
        "contestants": {
            contestant: {
                "steps_per_second": number / best[contestant],
                "median_steps_per_second": number / statistics.median(chunks),
                "ratio_to_gymnasium": gymnasium_best / best[contestant],
            }
            for contestant, chunks in times.items()
        },
    }


def show(summary: dict[str, Any]) -> None:
    entries = summary["contestants"]
    row = "".join(f"{entries[name]['steps_per_second']:>11,.0f}" for name in entries)
    compared = [name for name in entries if name not in GYMNASIUM]
    ratios = "".join(f"{entries[name]['ratio_to_gymnasium']:>7.2f}x" for name in compared)
    print(f"{summary['environment']:<15}{summary['num_envs']:>3}{row}{ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="use short chunks to test the benchmark"
    )
    parser.add_argument(
        "--one-process", action="store_true", help="measure without worker processes"
    )
    parser.add_argument("--chunks", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "environments.json")
    arguments = parser.parse_args()
    chunks, chunk_seconds = (3, 0.05) if arguments.quick else (arguments.chunks, 0.5)

    print("environment steps per second; ratios to the faster Gymnasium backend")
    alone = arguments.one_process
    ours_shown = ["ours sync", BARE] if alone else [*OURS, BARE]
    shown = [*ours_shown, "gym sync", *([] if alone else ["gym async"])]
    header = "".join(f"{name:>11}" for name in shown)
    print(f"{'':<15}{'n':>3}{header}" + "".join(f"{name[5:]:>8}" for name in ours_shown))
    rows = []
    for name in ENVIRONMENTS:
        for number in NUMBERS:
            times = measure(name, number, chunks, chunk_seconds, alone)
            rows.append(summarize(name, number, times))
            show(rows[-1])
    about = machine(
        cores=available_cores(), load_after=os.getloadavg()[0], gymnasium=gym.__version__
    )
    write_results(arguments.output, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
