"""Train a task, and print the last mean return of each seed as one line of JSON.

python ours_learn.py '{"config": "sac/mujoco", "seeds": [0], "total_timesteps": 40000, ...}'
"""

from __future__ import annotations

import json
import sys
import tempfile

import rl_training
from rl_training.config_files import load_config


def main() -> None:
    task = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(task.pop("config"), **task, output_dir=folder)
        results = rl_training.train(config, progress=False)
        print(json.dumps({"returns": [each.metrics["eval_return_mean"] for each in results]}))


if __name__ == "__main__":
    main()
