"""The command `compare`, and the table at the end of a training with several seeds."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_training.cli_options import RunsArgument, import_flags

if TYPE_CHECKING:
    from rl_training.types import TrainResult

WIDTH = 80
"""Columns of a table that is not printed in a terminal"""


def compare_runs(
    paths: RunsArgument,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw learning curves to a PNG, PDF or SVG file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    resamples: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="Resamples of the bootstrap.")
    ] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the bootstrap.")] = 0,
) -> None:
    """Compare the final scores of runs, with intervals over seeds.

    Runs that differ only in seed form a group. The final score of a run is the mean return of its
    last evaluation. Scores over several tasks are normalized.
    """
    from rl_training.experiment.comparison import compare

    comparison = compare(paths, resamples=resamples, seed=seed)
    if plot is not None:
        comparison.plot(plot)
    if as_json:
        print(json.dumps(comparison.to_json(), indent=2, allow_nan=False))
        return
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(comparison.table(max(WIDTH, terminal)))
    if plot is not None:
        print(f"\nlearning curves: {plot}")


def report_seeds(results: Sequence[TrainResult]) -> None:
    """Print one table of several runs; runs with different settings get one each."""
    from rl_training.experiment.comparison_text import seeds_text
    from rl_training.experiment.curves import group_runs, read_curve

    by_path = {result.run_dir: result for result in results}
    groups = group_runs(read_curve(path) for path in by_path)
    for group in groups:
        own = [(run.seed, by_path.pop(run.path)) for run in group.runs if run.path in by_path]
        print(f"{group.environment}, {group.label}: last evaluation of each seed")
        print(seeds_text([seed for seed, _ in own], [result for _, result in own]))
    if by_path:  # a folder that was moved or damaged meanwhile
        print(seeds_text([None] * len(by_path), list(by_path.values())))
    print("these episodes also select the best checkpoints; for an unbiased estimate of a run:")
    print(f"  rl-training evaluate RUN{import_flags()}")
    print("compare these runs with others:")
    print(f"  rl-training compare {_common_folder(results)}")


def _common_folder(results: Sequence[TrainResult]) -> str:
    parents = {result.run_dir.parent for result in results}
    return str(parents.pop()) if len(parents) == 1 else "RUN ..."
