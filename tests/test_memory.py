"""Runs and datasets that do not fit into memory are refused with what is needed and available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import tiny

from rl_training.algorithms.base import Draw
from rl_training.data import DatasetPart, array_recording, load_dataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.spaces import describe_observations
from rl_training.errors import ConfigError, DataError, TrainingError
from rl_training.execution.random_streams import RandomPool
from rl_training.internals import available_memory, is_out_of_memory
from rl_training.models.network_plan import NetworkPlan
from rl_training.runtime.workflows import train
from rl_training.types import ActionSpec, SpaceInfo

GIB = 2**30
SPACES = SpaceInfo(2, 1, action_low=-np.ones(1, np.float32), action_high=np.ones(1, np.float32))


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 2 GiB be available."""
    for module in ("training.needs", "training.memory", "data.loading"):
        monkeypatch.setattr(f"rl_training.{module}.available_memory", lambda _: 2 * GIB)


def refused(tmp_path: Path, **algo_kwargs: Any) -> str:
    """Return the error of a run with these settings, which creates nothing."""
    with pytest.raises(ConfigError) as caught:
        train(tiny(tmp_path, algo_kwargs=algo_kwargs))
    assert not any(tmp_path.iterdir())
    return str(caught.value)


@pytest.mark.usefixtures("small_machine")
def test_a_replay_buffer_that_does_not_fit_names_a_capacity_that_does(tmp_path: Path) -> None:
    message = refused(tmp_path, buffer_capacity=10**9)
    assert message.startswith("algo_kwargs.buffer_capacity = 1,000,000,000: needs 34 GiB")
    assert "2 GiB are available" in message
    words = message.split("buffer_capacity = ")[2].split()
    assert words[1:] == ["would", "fit"]
    fitting = int(words[0].replace(",", ""))
    assert 1.7 * GIB < fitting * ReplayBuffer.row_bytes(3, 1) < 2 * GIB


@pytest.mark.usefixtures("small_machine")
def test_the_buffers_of_all_seeds_count(tmp_path: Path) -> None:
    config = tiny(tmp_path, seeds=[0, 1, 2, 3], algo_kwargs={"buffer_capacity": 20_000_000})
    with pytest.raises(ConfigError, match=r"for 4 seeds: needs 2\.7 GiB.*train fewer seeds"):
        train(config)


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("batch_size", 10**9, "1,000,000,000"),
        ("num_critics", 10**9, "1,000,000,000"),
        ("hidden_sizes", [65536, 65536], "[65536, 65536]"),
    ],
)
@pytest.mark.usefixtures("small_machine")
def test_other_settings_that_do_not_fit_are_named(
    tmp_path: Path, key: str, value: Any, written: str
) -> None:
    message = refused(tmp_path, **{key: value})
    assert message.startswith(f"algo_kwargs.{key} = {written}: needs at least ")
    assert "use a smaller value (default: " in message


def test_an_allocation_that_fails_is_explained_even_if_memory_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("training.needs", "training.memory"):
        monkeypatch.setattr(f"rl_training.{module}.available_memory", lambda _: None)
    message = refused(tmp_path, num_critics=10**9)
    assert message == (
        "algo_kwargs.num_critics = 1,000,000,000: does not fit into memory; use a smaller value"
    )


def test_memory_that_runs_out_in_training_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nDetails")

    monkeypatch.setattr("rl_training.training.run.Engine.run", run)
    with pytest.raises(TrainingError, match=r"algo_kwargs\.batch_size = .*20 GiB") as caught:
        train(tiny(tmp_path))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert any("checkpoint" in note for note in caught.value.__notes__)


def test_a_dataset_that_does_not_fit_says_how_much_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl_training.data.loading.available_memory", lambda _: 100)
    arrays = {
        "observations": np.zeros((50, 2), np.float32),
        "actions": np.zeros((50, 1), np.float32),
        "rewards": np.zeros(50, np.float32),
        "terminals": np.arange(50) == 49,
    }
    with pytest.raises(DataError, match=r"50 steps and needs .* GiB of memory on cpu; .* GiB are"):
        load_dataset([DatasetPart(array_recording(arrays))], SPACES)


def test_an_embedding_that_does_not_fit_is_named() -> None:
    space = spaces.Dict({"cell": spaces.Discrete(2**31 - 1), "speed": spaces.Box(-1, 1, (2,))})
    message = (
        r"the encoder of the observation 'cell' has 137,438,953,408 parameters, which need 1,536 "
        r"GiB of memory; .*networks\.encoders\.cell, or wrap"
    )
    with pytest.raises(ConfigError, match=message):
        NetworkPlan(describe_observations(space)).build("critic", [8], 1)


def test_row_bytes_are_those_of_the_allocated_rows() -> None:
    for actions in (3, ActionSpec("discrete", 3), ActionSpec("multi_binary", 3)):
        buffer = ReplayBuffer(10, 5, actions)
        assert ReplayBuffer.row_bytes(5, actions) == 4 * buffer.row_width


def test_the_available_memory_of_the_host_is_known() -> None:
    available = available_memory("cpu")
    assert available is not None
    assert 2**24 < available < 2**50


@pytest.mark.parametrize("shape", [(2**40,), (2**40, 2**40)])
def test_failed_allocations_are_recognized(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(shape)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("algo", "key"), [("tqc", "num_quantiles"), ("redq", "num_critics"), ("redq", "batch_size")]
)
@pytest.mark.usefixtures("small_machine")
def test_the_setting_of_another_algorithm_is_named(tmp_path: Path, algo: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"algo_kwargs.{key} = 1,000,000,000: needs"):
        train(tiny(tmp_path, algo=algo, algo_kwargs={key: 10**9}))


@pytest.mark.usefixtures("small_machine")
def test_memory_is_checked_before_many_environments_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.training.run.open_inputs", None)
    with pytest.raises(ConfigError, match="batch_size"):
        train(tiny(tmp_path, num_envs=64, algo_kwargs={"batch_size": 10**9}))


def test_random_numbers_that_do_not_fit_are_not_drawn() -> None:
    with pytest.raises(MemoryError, match="random numbers need"):
        RandomPool({"noise": Draw("normal", (10**12,))}, [torch.Generator()], "cpu")
