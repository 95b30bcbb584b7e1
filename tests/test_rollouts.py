"""Rollouts: advantages, minibatches, what is refused, and runs that are stopped anywhere."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import probes
import pytest
import torch
from helpers import StopAt, hashes, metric_rows, tiny_of
from hostile import seal
from safetensors.torch import load_file, save_file
from test_hindsight_runs import die_once
from test_interrupts import interrupting

import rl_training
from rl_training.algorithms.on_policy import discounted_sums
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.format import ROLLOUT
from rl_training.checkpoints.loading import cached_policy
from rl_training.config import TrainConfig
from rl_training.data.n_step import Transitions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollouts.minibatches import TARGETS, Rollouts
from rl_training.data.rollouts.steps import LOST, RolloutSteps
from rl_training.errors import CheckpointError, ConfigError, DataError, TrainingInterrupted
from rl_training.execution import execution
from rl_training.execution.programs import DirectProgram
from rl_training.runtime.workflows import resume_together
from rl_training.training.engine import UpdateSchedule, planned_updates
from rl_training.types import Batch, TrainResult

PPO_SPEC, A2C_SPEC = get_algorithm_spec("ppo"), get_algorithm_spec("a2c")


# Advantages


def rollout(steps: int, envs: int, seed: int = 0, gamma: float = 0.9) -> Batch:
    """Return rows in which episodes terminate, are truncated, or are lost."""
    random = np.random.default_rng(seed)
    number = steps * envs
    kinds = random.choice(4, number, p=[0.6, 0.15, 0.15, 0.1])
    numbers = random.normal(size=(number, 8)).astype(np.float32)
    parts = torch.from_numpy(numbers)
    return Batch(
        parts[:, :3],
        parts[:, 3:4],
        parts[:, 4],
        gamma * torch.from_numpy((kinds != 1).astype(np.float32)),
        parts[:, 5:8],
        ended=torch.from_numpy(np.array([0.0, 1.0, 1.0, LOST], np.float32)[kinds]),
    )


@pytest.mark.parametrize(("steps", "envs"), [(1, 1), (7, 1), (16, 3), (33, 2)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.8, 1.0])
def test_advantages_are_those_of_a_loop_over_steps(
    steps: int, envs: int, gae_lambda: float
) -> None:
    gamma = 0.9
    settings = {"rollout_steps": steps, "gae_lambda": gae_lambda, "gamma": gamma}
    ppo, given = PPO(3, 1, settings, seed=1), rollout(steps, envs, gamma=gamma)
    with torch.no_grad():
        targets, metrics = ppo.begin_rollout(ppo.state, given)
        value, next_value = (ppo.model.state_values(o) for o in (given.obs, given.next_obs))
    expected = np.zeros((steps, envs))
    for env in range(envs):
        later = 0.0
        for step in reversed(range(steps)):
            row = step * envs + env
            ended = float(given.ended[row])
            if ended == LOST:
                later = 0.0
            else:
                terminated = float(given.discount[row]) == 0.0
                bootstrap = 0.0 if terminated else gamma * float(next_value[row])
                error = float(given.reward[row]) + bootstrap - float(value[row])
                later = error + (0.0 if ended else gamma * gae_lambda * later)
            expected[step, env] = later
    found = targets["advantages"].view(steps, envs).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(targets["returns"], targets["advantages"] + value)
    torch.testing.assert_close(targets["values"], value)
    spread = targets["returns"].var(correction=0)
    if steps > 1:
        explained = 1 - (targets["returns"] - value).var(correction=0) / spread
        torch.testing.assert_close(metrics["explained_variance"], explained)


def test_sums_of_a_long_rollout_do_not_lose_precision() -> None:
    values, decays = torch.ones(5_000, 1), torch.full((5_000, 1), 1 - 2**-10)
    exact = (1 - (1 - 2**-10) ** 5_000) * 2**10
    assert float(discounted_sums(values, decays)[0]) == pytest.approx(exact, rel=1e-5)


def test_scaled_rewards_are_clipped() -> None:
    given = rollout(4, 1).with_fields(reward=torch.tensor([0.0, 50.0, 0.0, -50.0]))
    clipped = given.with_fields(reward=given.reward.clamp(-10, 10))
    plain = PPO(3, 1, {"rollout_steps": 4}, seed=1)
    scaled = PPO(3, 1, {"rollout_steps": 4, "normalize_rewards": True}, seed=1)
    found, expected, other = (
        each.begin_rollout(each.state, rows)[0]["returns"]
        for each, rows in ((scaled, given), (plain, clipped), (plain, given))
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, other)


# Minibatches


def filled(
    steps: int, envs: int, batch_size: int, epochs: int = 2, *, seeds: int = 1, width: int = 1
) -> Rollouts:
    storage = ReplayBuffer(
        steps * envs, 2, 1, ended=True, num_envs=envs, slots=range(seeds), width=width
    )
    source = Rollouts(storage, batch_size, epochs)
    for step in range(steps):
        names = np.arange(seeds * envs, dtype=np.float32) + 100 * step
        obs = np.stack([names, -names], axis=1)
        zeros = np.zeros_like(names)
        storage.add(Transitions(obs, names[:, None], names, zeros, obs, ended=zeros))
    source.flush()
    rows = source.all_rows()
    source.keep(rows, {name: rows.reward + place for place, name in enumerate(TARGETS)})
    return source


@pytest.mark.parametrize(("seeds", "width"), [(1, 1), (2, 2), (2, 3)])
def test_an_epoch_contains_each_transition_once_in_a_new_order(seeds: int, width: int) -> None:
    source, orders = filled(6, 2, 4, seeds=seeds, width=width), []
    lead = () if width == 1 else (width,)
    assert (source.num_minibatches, source.updates_per_rollout) == (3, 6)
    for key in (5, 6):
        source.shuffle(torch.full((*lead, 1), key))
        seen = []
        for minibatch in range(3):
            source.seek(minibatch)
            batch = source.draw()
            assert batch.obs.shape == (*lead, 4, 2)
            assert torch.equal(batch.obs[..., 0], batch.reward)
            assert torch.equal(batch.action[..., 0], batch.reward)
            for place, name in enumerate(TARGETS):
                assert torch.equal(getattr(batch, name), batch.reward + place)
            seen.append(batch.reward)
        drawn = torch.cat(seen, dim=-1)
        orders.append(drawn)
        assert torch.equal(drawn.sort(-1).values, source.all_rows().reward.sort(-1).values)
    assert not torch.equal(*orders)


def test_a_rest_is_left_out_and_a_short_rollout_is_one_minibatch() -> None:
    source = filled(5, 1, 2)
    assert (source.batch_size, source.num_minibatches) == (2, 2)
    left_out = set()
    for key in range(20):
        source.shuffle(torch.tensor([key]))
        left_out.add(int(source.order[-1]))
    assert left_out == set(range(5))
    assert filled(5, 1, 64).batch_size == 5


def test_orders_are_spread_evenly() -> None:
    source = filled(8, 1, 8)
    counts = torch.zeros(8, 8)
    for key in range(4_000):
        source.shuffle(torch.tensor([key * 7919]))
        counts[torch.arange(8), source.order] += 1
    assert (counts / 4_000 - 1 / 8).abs().max() < 0.03


def test_what_was_lost_is_marked_and_every_environment_keeps_its_position() -> None:
    steps, obs = RolloutSteps(0.9), np.arange(6, dtype=np.float32).reshape(3, 2)
    none, some = np.zeros(3, np.bool_), np.array([True, False, True])
    rows, environments = steps.add(
        obs, obs[:, :1], np.ones(3, np.float32), none, ~some, obs + 1, some
    )
    assert environments is None
    assert rows.ended is not None
    assert rows.ended.tolist() == [0.0, LOST, 0.0]
    assert rows.reward.tolist() == [1.0, 0.0, 1.0]
    assert rows.next_obs[1].tolist() == obs[1].tolist()


def test_an_interruption_cuts_the_newest_steps() -> None:
    source = filled(3, 2, 2)
    source.storage.interrupt(0)
    ended = source.all_rows().ended
    assert ended is not None
    assert ended.tolist() == [0, 0, 0, 0, 1, 1]


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regime": "offline"}, "regime = 'offline': ppo supports online"),
        ({"regime": "mixed"}, "regime = 'mixed': ppo supports online"),
        ({"dataset": {"kind": "random", "size": 10}}, "dataset: ppo learns online"),
        ({"checkpoint_replay": "none"}, "checkpoint_replay: ppo learns from rollouts"),
        ({"replay_device": "cpu"}, "replay_device: ppo learns from rollouts"),
        ({"replay_frame_stack": 4}, "replay_frame_stack: ppo learns from rollouts"),
        ({"replay": {"hindsight": {"strategy": "final"}}}, "replay: ppo learns from rollouts"),
        ({"overlap": "on"}, "overlap = 'on': ppo learns from complete rollouts"),
        ({"vectorization": "ray-async"}, "vectorization = 'ray-async': ppo needs the same"),
        (
            {"algo_kwargs": {"networks": {"random_shift": 4}}},
            "networks.random_shift = 4: must be 0",
        ),
        ({"algo_kwargs": {"learning_starts": 5}}, "learning_starts = 5: unknown key"),
        ({"algo_kwargs": {"batch_size": 1}}, "a minibatch of one transition has no standard"),
        (
            {"num_envs": 1, "algo_kwargs": {"rollout_steps": 1}},
            "a minibatch of one transition has no standard",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_other_regimes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(**{"algo": "ppo", **changes})
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("num_envs", [1, 3])
def test_updates_follow_complete_rollouts(tmp_path: Path, num_envs: int) -> None:
    config = tiny_of(PPO_SPEC, tmp_path, num_envs=num_envs, total_timesteps=121)
    schedule = UpdateSchedule.of(TrainConfig(**config))
    assert (schedule.learning_starts, schedule.train_frequency) == (0, 8 * num_envs)
    assert schedule.updates_per_block == 2 * 8 * num_envs // 4
    result = rl_training.train(config)
    assert isinstance(result, TrainResult)
    expected = 121 // (8 * num_envs) * schedule.updates_per_block
    assert result.metrics["gradient_steps"] == planned_updates(TrainConfig(**config)) == expected


class FirstRatios(Callback):
    """Notes how far the policy of the first minibatch is from the one that acted."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_update_end(self, context: TrainingContext) -> None:
        self.seen.append(abs(context.train_metrics()["approximate_kl"]))


