"""Environments that exit, raise when they are made or closed, or return unusable flags."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from helpers import tiny

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.envs import (
    EnvironmentFactory,
    VectorEnvironment,
    check_environment,
    measure_step_seconds,
    probe_resume_level,
)
from rl_training.errors import EnvironmentRuntimeError, EnvironmentSetupError

pytestmark = pytest.mark.usefixtures("no_pictures")
BACKENDS: Any = ["sync", "async"]


class Odd(gym.Env[np.ndarray, np.ndarray]):
    """Raises in one method, after a number of steps, or returns an odd flag."""

    observation_space, action_space = Box(-1, 1, (2,)), Box(-1.0, 1.0, (1,))

    def __init__(
        self, where: str = "", error: Any = SystemExit, after: int = 0, flag: Any = False
    ) -> None:
        self.where, self.error, self.after, self.flag = where, error, after, flag
        self.steps = 0
        self._raise("make")

    def _raise(self, where: str) -> None:
        if where == self.where and self.steps >= self.after:
            raise self.error("odd")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._raise("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        self._raise("step")
        flag = self.flag if self.steps > self.after else False
        truncated = self.steps % 5 == 0
        return np.zeros(2, np.float32), 1.0, flag, truncated, {}

    def close(self) -> None:
        self._raise("close")


def play(factory: EnvironmentFactory, backend: Any, steps: int = 12) -> None:
    with VectorEnvironment(factory, 2, 0, backend=backend) as vector:
        vector.reset()
        for _ in range(steps):
            vector.step(np.zeros((2, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flag", [float("nan"), None, np.array([True]), "yes", 2, object])
def test_a_flag_that_is_not_a_bool_is_an_error_of_its_step(flag: Any, backend: Any) -> None:
    factory = EnvironmentFactory(Odd, {"flag": flag, "after": 3})
    with pytest.raises(EnvironmentRuntimeError, match="Environment 0: its terminated is not True"):
        play(factory, backend)


@pytest.mark.parametrize("flag", [0, 1, np.bool_(True), np.int64(0), 1.0, np.array(False)])
def test_zero_and_one_are_flags(flag: Any) -> None:
    play(EnvironmentFactory(Odd, {"flag": flag}), "sync")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_cannot_end_the_program(where: str, error: Any, backend: Any) -> None:
    factory = EnvironmentFactory(Odd, {"where": where, "error": error, "after": 5})
    message = "sys.exit" if error is SystemExit else "GeneratorExit"
    with pytest.raises(EnvironmentRuntimeError, match=f"Environment 0: it .*{message}"):
        play(factory, backend)


def test_an_environment_in_a_worker_cannot_interrupt_it() -> None:
    factory = EnvironmentFactory(Odd, {"where": "step", "error": KeyboardInterrupt, "after": 5})
    with pytest.raises(EnvironmentRuntimeError, match="KeyboardInterrupt"):
        play(factory, "async")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_errors_of_the_constructor_are_setup_errors(error: Any, backend: Any) -> None:
    factory = EnvironmentFactory(Odd, {"where": "make", "error": error})
    with pytest.raises(EnvironmentSetupError, match=r"Cannot make .*Odd: .*odd"):
        play(factory, backend)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_checks_before_a_run_report_an_exit(where: str) -> None:
    factory = EnvironmentFactory(Odd, {"where": where})
    with pytest.raises(EnvironmentSetupError, match=rf"Odd: {where} failed: .*sys\.exit"):
        check_environment(factory)
    with pytest.raises(EnvironmentSetupError, match=r"sys\.exit"):
        measure_step_seconds(factory)
    probe_resume_level(factory)


class Numbered(Odd):
    """The third one cannot be made."""

    made: list[Numbered] = []  # noqa: RUF012
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)
        if len(self.made) == 3:
            raise ValueError("no license left")

    def close(self) -> None:
        Numbered.closed += 1


def test_environments_that_were_made_before_an_error_are_closed() -> None:
    Numbered.made.clear()
    Numbered.closed = 0
    with pytest.raises(EnvironmentSetupError, match="no license left"):
        VectorEnvironment(EnvironmentFactory(Numbered), 4, 0)
    assert Numbered.closed == 2


@pytest.mark.parametrize("error", [SystemExit, ValueError, GeneratorExit])
def test_an_error_of_close_is_a_warning(error: Any) -> None:
    factory = EnvironmentFactory(Odd, {"where": "close", "error": error})
    with pytest.warns(UserWarning, match="Odd could not be closed"):
        play(factory, "sync")
    with pytest.warns(UserWarning, match="Odd could not be closed"):
        check_environment(factory)
    probe_resume_level(factory)


def test_an_error_of_close_does_not_hide_the_first_error() -> None:
    class Worse(Odd):
        def close(self) -> None:
            raise ValueError("again")

    factory = EnvironmentFactory(Worse, {"where": "step", "after": 3})
    with (
        pytest.warns(UserWarning, match="could not be closed"),
        pytest.raises(EnvironmentRuntimeError, match=r"sys\.exit"),
    ):
        play(factory, "sync")


@pytest.mark.parametrize("vectorization", BACKENDS)
def test_a_run_finishes_although_close_fails(tmp_path: Path, vectorization: str) -> None:
    config = tiny(tmp_path, env_id=None, vectorization=vectorization, num_envs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = rl_training.train(config, env=lambda: Odd(where="close"))
    assert result.stop_reason == "total_timesteps"


class Lately(Odd):
    """Fails when it is made, reset or stepped, once after a file was written."""

    def __init__(self, flag: str, where: str) -> None:
        self.path = Path(flag)
        self.moment = where
        super().__init__()

    def _raise(self, where: str) -> None:
        if where == self.moment and self.path.exists():
            self.path.unlink()
            raise ValueError("no license left")


class Write(Callback):
    """Writes the file just before the first evaluation, and deletes it after the run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_update_end(self, context: TrainingContext) -> None:
        if context.global_step == 60:
            self.path.touch()

    def for_seed(self, seed: int) -> Callback:
        return self if seed == 1 else Callback()


