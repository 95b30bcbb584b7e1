"""The example that compares algorithms makes its table and its report in one go."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import EXAMPLES


def run_example(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "compare_algorithms.py"), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.docs
def test_one_command_compares_three_algorithms_in_two_tasks(tmp_path: Path) -> None:
    done = run_example(tmp_path, "--steps", "2", "--seeds", "2", "--out", "short")
    assert done.returncode == 0, done.stderr
    per_task, _, over_tasks = done.stdout.partition("All tasks: normalized scores")
    for algorithm in ("sac", "td3", "tqc"):
        assert len(re.findall(rf" {algorithm}  .* 2  +2$", per_task, re.MULTILINE)) == 2
        assert re.search(rf"^{algorithm} .* 2$", over_tasks, re.MULTILINE)
    assert len(list(tmp_path.glob("short/*/config.yaml"))) == 12
    page = (tmp_path / "short" / "report.html").read_text()
    assert "<title>SAC, TD3, TQC on Pendulum-v1 and InvertedDoublePendulum-v5" in page
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_the_example_does_not_mix_its_runs_with_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "comparison").mkdir()
    done = run_example(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "--out" in done.stderr
