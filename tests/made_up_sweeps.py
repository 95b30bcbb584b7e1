"""Sweeps for tests of their page, written without training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_up_runs import write_run

from rl_training.checkpoints.format import write_json
from rl_training.runtime.job_folder import STATUS, JobStatus, prepare_job, run_folders_of
from rl_training.sweeps.file import SweepFile, read_sweep
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.results import SweepResults, best_trial, read_results
from rl_training.sweeps.space import Params
from rl_training.sweeps.study import FAILED, FINISHED, PRUNED, Study, Trial
from rl_training.types import Json

STEPS = 6_000
BASE = {"base": "sac/pendulum", "set": {"total_timesteps": STEPS, "eval_interval": 500}}
SEARCH = {
    "algo_kwargs.learning_rate": {"log": [1e-4, 1e-2]},
    "algo_kwargs.tau": {"choice": [0.005, 0.01, 0.02]},
    "algo_kwargs.gamma": {"uniform": [0.9, 0.999]},
    "algo_kwargs.batch_size": {"log_int": [32, 20_000]},
    "algo_kwargs.hidden_sizes": {"choice": [[64, 64], [256, 256]]},
    "algo_kwargs.num_critics": {"int": [1, 5]},
}
FAILURE = "the loss of the critic is not finite at step 1,500"


def settings(parameters: int = 3, **values: Any) -> Json:
    """A sweep file that searches the first few parameters."""
    search = dict(list(SEARCH.items())[:parameters])
    return {**BASE, "search": search, "trials": 12, "seeds": "0-1", "sampler": "random", **values}


def level(params: Params) -> float:
    """The objective that a trial would have without noise; the learning rate matters most."""
    rate = math.log10(params.get("algo_kwargs.learning_rate", 1e-3))
    tau = params.get("algo_kwargs.tau", 0.005)
    gamma = params.get("algo_kwargs.gamma", 0.98)
    return -150 - 400 * (rate + 2.7) ** 2 - 4_000 * tau - 2_000 * (gamma - 0.97) ** 2


def made_up_trial(
    number: int,
    params: Params,
    seeds: int,
    reports: int = 12,
    level: Callable[[Params], float] = level,
) -> Trial:
    """A trial with noise: some are pruned, and a few fail."""
    noise = random.Random(number)
    steps = [STEPS * (place + 1) // reports for place in range(reports)]
    scores = [level(params) + noise.gauss(0, 25) for _ in range(seeds)]
    end = sum(scores) / seeds
    curve = {
        step: end - 900 * math.exp(-4 * step / STEPS) + noise.gauss(0, 10) for step in steps[:-1]
    } | {steps[-1]: end}
    if number % 17 == 11:
        return Trial(number, FAILED, params, None, [], FAILURE, dict(list(curve.items())[:2]))
    if end < -700:
        kept = dict(list(curve.items())[: max(1, reports // 3)])
        return Trial(number, PRUNED, params, kept[max(kept)], scores, "", kept)
    return Trial(number, FINISHED, params, end, scores, "", curve)


def made_up_results(
    folder: Path, values: Json, reports: int = 12, **level: Callable[[Params], float]
) -> SweepResults:
    """The results of a sweep without a study, for sweeps of many trials."""
    sweep = read_sweep(values)
    suggested = sweep.space.grid() if sweep.settings.grid else _random(sweep)
    trials = [
        made_up_trial(number, sweep.space.to_values(params), len(sweep.seeds), reports, **level)
        for number, params in enumerate(suggested[: sweep.trials])
    ]
    return SweepResults(SweepFolder(folder), sweep, trials)


def _random(sweep: SweepFile) -> list[Params]:
    import optuna

    distributions = sweep.space.distributions()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [study.ask(distributions).params for _ in range(sweep.trials)]


def make_sweep(path: Path, values: Json, ended: int | None = None) -> SweepResults:
    """Write a sweep through its study; `ended` is the number of trials that are over."""
    folder, sweep = SweepFolder(path), read_sweep(values)
    folder.open(sweep)
    study = Study(folder, sweep)
    for _ in range(sweep.trials if ended is None else ended):
        study.plan()
        number = study.begin()
        trial = made_up_trial(number, study.trials()[number].params, len(sweep.seeds))
        for step, value in trial.reports.items():
            study.report(number, step, value)
        if trial.state == FAILED:
            study.fail(number, trial.message)
        elif trial.state == PRUNED:
            study.prune(number, trial.scores)
        else:
            assert trial.value is not None
            study.finish(number, trial.value, trial.scores)
    return read_results(folder)


def make_winner(results: SweepResults, state: str = "finished") -> None:
    """Write the runs of the best trial with fresh seeds."""
    sweep, folder = results.sweep, results.folder.winner
    best = best_trial(sweep, results.trials)
    assert best is not None
    config = prepare_job(sweep.config(best.params), sweep.fresh_seeds, folder)
    for seed, path in zip(sweep.fresh_seeds, run_folders_of(folder, config), strict=True):
        write_run(
            path,
            environment="Pendulum-v1",
            seed=seed,
            steps=STEPS,
            rows=24,
            evaluations=12,
            level=900.0,
            finished=state == "finished",
            algo_kwargs=config.to_mapping()["algo_kwargs"],
        )
    write_json(folder / STATUS, JobStatus(state, STEPS, STEPS).to_json())  # type: ignore[arg-type]
