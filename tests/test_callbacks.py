"""The events, what callbacks see, and what they can request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import ONLINE, Recorder, StopAt, has_rollouts, hashes, tiny, tiny_of, trainer_of

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.callbacks import Callback, PeriodicCallback, TrainingContext
from rl_training.config import TrainConfig
from rl_training.training.engine import UpdateSchedule, planned_updates

each_online = pytest.mark.parametrize("spec", ONLINE, ids=lambda spec: spec.name)


def test_events_are_ordered_and_see_the_current_counters(tmp_path: Path) -> None:
    recorder = Recorder()
    rl_training.train(tiny(tmp_path, total_timesteps=44, eval_interval=43), callbacks=[recorder])
    assert recorder.events[0] == ("train_start", 0, 0)
    assert recorder.events[1] == ("collect_end", 1, 0)
    assert recorder.steps("collect_end") == list(range(1, 45))
    # Random actions until step 40, then one update per step.
    assert recorder.steps("update_end") == [41, 42, 43, 44]
    assert recorder.events[-7:] == [
        ("collect_end", 43, 2),
        ("update_end", 43, 3),
        ("evaluation_end", 43, 3),
        ("collect_end", 44, 3),
        ("update_end", 44, 4),
        ("evaluation_end", 44, 4),
        ("train_end", 44, 4),
    ]


class Counter(Callback):
    """Counts collected steps across resumes."""

    def __init__(self) -> None:
        self.collected = 0

    def on_collect_end(self, context: TrainingContext) -> None:
        self.collected += 1

    def state_dict(self) -> dict:
        return {"collected": self.collected}

    def load_state_dict(self, state: dict) -> None:
        self.collected = state["collected"]


@each_online
@pytest.mark.fast_cases
def test_a_stop_request_is_saved_and_the_stopped_run_can_be_resumed(
    tmp_path: Path, spec: AlgorithmSpec
) -> None:
    config = tiny_of(spec, tmp_path, num_envs=3, log_interval=3)
    schedule, seen = UpdateSchedule.of(TrainConfig(**config)), {}

    class Look(Callback):
        def on_update_end(self, context: TrainingContext) -> None:
            seen.update(context.train_metrics())

        def on_train_end(self, context: TrainingContext) -> None:
            seen["stopped"] = (context.should_stop, context.stop_reason)

    stopped = trainer_of(spec)(config, callbacks=[StopAt(50, "enough"), Counter(), Look()])
    # Stopped at the next step boundary, after the updates of that step.
    assert stopped.stop_reason == "enough"
    assert stopped.metrics["global_step"] == 51
    due = schedule.blocks_due(51) * schedule.updates_per_block
    assert stopped.metrics["gradient_steps"] == due > 0
    q = set() if has_rollouts(spec) else {"q_mean", "target_q_mean"}
    assert {"critic_loss", *q} <= seen.keys()
    assert seen["stopped"] == (True, "enough")
    assert stopped.checkpoint_path.name == "step_000000051"
    saved = json.loads((stopped.checkpoint_path / "state.json").read_text())
    assert saved["progress"]["should_stop"] is True
    assert saved["progress"]["stop_reason"] == "enough"

    counter, recorder = Counter(), Recorder()
    resumed = rl_training.resume_training(stopped.run_dir, callbacks=[counter, recorder])
    assert recorder.events[0] == ("train_start", 51, due)
    assert counter.collected == 40
    assert resumed.stop_reason == "total_timesteps"
    assert resumed.metrics["gradient_steps"] == planned_updates(TrainConfig(**config))


def test_the_first_stop_reason_is_kept(tmp_path: Path) -> None:
    result = rl_training.train(
        tiny(tmp_path), callbacks=[StopAt(45, "first"), StopAt(45, "second")]
    )
    assert result.stop_reason == "first"


def test_callbacks_see_metrics_and_cannot_write_counters(tmp_path: Path) -> None:
    seen = {}

    class Look(Callback):
        def on_update_end(self, context: TrainingContext) -> None:
            seen.update(context.train_metrics())
            with pytest.raises(AttributeError):
                context.global_step = 7  # type: ignore[misc]

        def on_train_end(self, context: TrainingContext) -> None:
            seen["stopped"] = (context.should_stop, context.stop_reason)
            seen["evaluation"] = context.evaluation.metrics["eval_return_mean"]

    rl_training.train(tiny(tmp_path, total_timesteps=45), callbacks=[Look()])
    assert {"critic_loss", "actor_loss", "alpha", "target_q_mean"} <= seen.keys()
    assert seen["stopped"] == (True, "total_timesteps")
    assert seen["evaluation"] < 0


def test_a_callbacks_own_state_survives_a_resume(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(50), Counter()])
    resumed = Counter()
    rl_training.resume_training(result.run_dir, callbacks=[resumed])
    assert resumed.collected == 120


def test_a_callback_can_request_an_evaluation_and_a_checkpoint(tmp_path: Path) -> None:
    class Ask(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 30:
                context.request_evaluation()
            if context.global_step == 60:
                context.request_checkpoint()

    recorder = Recorder()
    result = rl_training.train(tiny(tmp_path), callbacks=[Ask(), recorder])
    assert recorder.steps("evaluation_end") == [30, 120]
    saved = {path.name for path in (result.run_dir / "checkpoints").glob("step_*")}
    assert "step_000000060" in saved


def test_evaluating_more_often_does_not_change_training(tmp_path: Path) -> None:
    often, seldom = (
        rl_training.train(tiny(tmp_path, eval_interval=interval)) for interval in (7, 0)
    )
    assert hashes(often.checkpoint_path) == hashes(seldom.checkpoint_path)


class Reminder(PeriodicCallback):
    """Records the steps at which it was due."""

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self.steps: list[int] = []

    def due(self, context: TrainingContext) -> None:
        self.steps.append(context.global_step)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_periodic_callback_can_be_reused_for_another_run(tmp_path: Path, num_envs: int) -> None:
    reminder = Reminder(40)
    config = tiny(tmp_path, total_timesteps=120, num_envs=num_envs)
    expected = [40, 80, 120] if num_envs == 1 else [42, 81, 120]
    rl_training.train(config, callbacks=[reminder])
    assert reminder.steps == expected
    reminder.steps.clear()
    rl_training.train(config, callbacks=[reminder])
    assert reminder.steps == expected


def test_a_periodic_callback_can_also_handle_every_step(tmp_path: Path) -> None:
    class Watchful(Reminder):
        seen = 0

        def on_collect_end(self, context: TrainingContext) -> None:
            self.seen += 1
            super().on_collect_end(context)

    watchful = Watchful(50)
    rl_training.train(tiny(tmp_path, total_timesteps=120), callbacks=[watchful])
    assert watchful.seen == 120
    assert watchful.steps == [50, 100]


@pytest.mark.parametrize("fails", [False, True], ids=["in a good run", "after an error"])
def test_an_error_while_a_callback_is_closed_does_not_skip_the_others(
    tmp_path: Path, fails: bool
) -> None:
    closed: list[str] = []

    class Closing(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_collect_end(self, context: TrainingContext) -> None:
            if fails and context.global_step == 30:
                raise ValueError("failed in a step")

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "second":
                raise ValueError("cannot be closed")

    callbacks = [Closing(name) for name in ("first", "second", "third")]
    with pytest.raises(ValueError, match="cannot be closed"):
        rl_training.train(tiny(tmp_path), callbacks=callbacks)
    assert closed == ["first", "second", "third"]
