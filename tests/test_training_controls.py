"""Cadences, early stopping, budgets and ratios, for any number of environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import Recorder, StopAt, tiny
from hypothesis import given
from hypothesis import strategies as st

import rl_training
from rl_training.config import EarlyStopping, TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.controls import StopEarly, build_control_callbacks
from rl_training.runtime.evaluator import Evaluation
from rl_training.runtime.schedules import Cadence, planned_updates


class View:
    """As much of a run as a control needs."""

    def __init__(self) -> None:
        self.global_step, self.evaluation, self.stopped = 0, None, None

    def request_stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason


def evaluations_until_stop(settings: EarlyStopping, returns: list[float]) -> tuple[int, str | None]:
    control, view = StopEarly(settings), View()
    for number, value in enumerate(returns, start=1):
        view.global_step, view.evaluation = number * 100, Evaluation((value,), (1,))
        control.on_evaluation_end(view)
        if view.stopped:
            return number, view.stopped
    return len(returns), None


@given(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_a_cadence_fires_once_for_each_advance_that_passes_a_multiple(
    interval: int, advances: list[int]
) -> None:
    cadence, step = Cadence(interval), 0
    for advance in advances:
        passed = (step + advance) // interval > step // interval
        step += advance
        assert cadence.crossed(step) == passed
        assert not cadence.crossed(step)


@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_evaluation_and_updates_keep_their_cadence_for_any_number_of_environments(
    tmp_path: Path, num_envs: int
) -> None:
    recorder = Recorder()
    config = tiny(tmp_path, num_envs=num_envs, eval_interval=50, total_timesteps=121)
    result = rl_training.train(config, callbacks=[recorder])
    evaluated = recorder.steps("evaluation_end")
    assert [step // 50 for step in evaluated[:2]] == [1, 2]
    assert all(step % 50 < num_envs for step in evaluated[:2])
    final = -(-121 // num_envs) * num_envs
    assert result.metrics["global_step"] == evaluated[-1] == final
    assert result.metrics["gradient_steps"] == final - 40  # one update per step after the start


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize(("frequency", "updates"), [(1, 2), (3, 1), (5, 4)])
def test_the_update_to_data_ratio_is_exact(
    tmp_path: Path, num_envs: int, frequency: int, updates: int
) -> None:
    algo_kwargs = {"train_frequency": frequency, "gradient_updates_per_step": updates}
    config = tiny(tmp_path, num_envs=num_envs, algo_kwargs=algo_kwargs)
    result = rl_training.train(config)
    expected = (120 - 40) // frequency * updates
    assert result.metrics["gradient_steps"] == expected
    assert planned_updates(TrainConfig(**config)) == expected


def test_updates_wait_for_the_first_n_step_row_and_are_caught_up(tmp_path: Path) -> None:
    algo_kwargs = {"learning_starts": 0, "n_step": 5}
    result = rl_training.train(tiny(tmp_path, total_timesteps=30, algo_kwargs=algo_kwargs))
    assert result.metrics["gradient_steps"] == 30


def test_an_update_budget_ends_the_run_exactly(tmp_path: Path) -> None:
    algo_kwargs = {"gradient_updates_per_step": 4}
    result = rl_training.train(tiny(tmp_path, max_updates=10, algo_kwargs=algo_kwargs))
    assert result.stop_reason == "max_updates"
    assert result.metrics["gradient_steps"] == 10
    assert result.metrics["global_step"] == 43


def test_patience_counts_evaluations_without_improvement() -> None:
    settings = EarlyStopping(patience=2)
    assert evaluations_until_stop(settings, [1, 2, 1.5, 1.9, 5]) == (4, "early_stopping")
    assert evaluations_until_stop(settings, [1, 2, 1.5, 3, 2, 4]) == (6, None)


def test_small_improvements_do_not_count() -> None:
    settings = EarlyStopping(patience=2, min_delta=0.5)
    assert evaluations_until_stop(settings, [1.0, 1.4, 1.45])[1] == "early_stopping"
    assert evaluations_until_stop(settings, [1.0, 1.4, 1.6])[1] is None


def test_nothing_stops_before_min_steps() -> None:
    settings = EarlyStopping(patience=1, min_steps=400)
    assert evaluations_until_stop(settings, [3, 2, 1, 0, -1]) == (4, "early_stopping")


@pytest.mark.parametrize(
    ("mode", "returns", "number"), [("max", [1, 5, 9, 12], 3), ("min", [9, 5, 3, 1], 4)]
)
def test_a_target_value_stops_at_once(mode: str, returns: list[float], number: int) -> None:
    target = 8 if mode == "max" else 2
    settings = EarlyStopping(mode=mode, target_value=target)
    assert evaluations_until_stop(settings, returns) == (number, "target_value")


def test_an_unknown_metric_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"early_stopping.metric = 'reward': .*eval_return_mean"):
        TrainConfig(algo="sac", early_stopping={"metric": "reward"})


def saved_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


def test_early_stopping_and_its_state_are_in_the_checkpoint(tmp_path: Path) -> None:
    stop = {"patience": 1, "min_delta": 1e9}
    config = tiny(tmp_path, eval_interval=20, early_stopping=stop)
    result = rl_training.train(config)
    assert result.stop_reason == "early_stopping"
    assert result.metrics["global_step"] == 40
    state = saved_state(result.checkpoint_path)
    assert state["progress"]["should_stop"] is True
    assert state["progress"]["stop_reason"] == "early_stopping"
    assert state["callbacks"]["StopEarly"]["waited"] == 1


def test_patience_goes_on_where_it_was_after_a_resume(tmp_path: Path) -> None:
    stop = {"patience": 3, "min_delta": 1e9}
    config = tiny(tmp_path, eval_interval=20, early_stopping=stop)
    whole = rl_training.train(config)
    first = rl_training.train(config, callbacks=[StopAt(50)])
    resumed = rl_training.resume_training(first.run_dir)
    assert resumed.stop_reason == whole.stop_reason == "early_stopping"
    assert resumed.metrics["global_step"] == whole.metrics["global_step"] == 80


def test_a_finished_run_stays_finished_until_its_total_is_raised(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path))
    again = rl_training.resume_training(result.run_dir)
    assert again.metrics["global_step"] == 120
    assert again.stop_reason == "total_timesteps"
    more = rl_training.resume_training(result.run_dir, total_timesteps=150)
    assert more.metrics["global_step"] == 150


def test_every_run_has_the_controls_its_config_asks_for() -> None:
    plain = TrainConfig(algo="sac")
    stopping = TrainConfig(algo="sac", early_stopping={})
    names = [
        {type(callback).__name__ for callback in build_control_callbacks(config)}
        for config in (plain, stopping)
    ]
    assert names[0] == {"PeriodicEvaluation", "KeepBest", "PeriodicCheckpoint"}
    assert names[1] - names[0] == {"StopEarly"}
    assert all(isinstance(c, Callback) for c in build_control_callbacks(plain))
