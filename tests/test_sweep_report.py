"""The page of a sweep: its data, importances, and what is done with missing or hostile parts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_pages import ATTACKS
from made_up_sweeps import BASE, FAILURE, made_up_results, make_sweep, make_winner, settings

from rl_training.checkpoints.format import write_json
from rl_training.errors import UserError
from rl_training.experiment import statistics
from rl_training.report.page import MOST_BYTES
from rl_training.runtime.job_folder import STATUS, JobStatus
from rl_training.sweeps.file import read_sweep
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.report import data, importance, page
from rl_training.sweeps.report.data import Winner, sweep_json
from rl_training.sweeps.report.importance import importances, place_of, to_parameters
from rl_training.sweeps.report.page import write_sweep_report
from rl_training.sweeps.results import SweepResults
from rl_training.sweeps.space import Choice
from rl_training.sweeps.study import FINISHED, Trial
from rl_training.types import Json

pytest.importorskip("optuna")


def embedded(page: Path) -> Json:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    values: Json = json.loads(found[1])
    return values


def json_of(results: SweepResults, winner: Winner | None = None) -> Json:
    return sweep_json(results, winner or Winner())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SweepResults:
    """A sweep whose trials are over, and whose winner is trained with fresh seeds."""
    results = make_sweep(tmp_path_factory.mktemp("sweep") / "tuning", settings(fresh_seeds="5-8"))
    make_winner(results)
    return results


def written(results: SweepResults, tmp_path: Path) -> Json:
    return embedded(write_sweep_report(results.folder, tmp_path / "page.html"))


def test_the_page_begins_with_the_best_trial_and_its_seeds(
    finished: SweepResults, tmp_path: Path
) -> None:
    shown = written(finished, tmp_path)["sweep"]
    best = max(
        (trial for trial in finished.trials if trial.state == FINISHED),
        key=lambda trial: trial.value or 0.0,
    )
    assert shown["best"]["number"] == best.number
    assert [each["value"] for each in shown["best"]["values"]] == best.scores
    assert [each["seed"] for each in shown["best"]["values"]] == [0, 1]
    assert {key: json.loads(value) for key, value in shown["best"]["params"]} == best.params
    low, high = statistics.interval(np.array(best.scores)[:, None])
    assert (shown["best"]["low"], shown["best"]["high"]) == (low, high)


def test_the_winner_has_scores_of_fresh_seeds_alone(finished: SweepResults, tmp_path: Path) -> None:
    values = written(finished, tmp_path)
    winner = values["sweep"]["winner"]
    assert winner["problem"] == ""
    assert [each["seed"] for each in winner["values"]] == [5, 6, 7, 8]
    final = {run["seed"]: run["last"]["value"] for run in values["runs"]}
    assert {each["seed"]: each["value"] for each in winner["values"]} == final
    scores = np.array(list(final.values()))
    assert winner["value"] == pytest.approx(float(statistics.interquartile_mean(scores[:, None])))
    assert winner["low"] < winner["value"] < winner["high"]
    [group] = values["groups"]
    assert group["curve"]["seeds"] == 4
    assert len(group["curve"]["low"]) == 12


def test_every_trial_is_on_the_page_with_its_curve(finished: SweepResults, tmp_path: Path) -> None:
    shown = written(finished, tmp_path)["sweep"]
    assert len(shown["trials"]) == len(finished.trials) == 12
    keys = [each["key"] for each in shown["parameters"]]
    for trial, row in zip(finished.trials, shown["trials"], strict=True):
        number, state, at, value, scores, message, x, y = row
        assert (number, data.STATES[state], value) == (trial.number, trial.state, trial.value)
        assert scores == pytest.approx(trial.scores, rel=1e-4)
        assert shown["axes"][x] == sorted(trial.reports)
        assert y == pytest.approx([trial.reports[step] for step in sorted(trial.reports)], rel=1e-4)
        tau = shown["parameters"][keys.index("algo_kwargs.tau")]["values"][at[1]]
        assert float(tau) == trial.params["algo_kwargs.tau"]
        assert at[0] == trial.params["algo_kwargs.learning_rate"]
        assert (shown["messages"][message] if message is not None else "") == trial.message
    assert shown["states"]["failed"] == 1
    assert shown["messages"] == [FAILURE]
    assert shown["notes"] == []


def test_ranges_and_choices_keep_their_kind() -> None:
    shown = json_of(made_up_results(Path("sweep"), settings(6)))["parameters"]
    assert [(each["key"].split(".")[1], each["scale"]) for each in shown] == [
        ("learning_rate", "log"),
        ("tau", "choice"),
        ("gamma", "linear"),
        ("batch_size", "log"),
        ("hidden_sizes", "choice"),
        ("num_critics", "linear"),
    ]
    assert [each.get("whole") for each in shown] == [False, None, False, True, None, True]
    assert shown[4]["values"] == ["[64, 64]", "[256, 256]"]


@pytest.mark.parametrize(
    ("changes", "exact", "words"),
    [
        ({"sampler": "random"}, True, "exact"),
        ({"sampler": "tpe", "rounds": 4}, True, "exact"),
        ({"sampler": "tpe"}, False, "plans a trial from those that have ended"),
        ({"sampler": "random", "prune": {"median": None}}, False, "stops trials"),
    ],
)
def test_the_page_says_whether_its_table_is_exact(changes: Json, exact: bool, words: str) -> None:
    shown = json_of(made_up_results(Path("sweep"), settings(**changes)))
    assert shown["exact"] is exact
    assert words in shown["why"]
    assert ("statistical" in shown["why"]) is not exact


def test_a_sweep_that_goes_on_says_so(tmp_path: Path) -> None:
    results = make_sweep(tmp_path / "sweep", settings(trials=5), ended=2)
    values = written(results, tmp_path)
    assert values["sweep"]["notes"] == ["The sweep goes on: 2 of 5 trials are over."]
    assert values["sweep"]["states"] == {
        "finished": 2, "pruned": 0, "failed": 0, "running": 0, "queued": 3
    }  # fmt: skip
    assert values["sweep"]["winner"]["problem"] == "it is not trained with fresh seeds yet"
    assert values["runs"] == []


def test_a_sweep_without_a_finished_trial_has_a_page(tmp_path: Path) -> None:
    results = make_sweep(tmp_path / "sweep", settings(trials=2), ended=0)
    shown = written(results, tmp_path)["sweep"]
    assert shown["best"] is None
    assert shown["winner"]["problem"] == "no trial has finished yet"


def test_a_winner_that_is_not_done_has_curves_but_no_score(tmp_path: Path) -> None:
    results = make_sweep(tmp_path / "sweep", settings(trials=3))
    make_winner(results, "preempted")
    values = written(results, tmp_path)
    assert len(values["runs"]) == 2
    assert values["sweep"]["winner"]["value"] is None
    assert "preempted, 6,000 of 6,000 steps" in values["sweep"]["winner"]["problem"]


def test_runs_of_another_trial_are_not_shown_as_the_winner(
    finished: SweepResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = sorted(finished.trials, key=lambda trial: -(trial.value or -1e9))[1]
    better = Trial(12, FINISHED, second.params, 0.0, [0.0, 0.0])
    changed = SweepResults(finished.folder, finished.sweep, [*finished.trials, better])
    monkeypatch.setattr(page, "read_results", lambda *_: changed)
    values = written(changed, tmp_path)
    assert values["sweep"]["best"]["number"] == 12
    assert values["runs"] == []
    assert values["sweep"]["winner"]["value"] is None
    assert "has another job" in values["sweep"]["winner"]["problem"]


def test_a_finished_winner_without_its_metric_is_explained(tmp_path: Path) -> None:
    objective = {"metric": "eval_length_mean"}
    results = make_sweep(tmp_path / "sweep", settings(trials=3, objective=objective))
    make_winner(results)
    assert written(results, tmp_path)["sweep"]["winner"]["value"] == 1000.0
    metrics = next(results.folder.winner.glob("*/metrics.jsonl"))
    metrics.write_text(metrics.read_text().replace("eval/mean_ep_length", "eval/other"))
    assert "has no eval_length_mean" in written(results, tmp_path)["sweep"]["winner"]["problem"]


def test_damaged_files_of_the_winner_leave_the_rest_of_the_page(tmp_path: Path) -> None:
    results = make_sweep(tmp_path / "sweep", settings(trials=3))
    make_winner(results)
    (results.folder.winner / STATUS).write_text("{")
    shown = written(results, tmp_path)["sweep"]
    assert "cannot be shown" in shown["winner"]["problem"]
    assert shown["best"] is not None


def test_making_the_page_trains_and_changes_nothing(tmp_path: Path) -> None:
    results = make_sweep(tmp_path / "sweep", settings(trials=3))
    make_winner(results, "running")
    write_json(results.folder.winner / STATUS, JobStatus("running", 10, 6_000).to_json())

    def files() -> dict[Path, bytes]:
        found = (path for path in (tmp_path / "sweep").rglob("*") if path.is_file())
        # Optuna's journal notes every process that opens it.
        return {path: path.read_bytes() for path in found if path != results.folder.journal}

    before = files()
    write_sweep_report(results.folder, tmp_path / "page.html")
    assert files() == before


@pytest.mark.parametrize(
    ("statistic", "has_interval"), [("iqm", True), ("mean", True), ("median", True), ("min", False)]
)
def test_the_interval_belongs_to_the_statistic(statistic: str, has_interval: bool) -> None:
    objective = {"metric": f"eval_return_{statistic}"}
    best = json_of(made_up_results(Path("s"), settings(seeds="0-4", objective=objective)))["best"]
    scores = [each["value"] for each in best["values"]]
    assert (best["low"] is not None) is has_interval
    if statistic == "min":
        assert best["value"] == min(scores)
    else:
        assert best["low"] <= best["value"] <= best["high"]


def test_one_seed_has_no_interval() -> None:
    best = json_of(made_up_results(Path("sweep"), settings(seeds=[0])))["best"]
    assert best["low"] is None
    assert len(best["values"]) == 1


def test_the_smallest_value_is_the_best_where_the_objective_says_so() -> None:
    results = made_up_results(Path("s"), settings(objective={"mode": "min"}))
    shown = json_of(results)
    values = [trial.value for trial in results.trials if trial.state == FINISHED]
    assert shown["best"]["value"] == pytest.approx(min(value for value in values if value))
    assert shown["objective"]["mode"] == "min"


# Importances


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_parameter_that_decides_is_the_most_important(mode: str) -> None:
    results = made_up_results(
        Path("sweep"),
        settings(6, trials=150, objective={"mode": mode}),
        level=lambda params: 300 * params["algo_kwargs.gamma"] * (1 if mode == "max" else -1),
    )
    found = importances(results.sweep, results.trials)
    assert next(iter(found.shares)) == "algo_kwargs.gamma"
    assert found.shares["algo_kwargs.gamma"] > 0.5
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.best == 15


def test_a_choice_can_be_the_most_important() -> None:
    results = made_up_results(
        Path("sweep"),
        settings(6, trials=100),
        level=lambda params: 500.0 * (params["algo_kwargs.hidden_sizes"] == [256, 256]),
    )
    assert next(iter(importances(results.sweep, results.trials).shares)) == (
        "algo_kwargs.hidden_sizes"
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (settings(1, trials=40), "a single parameter"),
        (settings(3, trials=6), "at least 10 finished trials, and there are 6"),
    ],
)
def test_the_page_says_why_there_are_no_importances(values: Json, words: str) -> None:
    shown = json_of(made_up_results(Path("sweep"), values))["importances"]
    assert shown["shares"] == []
    assert words in shown["problem"]


def test_equal_objectives_give_no_importances() -> None:
    results = made_up_results(Path("sweep"), settings(trials=30))
    equal = [Trial(each.number, FINISHED, each.params, 1.0, [1.0]) for each in results.trials]
    assert "have the same objective" in importances(results.sweep, equal).problem
    two_better = [Trial(99, FINISHED, equal[0].params, value, [value]) for value in (2.0, 3.0)]
    assert "have the same objective" in importances(results.sweep, [*two_better, *equal]).problem


def test_trials_that_are_as_good_as_the_best_ones_count_as_best() -> None:
    results = made_up_results(Path("sweep"), settings(trials=30))
    mixed = [
        Trial(each.number, FINISHED, each.params, float(each.number % 3 == 0), [1.0])
        for each in results.trials
    ]
    found = importances(results.sweep, mixed)
    assert (found.best, found.trials) == (10, 30)


@pytest.mark.parametrize("count", [10, 11, 29, 49, 50, 51, 60, 70])
def test_rounding_adds_no_trial_to_the_best_ones(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = made_up_results(Path("sweep"), settings(trials=count))
    finished = [
        Trial(each.number, FINISHED, each.params, float(each.number), [1.0])
        for each in results.trials
    ]
    given: list[float] = []

    def divergences(_: Any, __: Any, share: float) -> dict[str, float]:
        given.append(share)
        return {"algo_kwargs.tau": 1.0}

    monkeypatch.setattr(importance, "_divergences", divergences)
    found = importances(results.sweep, finished)
    assert found.best == max(5, math.ceil(count / 10))
    assert math.ceil(given[0] * count) == found.best  # what Optuna makes of the share


def test_settings_that_only_python_finds_equal_are_different_choices() -> None:
    choice = Choice((1, True, 1.0, "1", None))
    assert [place_of(choice, value) for value in choice.values] == [0, 1, 2, 3, 4]
    space = read_sweep(
        {**BASE, "grid": {"algo_kwargs.alpha": ["auto", 1, 0.2]}, "seeds": [0]}
    ).space
    for parameters in space.grid():
        assert to_parameters(space, space.to_values(parameters)) == parameters


# The file


def test_a_thousand_trials_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = settings(6, trials=1_000, seeds="0-4")
    results = made_up_results(tmp_path / "sweep", values, reports=20)
    monkeypatch.setattr(page, "read_results", lambda *_: results)
    written_page = write_sweep_report(SweepFolder(tmp_path / "sweep"), tmp_path / "page.html")
    assert written_page.stat().st_size < MOST_BYTES < 2_000_000
    shown = embedded(written_page)["sweep"]
    assert len(shown["trials"]) == 1_000
    assert max(len(row[-1]) for row in shown["trials"]) == 20


def test_a_page_of_very_many_trials_shows_the_best_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MOST_TRIALS", 30)
    results = made_up_results(tmp_path / "sweep", settings(trials=60))
    shown = json_of(results)
    assert len(shown["trials"]) == 30
    kept = {row[0] for row in shown["trials"]}
    finished = [each for each in results.trials if each.state == FINISHED]
    best = sorted(finished, key=lambda trial: -(trial.value or 0.0))[:30]
    assert kept == {trial.number for trial in best}
    assert "30 of 60 trials" in shown["notes"][0]
    assert shown["states"]["finished"] == len(finished)


def test_a_page_needs_a_sweep_and_a_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no sweep"):
        write_sweep_report(SweepFolder(tmp_path / "nothing"), tmp_path / "page.html")
    with pytest.raises(UserError, match=r"must end with \.html"):
        write_sweep_report(SweepFolder(tmp_path), tmp_path / "page.txt")
    assert list(tmp_path.iterdir()) == []


def test_the_sweep_file_on_the_page_repeats_the_sweep(finished: SweepResults) -> None:
    from rl_training.config_files import parse_yaml

    shown = json_of(finished)
    [[name, content]] = shown["files"]
    again = read_sweep(parse_yaml(content, name))
    assert name == "sweep.yaml"
    assert again.identity == finished.sweep.identity
    assert again.fresh_seeds == finished.sweep.fresh_seeds
    repeat, proceed = (words for _, words in shown["commands"])
    assert repeat.startswith("rl-training sweep sweep.yaml --output-dir ")
    assert proceed == f"rl-training sweep {finished.folder.path} --report"


def test_a_base_that_is_a_file_is_on_the_page(tmp_path: Path) -> None:
    from rl_training.config_files import parse_yaml

    base = tmp_path / "mine.yaml"
    base.write_text("algo: sac\nenv_id: Pendulum-v1\ntotal_timesteps: 5000\n")
    results = made_up_results(tmp_path, {**settings(), "base": str(base), "set": {}})
    files = dict(json_of(results)["files"])
    assert str(tmp_path) not in files["sweep.yaml"]
    (tmp_path / "base.yaml").write_text(files["base.yaml"])
    values = parse_yaml(files["sweep.yaml"], "sweep.yaml")
    assert values["base"] == "base.yaml"
    again = read_sweep({**values, "base": str(tmp_path / "base.yaml")})
    assert {**again.identity, "base": None} == {**results.sweep.identity, "base": None}
    assert again.config(results.trials[0].params) == results.sweep.config(results.trials[0].params)


def test_passwords_and_variables_of_machines_are_not_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"ray": {"env_vars": {"TOKEN": "hush-1"}}, "storage": "s3://hush-2/bucket"}
    values = settings(**secret, study="postgresql://me:hush-3@host/study")
    results = made_up_results(tmp_path / "sweep", values)
    monkeypatch.setattr(page, "read_results", lambda *_: results)
    made = write_sweep_report(results.folder, tmp_path / "page.html")
    assert "hush" not in made.read_text()


def test_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = made_up_results(tmp_path / "sweep", settings(trials=12))
    hostile = [
        Trial(each.number, "failed", each.params, None, [], message=attack + "</script><b>")
        for each, attack in zip(results.trials, ATTACKS, strict=False)
    ]
    rest = results.trials[len(hostile) :]
    changed = SweepResults(results.folder, results.sweep, [*hostile, *rest])
    monkeypatch.setattr(page, "read_results", lambda *_: changed)
    made = write_sweep_report(results.folder, tmp_path / "page.html").read_text()
    assert "<img" not in made
    assert "</script><b>" not in made
    assert made.count("</script>") == 2
    assert "\u202e" not in made
    assert "\x1b" not in made


def test_values_that_are_not_finite_do_not_stop_the_page() -> None:
    results = made_up_results(Path("sweep"), settings(trials=12))
    strange: list[Any] = [float("inf"), float("nan"), -float("inf")]
    trials = [
        Trial(each.number, FINISHED, each.params, value, [value, 1.0], reports={500: value})
        for each, value in zip(results.trials, strange, strict=False)
    ] + results.trials[len(strange) :]
    shown = json_of(SweepResults(results.folder, results.sweep, trials))
    json.dumps(shown, allow_nan=False)
    assert [row[3] for row in shown["trials"][:3]] == [None, None, None]
