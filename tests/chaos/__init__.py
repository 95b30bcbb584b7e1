"""Fault campaigns: one for each promise R1 to R10 of docs/reliability.md.

`python -m tests.chaos` runs them all, `python -m tests.chaos R4 --seed 3 --trial 17` one trial.
"""

import sys
from pathlib import Path

# The helpers of the other tests are imported by their plain names, as pytest does.
sys.path.append(str(Path(__file__).parent.parent))
