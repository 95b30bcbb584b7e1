"""Run a sweep from start to end: open its folder, run its trials somewhere, show its table."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_training.config_files import dump_yaml
from rl_training.errors import ConfigError, UserError, warn_user
from rl_training.runtime.jobs import JobResult, run_or_resume
from rl_training.sweeps.file import HIDDEN, SweepFile, read_sweep
from rl_training.sweeps.folder import STUDY_VARIABLE, SWEEP, SweepFolder
from rl_training.sweeps.local import check_gpus, local_workers, suitable_workers
from rl_training.sweeps.results import SweepResults, write_results
from rl_training.sweeps.study import Study, open_database, rehearse
from rl_training.sweeps.worker import Board
from rl_training.validation import user_path

Place = Literal["local", "ray", "slurm"]
DEFAULT_FOLDER = "sweeps"
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Sweep:
    """A sweep whose folder is open."""

    folder: SweepFolder
    file: SweepFile

    def results(self) -> SweepResults:
        return SweepResults(self.folder, self.file, Study(self.folder, self.file).trials())


def open_sweep(
    source: str | Path | Mapping[str, Any],
    output_dir: str | Path | None = None,
    *,
    join: bool = False,
    check_place: Callable[[SweepFile], None] = lambda file: None,
) -> Sweep:
    """Open the folder of a sweep, or create it unless `join` is set.

    `source` is a sweep file, its content, or the folder of a sweep. Everything is checked before
    anything is created, at last with `check_place`, which raises if trials cannot run.
    """
    if not isinstance(source, Mapping) and (user_path(source) / SWEEP).is_file():
        folder = SweepFolder(user_path(source))
        if output_dir is not None and user_path(output_dir).resolve() != folder.path.resolve():
            raise UserError(f"--output-dir: {folder.path} is the folder of a sweep already")
        return Sweep(folder, folder.read(os.environ.get(STUDY_VARIABLE)))
    file = read_sweep(source)
    rehearse(file)
    folder = SweepFolder(_place(source, output_dir))
    if join and not folder.exists():
        raise ConfigError(
            f"{folder.path}: has no sweep to join; start it without --join, or name its folder "
            "with --output-dir"
        )
    if not folder.exists():
        folder.check(file)
        check_place(file)
    if file.settings.study is not None:
        open_database(file.settings.study)
    folder.open(file)
    return Sweep(folder, file)


@contextlib.contextmanager
def _workplace(
    on: Place, file: SweepFile, workers: int | None, address: str | None
) -> Iterator[int]:
    """Give how many trials run at once; raise a `UserError` if none can run there."""
    if on == "ray":
        from rl_training.sweeps.ray_executor import joined_cluster

        _check_storage(file)
        with joined_cluster(file, workers, address) as number:
            yield number
    elif on == "slurm":
        from rl_training.sweeps.slurm import require_slurm, suitable_jobs

        require_slurm()
        yield workers or suitable_jobs(file)
    else:
        check_gpus(file)
        yield workers or suitable_workers(file)


def _check_storage(file: SweepFile) -> None:
    """Raise `ConfigError` for a storage whose password is not known."""
    url = file.settings.storage or ""
    if HIDDEN in url:
        raise ConfigError(
            f"storage = {url!r}: its password is not in the folder of the sweep; start the sweep "
            "with its file"
        )


def _place(source: str | Path | Mapping[str, Any], output_dir: str | Path | None) -> Path:
    if output_dir is not None:
        return user_path(output_dir, "--output-dir")
    if isinstance(source, Mapping):
        raise UserError("output_dir: a sweep that is not a file needs a folder")
    return Path(DEFAULT_FOLDER) / Path(source).stem


def run_sweep(
    source: str | Path | Mapping[str, Any],
    output_dir: str | Path | None = None,
    *,
    on: Place = "local",
    workers: int | None = None,
    address: str | None = None,
    join: bool = False,
    modules: Sequence[str] = (),
    look: Callable[[SweepResults], None] = lambda results: None,
) -> SweepResults:
    """Run all trials of a sweep, or those that are left; return its results.

    `on` is where trials run, and `workers` how many at once. `look` is called now and then with
    the results so far. Call it again after any interruption: it goes on.
    """
    number = 0
    with contextlib.ExitStack() as stack:

        def enter(file: SweepFile) -> None:
            nonlocal number
            number = number or stack.enter_context(_workplace(on, file, workers, address))

        sweep = open_sweep(source, output_dir, join=join, check_place=enter)
        if sweep.file.settings.storage is not None and on != "ray":
            warn_user("storage: only --on ray uses it; trials write to the folder of the sweep")
        if not sweep.results().is_over:
            enter(sweep.file)
            _run_trials(sweep, on, number, modules, look)
    results = sweep.results()
    write_results(sweep.folder, sweep.file, results.trials)
    _write_best(results)
    return results


def _run_trials(
    sweep: Sweep,
    on: Place,
    number: int,
    modules: Sequence[str],
    look: Callable[[SweepResults], None],
) -> None:
    folder, file = sweep.folder, sweep.file
    board = Board(folder, file)
    with folder.lock():
        board.prepare()

    shown = 0.0

    def show() -> None:
        nonlocal shown
        if time.monotonic() > shown + LOOK_SECONDS:
            look(SweepResults(folder, file, board.study.trials()))
            shown = time.monotonic()

    if on == "local":
        with local_workers(folder, file, number, modules) as running:
            running.watch(show)
    elif on == "ray":
        from rl_training.sweeps.ray_executor import run_on_ray

        run_on_ray(board, folder, file, number, show)
    else:
        from rl_training.sweeps.slurm import run_on_slurm

        run_on_slurm(folder, file, workers=number, modules=modules, look=show)


def _write_best(results: SweepResults) -> None:
    """Write the config of the best trial, to train it again."""
    if (best := results.best) is not None:
        config = results.sweep.config(best.params)
        text = dump_yaml({**config.to_mapping(), "run_name": None, "seeds": None})
        (results.folder.path / "best.yaml").write_text(text)


def run_winner(results: SweepResults) -> JobResult:
    """Train the best trial with seeds that the search has not seen, in a folder of its own."""
    best = results.best
    if best is None:
        raise UserError(f"{results.folder.path}: no trial has finished, so there is no winner")
    config = results.sweep.config(best.params)
    return run_or_resume(config, results.sweep.fresh_seeds, results.folder.winner)
