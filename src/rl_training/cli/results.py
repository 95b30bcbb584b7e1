"""What `train` and `resume` print about their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_training.cli.options import import_flags

if TYPE_CHECKING:
    from rl_training.types import TrainResult


def print_results(results: Sequence[TrainResult]) -> None:
    """Print where the results of runs are, and the returns of their last evaluations."""
    if len(results) == 1:
        _print_one(results[0])
    elif results:
        _print_seeds(results)


def _print_one(result: TrainResult) -> None:
    from rl_training.types import SUCCESS_RATE

    metrics = result.metrics
    reason = "finished" if result.stop_reason == "total_timesteps" else result.stop_reason
    mean, spread = metrics["eval_return_mean"], metrics["eval_return_std"]
    returns = "not evaluated" if mean != mean else f"evaluation {mean:.2f} ± {spread:.2f}"
    print(
        f"{reason} at step {int(metrics['global_step']):,} "
        f"({int(metrics['gradient_steps']):,} updates), {returns}"
    )
    if mean == mean:  # biased: the same episodes select the best checkpoint
        if SUCCESS_RATE in metrics:
            print(f"success rate {metrics[SUCCESS_RATE]:.0%}")
        print("these episodes also select the best checkpoint; for an unbiased estimate:")
        print(f"  rl-training evaluate {result.run_dir}{import_flags()}")
    print(f"run            {result.run_dir}")
    print(f"checkpoint     {result.checkpoint_path}")
    if result.best_checkpoint_path is not None:
        print(f"best           {result.best_checkpoint_path}")
    curve = result.run_dir / "learning_curve.png"
    if curve.exists():  # not drawn if the run was interrupted
        print(f"learning curve {curve}")


def _print_seeds(results: Sequence[TrainResult]) -> None:
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
