"""Write the page of a sweep: one HTML file with the best trial, its fresh seeds, and all trials."""

from __future__ import annotations

from pathlib import Path

from rl_training.checkpoints.run_folder import RunFolder, last_metrics
from rl_training.errors import CheckpointError, UserError
from rl_training.report.data import assemble
from rl_training.report.numbers import text
from rl_training.report.page import beside, checked_page, write_page
from rl_training.report.runs import read_run
from rl_training.runtime.job_folder import JOB, prepare_job, read_job_status, run_folders_of
from rl_training.runtime.jobs import EVALUATION, EVALUATION_KEYS
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.report.data import MAX_MESSAGE, Winner, sweep_json
from rl_training.sweeps.results import SweepResults, read_results
from rl_training.sweeps.settings import Objective


def write_sweep_report(folder: SweepFolder, out: Path, study: str | None = None) -> Path:
    """Write the page of a sweep, whether or not it is over, and return its path.

    The page is one file that needs no network. `study` is the URL of the sweep's database, if it
    has one.
    """
    page = checked_page(out)
    results = read_results(folder, study)
    winner = _read_winner(results)
    link = beside(page.parent)
    return write_page(
        page,
        lambda detail: {
            **assemble(
                winner.runs, published=False, title=_title(results), link=link, detail=detail
            ),
            "sweep": sweep_json(results, winner, detail),
        },
    )


def _read_winner(results: SweepResults) -> Winner:
    folder, sweep, best = results.folder.winner, results.sweep, results.best
    if best is None:
        return Winner(problem="no trial has finished yet")
    if not (folder / JOB).is_file():
        return Winner(problem="it is not trained with fresh seeds yet")
    try:
        # The folder has a job, so this only checks that it is the one of the best trial.
        config = prepare_job(sweep.config(best.params), sweep.fresh_seeds, folder)
        status, paths = read_job_status(folder), run_folders_of(folder, config)
        runs = [read_run(path) for path in paths if path.is_dir()]
        if status.state != "finished":
            done = f"{status.step:,} of {status.total_timesteps:,} steps"
            return Winner(runs, problem=f"its fresh seeds are not done ({status.state}, {done})")
        scores = [_final_score(path, sweep.objective) for path in paths]
    except (UserError, OSError) as error:
        return Winner(problem=f"its fresh seeds cannot be shown: {text(str(error), MAX_MESSAGE)}")
    return Winner(runs, dict(zip(sweep.fresh_seeds, scores, strict=True)))


def _final_score(path: Path, objective: Objective) -> float:
    """The metric of a run's last evaluation, which needs no checkpoint."""
    metric = objective.parts[0]
    value = last_metrics(RunFolder(path), EVALUATION).get(EVALUATION_KEYS[metric])
    if value is None:
        raise CheckpointError(f"{path}: has no {metric}")
    return float(value)


def _title(results: SweepResults) -> str:
    return text(f"Sweep {results.folder.path.absolute().name}")
