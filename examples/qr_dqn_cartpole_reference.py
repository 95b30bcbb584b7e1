"""Train QR-DQN on CartPole from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/qr_dqn_cartpole_reference.py --total-timesteps 100000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import QRDQN

if __name__ == "__main__":
    run_reference(QRDQN, "qr_dqn/cartpole", __doc__)
