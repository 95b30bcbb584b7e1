"""`python -m rl_training`."""

from rl_training.cli import main

main()
