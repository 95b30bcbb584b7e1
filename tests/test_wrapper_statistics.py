"""Wrappers with running statistics: evaluation uses those of training without changing them."""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit, TransformReward
from helpers import StopAt, hashes, model_bytes, tiny

import rl_training
from rl_training import SAC, TD3BC, evaluate_checkpoint
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.format import MODEL, POLICY, CheckpointReader, write_checkpoint
from rl_training.checkpoints.loading import load_policy
from rl_training.datasets.recipes import record_policy
from rl_training.envs import EnvironmentFactory, EvaluationFactory
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.errors import CheckpointError, ConfigError, EnvironmentSetupError
from rl_training.types import Json

Statistics = tuple[list[float], list[float], float]


class Ramp(gym.Env):
    """Episodes of ten steps with reward 3 each. Observations grow with the step."""

    observation_space = gym.spaces.Box(-100, 100, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_number = 0
        self.start = float(self.np_random.uniform(0, 5))
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.step_number += 1
        return self._observation(), 3.0, False, self.step_number == 10, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.start, 10.0 * self.step_number], np.float32)


def normalized() -> gym.Env:
    return NormalizeObservation(Ramp())


class Remembered:
    """A factory that stores the environments it created."""

    def __init__(self, make: Callable[[], gym.Env]) -> None:
        self.make, self.made = make, []

    def __call__(self) -> gym.Env:
        self.made.append(self.make())
        return self.made[-1]


def statistics(env: gym.Env) -> Statistics:
    while not isinstance(env, NormalizeObservation):
        env = env.env
    running = env.obs_rms
    return running.mean.tolist(), running.var.tolist(), float(running.count)


def saved_statistics(folder: Path) -> Statistics:
    [saved] = json.loads((folder / POLICY).read_text())["wrapper_statistics"]
    values = Decoder().decode(saved["state"])
    return values["mean"].tolist(), values["var"].tolist(), float(values["count"])


def own(tmp_path: Path, **changes: Any) -> Json:
    return {**tiny(tmp_path, eval_episodes=3, num_threads=1, **changes), "env_id": None}


class AtEvaluations(Callback):
    """Records the statistics of training and evaluation environments at each evaluation."""

    def __init__(self, factory: Remembered) -> None:
        self.factory, self.seen = factory, []

    def on_evaluation_end(self, context: TrainingContext) -> None:
        vector = context._run.collector._environment._vector
        training = statistics(vector._environments[0].env)
        evaluated = [statistics(env) for env in self.factory.made[-3:]]
        self.seen.append((context.global_step, training, evaluated))


