"""Train TD3 on Pendulum from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/td3_pendulum_reference.py --total-timesteps 20000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import TD3

if __name__ == "__main__":
    run_reference(TD3, "td3/pendulum", __doc__)
