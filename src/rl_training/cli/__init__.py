"""The command line, `rl-training`: one file for related commands.

Commands import what they need when they run, which keeps `--help` fast. Those that take a while
print a line before they import PyTorch.
"""

from __future__ import annotations

from rl_training.cli.application import app, main

__all__ = ["app", "main"]
