"""The example runs as a newcomer would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "sac_pendulum_reference.py"


def test_the_example_trains_evaluates_and_says_where_the_curve_is(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--total-timesteps", "560", "--episodes", "2"]
    done = subprocess.run(
        [*command, "--output-dir", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "evaluation over 2 fresh episodes: -" in done.stdout
    [picture] = tmp_path.glob("out/*/learning_curve.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture.relative_to(tmp_path)) in done.stdout
    # Nothing is left outside the folder that was asked for.
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