@pytest.mark.parametrize("where", ["make", "reset", "step"])
def test_a_failed_evaluation_ends_only_its_own_run(tmp_path: Path, where: str) -> None:
    flag = tmp_path / "flag"
    config = tiny(tmp_path / "runs", env_id=None, seeds=[0, 1], eval_interval=60)
    with (
        pytest.warns(UserWarning, match="seed 0 failed, the others continue"),
        pytest.raises(EnvironmentRuntimeError, match="no license left") as raised,
    ):
        rl_training.train(config, env=lambda: Lately(str(flag), where), callbacks=[Write(flag)])
    notes = "\n".join(raised.value.__notes__)
    assert "the last checkpoint is" in notes
    assert "`resume_training('" in notes  # the command line does not know the environment
    assert "rl-training resume" not in notes
    assert "finished: " in notes
    assert not flag.exists()


def test_refused_arguments_are_one_message(rl: Any) -> None:
    done = rl("train", "--algo", "sac", "--env", "Pendulum-v1", "--set", "env_kwargs={x: 1}")
    assert done.code == 2
    assert "Cannot make Pendulum-v1 with the keyword arguments x" in done.err
    assert "Traceback" not in done.err


def test_sys_exit_does_not_pass_for_a_finished_run(rl: Any) -> None:
    gym.register("Exit-v0", lambda: Odd(where="step", after=50))
    settings = ["--total-timesteps", "200", "--set", "algo_kwargs.learning_starts=300"]
    done = rl("train", "--algo", "sac", "--env", "Exit-v0", *settings)
    assert done.code == 1
    assert "sys.exit" in done.err
    assert "the last checkpoint is" in done.err
    assert "`rl-training resume " in done.err
    assert sys.exc_info()[0] is None
