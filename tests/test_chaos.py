"""A sample of each fault campaign; `make chaos` runs them at their full figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.__main__ import MODULES
from chaos.runner import Campaign, Outcome, Trial, summarize

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


@pytest.mark.parametrize("name", MODULES)
def test_every_trial_is_described_before_anything_ran(name: str, tmp_path: Path) -> None:
    campaign: Campaign = importlib.import_module(f"chaos.{MODULES[name]}").CAMPAIGN
    for index in range(campaign.trials):
        assert isinstance(campaign.describe(Trial(name, 0, index, tmp_path)), str)


def test_blocks_of_updates_can_be_left_on_every_device(tmp_path: Path) -> None:
    resumes = importlib.import_module("chaos.resumes")
    for index in range(resumes.TRIALS):
        trial = Trial("R2", 0, index, tmp_path, "cuda")
        if resumes.feature_of(trial) == "left within a block of updates":
            # Short blocks overlap with steps on a GPU, and are then made to their end.
            assert resumes.config_of(trial)["overlap"] == "off"


def test_a_difference_in_the_metrics_names_its_quantity(run_copy: Path) -> None:
    runs = importlib.import_module("chaos.runs")
    before, path = runs.digest(run_copy), run_copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    changed = next(row for row in rows if "eval/mean_reward" in row)
    changed["eval/mean_reward"] += 1.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(AssertionError, match=r"run in metrics\.jsonl: eval/mean_reward \("):
        runs.require_same(runs.digest(run_copy), before)


def test_a_trial_is_described_while_the_uninterrupted_run_is_being_written(tmp_path: Path) -> None:
    campaign = importlib.import_module("chaos.disk_errors").CAMPAIGN
    unfinished = tmp_path / "references" / "short" / "reference.json"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_text('{"digests": [')
    assert campaign.describe(Trial("R3", 0, 300, tmp_path)) == "operation"


def test_a_report_has_the_full_figure_and_adds_up_what_is_counted(tmp_path: Path) -> None:
    campaign = Campaign("R0", "kills", 7, lambda trial: {}, counted=("kills",))
    trials = [Trial("R0", 0, index, tmp_path) for index in range(2)]
    outcomes = [Outcome(0, True, 0.1, {"kills": 1.0}), Outcome(1, False, 0.1, {"kills": 2.0})]
    entry = summarize(campaign, trials, outcomes)
    assert (entry["held"], entry["trials"], entry["full"]) == (1, 2, 7)
    assert entry["figures"] == {"kills": {"total": 3.0}}
