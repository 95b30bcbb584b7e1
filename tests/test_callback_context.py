"""What callbacks see of the last step, what they log, and success rates."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import StopAt, metric_rows, tiny
from probes import Probe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.errors import UserError
from rl_training.types import TrainResult


class Reach(Probe):
    """Episodes of four steps, which succeed if the sum of the actions is positive.

    The info is one dictionary that every reset clears, as in some simulators.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.sum = 0, float(self.np_random.normal())
        self.info: dict[str, Any] = {}
        return self.observe(0.0), self.info

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        self.sum += float(action[0])
        ended = self.steps == 4
        self.info["step"], self.info["is_success"] = self.steps, self.sum > 0
        return self.observe(np.tanh(self.sum)), float(self.steps), False, ended, self.info


class ReachInPlace(Reach):
    """Same as `Reach`, but its resets change the info that the last step returned."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        info = getattr(self, "info", {})
        observation, _ = super().reset(seed=seed)
        info.clear()
        self.info = info
        return observation, info


class ReachWithRenderer(Reach):
    """Infos with an entry that cannot be sent to another process."""

    def step(self, action: np.ndarray) -> Any:
        *others, info = super().step(action)
        return *others, {**info, "draw": lambda: None}


class NoOpinion(Reach):
    """Says nothing usable about success."""

    def step(self, action: np.ndarray) -> Any:
        *others, info = super().step(action)
        return *others, {**info, "is_success": "perhaps"}


class Watch(Callback):
    """Keeps what a run shows after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.environments: list[Any] = []
        self.seeds: dict[int, Watch] = {}

    def for_seed(self, seed: int) -> Callback:
        self.seeds[seed] = Watch()
        return self.seeds[seed]

    def on_train_start(self, context: TrainingContext) -> None:
        self.environments.append(context.env)
        self.before = [dict(info) for info in context.infos], context.rewards.tolist()

    def on_collect_end(self, context: TrainingContext) -> None:
        self.steps.append(
            {
                "infos": [dict(info) for info in context.infos],
                "rewards": context.rewards.tolist(),
                "truncations": context.truncations.tolist(),
                "terminations": context.terminations.tolist(),
                "actions": context.actions.tolist(),
                "observations": context.observations.tolist(),
                "predicted": context.policy.predict(context.observations).tolist(),
            }
        )


def run(tmp_path: Path, environment: Any = Reach, **changes: Any) -> TrainResult:
    callbacks = changes.pop("callbacks", [])
    config = tiny(tmp_path, total_timesteps=48, **changes) | {"env_id": None}
    return rl_training.train(config, env=environment, callbacks=callbacks)


def watched(tmp_path: Path, environment: Any = Reach, **changes: Any) -> Watch:
    watch = Watch()
    run(tmp_path, environment, callbacks=[watch], **changes)
    return watch


def test_callbacks_see_the_last_step(tmp_path: Path) -> None:
    watch = watched(tmp_path, ReachInPlace)
    assert watch.before == ([{}], [])
    numbers = [step["infos"][0]["step"] for step in watch.steps]
    # The last info of an episode is that of its final step, not that of the next reset.
    assert numbers == [1, 2, 3, 4] * 12
    assert [step["rewards"] for step in watch.steps] == [[float(number)] for number in numbers]
    assert [step["truncations"] for step in watch.steps] == [[number == 4] for number in numbers]
    assert not any(any(step["terminations"]) for step in watch.steps)
    assert watch.steps[3]["observations"] == [[0.0]]  # the next episode has started
    sums = np.cumsum([step["actions"][0][0] for step in watch.steps[:3]])
    shown = [np.arctanh(step["observations"][0][0]) for step in watch.steps[:3]]
    np.testing.assert_allclose(np.diff(shown), np.diff(sums), atol=1e-4)
    assert all(np.shape(step["predicted"]) == (1, 1) for step in watch.steps)
    assert isinstance(watch.environments[0].unwrapped, Reach)


def test_several_environments_are_a_list_with_one_row_each(tmp_path: Path) -> None:
    watch = watched(tmp_path, num_envs=2)
    assert [step["rewards"] for step in watch.steps[:2]] == [[1.0, 1.0], [2.0, 2.0]]
    assert watch.before == ([{}, {}], [])
    [environments] = watch.environments
    assert [type(environment.unwrapped) for environment in environments] == [Reach, Reach]


