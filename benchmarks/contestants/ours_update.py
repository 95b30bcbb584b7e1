"""The time of this package's SAC update, without environments: to compare with `jax_sac.py`.

    python ours_update.py [--seeds 1 8 32] [--precision highest high] [--mode on]

Prints one JSON line for each number of seeds and precision.
"""

from __future__ import annotations

import argparse
import json
from typing import Any


def time_updates(seeds: int, precision: str, mode: str) -> dict[str, Any]:
    """Milliseconds per update of a population of `seeds`, all of them together, on the GPU.

    The same work as one update of `jax_sac.py`: draw noise and a minibatch of 256 rows for each
    seed from its own replay buffer of 100,000 rows on the device, then one SAC update at
    HalfCheetah's sizes (17 obs, 6 actions, two layers of 256, two critics).

    `precision` is `highest` (float32) or `high` (TF32), as in the config's `float32_precision`;
    `mode` is as in its `compile`: `on` or `off`. Times chunks of 100 updates with the device
    synchronised at both ends, compilation, graph capture and two chunks of warm-up left out.

    Returns `device`, `seeds`, `precision`, `mode`, `best_ms` and `median_ms` over the chunks.
    """
    raise NotImplementedError("time_updates waits for the learner's new interface")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--precision", nargs="+", default=["highest", "high"])
    parser.add_argument("--mode", default="on")
    arguments = parser.parse_args()
    for precision in arguments.precision:
        for seeds in arguments.seeds:
            print(json.dumps(time_updates(seeds, precision, arguments.mode)), flush=True)


if __name__ == "__main__":
    main()
