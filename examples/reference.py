"""What the reference scripts share: train from a packaged config, and look at what was learned."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rl_training.api import Agent
from rl_training.reporting.progress import progress_callback


def run_reference(agent_class: type[Agent], config_name: str, description: str) -> None:
    """Train, evaluate on fresh episodes, and say where the curve is and how to go on."""
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
    result = agent.learn(arguments.total_timesteps, callbacks=[progress_callback()])

    # On episodes that neither training nor its own evaluations have seen.
    returns = agent.evaluate(num_episodes=arguments.episodes)
    print(
        f"evaluation over {arguments.episodes} fresh episodes (seed {arguments.seed}): "
        f"{returns['eval_return_mean']:.1f} ± {returns['eval_return_std']:.1f}"
    )
    print(f"learning curve: {result.run_dir / 'learning_curve.png'}")
    command = os.path.relpath(Path(sys.executable).with_name("rl-training"))
    print(f"continue it:    {command} resume {result.run_dir} --total-timesteps {twice}")