@pytest.mark.parametrize("normalized", [False, True])
def test_actions_are_as_likely_in_the_first_update_as_when_they_were_chosen(
    tmp_path: Path, normalized: bool
) -> None:
    """One update per rollout. The policy has changed since the last one, and so have statistics."""
    once = {"num_epochs": 1, "batch_size": 64, "learning_rate": 0.01, "rollout_steps": 16}
    config = tiny_of(
        PPO_SPEC, tmp_path, num_envs=2, algo_kwargs=once, normalize_observations=normalized
    )
    ratios = FirstRatios()
    rl_training.train(config, callbacks=[ratios])
    assert len(ratios.seen) == 3
    assert max(ratios.seen) < 1e-6


class Probabilities(Callback):
    """Compares stored actions with the distribution that the policy has while it collects."""

    def __init__(self) -> None:
        self.normalizations: list[list[float]] = []

    def on_collect_end(self, context: TrainingContext) -> None:
        normalizer = context._run.policy.normalizer
        self.normalizations.append(normalizer.shift.tolist())


@pytest.mark.thorough
def test_statistics_of_observations_change_between_rollouts_alone(tmp_path: Path) -> None:
    config = tiny_of(
        PPO_SPEC, tmp_path, normalize_observations=True, total_timesteps=24, num_envs=1
    )
    watch = Probabilities()
    rl_training.train(config, callbacks=[watch])
    first, second, third = (watch.normalizations[i : i + 8] for i in (0, 8, 16))
    assert all(shift == [0.0, 0.0, 0.0] for shift in first)
    assert all(shift == second[0] for shift in second)
    assert all(shift == third[0] for shift in third)
    assert first[0] != second[0] != third[0]


