"""Train SAC on Pendulum from the packaged config, and look at what it learned.

Run it as it is (`make demo`), or with another length, seed or place:

    python examples/sac_pendulum_reference.py --total-timesteps 20000 --seed 1 --output-dir runs
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rl_training import SAC
from rl_training.runtime.progress import progress_callback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--total-timesteps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs")
    parser.add_argument("--episodes", type=int, default=20)
    arguments = parser.parse_args()

    agent = SAC.from_config("sac/pendulum", seed=arguments.seed, output_dir=arguments.output_dir)
    result = agent.learn(arguments.total_timesteps, callbacks=[progress_callback()])

    # Episodes that neither training nor its evaluations have seen.
    returns = agent.evaluate(num_episodes=arguments.episodes, seed=arguments.seed + 1000)
    print(
        f"evaluation over {arguments.episodes} fresh episodes: "
        f"{returns['eval_return_mean']:.1f} ± {returns['eval_return_std']:.1f}"
    )
    print(f"learning curve: {result.run_dir / 'learning_curve.png'}")
    command = os.path.relpath(Path(sys.executable).with_name("rl-training"))
    print(f"continue it:    {command} resume {result.run_dir} --total-timesteps 20000")


if __name__ == "__main__":
    main()
