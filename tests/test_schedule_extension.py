"""Schedules of runs that are extended to a larger total."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import StopAt, hashes, tiny, tiny_of
from safetensors.torch import load_file
from typer.testing import CliRunner

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.cli import app
from rl_training.errors import ConfigError
from rl_training.types import TrainResult

LINEAR = {"learning_rate_schedule": "linear"}


def finished(tmp_path: Path, algo: str = "dqn", **algo_kwargs: Any) -> TrainResult:
    """Return a finished run whose learning rate schedule has ended."""
    spec = get_algorithm_spec(algo)
    return rl_training.train(tiny_of(spec, tmp_path, algo_kwargs={**LINEAR, **algo_kwargs}))


def networks_changed(before: TrainResult, after: TrainResult) -> set[str]:
    old, new = (
        load_file(result.checkpoint_path / "model.safetensors") for result in (before, after)
    )
    return {name.partition(".")[0] for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_extending_a_run_after_its_schedule_is_refused_with_the_choices(
    schedule: str, tmp_path: Path
) -> None:
    done = finished(tmp_path, learning_rate_schedule=schedule)
    before = hashes(done.checkpoint_path)
    with pytest.raises(
        ConfigError, match=rf"'{schedule}'.*--schedule extend.*schedule='extend'.*'keep'"
    ):
        rl_training.resume_training(done.run_dir, total_timesteps=200)
    assert hashes(done.checkpoint_path) == before
    kept = rl_training.resume_training(done.run_dir, total_timesteps=200, schedule="keep")
    assert kept.metrics["gradient_steps"] == 160
    assert networks_changed(done, kept) == set()


def test_an_extended_schedule_learns_until_the_new_total(tmp_path: Path) -> None:
    done = finished(tmp_path)
    extended = rl_training.resume_training(done.run_dir, total_timesteps=200, schedule="extend")
    assert networks_changed(done, extended) == {"critic"}
    # The new schedule is saved: it ends at the new total and can be extended again.
    with pytest.raises(ConfigError, match="extend"):
        rl_training.resume_training(done.run_dir, total_timesteps=300)
    again = rl_training.resume_training(done.run_dir, total_timesteps=300, schedule="extend")
    assert networks_changed(extended, again) == {"critic"}


def test_an_extended_run_that_is_stopped_resumes_bit_for_bit(tmp_path: Path) -> None:
    first, second = finished(tmp_path / "a"), finished(tmp_path / "b")
    longer = {"total_timesteps": 200, "schedule": "extend"}
    uninterrupted = rl_training.resume_training(first.run_dir, **longer)
    rl_training.resume_training(second.run_dir, **longer, callbacks=[StopAt(150)])
    resumed = rl_training.resume_training(second.run_dir)
    assert hashes(uninterrupted.checkpoint_path) == hashes(resumed.checkpoint_path)


@pytest.mark.parametrize("total", [None, 200])
def test_a_run_extended_with_its_schedule_kept_resumes_without_choosing_again(
    total: int | None, tmp_path: Path
) -> None:
    done = finished(tmp_path)
    longer = {"total_timesteps": 200, "schedule": "keep"}
    rl_training.resume_training(done.run_dir, **longer, callbacks=[StopAt(150)])
    with pytest.warns(UserWarning, match="linear schedule ends after 80 updates"):
        resumed = rl_training.resume_training(
            done.run_dir, total_timesteps=total, callbacks=[StopAt(160)]
        )
    assert resumed.metrics["global_step"] == 160
    # A larger total than that of the choice is another extension.
    with pytest.raises(ConfigError, match="extend"):
        rl_training.resume_training(done.run_dir, total_timesteps=300)
    with pytest.warns(UserWarning, match="linear schedule ends after 80 updates"):
        resumed = rl_training.resume_training(done.run_dir, total_timesteps=total)
    assert resumed.metrics["global_step"] == 200
    assert networks_changed(done, resumed) == set()


def test_a_schedule_that_ends_above_zero_continues_to_learn(tmp_path: Path) -> None:
    done = finished(tmp_path, learning_rate_end_factor=0.5)
    longer = rl_training.resume_training(done.run_dir, total_timesteps=150)
    assert networks_changed(done, longer) == {"critic"}


def test_networks_that_would_not_change_are_named_in_a_warning(tmp_path: Path) -> None:
    done = finished(tmp_path, "iql", learning_rate_schedule="cosine")
    with pytest.warns(
        UserWarning, match="cosine schedule ends after 120 updates.*not change actor.*extend"
    ):
        longer = rl_training.resume_training(done.run_dir, total_timesteps=150)
    assert networks_changed(done, longer) == {"critic", "value"}


def test_a_schedule_that_ends_before_the_new_total_warns(tmp_path: Path) -> None:
    config = tiny_of(get_algorithm_spec("dqn"), tmp_path, algo_kwargs=LINEAR)
    stopped = rl_training.train(config, callbacks=[StopAt(80)])
    with pytest.warns(UserWarning, match="linear schedule ends after 80 updates"):
        rl_training.resume_training(stopped.run_dir, total_timesteps=200)


def test_resuming_to_the_planned_total_does_not_warn(tmp_path: Path) -> None:
    config = tiny_of(get_algorithm_spec("dqn"), tmp_path, algo_kwargs=LINEAR)
    stopped = rl_training.train(config, callbacks=[StopAt(80)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl_training.resume_training(stopped.run_dir, total_timesteps=120)


def test_the_agent_and_the_command_line_accept_the_schedule_option(tmp_path: Path) -> None:
    agent = rl_training.SAC(rl_training.TrainConfig(**tiny(tmp_path, algo_kwargs=LINEAR)))
    first = agent.learn()
    with pytest.raises(ConfigError, match="extend"):
        agent.learn(30)
    second = agent.learn(30, schedule="extend")
    assert networks_changed(first, second) == {"actor", "critic"}
    command = ["resume", str(second.run_dir), "--total-timesteps", "200"]
    assert isinstance(CliRunner().invoke(app, command).exception, ConfigError)
    assert CliRunner().invoke(app, [*command, "--schedule", "extend"]).exit_code == 0
    with pytest.raises(ConfigError, match="schedule = 'longer'"):
        agent.learn(50, schedule="longer")


def test_extending_a_run_without_updates_requires_a_schedule_choice(
    tmp_path: Path,
) -> None:
    config = tiny_of(get_algorithm_spec("dqn"), tmp_path, algo_kwargs=LINEAR, total_timesteps=40)
    with pytest.warns(UserWarning, match="nothing will be learned"):
        done = rl_training.train(config)
    with pytest.raises(ConfigError, match="extend"):
        rl_training.resume_training(done.run_dir, total_timesteps=120)
    longer = rl_training.resume_training(done.run_dir, total_timesteps=120, schedule="extend")
    assert networks_changed(done, longer) == {"critic"}


def test_a_warm_up_longer_than_the_run_continues_before_the_schedule_ends(tmp_path: Path) -> None:
    done = finished(tmp_path, warmup_steps=100)
    with pytest.warns(UserWarning, match="linear schedule ends after 100 updates"):
        longer = rl_training.resume_training(done.run_dir, total_timesteps=150)
    assert networks_changed(done, longer) == {"critic"}
    with pytest.raises(ConfigError, match="extend"):
        rl_training.resume_training(longer.run_dir, total_timesteps=400)


def test_an_actor_whose_schedule_counts_its_own_updates_continues_to_learn(tmp_path: Path) -> None:
    done = finished(tmp_path, "xqc", learning_rate_end_factor=0.0)
    with pytest.warns(UserWarning, match="linear schedule ends after .* do not change critic;"):
        longer = rl_training.resume_training(done.run_dir, total_timesteps=150)
    assert networks_changed(done, longer) >= {"actor"}


def test_an_unknown_schedule_option_is_refused_by_the_first_call(tmp_path: Path) -> None:
    agent = rl_training.SAC(rl_training.TrainConfig(**tiny(tmp_path)))
    with pytest.raises(ConfigError, match="schedule = 'longer'"):
        agent.learn(schedule="longer")
    assert not list(tmp_path.iterdir())
