"""Train Cal-QL on recorded steps of Pendulum from the packaged config, and show the result.

Run it as it is, or choose the length, seed and output folder:

    python examples/cal_ql_pendulum_reference.py --total-timesteps 20000 --seed 1 --output-dir runs
"""

from reference import run_reference

from rl_training import CalQL

if __name__ == "__main__":
    run_reference(CalQL, "cal_ql/pendulum", __doc__)