def test_worker_processes_show_the_same_steps(tmp_path: Path) -> None:
    here = watched(tmp_path, num_envs=3, vectorization="sync")
    elsewhere = watched(tmp_path, num_envs=3, vectorization="async")
    assert elsewhere.steps == here.steps
    assert elsewhere.environments == [None]


def test_an_entry_that_cannot_be_sent_by_a_worker_process_is_left_out(tmp_path: Path) -> None:
    watch = watched(tmp_path, ReachWithRenderer, num_envs=2, vectorization="async")
    assert [set(info) for info in watch.steps[0]["infos"]] == [{"step", "is_success"}] * 2


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_each_seed_sees_its_own_environments(tmp_path: Path, vectorization: str) -> None:
    together = watched(tmp_path, seeds=[3, 4], num_envs=2, vectorization=vectorization)
    for seed, watch in together.seeds.items():
        alone = watched(tmp_path, seed=seed, num_envs=2, vectorization="sync")
        assert watch.steps == alone.steps


def test_offline_training_has_no_steps_to_show(tmp_path: Path) -> None:
    seen = []

    class Look(Callback):
        def on_update_end(self, context: TrainingContext) -> None:
            seen.append((context.env, len(context.infos), len(context.rewards)))
            seen.append(context.policy.predict(np.zeros(3)).shape)

    dataset = {"kind": "random", "size": 50, "seed": 0}
    config = tiny(tmp_path, total_timesteps=1) | {
        "algo": "bc",
        "dataset": dataset,
        "algo_kwargs": {"hidden_sizes": [8], "batch_size": 8},
    }
    rl_training.train(config, callbacks=[Look()])
    assert seen == [(None, 0, 0), (1,)]


def success_of(steps: list[dict[str, Any]]) -> list[bool]:
    infos = [info for step in steps for info in step["infos"]]
    return [info["is_success"] for info in infos if info["step"] == 4]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_success_rate_is_that_of_the_last_infos_of_the_episodes(
    tmp_path: Path, vectorization: str
) -> None:
    watch = Watch()
    result = run(
        tmp_path,
        ReachInPlace,
        callbacks=[watch],
        num_envs=2,
        vectorization=vectorization,
        eval_interval=24,
        eval_episodes=5,
    )
    successes = success_of(watch.steps)
    assert 0 < sum(successes) < len(successes) == 12
    assert result.metrics["rollout/success_rate"] == np.mean(successes)
    rows = metric_rows(result.run_dir)
    assert [row["rollout/success_rate"] for row in rows if "rollout/ep_rew_mean" in row] == [
        np.mean(success_of(watch.steps[:20]))
    ]
    evaluated = [row["eval/success_rate"] for row in rows if "eval/mean_reward" in row]
    assert len(evaluated) == 2
    assert all(rate * 5 in range(6) for rate in evaluated)
    assert result.metrics["eval_success_rate"] == evaluated[-1]
    assert rl_training.evaluate_checkpoint(result.run_dir, env=Reach, num_episodes=4).keys() >= {
        "eval_success_rate"
    }
    assert {"rollout/success_rate", "eval/success_rate"} <= set(scalars(result).Tags()["scalars"])


def scalars(result: TrainResult) -> EventAccumulator:
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    return events


def test_without_is_success_there_is_no_success_rate(tmp_path: Path) -> None:
    result = rl_training.train(
        tiny(tmp_path, total_timesteps=210, algo_kwargs={"hidden_sizes": [4]})
    )
    assert "rollout/ep_rew_mean" in result.metrics
    assert not [name for name in result.metrics if "success" in name]


def test_an_unusable_is_success_is_ignored_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="must be a bool, 0 or 1"):
        result = run(tmp_path, NoOpinion)
    assert not [name for name in result.metrics if "success" in name]


def test_an_early_stop_can_wait_for_a_success_rate(tmp_path: Path) -> None:
    early = {"metric": "eval_success_rate", "target_value": 0.0}
    assert run(tmp_path, eval_interval=10, early_stopping=early).stop_reason == "target_value"
    config = tiny(tmp_path, total_timesteps=20, eval_interval=5, early_stopping=early)
    with pytest.warns(UserWarning, match=r'early_stopping has no effect: .*info\["is_success"\]'):
        result = rl_training.train(config)
    assert result.stop_reason == "total_timesteps"


class Heights(Callback):
    """Logs a value at every step, and another one at evaluations."""

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step % 9 == 0:
            context.log("custom/height", context.global_step)

    def on_evaluation_end(self, context: TrainingContext) -> None:
        context.log("custom/evaluated_at", np.float32(context.global_step))


