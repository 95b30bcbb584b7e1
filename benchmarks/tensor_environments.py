"""Measure steps per second of tensor environments, alone and with learning, by number of worlds.

    python benchmarks/tensor_environments.py [--env warp/HalfCheetah-v5 ...] [--worlds 1024 4096]
                                             [--seconds 5] [--config flash_sac/gpu] [--device cuda]
                                             [--alone] [--output FILE]

Alone, the worlds are stepped with random actions of which the device has a stock, and results stay
there. With learning, a run of `--config` is measured after compilation and the first updates, with
its own updates per round. Evaluations, checkpoints and logging are not part of the measured time.
Use `--device cpu --env tensors/Pendulum-v1 --worlds 64` to test the benchmark without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

from rl_training import Callback, train
from rl_training.callbacks import TrainingContext
from rl_training.config_files import load_config
from rl_training.envs import environment_factory

ENVIRONMENTS = [f"warp/{name}-v5" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant")]
WORLDS = [1_024, 4_096, 16_384]
STOCK = 16
"""Number of random actions per world that are used again and again"""
WARM_UP_ROUNDS = 30
"""Rounds that are not measured: they compile and capture"""
CHECKED_ROUNDS = 50
"""Rounds after which the clock is read"""


def wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def steps_alone(environment_id: str, worlds: int, device: str, seconds: float) -> dict[str, Any]:
    """Step worlds with random actions."""
    source = environment_factory(environment_id, {}, None).tensor_source
    assert source is not None, f"{environment_id} is no tensor environment"
    began = time.perf_counter()
    environment = source.make(worlds, device)
    environment.reset([0])
    space = environment.action_space
    space.seed(0)
    one = torch.stack([torch.as_tensor(space.sample()) for _ in range(STOCK * 64)]).to(device)
    chosen = torch.randint(len(one), (STOCK, worlds), device=device)
    actions = [one[index] for index in chosen]
    for index in range(WARM_UP_ROUNDS):
        environment.step(actions[index % STOCK])
    wait_for(device)
    prepared, began = time.perf_counter() - began, time.perf_counter()
    rounds, broken = 0, torch.zeros((), dtype=torch.int64, device=device)
    while time.perf_counter() - began < seconds:
        for index in range(CHECKED_ROUNDS):
            broken += environment.step(actions[index % STOCK]).broken.sum()
        wait_for(device)
        rounds += CHECKED_ROUNDS
    elapsed = time.perf_counter() - began
    environment.close()
    return {
        "steps_per_second": round(rounds * worlds / elapsed),
        "preparation_seconds": round(prepared, 1),
        "broken_worlds": int(broken),
    }


class Clock(Callback):
    """Measures rounds with updates, and ends the run after `seconds` of them."""

    def __init__(self, device: str, seconds: float) -> None:
        self._device, self._seconds, self._rounds = device, seconds, 0
        self._began, self._first = time.perf_counter(), (0, 0)
        self.found: dict[str, Any] = {}
        self._made = time.perf_counter()

    def on_update_end(self, context: TrainingContext) -> None:
        self._rounds += 1
        if self._rounds == WARM_UP_ROUNDS:
            wait_for(self._device)
            self._began = time.perf_counter()
            self._first = context.global_step, context.gradient_steps
            self.found["preparation_seconds"] = round(self._began - self._made, 1)
        if self._rounds <= WARM_UP_ROUNDS or self._rounds % CHECKED_ROUNDS:
            return
        wait_for(self._device)
        elapsed = time.perf_counter() - self._began
        if elapsed >= self._seconds:
            steps = context.global_step - self._first[0]
            updates = context.gradient_steps - self._first[1]
            self.found["steps_per_second"] = round(steps / elapsed)
            self.found["updates_per_second"] = round(updates / elapsed, 1)
            context.request_stop("measured")


def steps_with_learning(
    environment_id: str, worlds: int, device: str, seconds: float, config: str
) -> dict[str, Any]:
    """Measure a run; its updates per round are those of the config."""
    base = load_config(config).to_mapping()
    settings = dict(base["algo_kwargs"])
    settings |= {"train_frequency": worlds, "learning_starts": 10 * worlds}
    settings["buffer_capacity"] = max(settings["buffer_capacity"], 20 * worlds)
    clock = Clock(device, seconds)
    with tempfile.TemporaryDirectory() as folder:
        train(
            {
                **base,
                "env_id": environment_id,
                "num_envs": worlds,
                "device": device,
                "total_timesteps": 10**11,
                "eval_interval": 0,
                "eval_episodes": 1,
                "checkpoint_interval": 0,
                "checkpoint_replay": "none",
                "log_interval": 10**11,
                "output_dir": folder,
                "algo_kwargs": settings,
            },
            callbacks=[clock],
            progress=False,
        )
    return {**clock.found, "updates_per_round": settings["gradient_updates_per_step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", nargs="+", default=ENVIRONMENTS)
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--config", default="flash_sac/gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--alone", action="store_true", help="measure no learning")
    parser.add_argument("--output", type=Path, default=RESULTS / "tensor_environments.json")
    arguments = parser.parse_args()
    load, rows = warn_if_busy(), []
    for environment_id in arguments.env:
        for worlds in arguments.worlds:
            row: dict[str, Any] = {"env": environment_id, "worlds": worlds}
            place = (environment_id, worlds, arguments.device, arguments.seconds)
            row["alone"] = steps_alone(*place)
            if not arguments.alone:
                row["learning"] = steps_with_learning(*place, arguments.config)
            rows.append(row)
            print(row, flush=True)
    header = ["environment", "worlds", "steps/s alone", "with learning", "updates/s"]
    print_table(
        f"Tensor environments, learning with {arguments.config}",
        header,
        [
            [
                row["env"],
                f"{row['worlds']:,}",
                f"{row['alone']['steps_per_second']:,}",
                f"{row.get('learning', {}).get('steps_per_second', 0):,}",
                f"{row.get('learning', {}).get('updates_per_second', 0):,}",
            ]
            for row in rows
        ],
    )
    about = machine(device=arguments.device, config=arguments.config, load_before=load)
    write_results(arguments.output, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
