"""Measure the seconds from process start to the first gradient update, cold and warm.

    python benchmarks/startup.py [--config sac/mujoco] [--env HalfCheetah-v5] [--output FILE]

Trains the packaged config in a separate process with `compile: on` until its first update is done.
The time includes imports, environment, `learning_starts` random steps and compilation. The first
start has an empty cache of compiled programs, and the second uses the cache of the first. A third,
eager start shows how much of the time is compilation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from processes import timed_run
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

STARTS = {"cold cache": "on", "second start": "on", "eager": "off"}


def measure(config: str, env_id: str, device: str) -> dict[str, float]:
    """Seconds to the first update of each kind of start."""
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, mode in STARTS.items():
            print(f"starting: {name} ...", flush=True)
            changes: dict[str, Any] = {"env_id": env_id, "compile": mode, "device": device}
            run = timed_run(config, changes, cache=cache, stop_at_first_update=True)
            seconds[name] = run.first_update
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="sac/mujoco", help="a packaged config or a file")
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.json")
    arguments = parser.parse_args()

    load = warn_if_busy()
    seconds = measure(arguments.config, arguments.env, arguments.device)
    title = f"Start to first update ({arguments.config}, {arguments.env})"
    rows = [[name, f"{value:.1f}"] for name, value in seconds.items()]
    print_table(title, ["", "seconds"], rows)
    about = machine(
        config=arguments.config, env_id=arguments.env, device=arguments.device, load_before=load
    )
    write_results(arguments.output, {"machine": about, "seconds_to_first_update": seconds})


if __name__ == "__main__":
    main()
