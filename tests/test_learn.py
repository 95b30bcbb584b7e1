"""`learn`: how many steps it trains, what it shows, and how it explains other packages' calls."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers import BUILT_IN, Recorder, StopAt, keywords, model_bytes, tiny

import rl_training
from rl_training import (
    A2C,
    BC,
    DQN,
    IQL,
    PPO,
    RLPD,
    SAC,
    TD3,
    TD3BC,
    TrainConfig,
    TrainingInterrupted,
)
from rl_training.api import other_packages
from rl_training.callbacks import Callback, PeriodicCallback, as_callbacks
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.reporting.progress import ProgressBar, ProgressLines, with_progress
from rl_training.runtime import workflows
from rl_training.types import TrainResult

pytestmark = pytest.mark.usefixtures("no_pictures")

DATA = {"kind": "random", "size": 200}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return keyword arguments for a run of 60 steps with updates from step 41 on."""
    return keywords(tiny(tmp_path / "runs", total_timesteps=60))


def step_of(result: TrainResult) -> int:
    return int(result.metrics["global_step"])


# The number of steps


def test_the_first_call_trains_n_steps_and_later_calls_n_more(settings: dict[str, Any]) -> None:
    agent = SAC("Pendulum-v1", **settings)
    first = agent.learn(50)
    assert (step_of(first), agent.config.total_timesteps) == (50, 50)
    second = agent.learn(20)
    assert (step_of(second), second.run_dir) == (70, first.run_dir)
    assert agent.config.total_timesteps == 70
    assert step_of(SAC.load(first.run_dir).learn(10)) == 80
    # The agent continues from where the run is now, even if another object trained it.
    assert step_of(agent.learn(5)) == 85


def test_a_result_that_is_used_as_an_agent_says_what_to_keep() -> None:
    result = TrainResult(Path("run"), Path("run/last"), None, {"global_step": 3.0}, "enough")
    for name in ("evaluate", "learn", "policy", "predict", "save"):
        with pytest.raises(AttributeError, match=r"keep the agent: agent = SAC\(\.\.\.\)"):
            getattr(result, name)
        assert not hasattr(result, name)
    with pytest.raises(AttributeError, match=r"no attribute 'metric'$"):
        result.metric  # type: ignore[attr-defined]  # noqa: B018
    for same in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert same == result


def test_n_more_steps_of_a_checkpoint_count_from_that_checkpoint(run_copy: Path) -> None:
    agent = SAC.load(run_copy / "checkpoints/step_000000080")
    assert step_of(agent.learn(10)) == 90


def test_learn_without_a_number_finishes_the_total_after_a_stop(settings: dict[str, Any]) -> None:
    agent = SAC("Pendulum-v1", **settings)
    assert step_of(agent.learn(callbacks=[StopAt(45)])) == 45
    assert step_of(agent.learn()) == 60
    uninterrupted = SAC("Pendulum-v1", **settings).learn()
    assert agent.result is not None
    assert model_bytes(agent.result) == model_bytes(uninterrupted)


def test_a_number_after_a_stop_counts_from_the_stop_and_keeps_the_schedule(
    settings: dict[str, Any],
) -> None:
    settings |= {"total_timesteps": 120, "learning_rate_schedule": "linear"}
    agent = SAC("Pendulum-v1", **settings)
    agent.learn(callbacks=[StopAt(60)])
    shorter = agent.learn(30)
    assert (step_of(shorter), agent.config.total_timesteps) == (90, 90)
    straight = SAC("Pendulum-v1", **settings).learn(callbacks=[StopAt(90)])
    assert model_bytes(shorter) == model_bytes(straight)


def test_learn_on_a_finished_run_warns_and_returns_its_result(settings: dict[str, Any]) -> None:
    agent = SAC("Pendulum-v1", **settings)
    done = agent.learn()
    with pytest.warns(UserWarning, match=r"has finished.*learn\(n\)") as caught:
        again = agent.learn()
    assert caught[0].filename == __file__
    assert (step_of(again), again.checkpoint_path) == (60, done.checkpoint_path)
    with pytest.warns(UserWarning, match=r"learn\(n\)"):
        loaded = SAC.load(done.run_dir).learn()
    assert loaded.metrics["eval_return_mean"] == done.metrics["eval_return_mean"]


