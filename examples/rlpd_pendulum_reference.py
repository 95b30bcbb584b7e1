"""Train RLPD on Pendulum from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/rlpd_pendulum_reference.py --total-timesteps 6000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import RLPD

if __name__ == "__main__":
    run_reference(RLPD, "rlpd/pendulum", __doc__)
