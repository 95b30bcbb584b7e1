"""Statistics over seeds and tasks: known values, and agreement with rliable."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_training.experiment import statistics

RESAMPLES = 200
EXACT = {"rtol": 0, "atol": 1e-6}


def scores(runs: int, tasks: int, seed: int = 0) -> np.ndarray:
    """Scores with ties, as episodes of fixed length have them."""
    return np.random.default_rng(seed).normal(1.0, 0.5, (runs, tasks)).round(1)


@pytest.fixture(scope="module")
def rliable() -> Any:
    pytest.importorskip("rliable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rliable import library, metrics
    library.metrics = metrics
    return library


AGGREGATES = [
    (statistics.interquartile_mean, "aggregate_iqm"),
    (statistics.mean, "aggregate_mean"),
    (statistics.median, "aggregate_median"),
    (statistics.optimality_gap, "aggregate_optimality_gap"),
    (functools.partial(statistics.optimality_gap, gamma=1.5), "gap_1.5"),
]


@pytest.mark.parametrize(("runs", "tasks"), [(10, 5), (3, 2), (7, 1), (4, 3)])
@pytest.mark.parametrize(("ours", "theirs"), AGGREGATES, ids=[name for _, name in AGGREGATES])
def test_values_and_intervals_equal_those_of_rliable(
    rliable: Any, ours: Callable[..., Any], theirs: str, runs: int, tasks: int
) -> None:
    values = scores(runs, tasks)
    gap = functools.partial(rliable.metrics.aggregate_optimality_gap, gamma=1.5)
    reference = gap if theirs == "gap_1.5" else getattr(rliable.metrics, theirs)
    np.random.seed(7)
    point, interval = rliable.get_interval_estimates(
        {"": values}, lambda drawn: np.array([reference(drawn)]), reps=RESAMPLES
    )
    np.random.seed(7)  # rliable draws from the global stream
    indices = np.stack([np.random.choice(runs, values.shape) for _ in range(RESAMPLES)])
    np.testing.assert_allclose(ours(values), point[""][0], **EXACT)
    found = statistics.interval(values, ours, indices=indices)
    np.testing.assert_allclose(found, interval[""][:, 0], **EXACT)


@pytest.mark.parametrize("tasks", [1, 4])
def test_the_probability_of_improvement_equals_that_of_rliable(rliable: Any, tasks: int) -> None:
    first, second = scores(8, tasks, 1), scores(5, tasks, 2)
    second[0] = first[0]
    assert (first[:, None] == second).sum() > tasks  # ties
    reference = rliable.metrics.probability_of_improvement
    np.random.seed(3)
    point, interval = rliable.get_interval_estimates(
        {"": [first, second]}, lambda x, y: np.array([reference(x, y)]), reps=RESAMPLES
    )
    np.random.seed(3)
    drawn = [
        (np.random.choice(8, first.shape), np.random.choice(5, second.shape))
        for _ in range(RESAMPLES)
    ]
    mine, theirs = (np.stack(each) for each in zip(*drawn, strict=True))
    found = statistics.probability_of_improvement(first, second)
    np.testing.assert_allclose(found, point[""][0], **EXACT)
    ends = statistics.interval_between(first, second, indices=(mine, theirs))
    np.testing.assert_allclose(ends, interval[""][:, 0], **EXACT)


@pytest.mark.parametrize("average", [False, True])
def test_performance_profiles_equal_those_of_rliable(rliable: Any, average: bool) -> None:
    values, thresholds = scores(6, 4), np.linspace(0, 2, 21)
    np.random.seed(5)
    profile, interval = rliable.create_performance_profile(
        {"": values}, thresholds, use_score_distribution=not average, reps=RESAMPLES
    )
    np.random.seed(5)
    indices = np.stack([np.random.choice(6, values.shape) for _ in range(RESAMPLES)])
    ours = functools.partial(statistics.performance_profile, thresholds=thresholds, average=average)
    np.testing.assert_allclose(ours(values), profile[""], **EXACT)
    ends = statistics.interval(values, ours, indices=indices)
    np.testing.assert_allclose(ends, interval[""], **EXACT)


def test_a_curve_has_the_intervals_of_its_points(rliable: Any) -> None:
    """rliable takes curves as `(runs, tasks, points)`."""
    curve = np.stack([scores(5, 3, seed) for seed in range(4)])
    indices = np.random.default_rng(0).integers(5, size=(RESAMPLES, 5, 3))
    low, high = statistics.interval(curve, statistics.interquartile_mean, indices=indices)
    for point, values in enumerate(curve):
        drawn = [
            rliable.metrics.aggregate_iqm(np.take_along_axis(values, chosen, axis=0))
            for chosen in indices
        ]
        expected = np.percentile(drawn, [2.5, 97.5])
        np.testing.assert_allclose([low[point], high[point]], expected, **EXACT)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert statistics.interquartile_mean([100.0, 1.0, 3.0, -50.0]) == 2.0
    assert statistics.interquartile_mean([1.0, 2.0, 6.0]) == 3.0  # less than one is left out
    assert statistics.interquartile_mean([[1.0, 2.0], [3.0, 90.0]]) == 2.5


def test_a_tie_counts_as_half_of_an_improvement() -> None:
    improvement = statistics.probability_of_improvement
    assert improvement([1.0, 2.0], [2.0, 3.0]) == 0.125
    assert improvement([5.0, 5.0], [5.0]) == 0.5
    assert improvement([[1.0, 9.0]], [[0.0, 10.0]]) == 0.5  # over two tasks


def test_a_task_may_have_fewer_runs_than_another() -> None:
    joined = statistics.ragged([[1.0, 2.0, 3.0], [10.0]])
    assert statistics.mean(joined) == 6.0
    assert statistics.median(joined) == 6.0
    assert statistics.interquartile_mean(joined) == 2.5
    assert statistics.optimality_gap(joined, gamma=2.0) == pytest.approx(2 - (5 / 3 + 2) / 2)
    assert statistics.performance_profile(joined, [1.5]).tolist() == [
        pytest.approx((2 / 3 + 1) / 2)
    ]
    other = statistics.ragged([[0.0], [10.0]])
    assert statistics.probability_of_improvement(joined, other) == 0.75


def test_resamples_of_a_task_are_drawn_from_its_own_runs() -> None:
    joined = statistics.ragged([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0]])
    drawn = statistics.stratified_bootstrap(joined, lambda each: each, resamples=500)
    assert set(np.unique(drawn[..., 0])) == {1.0, 2.0, 3.0, 4.0}
    assert set(np.unique(drawn[:, :2, 1])) == {10.0, 20.0}
    assert np.isnan(drawn[:, 2:, 1]).all()
    pairs = {tuple(pair) for pair in drawn[:, :2, 1]}
    assert pairs == set(itertools.product([10.0, 20.0], repeat=2))
    low, high = statistics.interval(joined, statistics.mean)
    assert 5.5 <= low < statistics.mean(joined) < high <= 12.0


def test_the_same_runs_are_drawn_at_all_points_of_a_curve() -> None:
    curve = np.stack([scores(6, 2), scores(6, 2) + 10.0])
    drawn = statistics.stratified_bootstrap(curve, lambda each: each, resamples=50)
    np.testing.assert_allclose(drawn[:, 1] - drawn[:, 0], 10.0)


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    """Each point of the curve is an experiment; with 60 runs, 94.4 % of them are expected."""
    experiments = np.random.default_rng(0).normal(5.0, 1.0, (2_000, 60, 1))
    low, high = statistics.interval(experiments, statistics.mean, resamples=500)
    assert np.mean((low < 5.0) & (high > 5.0)) == pytest.approx(0.944, abs=0.015)


def test_intervals_are_repeatable_narrower_with_less_confidence_and_unknown_for_one_seed() -> None:
    values = scores(8, 2)
    assert statistics.interval(values, seed=1) == statistics.interval(values, seed=1)
    assert statistics.interval(values, seed=1) != statistics.interval(values, seed=2)
    wide = statistics.interval(values)
    narrow = statistics.interval(values, confidence=0.5)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert np.isnan(statistics.interval([3.0])).all()
    assert np.isnan(statistics.interval_between([3.0], [1.0, 2.0])).all()


def test_parts_of_the_resamples_give_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = np.stack([scores(6, 2), scores(6, 2, 1)])
    whole = statistics.interval(curve)
    monkeypatch.setattr(statistics, "MOST_AT_ONCE", 100)
    np.testing.assert_array_equal(statistics.interval(curve), whole)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"scores": []}, "not empty"),
        ({"scores": np.zeros((3, 0))}, "not empty"),
        ({"scores": [1.0, 2.0], "confidence": 1.0}, "confidence"),
        ({"scores": [1.0, 2.0], "resamples": 0}, "resamples"),
        ({"scores": [[np.nan], [1.0]]}, "must come after"),
        ({"scores": [[np.nan, 1.0]]}, "no runs"),
    ],
)
def test_scores_that_cannot_be_resampled_are_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        statistics.interval(**arguments)


def test_groups_with_different_tasks_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 and 3 tasks"):
        statistics.probability_of_improvement(np.ones((4, 2)), np.ones((4, 3)))


@pytest.mark.parametrize(
    ("task", "score", "expected"),
    [
        ("HalfCheetah-v5", 10574.0, 1.0),
        ("Hopper-v4", 18.791, 0.0),
        ("Pendulum-v1", -150.0, 1.0),
        ("CartPole-v1", 500.0, 1.0),
        ("InvertedPendulum-v5", 5.1, 0.0),
        ("InvertedDoublePendulum-v5", 9100.0, 1.0),
        ("dm_control/dog-run-v0", 250.0, 0.25),
        ("door-human-v1", 2880.5693087298737, 1.0),  # D4RL's scale
    ],
)
def test_scores_are_normalized_by_the_constants_of_their_task(
    task: str, score: float, expected: float
) -> None:
    found = statistics.normalized(task, [score])
    assert found is not None
    assert found[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "task", ["Unknown-v0", "Hopper-v5 (ctrl_cost_weight=0)", "Pendulum-v1 (TimeLimit)", "(own)"]
)
def test_a_changed_task_has_no_constants(task: str) -> None:
    assert statistics.normalized(task, [1.0]) is None