def test_a_run_that_stopped_early_continues_only_with_a_number(settings: dict[str, Any]) -> None:
    stopping = {"patience": 1, "min_delta": 1e9}
    settings |= {"total_timesteps": 200, "eval_interval": 10, "early_stopping": stopping}
    agent = SAC("Pendulum-v1", **settings)
    stopped = agent.learn()
    assert (stopped.stop_reason, step_of(stopped)) == ("early_stopping", 20)
    with pytest.warns(UserWarning, match=r"early_stopping at step 20.*learn\(180\)"):
        assert step_of(agent.learn()) == 20
    more = agent.learn(5)
    assert (more.stop_reason, step_of(more)) == ("total_timesteps", 25)


def test_a_run_without_updates_left_says_how_to_go_on(settings: dict[str, Any]) -> None:
    agent = SAC("Pendulum-v1", **settings, max_updates=5)
    assert step_of(agent.learn()) == 45
    with pytest.warns(UserWarning, match="all 5 max_updates are used.*init_from"):
        assert step_of(agent.learn(20)) == 45


def test_several_environments_take_the_next_multiple(settings: dict[str, Any]) -> None:
    agent = SAC("Pendulum-v1", **settings, num_envs=4, vectorization="sync")
    assert step_of(agent.learn(50)) == 52
    assert step_of(agent.learn(10)) == 64


def test_offline_agents_train_n_more_gradient_steps(settings: dict[str, Any]) -> None:
    agent = TD3BC("Pendulum-v1", dataset=DATA, **settings)
    assert agent.learn(20).metrics["gradient_steps"] == 20
    assert agent.learn(15).metrics["gradient_steps"] == 35


def test_pretraining_does_not_count_as_steps(settings: dict[str, Any]) -> None:
    agent = RLPD("Pendulum-v1", dataset=DATA, **settings, offline_pretrain_updates=10)
    assert step_of(agent.learn(20, [StopAt(0)])) == 0
    assert step_of(agent.learn(15)) == 15


def test_a_schedule_that_has_ended_names_the_call_that_extends_it(
    settings: dict[str, Any],
) -> None:
    agent = SAC("Pendulum-v1", **settings, learning_rate_schedule="linear")
    done = agent.learn()
    with pytest.raises(ConfigError, match=r"learn\(n, schedule='extend'\)"):
        agent.learn(30)
    assert agent.config.total_timesteps == 60
    extended = agent.learn(30, schedule="extend")
    assert step_of(extended) == 90
    assert model_bytes(extended) != model_bytes(done)


@pytest.mark.parametrize("given", [50.0, np.int64(50), np.float64(50)], ids=repr)
def test_whole_numbers_of_every_type_are_accepted(settings: dict[str, Any], given: Any) -> None:
    assert step_of(SAC("Pendulum-v1", **settings).learn(given)) == 50


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "at least 1"),
        (-5, "at least 1"),
        (1.5, "whole number"),
        ("100", "whole number"),
        (True, "whole number"),
        (float("nan"), "whole number"),
        (float("inf"), "whole number"),
    ],
)
def test_other_numbers_of_steps_are_refused(
    settings: dict[str, Any], given: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"total_timesteps = .*{message}"):
        SAC("Pendulum-v1", **settings).learn(given)
    assert not Path(settings["output_dir"]).exists()


# Loaded policies


@pytest.mark.parametrize("load", ["policy", "another environment"])
def test_a_loaded_policy_needs_a_number_and_starts_a_new_run(
    run_copy: Path, work: Path, capsys: pytest.CaptureFixture[str], load: str
) -> None:
    if load == "policy":
        agent = SAC.load(SAC.load(run_copy).save(work / "policy"))
    else:
        agent = SAC.load(run_copy, env=lambda: gym.make("Pendulum-v1", g=5.0))
    with pytest.raises(ConfigError, match=r"starts a new run from this policy.*learn\(10_000\)"):
        agent.learn()
    agent.config = agent.config.with_changes(output_dir=str(work / "new"), eval_episodes=1)
    result = agent.learn(20, progress=True)
    assert (step_of(result), result.run_dir.parent) == (20, work / "new")
    source = work / "policy" if load == "policy" else run_copy
    assert f"new run that starts from the policy in {source}" in capsys.readouterr().out
    assert step_of(agent.learn(5, progress=True)) == 25  # the new run continues
    assert "starts from the policy" not in capsys.readouterr().out


# Interruptions


