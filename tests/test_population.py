"""Several seeds trained together, in turns or batched: each equals a single run."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers import Recorder, StopAt, hashes, metric_rows, model_bytes, tiny

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.errors import ConfigError, EnvironmentRuntimeError
from rl_training.execution import execution
from rl_training.runtime.workflows import resume_together
from rl_training.training import saver as run_state
from rl_training.types import TrainResult


@pytest.fixture(params=["in turn", "batched"])
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test with seeds in turns, as on a CPU, and batched, as on a GPU."""
    if request.param == "batched":
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    return request.param == "batched"


class StopSeedAt(Callback):
    """Requests a stop of one seed or of all seeds."""

    def __init__(self, step: int, only: int | None = None) -> None:
        self.step, self.only = step, only

    def on_collect_end(self, context: TrainingContext) -> None:
        mine = self.only in (None, context.config.seed)
        if mine and context.global_step >= self.step:
            context.request_stop("test")


def assert_same(first: TrainResult, second: TrainResult) -> None:
    assert hashes(first.checkpoint_path) == hashes(second.checkpoint_path)
    assert metric_rows(first.run_dir) == metric_rows(second.run_dir)


def population(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return tiny(tmp_path, seeds=[3, 1, 4], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "num_envs": 2,
            "normalize_observations": True,
            "algo_kwargs": {"n_step": 3, "entropy_in_target": False},
        },
        {"vectorization": "async", "overlap": "on", "algo_kwargs": {"policy_delay": 2}},
        {"algo": "dqn", "env_id": "CartPole-v1", "algo_kwargs": {"prioritized": True}},
    ],
    ids=["plain", "many", "overlapped", "prioritized"],
)
@pytest.mark.fast_cases("in turn-plain", "batched-many")
def test_a_population_resumes_bit_for_bit_together_and_one_by_one(
    tmp_path: Path, batched: bool, changes: dict
) -> None:
    config = population(tmp_path, **changes)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopSeedAt(77)])
    assert [result.stop_reason for result in stopped] == ["test"] * 3
    copies = [tmp_path / f"copy{number}" for number in range(3)]
    for result, copy in zip(stopped, copies, strict=True):
        shutil.copytree(result.run_dir, copy)
    together = resume_together([result.run_dir for result in stopped])
    for one, other in zip(uninterrupted, together, strict=True):
        assert_same(one, other)
    alone = rl_training.resume_training(copies[1])
    assert_same(uninterrupted[1], alone)
    state = json.loads((alone.checkpoint_path / "state.json").read_text())
    assert (state["width"], state["slot"]) == ((3, 1) if batched else (1, 0))


@pytest.mark.compiled
def test_a_compiled_population_resumes_bit_for_bit(tmp_path: Path, batched: bool) -> None:
    config = tiny(tmp_path, seeds=[3, 1], compile="on", algo_kwargs={"policy_delay": 2})
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopSeedAt(77)])
    copy = shutil.copytree(stopped[1].run_dir, tmp_path / "copy")
    together = resume_together([result.run_dir for result in stopped])
    for one, other in zip(uninterrupted, together, strict=True):
        assert_same(one, other)
    assert_same(uninterrupted[1], rl_training.resume_training(copy))
    if not batched:
        config = tiny(tmp_path, seed=1, compile="on", algo_kwargs={"policy_delay": 2})
        assert_same(uninterrupted[1], rl_training.train(config))


def test_a_population_member_equals_a_single_run(tmp_path: Path, batched: bool) -> None:
    together = rl_training.train(population(tmp_path, total_timesteps=100))
    alone = rl_training.train(tiny(tmp_path, seed=1, total_timesteps=100))
    if not batched:
        assert_same(together[1], alone)
    rows = zip(metric_rows(together[1].run_dir), metric_rows(alone.run_dir), strict=True)
    for one, other in rows:
        assert one == pytest.approx(other, rel=1e-2, abs=1e-2)


