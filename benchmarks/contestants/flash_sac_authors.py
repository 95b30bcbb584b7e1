"""Measure the time of one update of the FlashSAC authors' code, without environments.

    python flash_sac_authors.py --source FOLDER [--precision highest high half] [--compile MODE]

`FOLDER` is a checkout of Holiday-Robot/FlashSAC. `half` is its mixed precision, the authors'
default; `high` turns that off and keeps TF32; `highest` is float32. Networks, batch size and delay
of the policy are those of `flash_sac/mujoco`, for the sizes of HalfCheetah. Prints one JSON line
for each precision.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from ours_update import ACTION, CHUNK, CHUNKS, OBS, WARM_UP, synchronize

BATCH, ROWS, GAMMA = 512, 100_000, 0.99
PLANNED_UPDATES = 1_000_000


def settings(source: Path, precision: str, mode: str, device: str) -> dict[str, Any]:
    """The authors' settings, with their references to other files resolved."""
    given = yaml.safe_load((source / "configs" / "agent" / "flashSAC.yaml").read_text())
    given.pop("agent_type")
    return given | {
        "seed": 0,
        "device_type": device,
        "buffer_device_type": device,
        "buffer_max_length": ROWS,
        "sample_batch_size": BATCH,
        "learning_rate_init": 3e-4,  # YAML reads numbers without a point as text
        "learning_rate_peak": 3e-4,
        "learning_rate_end": 1.5e-4,
        "learning_rate_warmup_step": 1,
        "learning_rate_decay_step": PLANNED_UPDATES,
        "critic_min_v": -given["normalized_G_max"],
        "critic_max_v": given["normalized_G_max"],
        "gamma": GAMMA,
        "n_step": 1,
        "use_amp": precision == "half",
        "use_compile": mode != "off",
        "compile_mode": mode,
    }


def build_agent(source: Path, precision: str, mode: str, device: str) -> Any:
    """Their agent, with a replay buffer full of random transitions."""
    sys.path.insert(0, str(source))
    if importlib.util.find_spec("omegaconf") is None:  # reads their files, which is done above
        sys.modules["omegaconf"] = types.SimpleNamespace(OmegaConf=None)  # type: ignore[assignment]
    import gymnasium
    from flash_rl.agents.flashSAC.agent import FlashSACAgent, FlashSACConfig

    high = math.inf
    agent = FlashSACAgent(
        gymnasium.spaces.Box(-high, high, (1, OBS), np.float32),
        gymnasium.spaces.Box(-1, 1, (1, ACTION), np.float32),
        {},
        FlashSACConfig(**settings(source, precision, mode, device)),
    )
    stream = np.random.default_rng(0)
    for _ in range(ROWS // 1_000):
        agent.process_transition(random_transitions(stream, 1_000))
    return agent


def random_transitions(stream: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> np.ndarray:
        return stream.standard_normal(shape, dtype=np.float32)

    return {
        "observation": normal(rows, OBS),
        "action": np.tanh(normal(rows, ACTION)),
        "reward": normal(rows),
        "terminated": np.zeros(rows, dtype=np.float32),
        "truncated": np.zeros(rows, dtype=np.float32),
        "next_observation": normal(rows, OBS),
    }


def time_updates(agent: Any, device: str) -> list[float]:
    """Milliseconds per update, per chunk, without the first chunks."""
    times = []
    for _ in range(WARM_UP + CHUNKS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(CHUNK):
            agent.update()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start) / CHUNK)
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--precision", nargs="+", default=["high", "half"])
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for precision in arguments.precision:
        torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")
        start = time.perf_counter()
        agent = build_agent(arguments.source, precision, arguments.compile, arguments.device)
        times = time_updates(agent, arguments.device)
        entry = {
            "algo": "flash_sac",
            "device": arguments.device,
            "seeds": 1,
            "precision": precision,
            "mode": arguments.compile,
            "best_ms": min(times),
            "median_ms": statistics.median(times),
            "seconds": time.perf_counter() - start,
        }
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