def test_an_interrupted_agent_has_its_result_and_continues(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SAC("Pendulum-v1", **settings)
    run = workflows.train

    def interrupted(*arguments: Any, **options: Any) -> Any:
        options["callbacks"] = [StopAt(45)]
        raise TrainingInterrupted([run(*arguments, **options)])

    monkeypatch.setattr(workflows, "train", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        agent.learn()
    assert isinstance(raised.value, TrainingInterrupted)
    assert agent.result is raised.value.result
    assert step_of(raised.value.result) == 45
    assert agent.predict([1.0, 0.0, 0.0]).shape == (1,)
    assert step_of(agent.learn()) == 60


# Progress


class Screen(io.StringIO):
    """A standard output that may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def notebook(shell_base: str) -> types.ModuleType:
    """Return an `IPython` module whose shell has a base class of this name."""
    module: Any = types.ModuleType("IPython")
    shell = type("Shell", (type(shell_base, (), {}),), {})
    module.get_ipython = shell
    return module


@pytest.mark.parametrize(
    ("is_terminal", "shell", "expected"),
    [
        (True, None, ProgressBar),
        (False, None, None),
        (False, "ZMQInteractiveShell", ProgressLines),
        (False, "TerminalInteractiveShell", None),
    ],
)
def test_progress_is_shown_in_a_terminal_or_a_notebook(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, shell: str | None, expected: type | None
) -> None:
    monkeypatch.setattr(sys, "stdout", Screen(is_terminal=is_terminal))
    monkeypatch.setitem(sys.modules, "IPython", notebook(shell) if shell else None)
    found = with_progress([], None)
    assert [type(each) for each in found] == ([expected] if expected else [])
    assert with_progress([], False) == []
    assert len(with_progress([], True)) == 1
    shown = rl_training.progress_callback()
    assert with_progress([shown], True) == [shown]


TRAINERS: dict[str, Callable[..., Any]] = {
    "learn": lambda config, **options: SAC(TrainConfig(**config)).learn(**options),
    "train": lambda config, **options: rl_training.train(config, **options),
    "resume_training": lambda config, **options: rl_training.resume_training(
        rl_training.train(config, progress=False, callbacks=[StopAt(5)]).run_dir, **options
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_way_to_train_shows_progress_by_default(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path, total_timesteps=50)
    for is_terminal, progress, shown in ((True, None, True), (True, False, False)):
        screen = Screen(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stdout", screen)
        TRAINERS[name](config, progress=progress)
        assert ("training in" in screen.getvalue()) == shown


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"progress": True}, True),
        ({"progress_bar": True}, True),
        ({"verbose": 1}, True),
        ({"verbose": 1, "progress_bar": True}, True),
        ({"verbose": 0}, False),
        ({}, False),
    ],
)
def test_other_names_of_progress_work(
    settings: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    shown: bool,
) -> None:
    SAC("Pendulum-v1", **settings).learn(45, **options)
    assert ("to step 45" in capsys.readouterr().out) == shown


def test_verbose_of_the_constructor_is_the_default(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    agent = SAC("Pendulum-v1", verbose=1, **settings)  # type: ignore[call-arg]
    agent.learn(45)
    assert "training in" in capsys.readouterr().out
    agent.learn(5, progress=False)
    assert capsys.readouterr().out == ""


# Callbacks


def test_callbacks_come_second_and_may_be_one_or_many(settings: dict[str, Any]) -> None:
    for number, give in enumerate(
        (
            lambda agent, seen: agent.learn(45, seen),
            lambda agent, seen: agent.learn(45, [seen]),
            lambda agent, seen: agent.learn(45, callbacks=(seen,)),
            lambda agent, seen: agent.learn(45, callback=seen),
        )
    ):
        seen = Recorder()
        give(SAC("Pendulum-v1", **settings, seed=number), seen)
        assert seen.steps("collect_end") == list(range(1, 46))


class FromSB3:
    """Stands for Stable-Baselines3's `BaseCallback`."""

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize("given", [FromSB3(), [FromSB3()], lambda local, all_: True, FromSB3])
def test_other_callbacks_get_a_message_that_shows_ours(
    settings: dict[str, Any], given: Any
) -> None:
    with pytest.raises(ConfigError, match=r"not a Callback(.|\n)*class ShowStep\(Callback\)"):
        SAC("Pendulum-v1", **settings).learn(50, callback=given)
    assert not Path(settings["output_dir"]).exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_on_step", r"Mine\._on_step .* Stable-Baselines3, .*use on_collect_end\(self, context\)"),
        ("on_step", r"use on_collect_end\(self, context\)"),
        ("_on_training_start", "use on_train_start"),
        ("_on_rollout_end", "use on_collect_end"),
        ("on_colect_end", "not an event; did you mean on_collect_end"),
        ("on_evaluate_end", "did you mean on_evaluation_end"),
    ],
)
def test_a_method_that_would_never_be_called_is_refused(
    settings: dict[str, Any], name: str, message: str
) -> None:
    callback = type("Mine", (Callback,), {name: lambda self, *arguments: True})()
    with pytest.raises(ConfigError, match=message):
        SAC("Pendulum-v1", **settings).learn(50, callbacks=callback)
    assert not Path(settings["output_dir"]).exists()