def test_evaluation_uses_the_current_training_statistics_without_changing_them(
    tmp_path: Path,
) -> None:
    factory = Remembered(normalized)
    watch = AtEvaluations(factory)
    config = own(tmp_path, eval_interval=40)
    result = rl_training.train(config, env=factory, callbacks=[watch])
    assert [step for step, _, _ in watch.seen] == [40, 80, 120]
    for step, training, evaluated in watch.seen:
        # All steps and the first observation of each episode.
        assert training[2] == pytest.approx(step + step // 10 + 1, abs=0.01)
        assert evaluated == [training] * 3
    assert saved_statistics(result.checkpoint_path) == watch.seen[-1][1]


def test_evaluated_and_saved_policies_use_the_statistics_of_their_checkpoint(
    tmp_path: Path,
) -> None:
    factory = Remembered(normalized)
    config = own(tmp_path, eval_interval=40, checkpoint_interval=40)
    agent = SAC(factory, **{k: v for k, v in config.items() if k not in ("algo", "env_id")})
    result = agent.learn()
    saved = saved_statistics(result.checkpoint_path)
    found = evaluate_checkpoint(result.run_dir, env=factory)
    assert [statistics(env) for env in factory.made[-3:]] == [saved] * 3
    assert agent.evaluate() == found
    policy = agent.save(tmp_path / "policy")
    assert saved_statistics(policy) == saved
    assert evaluate_checkpoint(policy, env=factory, num_episodes=3) == found
    assert SAC.load(policy, env=factory).evaluate(num_episodes=3) == found
    assert [statistics(env) for env in factory.made[-3:]] == [saved] * 3

    # All evaluations are equal here, so the first is the best.
    evaluate_checkpoint(result.run_dir, best=True, env=factory)
    assert result.best_checkpoint_path is not None
    assert result.best_checkpoint_path.name == "step_000000040"
    best = saved_statistics(result.best_checkpoint_path)
    assert best[2] < saved[2]
    assert [statistics(env) for env in factory.made[-3:]] == [best] * 3


def test_reported_returns_use_rewards_before_normalization(tmp_path: Path) -> None:
    def make() -> gym.Env:
        clipped = TransformReward(NormalizeReward(Ramp()), lambda reward: np.clip(reward, -1, 1))
        return gym.wrappers.RecordEpisodeStatistics(clipped)

    result = rl_training.train(own(tmp_path, eval_interval=40), env=make)
    assert result.metrics["eval_return_mean"] == 30.0
    assert result.metrics["rollout/ep_rew_mean"] <= 10.0  # training uses normalized rewards
    assert evaluate_checkpoint(result.run_dir, env=make)["eval_return_mean"] == 30.0
    assert evaluate_checkpoint(result.run_dir, env=Ramp)["eval_return_mean"] == 30.0


class SkipFour(gym.Wrapper):
    """Makes four environment steps in one."""

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def test_unnormalized_rewards_of_several_steps_add_up(tmp_path: Path) -> None:
    result = rl_training.train(own(tmp_path), env=lambda: SkipFour(NormalizeReward(Ramp())))
    assert result.metrics["eval_return_mean"] == 30.0


class Scaled(gym.ObservationWrapper):
    """A custom wrapper that divides by the largest observation so far."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.update_running_mean = True
        self.restored: list[float] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if not hasattr(self, "largest"):
            self.largest = 1.0
        self.steps_of_episode = 0
        return super().reset(seed=seed, options=options)

    def observation(self, observation: Any) -> Any:
        if self.update_running_mean:
            self.largest = max(self.largest, float(np.abs(observation).max()))
        self.steps_of_episode += 1
        return observation / np.float32(self.largest)

    def snapshot(self) -> Json:
        return {"largest": self.largest, "steps_of_episode": self.steps_of_episode}

    def restore(self, snapshot: Json) -> None:
        assert hasattr(self, "largest"), "before a reset there is nothing to restore into"
        self.restored.append(snapshot["largest"])
        vars(self).update(snapshot)


def scaled() -> gym.Env:
    return TimeLimit(Scaled(Ramp()), 4)


def test_a_custom_wrapper_is_transferred_by_snapshot_and_restore(tmp_path: Path) -> None:
    factory = Remembered(scaled)
    result = rl_training.train(own(tmp_path), env=factory)
    evaluated = [env.env for env in factory.made[-3:]]
    # Once when it is created, and before every episode.
    assert [set(wrapper.restored) for wrapper in evaluated] == [{40.0}] * 3
    # Restored before each episode, and statistics are frozen.
    assert [wrapper.steps_of_episode for wrapper in evaluated] == [1, 1, 1]
    assert not any(wrapper.update_running_mean for wrapper in evaluated)
    evaluate_checkpoint(result.run_dir, env=factory)
    assert [set(env.env.restored) for env in factory.made[-3:]] == [{40.0}] * 3


def test_evaluation_before_the_first_step_needs_no_snapshot(tmp_path: Path) -> None:
    """The training environment has not been reset yet, so `snapshot` might fail."""
    config = own(
        tmp_path,
        algo="rlpd",
        eval_interval=5,
        total_timesteps=60,
        dataset={"kind": "random", "size": 50, "seed": 0},
        algo_kwargs={"offline_pretrain_updates": 10, "num_critics": 2},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert rl_training.train(config, env=scaled).metrics["eval_length_mean"] == 4


class Failing(Scaled):
    def snapshot(self) -> Json:
        raise RuntimeError("no")


def test_a_failed_snapshot_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"statistics of wrappers: .*Failing.snapshot\(\) failed"):
        result = rl_training.train(own(tmp_path), env=lambda: Failing(Ramp()))
    assert result.metrics["eval_length_mean"] == 10


@pytest.mark.parametrize("make", [normalized, scaled])
def test_worker_processes_transfer_the_same_statistics(
    make: Callable[[], gym.Env], tmp_path: Path
) -> None:
    here, there = (
        rl_training.train(own(tmp_path, num_envs=2, vectorization=vectorization), env=make)
        for vectorization in ("sync", "async")
    )
    contents = [(run.checkpoint_path / POLICY).read_text() for run in (here, there)]
    assert contents[0] == contents[1]
    assert json.loads(contents[0])["wrapper_statistics"]
    for name in ("eval_return_mean", "eval_length_mean"):
        assert here.metrics[name] == there.metrics[name]


def test_each_seed_has_the_statistics_of_its_own_environments(tmp_path: Path) -> None:
    together = rl_training.train(own(tmp_path, seeds=[0, 1]), env=normalized)
    assert isinstance(together, list)
    for seed, result in enumerate(together):
        alone = rl_training.train(own(tmp_path, seed=seed), env=normalized)
        assert saved_statistics(result.checkpoint_path) == saved_statistics(alone.checkpoint_path)


@pytest.mark.parametrize("make", [normalized, scaled])
def test_evaluating_changes_nothing_and_resuming_is_exact(
    make: Callable[[], gym.Env], tmp_path: Path
) -> None:
    uninterrupted, often = (
        rl_training.train(own(tmp_path, eval_interval=interval), env=make) for interval in (0, 10)
    )
    assert hashes(uninterrupted.checkpoint_path) == hashes(often.checkpoint_path)
    part = rl_training.train(own(tmp_path, eval_interval=10), env=make, callbacks=[StopAt(77)])
    resumed = rl_training.resume_training(part.run_dir, env=make)
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert (resumed.checkpoint_path / POLICY).read_text() == (
        uninterrupted.checkpoint_path / POLICY
    ).read_text()
    assert resumed.metrics["eval_return_mean"] == often.metrics["eval_return_mean"]


def test_an_environment_without_learning_wrappers_is_unchanged(tmp_path: Path) -> None:
    plain = EvaluationFactory.like(EnvironmentFactory("Pendulum-v1"), None)()
    assert str(plain) == str(EnvironmentFactory("Pendulum-v1")())
    result = rl_training.train(tiny(tmp_path))
    assert json.loads((result.checkpoint_path / POLICY).read_text())["wrapper_statistics"] is None


def without_statistics(checkpoint: Path, destination: Path) -> Path:
    """Return a policy as saved by version 0.1.0."""
    reader = CheckpointReader(checkpoint)
    description = reader.json(POLICY)
    del description["wrapper_statistics"]
    write_checkpoint(destination, {POLICY: description, MODEL: reader.tensors(MODEL)})
    return destination


def test_a_policy_of_0_1_without_statistics_can_be_evaluated_and_warns(tmp_path: Path) -> None:
    factory = Remembered(normalized)
    result = rl_training.train(own(tmp_path), env=factory)
    policy = without_statistics(result.checkpoint_path, tmp_path / "old")
    with pytest.warns(UserWarning, match="no statistics of NormalizeObservation.*normal"):
        evaluate_checkpoint(policy, env=factory, num_episodes=1)
    assert statistics(factory.made[-1])[2] > 10  # updated in this evaluation
    assert model_bytes(result) == (policy / MODEL).read_bytes()


def test_an_environment_without_the_wrappers_of_the_policy_is_refused(tmp_path: Path) -> None:
    result = rl_training.train(own(tmp_path), env=normalized)
    with pytest.raises(
        CheckpointError, match="was trained with 'NormalizeObservation', which this"
    ):
        evaluate_checkpoint(result.run_dir, env=Ramp)


@pytest.mark.parametrize(
    "state", [None, 5, {"kind": "dict", "items": []}, {"kind": "array"}, "text"]
)
def test_damaged_statistics_are_refused(state: Any, tmp_path: Path) -> None:
    saved = {"wrapper": "NormalizeObservation", "kind": "observation", "state": state}
    with pytest.raises(CheckpointError, match="NormalizeObservation do not fit"):
        EvaluationFactory(normalized, statistics=[saved])()


def test_statistics_of_other_observations_are_refused(tmp_path: Path) -> None:
    result = rl_training.train(own(tmp_path), env=normalized)

    def wider() -> gym.Env:
        return NormalizeObservation(gym.make("Pendulum-v1"))

    with pytest.raises(CheckpointError, match=r"do not fit it: mean has shape \(2,\)"):
        evaluate_checkpoint(result.run_dir, env=wider)


@pytest.mark.parametrize("regime", ["offline", "mixed"])
def test_recorded_and_live_observations_with_different_scales_are_refused(
    regime: str, tmp_path: Path
) -> None:
    data = {"kind": "random", "size": 50, "seed": 0}
    settings: Json = {"total_timesteps": 5, "output_dir": str(tmp_path), "regime": regime}
    with pytest.raises(EnvironmentSetupError, match="set `normalize_observations: true`"):
        TD3BC(normalized, dataset=data, **settings).learn()
    assert not list(tmp_path.iterdir())


class Locked(Ramp):
    """Cannot be captured, so a resumed run resets it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_resumed_run_continues_with_the_statistics_of_its_checkpoint(
    num_envs: int, tmp_path: Path
) -> None:
    factory = Remembered(lambda: NormalizeObservation(Locked()))
    config = own(tmp_path, num_envs=num_envs)
    stopped = rl_training.train(config, env=factory, callbacks=[StopAt(60)])
    before = saved_statistics(stopped.checkpoint_path)[2]
    resumed = rl_training.resume_training(stopped.run_dir, env=factory)
    steps = (120 - 60) / num_envs
    assert saved_statistics(resumed.checkpoint_path)[2] >= before + steps


def test_a_run_initialized_from_a_policy_starts_with_its_statistics(tmp_path: Path) -> None:
    first = rl_training.train(own(tmp_path), env=normalized)
    before = saved_statistics(first.checkpoint_path)[2]
    config = own(tmp_path / "new", init_from=str(first.run_dir), total_timesteps=60)
    second = rl_training.train(config, env=normalized)
    assert saved_statistics(second.checkpoint_path)[2] >= before + 60
    with pytest.raises(ConfigError, match=r"init_from = .*'NormalizeObservation', which this"):
        rl_training.train(own(tmp_path / "other", init_from=str(first.run_dir)), env=Ramp)
    assert not (tmp_path / "other").exists()


class OtherRestore(gym.Wrapper):
    """Has `snapshot` and `restore` methods with another meaning."""

    def snapshot(self) -> int:
        return 1

    def restore(self, path: str) -> None:
        raise OSError(f"no such file: {path}")


def test_a_failed_restore_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="OtherRestore.restore refused.*starts without"):
        result = rl_training.train(own(tmp_path), env=lambda: OtherRestore(Ramp()))
    assert result.metrics["eval_return_mean"] == 30


