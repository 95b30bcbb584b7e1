"""A sample of each fault campaign; `make chaos` runs them at their full figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLE = {
    "R1": 6,
    "R2": 3,
    "R3": 16,
    "R4": 24,
    "R5": 14,
    "R6": 150,
    "R7": 10,
    "R8": 5,
    "R9": 6,
    "R10": 3,
}
"""Number of trials of each campaign: together under two minutes on two cores"""


@pytest.mark.faults
@pytest.mark.parametrize("campaign", SAMPLE)
def test_a_sample_of_the_campaign_holds(campaign: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--trials", str(SAMPLE[campaign]), "--processes", "1", "--fast"]
    options += ["--work", str(tmp_path), "--json", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", campaign, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert report.is_file(), done.stdout + done.stderr
    entry = json.loads(report.read_text())["campaigns"][campaign]
    assert entry["failures"] == []
    assert entry["held"] + entry["skipped"] == SAMPLE[campaign]
    assert done.returncode == 0
