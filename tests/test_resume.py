"""A run that was stopped and resumed equals the uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import StopAt, hashes, metric_rows, tiny
from probes import Probe
from safetensors.torch import load_file

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints import run_folder
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.errors import ConfigError, TrainingError
from rl_training.training import saved_run as resuming
from rl_training.types import TrainResult

ROUNDED = {
    "float32_precision": "medium",
    "algo_kwargs": {"hidden_sizes": [384, 384], "batch_size": 32},
}
"""With products large enough to be rounded"""


def assert_same(uninterrupted: TrainResult, resumed: TrainResult) -> None:
    assert resumed.metrics == uninterrupted.metrics
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(uninterrupted.run_dir)


def stop_and_resume(config: dict[str, Any], *steps: int, **options: Any) -> TrainResult:
    result = rl_training.train(config, callbacks=[StopAt(steps[0])], **options)
    for step in steps[1:]:
        result = rl_training.resume_training(result.run_dir, callbacks=[StopAt(step)], **options)
    return rl_training.resume_training(result.run_dir, **options)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"num_envs": 3, "algo_kwargs": {"n_step": 3, "entropy_in_target": False}},
            id="3-envs-3-step",
        ),
        pytest.param(
            {
                "normalize_observations": True,
                "algo_kwargs": {
                    "learning_rate_schedule": "linear",
                    "policy_delay": 2,
                    "buffer_capacity": 70,
                },
            },
            id="normalized-scheduled-wrapping",
        ),
        pytest.param(ROUNDED, id="bfloat16-products"),
    ],
)
@pytest.mark.thorough
def test_stopping_within_an_episode_changes_nothing(
    tmp_path: Path, env_id: str, changes: dict[str, Any]
) -> None:
    if env_id.startswith("HalfCheetah"):
        pytest.importorskip("mujoco")
    config = tiny(tmp_path, env_id=env_id, eval_interval=45, total_timesteps=240, **changes)
    uninterrupted = rl_training.train(config)
    # During warm-up, within an episode, and within the next episode.
    assert_same(uninterrupted, stop_and_resume(config, 25, 77, 205))


def test_stopping_with_environments_in_processes_changes_nothing(tmp_path: Path) -> None:
    config = tiny(tmp_path, num_envs=2, vectorization="async")
    assert_same(rl_training.train(config), stop_and_resume(config, 60))


def test_extending_a_finished_run_equals_a_longer_one(tmp_path: Path) -> None:
    longer = rl_training.train(tiny(tmp_path, total_timesteps=200, eval_interval=70))
    short = rl_training.train(tiny(tmp_path, total_timesteps=100, eval_interval=70))
    extended = rl_training.resume_training(short.run_dir, total_timesteps=200)
    assert_same(longer, extended)


def test_going_back_to_an_older_checkpoint_repeats_the_rest_exactly(tmp_path: Path) -> None:
    config = tiny(tmp_path, checkpoint_interval=70)
    uninterrupted = rl_training.train(config)
    before, rows = hashes(uninterrupted.checkpoint_path), metric_rows(uninterrupted.run_dir)
    older = uninterrupted.run_dir / "checkpoints" / "step_000000070"
    again = rl_training.resume_training(older)
    assert hashes(again.checkpoint_path) == before
    assert metric_rows(again.run_dir) == rows
    # Later checkpoints are moved, not deleted.
    assert (uninterrupted.run_dir / "superseded" / "step_000000120").is_dir()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    first, again, other = (
        rl_training.train(tiny(tmp_path, seed=seed)).checkpoint_path for seed in (3, 3, 4)
    )
    assert hashes(first) == hashes(again)
    assert hashes(first)["model.safetensors"] != hashes(other)["model.safetensors"]


@pytest.mark.thorough
def test_a_run_does_not_change_the_callers_random_streams_and_threads(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    rl_training.train(tiny(tmp_path, num_threads=2))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert torch.get_num_threads() == threads


class GlobalNoise(gym.Wrapper):
    """An environment that uses the global random streams, as custom environments often do."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward + random.random() + np.random.rand(), terminated, truncated, info


def test_environments_with_global_random_streams_are_reproducible_and_report_their_resume_level(
    tmp_path: Path,
) -> None:
    config = {**tiny(tmp_path), "env_id": None}

    def make() -> gym.Env:
        return GlobalNoise(gym.make("Pendulum-v1"))

    first, again = (rl_training.train(config, env=make) for _ in range(2))
    assert hashes(first.checkpoint_path) == hashes(again.checkpoint_path)
    assert '"resume_level": "statistical"' in (first.run_dir / "metadata.json").read_text()
    resumed = stop_and_resume(config, 77, env=make)
    assert resumed.metrics["global_step"] == 120
    assert resumed.metrics["gradient_steps"] == 80


