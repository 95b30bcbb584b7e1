"""Train FlashSAC on Pendulum from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/flash_sac_pendulum_reference.py --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import FlashSAC

if __name__ == "__main__":
    run_reference(FlashSAC, "flash_sac/pendulum", __doc__)
