"""The five events, what callbacks see, and what they can ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Recorder, StopAt, hashes, tiny

import rl_training
from rl_training.runtime.callbacks import Callback, TrainingContext


def test_events_come_in_order_with_the_counters_of_their_moment(tmp_path: Path) -> None:
    recorder = Recorder()
    rl_training.train(tiny(tmp_path, total_timesteps=44, eval_interval=43), callbacks=[recorder])
    assert recorder.events[0] == ("train_start", 0, 0)
    assert recorder.events[1] == ("collect_end", 1, 0)
    assert recorder.steps("collect_end") == list(range(1, 45))
    # Random actions until step 40, then one update a step.
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


def test_a_stop_request_is_honoured_at_the_next_step_boundary(tmp_path: Path) -> None:
    recorder = Recorder()
    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(50, "enough"), recorder])
    assert result.stop_reason == "enough"
    assert result.metrics["global_step"] == 50
    assert result.metrics["gradient_steps"] == 10  # the updates of that step were still made
    assert result.checkpoint_path.name == "step_000000050"


def test_the_first_reason_to_stop_counts(tmp_path: Path) -> None:
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
    class Counter(Callback):
        def __init__(self) -> None:
            self.collected = 0

        def on_collect_end(self, context: TrainingContext) -> None:
            self.collected += 1

        def state_dict(self) -> dict:
            return {"collected": self.collected}

        def load_state_dict(self, state: dict) -> None:
            self.collected = state["collected"]

    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(50), Counter()])
    resumed = Counter()
    rl_training.resume_training(result.run_dir, callbacks=[resumed])
    assert resumed.collected == 120


def test_a_callback_can_ask_for_an_evaluation_and_a_checkpoint(tmp_path: Path) -> None:
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
