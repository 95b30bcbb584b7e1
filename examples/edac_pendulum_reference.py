"""Train EDAC on recorded steps of Pendulum from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/edac_pendulum_reference.py --total-timesteps 20000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import EDAC

if __name__ == "__main__":
    run_reference(EDAC, "edac/pendulum", __doc__)
