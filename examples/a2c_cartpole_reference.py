"""Train A2C on CartPole from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/a2c_cartpole_reference.py --total-timesteps 200000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import A2C

if __name__ == "__main__":
    run_reference(A2C, "a2c/cartpole", __doc__)