def logged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = "step", "custom/height", "custom/evaluated_at", "custom/end"
    return [{key: row[key] for key in keys if key in row} for row in rows]


def test_a_logged_value_is_in_the_next_row_and_in_tensorboard(tmp_path: Path) -> None:
    class End(Callback):
        def on_train_end(self, context: TrainingContext) -> None:
            context.log("custom/end", torch.tensor(7))

    result = run(tmp_path, callbacks=[Heights(), End()], log_interval=20, eval_interval=30)
    assert logged(metric_rows(result.run_dir)) == [
        {"step": 20, "custom/height": 18},
        {"step": 30, "custom/height": 27, "custom/evaluated_at": 30},
        {"step": 40, "custom/height": 36},
        {"step": 48, "custom/height": 45, "custom/evaluated_at": 48},
        {"step": 48, "custom/end": 7},
    ]
    events = scalars(result).Scalars("custom/height")
    assert [(event.step, event.value) for event in events] == [
        (20, 18.0),
        (30, 27.0),
        (40, 36.0),
        (48, 45.0),
    ]


def test_a_value_that_waits_for_its_row_survives_a_resume(tmp_path: Path) -> None:
    settings = {"log_interval": 20, "eval_interval": 30, "num_envs": 2}
    straight = run(tmp_path, callbacks=[Heights()], **settings)
    # Step 46 ends in the middle of an episode of each environment.
    for stop in (10, 38, 46):
        stopped = run(tmp_path, callbacks=[Heights(), StopAt(stop)], **settings)
        resumed = rl_training.resume_training(stopped.run_dir, env=Reach, callbacks=[Heights()])
        rows = metric_rows(resumed.run_dir)
        assert rows == metric_rows(straight.run_dir)
        assert len([row for row in rows if "custom/height" in row]) >= 2
        assert resumed.metrics == straight.metrics
    assert "rollout/success_rate" in straight.metrics


def test_a_checkpoint_without_successes_can_be_resumed(tmp_path: Path) -> None:
    """Earlier versions saved neither successes nor logged values."""
    stopped = run(tmp_path, callbacks=[StopAt(24)])
    path = stopped.checkpoint_path / "state.json"
    state = json.loads(path.read_text())
    assert [len(episode) for episode in state["collector"]["episodes"]] == [3] * 6
    state["collector"]["episodes"] = [each[:2] for each in state["collector"]["episodes"]]
    del state["callbacks"]["MetricsLog"]["logged"]
    state["evaluation"] = None
    replace_file(path, json.dumps(state).encode())
    watch = Watch()
    resumed = rl_training.resume_training(stopped.run_dir, env=Reach, callbacks=[watch])
    assert resumed.metrics["rollout/success_rate"] == np.mean(success_of(watch.steps))


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file of a checkpoint, and its entry in the manifest."""
    import hashlib

    path.write_bytes(data)
    manifest = path.parent / "MANIFEST.json"
    values = json.loads(manifest.read_text())
    values["files"][path.name].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("my height", 1.0, "not a valid name"),
        ("", 1.0, "not a valid name"),
        ("/height", 1.0, "not a valid name"),
        (7, 1.0, "not a valid name"),
        ("a" * 201, 1.0, "has 201 characters; use at most 200"),
        ("step", 1.0, "every row already has 'step'"),
        ("eval/mean_reward", 1.0, "metrics of this package; .* 'custom/mean_reward'"),
        ("rollout/height", 1.0, "begin with rollout/"),
        ("time/of_day", 1.0, "begin with time/"),
        ("train/a/b", 1.0, "'custom/a/b'"),
        ("height", float("nan"), "must be one finite number, not nan"),
        ("height", np.ones(2), "must be one finite number"),
        ("height", torch.ones(2), "must be one finite number"),
        ("height", "3", "must be one finite number, not '3'"),
        ("height", None, "must be one finite number, not None"),
    ],
)
def test_a_wrong_name_or_value_is_refused(
    tmp_path: Path, name: Any, value: Any, message: str
) -> None:
    class Log(Callback):
        def on_train_start(self, context: TrainingContext) -> None:
            context.log(name, value)

    with pytest.raises(UserError, match=message):
        run(tmp_path, callbacks=[Log()])


def test_reading_infos_changes_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = run(tmp_path, num_envs=2)
        observed = run(tmp_path, num_envs=2, callbacks=[Watch()])
    assert plain.metrics == observed.metrics
