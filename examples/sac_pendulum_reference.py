"""Train SAC on Pendulum from the packaged config, and show the result.

Run it as it is (`make demo`), or choose the length, seed and output folder:

    python examples/sac_pendulum_reference.py --total-timesteps 20000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import SAC

if __name__ == "__main__":
    run_reference(SAC, "sac/pendulum", __doc__)