def test_other_methods_and_the_argument_verbose_are_accepted() -> None:
    class Mine(Callback):
        def __init__(self, verbose: int = 0) -> None:
            super().__init__(verbose)

        def on_new_best(self) -> None: ...
        def _on_success(self) -> None: ...

    class Base:
        def __init__(self) -> None:
            self.is_ready = True

    class Both(Callback, Base): ...

    callbacks = [Mine(1), PeriodicCallback(10), Both()]
    assert as_callbacks(callbacks) == callbacks
    assert Both().is_ready


# Calls as other packages write them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_interval": 4}, "log_interval.*where you create the agent"),
        ({"tb_log_name": "x"}, "run_name"),
        ({"reset_num_timesteps": False}, "n more steps of the same run"),
        ({"eval_env": None}, "eval_interval and eval_episodes"),
        ({"progres": True}, "did you mean 'progress'"),
        ({"whatever": 1}, "learn takes total_timesteps, callbacks"),
        ({"verbose": 0, "progress_bar": True}, "verbose and progress_bar: contradict"),
        ({"progress": True, "verbose": 0}, "progress and verbose: contradict"),
        ({"callback": StopAt(1), "callbacks": [StopAt(2)]}, "use only callbacks"),
    ],
)
def test_options_that_learn_does_not_have_are_explained(
    settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SAC("Pendulum-v1", **settings).learn(50, **options)
    assert not Path(settings["output_dir"]).exists()


class MlpPolicy:
    """Stands for a policy class of Stable-Baselines3."""


@pytest.mark.parametrize(
    ("arguments", "settings", "ours"),
    [
        (("MlpPolicy", "Hopper-v5"), {}, 'SAC("Hopper-v5", ...)'),
        (("MlpPolicy", object()), {"verbose": 1}, "SAC(env, ...)"),
        (("MlpPolicy", "Hopper-v5", 3e-4), {}, 'SAC("Hopper-v5", ...)'),
        ((MlpPolicy, "Hopper-v5"), {}, 'SAC("Hopper-v5", ...)'),
        (("MlpPolicy",), {}, 'SAC("Pendulum-v1", ...)'),
        ((), {"policy": "MlpPolicy", "env": "Hopper-v5"}, 'SAC("Hopper-v5", ...)'),
        ((), {"policy": "MlpPolicy"}, 'SAC("Pendulum-v1", ...)'),
        (("Hopper-v5", 3e-4), {}, 'SAC("Hopper-v5", learning_rate=3e-4)'),
    ],
)
def test_a_policy_class_gets_a_message_with_our_form(
    arguments: tuple[Any, ...], settings: dict[str, Any], ours: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        SAC(*arguments, **settings)
    assert ours in str(refused.value)


@pytest.mark.parametrize(
    ("agent", "name", "value", "message"),
    [
        (SAC, "buffer_size", 100, "called buffer_capacity"),
        (SAC, "ent_coef", "auto", "called alpha"),
        (SAC, "train_freq", 1, "called train_frequency"),
        (SAC, "gradient_steps", -1, "called gradient_updates_per_step .*-1 is not needed"),
        (SAC, "use_sde", True, "SAC has no such setting"),
        (TD3, "action_noise", None, "called exploration_noise"),  # None means no noise
        (SAC, "policy_kwargs", {"net_arch": [64]}, "called hidden_sizes"),
        (SAC, "tensorboard_log", "logs", "called output_dir"),
        (SAC, "n_critics", 2, "called num_critics"),
        (SAC, "n_steps", 3, "called n_step"),
        (SAC, "temp_learning_rate", 1e-4, "called alpha_learning_rate"),
        (SAC, "target_update_interval", 1, "called tau"),
        (SAC, "replay_buffer_class", object, "called replay .*hindsight"),
        (PPO, "track", True, "called trackers .*wandb"),
        (SAC, "learning_rate", lambda left: 3e-4 * left, "learning_rate_schedule"),
        (TD3, "target_policy_noise", 0.2, "called policy_noise"),
        (TD3, "ent_coef", "auto", "TD3 has no such setting"),
        (DQN, "exploration_final_eps", 0.1, "called epsilon_end"),
        (BC, "actor_learning_rate", 1e-3, "called learning_rate"),
        (IQL, "weight_temp", 3.0, "called beta"),
        (PPO, "n_steps", 128, "called rollout_steps"),
        (PPO, "n_epochs", 4, "called num_epochs"),
        (PPO, "ent_coef", 0.01, "called entropy_coefficient$"),
        (PPO, "num_minibatches", 4, "called batch_size .*transitions"),
        (A2C, "vf_coef", 0.5, "called value_coefficient"),
    ],
)
def test_settings_of_other_packages_name_ours(
    agent: Any, name: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        agent("Pendulum-v1", **{name: value})


def test_settings_of_other_packages_that_are_off_have_no_effect() -> None:
    off: dict[str, Any] = dict.fromkeys(
        ["action_noise", "policy_kwargs", "replay_buffer_class", "tensorboard_log"]
    )
    agent = SAC("Pendulum-v1", **off, optimize_memory_usage=False, use_sde=False)
    assert agent.config == SAC("Pendulum-v1").config


@pytest.mark.parametrize("verbose", ["a", [1]])
def test_verbose_must_be_a_number(settings: dict[str, Any], verbose: Any) -> None:
    with pytest.raises(ConfigError, match=r"verbose = .*must be 0 or 1"):
        SAC("Pendulum-v1", **settings, verbose=verbose)
    with pytest.raises(ConfigError, match=r"verbose = .*must be 0 or 1"):
        SAC("Pendulum-v1", **settings).learn(50, verbose=verbose)


def test_every_setting_that_the_table_names_exists() -> None:
    known = set(TrainConfig.model_fields)
    for spec in BUILT_IN:
        known |= set(spec.hyperparameters_type.model_fields)
    ours = other_packages.OUR_SETTINGS
    assert [name for names in ours.values() for name in names if name not in known] == []
    for table in (other_packages.NOTES, other_packages.UNUSED_IF_NONE):
        assert [name for name in table if name not in ours] == []


# What an agent says about itself


def test_an_agent_says_what_it_will_do_and_what_it_has_done(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    agent = SAC("Pendulum-v1", **settings, seed=3)
    fresh = repr(agent)
    for expected in ("SAC on Pendulum-v1", "0 of 60", "seed    3", "cpu, eager", "folder in"):
        assert expected in fresh
    result = agent.learn(callbacks=[StopAt(45)])
    stopped = repr(agent)
    assert "45 of 60 (learn() trains the rest" in stopped
    assert str(result.run_dir) in stopped
    assert "45 of 60" in repr(SAC.load(result.run_dir))
    agent.learn()
    assert "60 of 60 (finished; learn(n)" in repr(agent)
    policy = repr(SAC.load(agent.save(tmp_path / "policy")))
    assert str(tmp_path / "policy") in policy
    assert "learn(n) trains n steps in a new run" in policy


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: SAC(), "SAC without environment"),
        (lambda: SAC("No-v0"), "SAC on No-v0"),
        (lambda: SAC(3), "SAC on "),  # type: ignore[arg-type]
        (lambda: SAC("Pendulum-v1", device="cuda:99"), "cuda:99"),
        (lambda: IQL(dataset={"observations": np.zeros((2, 3))}), "arrays in memory"),
        (lambda: IQL(dataset=[DATA, {"kind": "npz", "path": "a.npz"}]), "random 200, npz a.npz"),
        (lambda: IQL(total_timesteps=10), "0 of 10 gradient steps"),
    ],
)
def test_describing_an_agent_never_fails_and_makes_no_environment(
    make: Callable[[], Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym, "make", lambda *_, **__: pytest.fail("made an environment"))
    assert expected in repr(make())


def test_describing_an_agent_whose_run_is_gone_never_fails(run_copy: Path) -> None:
    agent = SAC.load(run_copy)
    (run_copy / "checkpoints").rename(run_copy / "moved")
    assert "cannot be read" in repr(agent)
    with pytest.raises(CheckpointError):
        agent.learn(5)


def test_help_of_the_package_shows_how_to_start() -> None:
    assert rl_training.__doc__ is not None
    for name in ("SAC", "learn", "train", "evaluate_offline", "Callback", "TrainingInterrupted"):
        assert name in rl_training.__doc__
    assert issubclass(TrainingInterrupted, KeyboardInterrupt)
    assert not issubclass(TrainingInterrupted, UserError)
    assert isinstance(rl_training.progress_callback(), Callback)
