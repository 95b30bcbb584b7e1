"""Train PPO on Pendulum from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/ppo_pendulum_reference.py --total-timesteps 200000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import PPO

if __name__ == "__main__":
    run_reference(PPO, "ppo/pendulum", __doc__)
