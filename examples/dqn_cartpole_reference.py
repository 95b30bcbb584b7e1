"""Train DQN on CartPole from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/dqn_cartpole_reference.py --total-timesteps 100000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import DQN

if __name__ == "__main__":
    run_reference(DQN, "dqn/cartpole", __doc__)