@pytest.mark.fast_cases("batched")
def test_a_stopped_seed_does_not_affect_the_others(tmp_path: Path, batched: bool) -> None:
    config = population(tmp_path, num_envs=2)
    uninterrupted = rl_training.train(config)
    some = rl_training.train(config, callbacks=[StopSeedAt(60, only=1)])
    assert [result.stop_reason for result in some] == ["total_timesteps", "test", "total_timesteps"]
    assert [result.metrics["global_step"] for result in some] == [120, 60, 120]
    assert_same(uninterrupted[0], some[0])
    assert_same(uninterrupted[2], some[2])
    # The stopped seed resumes as if it had not stopped.
    assert_same(uninterrupted[1], rl_training.resume_training(some[1].run_dir))


@pytest.mark.fast_cases("batched")
def test_early_stopping_applies_to_each_seed_separately(tmp_path: Path, batched: bool) -> None:
    config = population(
        tmp_path, eval_interval=50, early_stopping={"patience": 1, "min_delta": 1e9}
    )
    results = rl_training.train(config)
    assert [result.stop_reason for result in results] == ["early_stopping"] * 3
    config["early_stopping"]["target_value"] = np.median(
        [metric_rows(result.run_dir)[1]["eval/mean_reward"] for result in results]
    )
    reasons = [result.stop_reason for result in rl_training.train(config)]
    assert sorted(reasons) == ["early_stopping", "target_value", "target_value"]


class Pendulum(gym.Wrapper):
    """Records its seeds. With a seed of `bad`, it fails at once or after some steps."""

    def __init__(self, seen: set[int], bad: set[int], patience: int | None = 0) -> None:
        super().__init__(gym.make("Pendulum-v1"))
        self.seen, self.bad, self.faulty, self.steps = seen, bad, False, 0
        self.patience = patience

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        if seed is not None:
            self.seen.add(seed)
            self.faulty = seed in self.bad
        obs, info = super().reset(seed=seed)
        return obs * (np.nan if self.faulty and self.patience is None else 1), info

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        self.steps += 1
        fails = self.faulty and self.steps > (self.patience or 0)
        return obs, float("nan") if fails else reward, *rest


@pytest.mark.parametrize("patience", [60, 0, None], ids=["later", "first step", "first reset"])
@pytest.mark.usefixtures("batched")
@pytest.mark.fast_cases("in turn-later", "batched-first step")
def test_an_error_ends_only_its_seed(tmp_path: Path, patience: int | None) -> None:
    seen: dict[int, set[int]] = {1: set(), 3: set()}
    for seed, its in seen.items():
        config = tiny(tmp_path, env_id=None, seed=seed)
        rl_training.train(config, env=lambda its=its: Pendulum(its, set()))
    config = population(tmp_path, env_id=None)
    uninterrupted = rl_training.train(config, env=lambda: Pendulum(set(), set()))
    config["run_name"] = "faulty"
    with (
        pytest.warns(UserWarning, match="seed 1 failed, the others continue"),
        pytest.raises(EnvironmentRuntimeError, match="not finite") as raised,
    ):
        rl_training.train(config, env=lambda: Pendulum(set(), seen[1] - seen[3], patience))
    where, *finished = raised.value.__notes__
    assert "faulty__seed1" in where
    assert len(finished) == 2
    for result, seed in ((uninterrupted[0], 3), (uninterrupted[2], 4)):
        checkpoint = tmp_path / f"faulty__seed{seed}" / "checkpoints" / "step_000000120"
        assert (checkpoint / "model.safetensors").read_bytes() == model_bytes(result)


@pytest.mark.usefixtures("batched")
def test_a_failed_save_of_one_seed_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_state.write_checkpoint

    def fail_for_seed_3(destination: Path, contents: Any) -> None:
        if "seed3" in str(destination) and "step_000000000" not in str(destination):
            raise OSError("no space left")
        write(destination, contents)

    monkeypatch.setattr(run_state, "write_checkpoint", fail_for_seed_3)
    config = population(tmp_path, run_name="full")
    with pytest.raises(OSError, match="no space"), pytest.warns(UserWarning, match="seed 3"):
        rl_training.train(config, callbacks=[StopSeedAt(77)])
    for seed in (1, 4):
        assert (tmp_path / f"full__seed{seed}" / "checkpoints" / "step_000000077").is_dir()


