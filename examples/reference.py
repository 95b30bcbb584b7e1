"""Code shared by the reference scripts: train from a packaged config and show the result."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rl_training.api import Agent


def run_reference(agent_class: type[Agent], config_name: str, description: str) -> None:
    """Train, evaluate on new episodes, and print the learning curve's path and how to continue."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--total-timesteps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs")
    parser.add_argument("--episodes", type=int, default=20)
    arguments = parser.parse_args()

    agent = agent_class.from_config(
        config_name, seed=arguments.seed, output_dir=arguments.output_dir
    )
    twice = 2 * agent.config.total_timesteps
    result = agent.learn(arguments.total_timesteps, progress=True)

    # These episodes are not used by training or by its evaluations.
    returns = agent.evaluate(num_episodes=arguments.episodes)
    print(
        f"evaluation over {arguments.episodes} new episodes (seed {arguments.seed}): "
        f"{returns['eval_return_mean']:.1f} ± {returns['eval_return_std']:.1f}"
    )
    print(f"learning curve: {result.run_dir / 'learning_curve.png'}")
    command = os.path.relpath(Path(sys.executable).with_name("rl-training"))
    print(f"to continue:    {command} resume {result.run_dir} --total-timesteps {twice}")
