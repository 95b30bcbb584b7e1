"""Runs an `rl-training` command that writes the step it has reached to a file.

`python -m tests.chaos.counted_command FILE COMMAND ...`: for commands in new processes, which
share no memory with the trial.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_training import cli

from .runs import Counter, count_steps_of_commands

if __name__ == "__main__":
    count_steps_of_commands(Counter(Path(sys.argv[1])))
    sys.argv = ["rl-training", *sys.argv[2:]]
    cli.main()
