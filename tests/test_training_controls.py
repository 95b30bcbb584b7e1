"""Intervals, early stopping, budgets and ratios, for any number of environments."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers import (
    BUILT_IN,
    REPLAYED,
    Recorder,
    StopAt,
    each_algorithm,
    tiny,
    tiny_of,
    trainer_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.callbacks import Cadence, Callback, Progress, TrainingContext
from rl_training.config import EarlyStopping, TrainConfig
from rl_training.evaluation.evaluator import Evaluation
from rl_training.training.controls import (
    PeriodicEvaluation,
    StopEarly,
    build_control_callbacks,
    planned_end,
    why_never_stopped_early,
)
from rl_training.training.engine import UpdateSchedule, planned_updates, steps_at_once

LIVE = [*REPLAYED, *(spec for spec in BUILT_IN if spec.regimes[0] == "mixed")]
"""Those whose trainers take steps in an environment, from the start or after pretraining"""

pytestmark = pytest.mark.usefixtures("no_pictures")
each_live = pytest.mark.parametrize("spec", LIVE, ids=lambda spec: spec.name)


class View:
    """The part of a run that a control callback uses."""

    def __init__(self) -> None:
        self.global_step, self.evaluation, self.stopped = 0, None, None
        self.is_pretraining = False

    def request_stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason


def evaluations_until_stop(settings: EarlyStopping, returns: list[float]) -> tuple[int, str | None]:
    control, view = StopEarly(settings, 10**9), View()
    for number, value in enumerate(returns, start=1):
        view.global_step, view.evaluation = number * 100, Evaluation((value,), (1,))
        control.on_evaluation_end(view)
        if view.stopped:
            return number, view.stopped
    return len(returns), None


@given(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_an_interval_fires_once_when_one_or_more_multiples_are_passed(
    interval: int, advances: list[int]
) -> None:
    cadence, step = Cadence(interval), 0
    for advance in advances:
        passed = (step + advance) // interval > step // interval
        step += advance
        assert cadence.crossed(step) == passed
        assert not cadence.crossed(step)


@pytest.mark.parametrize(
    ("spec", "num_envs"),
    [*((spec, 3) for spec in LIVE), (LIVE[0], 1), (LIVE[0], 4)],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.fast_cases
def test_evaluation_and_update_intervals_hold_for_any_number_of_environments(
    tmp_path: Path, spec: AlgorithmSpec, num_envs: int
) -> None:
    recorder = Recorder()
    config = tiny_of(spec, tmp_path, num_envs=num_envs, eval_interval=50, total_timesteps=121)
    result = trainer_of(spec)(config, callbacks=[recorder])
    evaluated = recorder.steps("evaluation_end")
    assert [step // 50 for step in evaluated[:2]] == [1, 2]
    assert all(step % 50 < num_envs for step in evaluated[:2])
    final = -(-121 // num_envs) * num_envs
    assert result.metrics["global_step"] == evaluated[-1] == final
    block = config["algo_kwargs"].get("gradient_updates_per_step", 1)
    assert (
        result.metrics["gradient_steps"] == (final - 40) * block
    )  # one per step after `learning_starts`


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


def test_updates_delayed_until_the_first_n_step_row_are_caught_up(tmp_path: Path) -> None:
    algo_kwargs = {"learning_starts": 0, "n_step": 5, "entropy_in_target": False}
    result = rl_training.train(tiny(tmp_path, total_timesteps=30, algo_kwargs=algo_kwargs))
    assert result.metrics["gradient_steps"] == 30


class ScheduleAtEnd(Callback):
    """Records the learning rate factor and the update count at the end of the run."""

    def on_train_end(self, context: TrainingContext) -> None:
        algorithm = context._run.policy.algorithm
        self.factor = float(algorithm.learning_rate_factor(algorithm.state))
        self.updates = int(algorithm.state["updates"])


@each_live
def test_schedules_reach_their_end_with_the_run(tmp_path: Path, spec: AlgorithmSpec) -> None:
    """Of 102 steps, 62 are after `learning_starts`: 20 blocks of 2 updates."""
    config = tiny_of(
        spec,
        tmp_path,
        num_envs=3,
        total_timesteps=100,
        algo_kwargs={
            "learning_rate_schedule": "linear",
            "learning_rate_end_factor": 0.0,
            "train_frequency": 3,
            "gradient_updates_per_step": 2,
        },
    )
    end = ScheduleAtEnd()
    result = trainer_of(spec)(config, callbacks=[end])
    planned = planned_updates(TrainConfig(**config))
    assert end.updates == result.metrics["gradient_steps"] == planned == 40
    assert end.factor == pytest.approx(0.0, abs=1e-6)


@each_live
def test_an_update_budget_ends_the_run_and_its_schedules_exactly(
    tmp_path: Path, spec: AlgorithmSpec
) -> None:
    """This holds within a block of updates too."""
    algo_kwargs = {
        "gradient_updates_per_step": 4,
        "learning_rate_schedule": "linear",
        "learning_rate_end_factor": 0.0,
    }
    end = ScheduleAtEnd()
    config = tiny_of(spec, tmp_path, max_updates=10, algo_kwargs=algo_kwargs)
    result = trainer_of(spec)(config, callbacks=[end])
    assert result.stop_reason == "max_updates"
    assert end.updates == result.metrics["gradient_steps"] == 10
    assert end.factor == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["global_step"] == 43
    with pytest.warns(UserWarning, match="all 10 max_updates are used"):
        again = rl_training.resume_training(result.run_dir)
    assert (again.stop_reason, again.metrics["gradient_steps"]) == ("max_updates", 10)


def test_patience_counts_evaluations_without_improvement() -> None:
    settings = EarlyStopping(patience=2)
    assert evaluations_until_stop(settings, [1, 2, 1.5, 1.9, 5]) == (4, "early_stopping")
    assert evaluations_until_stop(settings, [1, 2, 1.5, 3, 2, 4]) == (6, None)


def test_improvements_below_min_delta_are_ignored() -> None:
    settings = EarlyStopping(patience=2, min_delta=0.5)
    assert evaluations_until_stop(settings, [1.0, 1.4, 1.45])[1] == "early_stopping"
    assert evaluations_until_stop(settings, [1.0, 1.4, 1.6])[1] is None


def test_nothing_stops_before_min_steps() -> None:
    settings = EarlyStopping(patience=1, min_steps=400)
    assert evaluations_until_stop(settings, [3, 2, 1, 0, -1]) == (4, "early_stopping")


@pytest.mark.parametrize(
    ("mode", "returns", "number"), [("max", [1, 5, 9, 12], 3), ("min", [9, 5, 3, 1], 4)]
)
def test_reaching_the_target_value_stops_immediately(
    mode: str, returns: list[float], number: int
) -> None:
    target = 8 if mode == "max" else 2
    settings = EarlyStopping(mode=mode, target_value=target)
    assert evaluations_until_stop(settings, returns) == (number, "target_value")


def test_the_error_for_an_unknown_metric_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"early_stopping.metric = 'reward': .*eval_return_mean"):
        TrainConfig(algo="sac", early_stopping={"metric": "reward"})


def saved_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


def test_an_evaluation_at_the_end_does_not_stop_a_run_early(tmp_path: Path) -> None:
    stop = {"patience": 2, "min_delta": 1e9}
    config = tiny(tmp_path, total_timesteps=60, eval_interval=20, early_stopping=stop)
    with pytest.warns(UserWarning, match="early_stopping has no effect"):
        result = rl_training.train(config)
    assert (result.metrics["global_step"], result.stop_reason) == (60, "total_timesteps")


@each_algorithm
@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"min_delta": 1e9}, "early_stopping"), ({"target_value": -1e9}, "target_value")],
    ids=["patience", "target"],
)
@pytest.mark.fast_cases
def test_early_stopping_and_its_state_are_in_the_checkpoint(
    tmp_path: Path, spec: AlgorithmSpec, settings: dict, reason: str
) -> None:
    """With three environments, evaluations are at 21 and 42. The second does not improve enough.

    Offline, environments are only used for evaluation, and evaluations are at 20 and 40.
    """
    stop = {"patience": 1, "min_steps": 30, **settings}
    config = tiny_of(spec, tmp_path, num_envs=3, eval_interval=20, early_stopping=stop)
    result = trainer_of(spec)(config)
    assert result.stop_reason == reason
    assert result.metrics["global_step"] == (40 if spec.regimes[0] == "offline" else 42)
    state = saved_state(result.checkpoint_path)
    assert state["progress"]["should_stop"] is True
    assert state["progress"]["stop_reason"] == reason
    assert state["callbacks"]["StopEarly"].keys() == {"best", "waited"}
    if reason == "early_stopping":
        assert state["callbacks"]["StopEarly"]["waited"] == 1
    with pytest.warns(UserWarning, match=rf"this run has finished \({reason} at step"):
        again = rl_training.resume_training(result.run_dir)
    assert (again.stop_reason, again.metrics["global_step"]) == (
        reason,
        result.metrics["global_step"],
    )


@each_live
@pytest.mark.fast_cases
def test_patience_continues_after_a_resume(tmp_path: Path, spec: AlgorithmSpec) -> None:
    """The first evaluation stays the best. The fourth, at 80, exceeds the patience."""
    stop = {"patience": 3, "min_delta": 1e9}
    config = tiny_of(spec, tmp_path, eval_interval=20, early_stopping=stop)
    first = trainer_of(spec)(config, callbacks=[StopAt(50)])
    assert saved_state(first.checkpoint_path)["callbacks"]["StopEarly"]["waited"] == 1
    resumed = rl_training.resume_training(first.run_dir)
    assert resumed.stop_reason == "early_stopping"
    assert resumed.metrics["global_step"] == 80


def test_a_finished_run_stays_finished_until_its_total_is_raised(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path))
    again = rl_training.resume_training(result.run_dir)
    assert again.metrics["global_step"] == 120
    assert again.stop_reason == "total_timesteps"
    more = rl_training.resume_training(result.run_dir, total_timesteps=150)
    assert more.metrics["global_step"] == 150


def test_every_run_has_the_control_callbacks_of_its_config() -> None:
    plain = TrainConfig(algo="sac")
    stopping = TrainConfig(algo="sac", early_stopping={})
    names = [
        {type(callback).__name__ for callback in build_control_callbacks(config)}
        for config in (plain, stopping)
    ]
    assert names[0] == {"PeriodicEvaluation", "KeepBest", "PeriodicCheckpoint"}
    assert names[1] - names[0] == {"StopEarly"}
    assert all(isinstance(c, Callback) for c in build_control_callbacks(plain))


# Early stopping that cannot act


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_interval": 0}, "eval_interval = 0 switches evaluations off"),
        ({"eval_interval": 500}, "eval_interval = 500 leaves no evaluation before .* 120; make"),
        ({"eval_interval": 120}, "eval_interval = 120 leaves no evaluation"),
        (
            {"eval_interval": 40, "early_stopping": {"patience": 2}},
            "patience = 2 takes 3 evaluations before the end, and there are 2; make",
        ),
        (
            {"eval_interval": 40, "early_stopping": {"target_value": 0.0, "min_steps": 90}},
            "min_steps = 90 is beyond the last evaluation before the end, at step 80",
        ),
        (
            {"eval_interval": 50, "max_updates": 5, "early_stopping": {"target_value": 0.0}},
            "eval_interval = 50 leaves no evaluation before the run ends at step 45",
        ),
    ],
)
def test_early_stopping_that_can_never_act_warns_once_before_the_run(
    changes: dict, message: str, tmp_path: Path
) -> None:
    config = tiny(tmp_path, seeds=[0, 1], **{"early_stopping": {}, **changes})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rl_training.train(config, callbacks=[NoRunWithoutWarning(caught)])
    found = [str(each.message) for each in caught if "early_stopping" in str(each.message)]
    assert len(found) == 1
    assert re.search(f"early_stopping has no effect: {message}", found[0])


class NoRunWithoutWarning(Callback):
    """Checks that a warning was given before training starts."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self.caught = caught

    def for_seed(self, seed: int) -> Callback:
        return self

    def on_train_start(self, context: TrainingContext) -> None:
        assert any("early_stopping" in str(each.message) for each in self.caught)