class InterruptAtEvaluation(Callback):
    """Simulates a signal during the evaluation of the first seed."""

    def __init__(self) -> None:
        self.evaluations = 0

    def for_seed(self, seed: int) -> Callback:
        return self

    def on_evaluation_end(self, context: TrainingContext) -> None:
        self.evaluations += 1
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("batched")
@pytest.mark.fast_cases("in turn")
def test_an_interruption_skips_further_evaluations(tmp_path: Path) -> None:
    config = population(tmp_path, eval_interval=60)
    uninterrupted = rl_training.train(config)
    callback = InterruptAtEvaluation()
    with pytest.raises(rl_training.TrainingInterrupted) as stopped:
        rl_training.train(config, callbacks=[callback])
    results = stopped.value.results
    assert callback.evaluations == 1
    assert [result.stop_reason for result in results] == ["interrupted"] * 3
    for one, other in zip(
        uninterrupted, resume_together([result.run_dir for result in results]), strict=True
    ):
        assert_same(one, other)  # skipped evaluations are made on resume


def test_runs_that_were_never_reached_are_reported_as_interrupted(tmp_path: Path) -> None:
    config = population(tmp_path)
    some = rl_training.train(config, callbacks=[StopSeedAt(60, only=1), StopSeedAt(80)])
    runs = [result.run_dir for result in some]

    class Interrupt(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.config.seed == 3:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(rl_training.TrainingInterrupted) as stopped:
        resume_together(runs, callbacks=[Interrupt()])
    results = stopped.value.results
    assert [result.run_dir for result in results] == runs
    assert [result.stop_reason for result in results] == ["interrupted"] * 3
    assert [result.metrics["global_step"] for result in results] == [81, 60, 81]


@pytest.mark.usefixtures("batched")
@pytest.mark.fast_cases("in turn")
def test_seeds_are_saved_at_the_same_steps(tmp_path: Path) -> None:
    """This includes the best result of one seed, so that all can resume together after a crash."""
    results = rl_training.train(population(tmp_path, eval_interval=30))
    names = [
        {path.name for path in (result.run_dir / "checkpoints").glob("step_*")}
        for result in results
    ]
    assert len(set.intersection(*names)) >= 2


def test_each_seed_has_its_own_callbacks(tmp_path: Path, batched: bool) -> None:
    class Shared(Recorder):
        def for_seed(self, seed: int) -> Callback:
            return self

    shared, copied = Shared(only=["train_end"]), Recorder()
    rl_training.train(population(tmp_path), callbacks=[shared, copied])
    assert shared.steps("train_end") == [120] * 3
    assert copied.events == []


@pytest.mark.fast_cases("batched")
def test_runs_at_different_steps_are_resumed_in_sequence(tmp_path: Path, batched: bool) -> None:
    config = population(tmp_path)
    uninterrupted = rl_training.train(config)
    some = rl_training.train(config, callbacks=[StopSeedAt(60, only=1), StopSeedAt(80)])
    assert [result.metrics["global_step"] for result in some] == [80, 60, 80]
    resumed = resume_together([result.run_dir for result in some], total_timesteps=120)
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert_same(one, other)


def test_nothing_is_created_if_one_folder_exists(tmp_path: Path) -> None:
    (tmp_path / "mine__seed4").mkdir()
    with pytest.raises(ConfigError, match="mine__seed4"):
        rl_training.train(population(tmp_path, run_name="mine"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine__seed4"]


# Overlap


def test_an_overlapped_run_makes_the_same_updates_and_resumes_exactly(tmp_path: Path) -> None:
    config = tiny(tmp_path, overlap="on", algo_kwargs={"gradient_updates_per_step": 2})
    recorder = Recorder()
    uninterrupted = rl_training.train(config, callbacks=[recorder])
    assert uninterrupted.metrics["gradient_steps"] == 160
    assert recorder.steps("update_end") == list(range(41, 121))
    stopped = rl_training.train(config, callbacks=[StopAt(77)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir))
    assert model_bytes(uninterrupted) != model_bytes(
        rl_training.train({**config, "overlap": "off"})
    )