class Opaque(gym.Wrapper):
    """An environment with an attribute that cannot be captured."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.handle = (value for value in range(3))


def test_an_environment_that_cannot_be_captured_is_saved_at_episode_boundaries(
    tmp_path: Path,
) -> None:
    def make() -> gym.Env:
        return gym.wrappers.TimeLimit(Opaque(gym.make("Pendulum-v1").unwrapped), 30)

    config = {**tiny(tmp_path, checkpoint_interval=50), "env_id": None}
    uninterrupted = rl_training.train(config, env=make)
    saved = {path.name for path in (uninterrupted.run_dir / "checkpoints").glob("step_*")}
    assert saved == {"step_000000060", "step_000000120"}
    metadata = (uninterrupted.run_dir / "metadata.json").read_text()
    assert "episode-exact" in metadata
    before = hashes(uninterrupted.checkpoint_path)
    resumed = rl_training.resume_training(
        uninterrupted.run_dir / "checkpoints" / "step_000000060", env=make
    )
    assert hashes(resumed.checkpoint_path) == before


def test_resuming_with_other_versions_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(77)])
    present = run_folder.package_versions()
    monkeypatch.setattr(resuming, "package_versions", lambda: {**present, "torch": "99.0"})
    with pytest.warns(UserWarning, match=r"in the last bits: torch .* -> 99.0"):
        assert rl_training.resume_training(result.run_dir).metrics["global_step"] == 120


class Tally(Probe):
    """Its reward is the number of the episode, counted by the object."""

    episode = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        self.episode += 1
        return super().reset(seed=seed)

    def step(self, action: np.ndarray) -> Any:
        return self.observe(0.0), float(self.episode), True, False, {}


def test_an_evaluation_does_not_depend_on_earlier_evaluations(tmp_path: Path) -> None:
    config = {**tiny(tmp_path, eval_interval=30), "env_id": None}
    uninterrupted = rl_training.train(config, env=Tally)
    rows = [
        row["eval/mean_reward"]
        for row in metric_rows(uninterrupted.run_dir)
        if "eval/mean_reward" in row
    ]
    assert len(rows) == 4
    assert len(set(rows)) == 1
    assert_same(uninterrupted, stop_and_resume(config, 77, env=Tally))


def test_evaluation_does_not_use_the_random_streams_of_training(tmp_path: Path) -> None:
    def make() -> gym.Env:
        return GlobalNoise(gym.make("Pendulum-v1"))

    often, seldom = (
        rl_training.train({**tiny(tmp_path, eval_interval=interval), "env_id": None}, env=make)
        for interval in (7, 0)
    )
    assert hashes(often.checkpoint_path) == hashes(seldom.checkpoint_path)


def test_an_unfinished_episode_is_not_repeated(tmp_path: Path) -> None:
    def make() -> gym.Env:
        return gym.wrappers.TimeLimit(Opaque(gym.make("Pendulum-v1").unwrapped), 30)

    config = {**tiny(tmp_path), "env_id": None}
    resumed = stop_and_resume(config, 77, env=make)
    rows = load_file(resumed.checkpoint_path / "replay-00000.safetensors")["rows"]
    assert len(rows) == 120
    assert len(rows.unique(dim=0)) == 120


def test_resuming_a_run_interrupted_at_its_end_trains_no_further(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(120, "interrupted")])
    resumed = rl_training.resume_training(result.run_dir)
    assert resumed.metrics["global_step"] == 120
    assert resumed.stop_reason == "total_timesteps"


def test_a_total_below_the_current_step_is_refused(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(77)])
    with pytest.raises(ConfigError, match="already at step 77"):
        rl_training.resume_training(result.run_dir, total_timesteps=50)


def test_a_run_that_was_killed_before_its_first_interval_resumes_from_its_start(
    tmp_path: Path,
) -> None:
    class Killed(Exception):
        pass

    class Kill(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 60:
                raise Killed

    uninterrupted = rl_training.train(tiny(tmp_path))
    with pytest.raises(Killed):
        rl_training.train(tiny(tmp_path, run_name="killed"), callbacks=[Kill()])
    assert_same(uninterrupted, rl_training.resume_training(tmp_path / "killed"))


class Worsening(Probe):
    """Returns decrease with each episode, counted over all environments of the process."""

    played = 0

    def step(self, action: np.ndarray) -> Any:
        Worsening.played += 1
        return self.observe(0.0), -float(Worsening.played), True, False, {}


def test_a_best_checkpoint_not_recorded_before_a_crash_is_recorded_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    config = {**tiny(tmp_path, eval_interval=50, run_name="crashed"), "env_id": None}
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "mark_best", crash)
        with pytest.raises(KeyboardInterrupt):
            rl_training.train(config, env=Worsening)
    rl_training.resume_training(tmp_path / "crashed", env=Worsening)
    assert RunFolder(tmp_path / "crashed").best()["step"] == 50


class Diverge(Callback):
    """Makes the policy NaN, as a learning rate that is too large can."""

    def on_update_end(self, context: TrainingContext) -> None:
        if context.global_step == 70:
            context._run.policy.algorithm.state["actor"].fill_(float("nan"))


@pytest.mark.parametrize("checkpoint_interval", [0, 70])
def test_a_policy_that_is_not_finite_raises_and_is_not_saved(
    tmp_path: Path, checkpoint_interval: int
) -> None:
    config = tiny(tmp_path, checkpoint_interval=checkpoint_interval, run_name="diverged")
    with pytest.raises(TrainingError, match="not finite at step 70") as raised:
        rl_training.train(config, callbacks=[Diverge()])
    assert "step_000000000" in raised.value.__notes__[0]
    assert [p.name for p in (tmp_path / "diverged" / "checkpoints").glob("step*")] == [
        "step_000000000"
    ]


@pytest.mark.compiled
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"algo_kwargs": {"policy_delay": 2}}, id="float32"),
        pytest.param(ROUNDED, id="bfloat16-products"),
    ],
)
def test_compiled_runs_resume_exactly_and_stay_compiled(
    tmp_path: Path, env_id: str, changes: dict[str, Any]
) -> None:
    config = tiny(tmp_path, env_id=env_id, compile="on", **changes)
    uninterrupted = rl_training.train(config)
    resumed = stop_and_resume(config, 77)
    assert_same(uninterrupted, resumed)
    state = json.loads((resumed.checkpoint_path / "state.json").read_text())
    assert state["execution"]["compiled"] is True
