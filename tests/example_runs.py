"""Run example scripts by path from another folder, as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def check_example(script: str, folder: Path, *, total_timesteps: int) -> None:
    """Check that an example trains, evaluates and prints the path of the learning curve."""
    command = [sys.executable, str(EXAMPLES / script), "--output-dir", "out"]
    done = subprocess.run(
        [*command, "--total-timesteps", str(total_timesteps), "--episodes", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "evaluation over 2 new episodes (seed 0): " in done.stdout
    [picture] = folder.glob("out/*/learning_curve.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture.relative_to(folder)) in done.stdout
    [state] = folder.glob(f"out/*/checkpoints/step_{total_timesteps:09}/state.json")
    assert json.loads(state.read_text())["progress"]["gradient_steps"] > 0
    # No files are created outside the requested folder.
    assert [path.name for path in folder.iterdir()] == ["out"]