@pytest.mark.parametrize(
    "change",
    [
        {"mean": ["1", "2"]},
        {"mean": [1j, 0]},
        {"mean": [math.nan, 0.0]},
        {"var": [-1.0, 1.0]},
        {"var": [math.inf, 1.0]},
        {"count": 10**400},
        {"count": 0},
        {"mean": [1.0, 2.0, 3.0]},
    ],
    ids=str,
)
def test_impossible_statistics_are_refused_with_a_one_line_message(change: Json) -> None:
    values = {"mean": np.zeros(2), "var": np.ones(2), "count": 3.0}
    values |= {k: np.array(v) if isinstance(v, list) else v for k, v in change.items()}
    state = Encoder().encode(values)
    saved = {"wrapper": "NormalizeObservation", "kind": "observation", "state": state}
    factory = EvaluationFactory(normalized, statistics=[saved])
    with pytest.raises(CheckpointError, match="NormalizeObservation do not fit it") as refused:
        factory()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"wrapper": "a\x1b[31m", "kind": "own", "state": 1},
        {"wrapper": "x" * 300, "kind": "own", "state": 1},
        {"wrapper": "x", "kind": "other", "state": 1},
    ],
)
@pytest.mark.parametrize("number", [1, 1_000])
def test_policies_with_invalid_wrapper_statistics_are_refused(
    entry: Json, number: int, tmp_path: Path
) -> None:
    result = rl_training.train(own(tmp_path), env=normalized)
    reader = CheckpointReader(result.checkpoint_path)
    description = reader.json(POLICY) | {"wrapper_statistics": [entry] * number}
    policy = tmp_path / "policy"
    write_checkpoint(policy, {POLICY: description, MODEL: reader.tensors(MODEL)})
    with pytest.raises(CheckpointError, match="wrapper_statistics") as refused:
        load_policy(CheckpointReader(policy))
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 10_000


def test_recording_a_policy_uses_its_statistics(tmp_path: Path) -> None:
    factory = Remembered(lambda: NormalizeReward(normalized()))
    result = rl_training.train(own(tmp_path), env=factory)
    policy = load_policy(CheckpointReader(result.checkpoint_path))
    recording = record_policy(EnvironmentFactory(factory), policy, 20, 0, noise=0.1, name="policy")
    [*_, saved] = [s for s in policy.wrapper_statistics or [] if s["kind"] == "observation"]
    mean = Decoder().decode(saved["state"])["mean"].tolist()
    assert statistics(factory.made[-1])[0] == mean
    [steps] = recording.chunks()
    assert (steps.reward == 3.0).all()


@pytest.mark.parametrize("source", ["object", "function"])
def test_the_error_for_a_vector_environment_says_what_to_use_instead(source: str) -> None:
    vector = gym.wrappers.vector.NormalizeObservation(gym.vector.SyncVectorEnv([Ramp, Ramp]))
    factory = EnvironmentFactory(vector if source == "object" else lambda: vector)
    with pytest.raises(
        EnvironmentSetupError, match=r"vector environment.*num_envs.*`normalize_observations: true`"
    ):
        factory()