def test_early_stopping_without_an_environment_to_evaluate_in_warns(tmp_path: Path) -> None:
    rows = np.zeros((50, 2), np.float32)
    data = {
        "observations": rows,
        "actions": rows,
        "rewards": rows[:, 0],
        "terminals": np.arange(50) % 10 == 9,
        "action_low": -np.ones(2),
        "action_high": np.ones(2),
    }
    config = {"algo": "bc", "total_timesteps": 3, "early_stopping": {}, "eval_interval": 1}
    with pytest.warns(UserWarning, match="has no effect: there is no environment to evaluate in"):
        rl_training.train({**config, "output_dir": str(tmp_path)}, dataset=data)


def stops_early(config: TrainConfig) -> bool:
    """Return whether a run stops early if all evaluations are equal and reach the target."""
    assert config.early_stopping is not None
    value = config.early_stopping.target_value or 0.0
    progress, requests = Progress(), {"evaluation": False, "stop": False}
    member = SimpleNamespace(
        config=config,
        progress=progress,
        evaluation=Evaluation((value,), (1,)),
        request_evaluation=lambda: requests.update(evaluation=True),
        request_stop=lambda reason: requests.update(stop=True),
    )
    context: Any = TrainingContext(cast(Any, member))
    cadence = PeriodicEvaluation(config.eval_interval)
    control = StopEarly(config.early_stopping, planned_end(config))
    schedule, budget = UpdateSchedule.of(config), config.max_updates or 10**9
    while progress.global_step < config.total_timesteps and progress.gradient_steps < budget:
        if requests["stop"]:
            return True
        if progress.pretrain_updates < config.pretraining_updates:
            progress.pretrain_updates += 1
            progress.gradient_steps += 1
        else:
            progress.global_step += steps_at_once(config)
            blocks = schedule.blocks_due(progress.global_step)
            made = progress.pretrain_updates + blocks * schedule.updates_per_block
            progress.gradient_steps = min(budget, made)
        cadence.on_update_end(context)
        if requests["evaluation"]:
            requests["evaluation"] = False
            control.on_evaluation_end(context)
    return False


@given(
    st.sampled_from(["online", "offline", "mixed"]),
    st.integers(1, 60),
    st.integers(0, 70),
    st.integers(1, 7),
    st.none() | st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 50),
    st.sampled_from([None, 1.0]),
    st.integers(0, 20),
)
@settings(max_examples=300)
def test_a_warning_appears_only_if_early_stopping_cannot_stop_the_run(
    regime: Any,
    total: int,
    interval: int,
    num_envs: int,
    max_updates: int | None,
    patience: int,
    min_steps: int,
    target: float | None,
    pretraining: int,
) -> None:
    config = TrainConfig(
        algo="rlpd",
        regime=regime,
        total_timesteps=total,
        eval_interval=interval,
        num_envs=num_envs,
        max_updates=max_updates,
        early_stopping={"patience": patience, "min_steps": min_steps, "target_value": target},
        algo_kwargs={
            "learning_starts": 5,
            "train_frequency": 2,
            "gradient_updates_per_step": 3,
            "offline_pretrain_updates": pretraining if regime == "mixed" else 0,
        },
    )
    warned = why_never_stopped_early(config, can_evaluate=True) is not None
    assert warned == (not stops_early(config))