# Runs that are stopped


def assert_same(one: TrainResult, other: TrainResult) -> None:
    assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)
    assert metric_rows(one.run_dir) == metric_rows(other.run_dir)
    assert one.metrics == other.metrics


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "normalize_observations": True,
        "num_envs": 3,
        "algo_kwargs": {
            "normalize_rewards": True,
            "target_kl": 1e-4,
            "value_clip_range": 0.2,
            "learning_rate_schedule": "linear",
        },
    },
    "choices": {"env_id": "CartPole-v1", "num_envs": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", [5, 59])
def test_a_run_that_stops_within_a_rollout_continues_with_the_same_bits(
    tmp_path: Path, options: str, step: int
) -> None:
    config = tiny_of(PPO_SPEC, tmp_path, **OPTIONS[options])
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(step)])
    assert isinstance(stopped, TrainResult)
    assert isinstance(uninterrupted, TrainResult)
    rows = load_file(stopped.checkpoint_path / "replay-00000.safetensors")["rows"]
    num_envs = config.get("num_envs", 1)
    assert 0 < len(rows) <= 8 * num_envs
    resumed = rl_training.resume_training(stopped.run_dir)
    assert_same(uninterrupted, resumed)


def interrupted(config: dict[str, Any], update: int) -> TrainResult:
    with (
        interrupting(DirectProgram, "__call__", update, signal.SIGTERM),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        rl_training.train(config)
    return stopped.value.result


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("update", [1, 7])
def test_a_block_of_updates_is_left_and_completed_with_the_same_bits(
    tmp_path: Path, options: str, update: int
) -> None:
    config = tiny_of(PPO_SPEC, tmp_path, **OPTIONS[options])
    uninterrupted = rl_training.train(config)
    assert isinstance(uninterrupted, TrainResult)
    result = interrupted(config, update)
    state = json.loads((result.checkpoint_path / "state.json").read_text())
    assert state["progress"]["updates_left"] > 0
    assert load_file(result.checkpoint_path / ROLLOUT).keys() == {"order", *TARGETS}
    resumed = rl_training.resume_training(result.run_dir)
    assert ROLLOUT not in [path.name for path in resumed.checkpoint_path.iterdir()]
    assert_same(uninterrupted, resumed)


@pytest.mark.parametrize("batched", [False, True])
def test_seeds_leave_a_block_together_and_continue_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = tiny_of(PPO_SPEC, tmp_path, seeds=[4, 2], **OPTIONS["everything"])
    uninterrupted = rl_training.train(config)
    assert isinstance(uninterrupted, list)
    with (
        interrupting(DirectProgram, "__call__", 5, signal.SIGTERM),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        rl_training.train(config)
    folders = [each.run_dir for each in stopped.value.results]
    for one, other in zip(uninterrupted, resume_together(folders), strict=True):
        assert_same(one, other)


def test_a_population_agrees_with_single_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_of(PPO_SPEC, tmp_path, seeds=[4, 2], num_envs=2, total_timesteps=48)
    alone = rl_training.train(config)
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    together = rl_training.train(config)
    assert isinstance(alone, list)
    assert isinstance(together, list)
    for one, other in zip(alone, together, strict=True):
        first, second = (load_file(r.checkpoint_path / "model.safetensors") for r in (one, other))
        for name, tensor in first.items():
            torch.testing.assert_close(tensor, second[name], rtol=1e-4, atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize("batched", [False, True])
def test_a_compiled_run_agrees_with_an_eager_one_and_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    changes = {**OPTIONS["everything"], "seeds": [4, 2], "total_timesteps": 72}
    eager = rl_training.train(tiny_of(PPO_SPEC, tmp_path, **changes))
    config = tiny_of(PPO_SPEC, tmp_path, compile="on", **changes)
    compiled = rl_training.train(config)
    assert isinstance(eager, list)
    assert isinstance(compiled, list)
    for one, other in zip(eager, compiled, strict=True):
        first, second = (load_file(r.checkpoint_path / "model.safetensors") for r in (one, other))
        for name, tensor in first.items():
            torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-3)
    stopped = rl_training.train(config, callbacks=[StopAt(30)])
    assert isinstance(stopped, list)
    for one, other in zip(compiled, resume_together([r.run_dir for r in stopped]), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", ["order", "advantages"])
def test_a_damaged_rollout_is_refused(tmp_path: Path, name: str) -> None:
    source = filled(4, 1, 2)
    state = {key: value.clone() for key, value in source.state_dict().items()}
    state[name][0] = 7 if name == "order" else torch.nan
    with pytest.raises(ValueError, match=name):
        source.load_state_dict(state)


def test_a_checkpoint_without_its_rollout_is_refused(tmp_path: Path) -> None:
    result = interrupted(tiny_of(PPO_SPEC, tmp_path), 3)
    manifest = result.checkpoint_path / "MANIFEST.json"
    contents = json.loads(manifest.read_text())
    del contents["files"][ROLLOUT]
    manifest.write_text(json.dumps(contents))
    (result.checkpoint_path / ROLLOUT).unlink()
    with pytest.raises(CheckpointError, match=ROLLOUT):
        rl_training.resume_training(result.checkpoint_path)


@pytest.mark.filterwarnings("ignore:nothing will be learned")
def test_a_rollout_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    long = {"rollout_steps": 1_000_000}
    with pytest.raises(ConfigError, match=r"rollout_steps = 1,000,000: needs .*would fit"):
        rl_training.train(tiny_of(PPO_SPEC, tmp_path, num_envs=4_096, algo_kwargs=long))


def test_a_rollout_of_another_size_is_refused(tmp_path: Path) -> None:
    result = interrupted(tiny_of(PPO_SPEC, tmp_path), 3)
    other = {name: value[:3] for name, value in load_file(result.checkpoint_path / ROLLOUT).items()}
    save_file(other, result.checkpoint_path / ROLLOUT)
    seal(result.checkpoint_path)
    with pytest.raises(CheckpointError, match=f"{ROLLOUT} does not fit 8 rows"):
        rl_training.resume_training(result.checkpoint_path)


# Known values


def learn(environment: Any, tmp_path: Path, spec: Any, **changes: Any) -> Any:
    settings = {
        "hidden_sizes": [32, 32],
        "learning_rate": 3e-3,
        "gamma": 0.9,
        "rollout_steps": 32 if spec is PPO_SPEC else 8,
        "batch_size": 64,
        **changes,
    }
    config = {
        "algo": spec.name,
        "num_envs": 4,
        "total_timesteps": 12_800,
        "eval_interval": 0,
        "checkpoint_interval": 0,
        "eval_episodes": 1,
        "compile": "off",
        "output_dir": str(tmp_path),
        "algo_kwargs": settings,
    }
    result = rl_training.train(config, env=environment)
    return cached_policy(result.run_dir)


def value(policy: Any, obs: float) -> float:
    with torch.no_grad():
        return float(policy.algorithm.model.state_values(torch.tensor([[obs]])))


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [PPO_SPEC, A2C_SPEC], ids=["ppo", "a2c"])
def test_values_of_known_environments_are_learned(tmp_path: Path, spec: Any) -> None:
    assert value(learn(probes.ConstantReward, tmp_path, spec), 0.0) == pytest.approx(1, abs=0.1)
    policy = learn(probes.DelayedReward, tmp_path, spec)
    assert value(policy, 0.0) == pytest.approx(0.9, abs=0.1)
    assert value(policy, 1.0) == pytest.approx(1.0, abs=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [PPO_SPEC, A2C_SPEC], ids=["ppo", "a2c"])
def test_a_truncated_episode_bootstraps_the_future_value(tmp_path: Path, spec: Any) -> None:
    policy = learn(probes.TruncatedReward, tmp_path, spec, learning_rate=1e-2)
    assert value(policy, 0.0) == pytest.approx(10, abs=1.0)


@pytest.mark.thorough
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("spec", [PPO_SPEC, A2C_SPEC], ids=["ppo", "a2c"])
def test_the_best_action_is_found(tmp_path: Path, spec: Any, discrete: bool) -> None:
    make = probes.Discrete.of(probes.ActionReward) if discrete else probes.ActionReward
    # With the default deviation most actions are clipped, and the best mean is first beyond 1.
    settings = {"learning_rate": 3e-3 if spec is PPO_SPEC else 1e-3, "initial_log_std": -1.0}
    policy = learn(make, tmp_path, spec, **settings)
    action = policy.predict(np.array([0.0]))
    found = probes.Discrete.value(int(action)) if discrete else float(action[0])
    assert found == pytest.approx(0.5, abs=0.1)


def test_a_run_that_ends_before_its_first_rollout_says_so(tmp_path: Path) -> None:
    config = tiny_of(PPO_SPEC, tmp_path, total_timesteps=60, algo_kwargs={"rollout_steps": 64})
    with pytest.warns(
        UserWarning, match="before its first rollout is complete .*rollout_steps = 64"
    ):
        rl_training.train(config)


def test_a_rollout_is_no_recorded_data(tmp_path: Path) -> None:
    result = rl_training.train(tiny_of(PPO_SPEC, tmp_path))
    assert isinstance(result, TrainResult)
    data = {"kind": "run", "path": str(result.run_dir)}
    config = tiny_of(get_algorithm_spec("bc"), tmp_path, dataset=data, env_id="Pendulum-v1")
    with pytest.raises(DataError, match="learns from rollouts and has no replay buffer"):
        rl_training.train(config)


# Environments in other processes


class Mortal(probes.Countdown):
    """Observations are (episode, step). Its worker process dies once, and cannot be replayed."""

    def __init__(self, marker: str) -> None:
        super().__init__(length=5)
        self.marker, self.noise = Path(marker), np.random.default_rng()  # differs in a replay

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return obs + self.noise.uniform(0, 0.4), info

    def step(self, action: np.ndarray) -> Any:
        if self.episode == 4 and self.steps == 2:
            die_once(self.marker)
        return super().step(action)


def test_a_lost_step_keeps_the_positions_of_all_others(tmp_path: Path) -> None:
    config = tiny_of(
        PPO_SPEC,
        tmp_path / "runs",
        num_envs=2,
        vectorization="async",
        env_restarts=1,
        total_timesteps=52,
        algo_kwargs={"rollout_steps": 26},
    )
    config |= {"env_id": None, "env_kwargs": {"marker": str(tmp_path / "died")}}
    with pytest.warns(UserWarning, match="new episode"):
        result = rl_training.train(config, env=Mortal)
    assert isinstance(result, TrainResult)
    assert result.metrics["rollout/lost_episodes"] >= 1
    assert result.metrics["gradient_steps"] > 0
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    assert len(rows) == 52
    obs, next_obs, ended = rows[:, :2], rows[:, -3:-1], rows[:, -1]
    assert LOST in ended
    for environment in range(2):
        own = slice(environment, None, 2)
        continues = ended[own][:-1] == 0
        assert torch.equal(obs[own][1:][continues], next_obs[own][:-1][continues])
