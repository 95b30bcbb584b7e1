"""Train DQN on CartPole from the packaged config, and look at what it learned.

Run it as it is, or with another length, seed or place:

    python examples/dqn_cartpole_reference.py --total-timesteps 100000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import DQN

if __name__ == "__main__":
    run_reference(DQN, "dqn/cartpole", __doc__)
