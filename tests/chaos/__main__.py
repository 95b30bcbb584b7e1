"""Run fault campaigns: `python -m tests.chaos [R1 ...] [--seed N] [--trials N | --trial N]`."""

from __future__ import annotations

import os

# Before PyTorch is imported: a forked process must not inherit threads, and looking for a GPU must
# not initialize it.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "MPLBACKEND": "agg",
}

import argparse
import datetime
import importlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runner import Campaign, Outcome, Trial, choose_trials, run_trials, summarize

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
MODULES = {
    "R1": "kills",
    "R2": "resumes",
    "R3": "disk_errors",
    "R4": "damage",
    "R5": "hostile",
    "R6": "fuzz",
    "R7": "values",
    "R8": "workers",
    "R9": "interrupts",
    "R10": "locks",
}
PRELOADED = (
    "rl_training.cli",
    "rl_training.runtime.workflows",
    "rl_training.experiment",
    "torch.utils.tensorboard",
    "torch.func",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "mujoco",
    "gymnasium.envs.classic_control",
    "gymnasium.envs.mujoco",
)
"""Imported once, before the processes of the trials are forked"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # no trial spends time on a GPU that it does not use
        )
    for name in PRELOADED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"{threads} threads run before the first trial; forked processes may hang")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the trials too
    work = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.work))
    names = options.campaigns or list(MODULES)
    print(f"seed {options.seed}, device {options.device}, work folder {work}", flush=True)
    campaigns = {}
    try:
        for name in names:
            campaigns[name] = _run(name, options, work / name)
    finally:
        if options.trial is None:
            shutil.rmtree(work, ignore_errors=True)
    # Last: describing a GPU initializes it, and then no process can be forked.
    report = {**_about(options), "campaigns": campaigns}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {options.json}")
    return int(any(entry["failed"] for entry in campaigns.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="R", help="R1 to R10; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, help="number of trials of each, instead of all")
    parser.add_argument("--trial", type=int, help="run only this one and keep its folder")
    parser.add_argument("--fast", action="store_true", help="leave out trials that compile")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help=f"write the report here, e.g. {RESULTS}")
    parser.add_argument("--work", type=Path, help="folder for the runs; by default a temporary one")
    return parser


def _about(options: argparse.Namespace) -> dict[str, Any]:
    from rl_training.checkpoints.run_folder import describe_machine

    found = describe_machine()
    return {
        "commit": found["git_commit"],
        "date": datetime.date.today().isoformat(),
        "hardware": found["hardware"],
        "versions": found["versions"],
        "seed": options.seed,
        "device": options.device,
        "processes": options.processes,
    }


def _run(name: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    campaign: Campaign = importlib.import_module(f".{MODULES[name]}", __package__).CAMPAIGN
    if reason := _why_left_out(campaign, options.device):
        print(f"{name:>3} {campaign.title}: skipped, {reason}")
        return {**summarize(campaign, [], []), "seconds": 0.0}
    chosen = [options.trial]
    if options.trial is None:
        chosen = choose_trials(campaign, options.trials, fast=options.fast)
    trials = [Trial(name, options.seed, index, work, options.device) for index in chosen]
    began = time.monotonic()
    outcomes = []
    for outcome in run_trials(campaign, trials, options.processes, keep=options.trial is not None):
        outcomes.append(outcome)
        _show_failure(campaign, outcome, trials)
    entry = summarize(campaign, trials, outcomes)
    entry["seconds"] = round(time.monotonic() - began, 1)
    _show(name, entry)
    return entry


def _why_left_out(campaign: Campaign, device: str) -> str | None:
    import torch

    if device == "cpu":
        return None
    if not campaign.on_gpu:
        return "because it does not depend on the device"
    return None if torch.cuda.is_available() else "because this machine has no GPU"


def _show_failure(campaign: Campaign, outcome: Outcome, trials: Sequence[Trial]) -> None:
    if not outcome.held:
        trial = next(each for each in trials if each.index == outcome.index)
        text = outcome.problem.strip().replace("\n", "\n    ")
        print(f"  FAILED {trial.command}  ({campaign.describe(trial)})\n    {text}", flush=True)


def _show(name: str, entry: dict[str, Any]) -> None:
    figures = "".join(
        f"; {key.replace('_', ' ')}: "
        + ", ".join(f"{what} {value:g}" for what, value in values.items())
        for key, values in entry["figures"].items()
    )
    skipped = f", {entry['skipped']} skipped" if entry["skipped"] else ""
    print(
        f"{name:>3} {entry['title']}: {entry['held']} of {entry['trials']} held{skipped} "
        f"in {entry['seconds']:.0f} s{figures}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
