"""Values that are not finite: caught in time, named, and neither stored nor saved."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box
from helpers import each_algorithm, has_rollouts, metric_rows, tiny_of
from probes import HugeReward, Probe
from safetensors.torch import load_file

import rl_training
from rl_training.algorithms import SACAlgorithm
from rl_training.algorithms.hyperparameters import priority_exponent
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.data import ReplayBuffer
from rl_training.data.n_step import Transitions
from rl_training.data.transforms import ObservationNormalizer, RewardTransform
from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.errors import (
    ConfigError,
    DataError,
    EnvironmentRuntimeError,
    TrainingError,
    UserError,
)
from rl_training.execution import execution
from rl_training.execution.execution import Execution
from rl_training.execution.learner import Explorer, Learner
from rl_training.execution.programs import Population
from rl_training.training import saver
from rl_training.training.collector import Collector
from rl_training.training.seed_run import SeedRun

HUGE = 3e38
"""Finite in float32, but not its square, nor the sum of two"""

SHORT = {"total_timesteps": 60, "log_interval": 20, "checkpoint_interval": 20}
"""With `learning_starts` 10, runs can be poisoned at step 40 and still have a good checkpoint"""


class Poison(Callback):
    """Makes one value of the learned state NaN, as an exploding update does."""

    def __init__(self, name: str, step: int = 40, seed: int | None = None) -> None:
        self.name, self.step, self.seed = name, step, seed

    def on_update_end(self, context: TrainingContext) -> None:
        if context.global_step == self.step and self.seed in (None, context.config.seed):
            context.policy.algorithm.state[self.name].view(-1)[0] = math.nan


def short(spec: AlgorithmSpec, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    known = spec.hyperparameters_type.model_fields
    own = {"learning_starts": 10} if "learning_starts" in known else {}
    own |= {"rollout_steps": 2} if has_rollouts(spec) else {}
    own |= changes.pop("algo_kwargs", {})
    return tiny_of(spec, tmp_path, run_name="run", **{**SHORT, **changes}, algo_kwargs=own)


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/*_*"))


@each_algorithm
@pytest.mark.fast_cases
def test_a_state_that_is_not_finite_stops_the_run_at_the_next_row(
    tmp_path: Path, spec: AlgorithmSpec
) -> None:
    config = short(spec, tmp_path, checkpoint_interval=30)
    state = rl_training.algorithms.spec.get_algorithm_spec(spec.name).algorithm(2, 1).state
    name = [name for name, tensor in state.items() if tensor.is_floating_point()][-1]
    pattern = rf"^{name} is not finite at step 40, after \d+ updates; .* is step_000000030; "
    with pytest.raises(TrainingError, match=pattern):
        rl_training.train(config, callbacks=[Poison(name)])
    assert checkpoints(tmp_path / "run") == [0, 30]
    assert rl_training.resume_training(tmp_path / "run").metrics["global_step"] == 60


@pytest.mark.compiled
def test_compiled_runs_are_checked_as_well(tmp_path: Path) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path, env_id=None, compile="on")
    with pytest.raises(TrainingError, match=r"^critic_loss is not finite at step 20,"):
        rl_training.train(config, env=HugeReward)
    assert checkpoints(tmp_path / "run") == [0]


class PoisonAfterEvaluation(Poison):
    """Changes the state after it was checked for the evaluation, and before it is saved."""

    on_update_end = Callback.on_update_end

    def on_evaluation_end(self, context: TrainingContext) -> None:
        super().on_update_end(context)


@pytest.mark.parametrize("batched", [False, True])
def test_what_a_callback_changes_between_updates_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    seeds = [0, 1]
    config = short(get_algorithm_spec("sac"), tmp_path, seeds=seeds, eval_interval=20)
    poison = PoisonAfterEvaluation("critic", seed=1)
    with (
        pytest.warns(UserWarning, match="seed 1 failed"),
        pytest.raises(TrainingError, match=r"^critic is not finite at step 40,.* step_000000020;"),
    ):
        rl_training.train(config, callbacks=[poison])
    assert [checkpoints(tmp_path / f"run__seed{seed}")[-1] for seed in seeds] == [60, 20]


# For DQN the largest of NaN values is a valid action; offline runs take no actions.
@pytest.mark.parametrize("algo", ["dqn", "iql"])
def test_parameters_that_are_not_finite_do_not_outlive_the_logging_interval(
    tmp_path: Path, algo: str
) -> None:
    config = short(get_algorithm_spec(algo), tmp_path, checkpoint_interval=0)
    with pytest.raises(TrainingError, match=r"^critic_loss is not finite at step 40,"):
        rl_training.train(config, callbacks=[Poison("critic", step=25)])
    assert checkpoints(tmp_path / "run") == [0]


HUGE_REWARD_MODULE = """
import gymnasium
from probes import HugeReward

gymnasium.register("HugeReward-v0", HugeReward)
"""


def test_the_command_line_says_which_loss_when_and_what_to_resume(
    work: Path, rl: Callable[..., Any]
) -> None:
    (work / "huge_reward.py").write_text(HUGE_REWARD_MODULE)
    config = short(get_algorithm_spec("sac"), work, env_id="HugeReward-v0", checkpoint_interval=10)
    (work / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = rl("train", "-c", "config.yaml", "--import", "huge_reward")
    assert outcome.code == 1
    assert "critic_loss is not finite at step 20, after 10 updates" in outcome.err
    assert "the last good checkpoint is step_000000010" in outcome.err
    assert f"rl-training resume {work / 'run'} --import huge_reward` continues" in outcome.err
    assert "Traceback" not in outcome.err
    assert checkpoints(work / "run") == [0, 10]
    *_, last = metric_rows(work / "run")
    assert last["step"] == 20
    assert last["train/critic_loss"] is None  # the row that shows it is still written


@pytest.mark.parametrize("algo", ["td3", "redq"])
def test_a_loss_that_overflows_is_caught_by_the_next_save(tmp_path: Path, algo: str) -> None:
    spec = get_algorithm_spec(algo)
    config = short(spec, tmp_path, env_id=None, log_interval=1_000)
    with pytest.raises(TrainingError, match=r"critic_loss is not finite at step 20, .*_000000000;"):
        rl_training.train(config, env=HugeReward)
    assert checkpoints(tmp_path / "run") == [0]


@pytest.mark.parametrize("algo", ["iql", "cql"])
def test_recorded_rewards_that_overflow_a_loss_stop_an_offline_run(
    tmp_path: Path, algo: str
) -> None:
    stream = np.random.default_rng(0)
    data = {
        "observations": stream.uniform(-1, 1, (50, 2)).astype(np.float32),
        "actions": stream.uniform(-1, 1, (50, 1)).astype(np.float32),
        "rewards": np.full(50, 1e30, np.float32),
        "terminals": np.arange(50) % 10 == 9,
        "action_low": np.array([-1.0]),
        "action_high": np.array([1.0]),
    }
    config = short(get_algorithm_spec(algo), tmp_path, env_id=None, checkpoint_interval=0)
    del config["dataset"]
    with pytest.raises(TrainingError, match=r"\w+ is not finite at step 20, .*_000000000;"):
        rl_training.train(config, dataset=data)
    assert checkpoints(tmp_path / "run") == [0]


@pytest.mark.parametrize("batched", [False, True], ids=["in turn", "batched"])
def test_only_the_seed_that_diverged_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = short(get_algorithm_spec("sac"), tmp_path, seeds=[3, 1])
    with (
        pytest.warns(UserWarning, match="seed 1 failed, .*actor is not finite.*_000000020;"),
        pytest.raises(TrainingError, match="actor is not finite at step 40"),
    ):
        rl_training.train(config, callbacks=[Poison("actor", seed=1)])
    assert checkpoints(tmp_path / "run__seed1") == [0, 20]
    assert checkpoints(tmp_path / "run__seed3")[-1] == 60


class Divergence(Callback):
    """Fails if it is evaluated with parameters that are not finite."""

    def on_update_end(self, context: TrainingContext) -> None:
        if context.global_step == 25:
            context.policy.algorithm.state["actor"].fill_(math.nan)
            context.request_evaluation()


def test_a_diverged_policy_is_not_evaluated(tmp_path: Path) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path)
    with pytest.raises(TrainingError, match="actor is not finite at step 25"):
        rl_training.train(config, callbacks=[Divergence()])


def test_an_action_that_is_not_finite_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path)
    with pytest.raises(TrainingError, match=r"an action .* at step 25; .* is step_000000020;"):
        rl_training.train(config, callbacks=[Poison("actor", step=25)])


@pytest.mark.parametrize("algo", ["sac", "tqc"])
def test_a_temperature_of_zero_is_trained_and_saved(tmp_path: Path, algo: str) -> None:
    config = short(get_algorithm_spec(algo), tmp_path, algo_kwargs={"alpha": 0})
    result = rl_training.train(config)
    assert load_file(result.checkpoint_path / "learner.safetensors")["log_alpha"] == -math.inf
    assert checkpoints(result.run_dir)[-1] == 60


def test_a_tuned_temperature_that_is_not_finite_is_not_exempt(tmp_path: Path) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path)
    with pytest.raises(TrainingError, match="log_alpha is not finite at step 40"):
        rl_training.train(config, callbacks=[Poison("log_alpha")])


def test_metrics_of_an_origin_without_rows_do_not_stop_a_mixed_run(tmp_path: Path) -> None:
    config = short(
        get_algorithm_spec("rlpd"),
        tmp_path,
        regime="mixed",
        dataset={"kind": "random", "size": 200, "seed": 0},
        algo_kwargs={"offline_pretrain_updates": 20},
    )
    rows = metric_rows(rl_training.train(config).run_dir)
    assert any(row.get("train/q_online_mean", 0.0) is None for row in rows)  # in pretraining
    with pytest.raises(TrainingError, match="critic is not finite at step 40, after"):
        rl_training.train({**config, "run_name": "poisoned"}, callbacks=[Poison("critic")])


def test_a_diverged_checkpoint_of_an_earlier_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SeedRun, "check_finite", lambda run, **_: None)  # as in version 0.1.0
        rl_training.train(config, callbacks=[Poison("critic.adam_square", step=60)])
    with pytest.raises(TrainingError, match=r"adam_square is not finite in .* of step 60; resume"):
        rl_training.resume_training(tmp_path / "run", total_timesteps=80)
    good = tmp_path / "run" / "checkpoints" / "step_000000040"
    assert rl_training.resume_training(good).metrics["global_step"] == 60


def test_a_run_cannot_start_from_a_diverged_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SeedRun, "check_finite", lambda run, **_: None)  # as in version 0.1.0
        rl_training.train(config, callbacks=[Poison("critic", step=60)])
    config |= {"init_from": str(tmp_path / "run"), "run_name": "next"}
    with pytest.raises(ConfigError, match=r"init_from = .*critic\S* is not finite"):
        rl_training.train(config)
    assert not (tmp_path / "next").exists()


def test_without_a_checkpoint_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(saver, "write_checkpoint", fail)
    config = short(get_algorithm_spec("sac"), tmp_path, checkpoint_interval=0)
    with (
        pytest.warns(UserWarning, match="checkpoint not written"),
        pytest.raises(TrainingError, match=r"at step 40, .*; there is no good checkpoint;"),
    ):
        rl_training.train(config, callbacks=[Poison("actor")])


def test_a_policy_that_is_not_finite_cannot_be_exported(tmp_path: Path) -> None:
    agent = rl_training.SAC("Pendulum-v1", hidden_sizes=[8], device="cpu")
    agent.policy.algorithm.state["actor"][0] = math.inf
    with pytest.raises(UserError, match=r"actor.* is not finite"):
        agent.save(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


# The learner


def make_learner(algo: str = "sac", width: int = 1, **changes: Any) -> Learner:
    spec = get_algorithm_spec(algo)
    algorithms = [
        spec.algorithm(3, 2, {"hidden_sizes": [4], "batch_size": 4, **changes}, seed=seed)
        for seed in range(width)
    ]
    population = Population(width, tuple(range(width)))
    replay = ReplayBuffer(
        100,
        3,
        algorithms[0].actions,
        slots=population.slots,
        width=width,
        priority_exponent=priority_exponent(algorithms[0].hyperparameters),
    )
    stream = np.random.default_rng(0)
    fields = [
        stream.uniform(-1, 1, (20 * width, *s)).astype(np.float32) for s in ((3,), (2,), (), ())
    ]
    if spec.actions[0] == "discrete":
        fields[1] = stream.integers(0, 2, 20 * width)
    replay.add(Transitions(*fields, fields[0]))
    return Learner(
        algorithms,
        replay,
        Execution("cpu", False, 1, "highest"),
        population=population,
        generators=[torch.Generator().manual_seed(seed) for seed in range(width)],
        normalizers=[ObservationNormalizer(3) for _ in range(width)],
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_part_of_the_state_of_every_slot_is_checked(value: float) -> None:
    learner = make_learner(width=3)
    learner.update(0, 2)
    assert [learner.first_not_finite(seed) for seed in range(3)] == [None] * 3
    for name, tensor in learner.algorithms[1].state.items():
        if not tensor.is_floating_point():
            continue
        learner = make_learner(width=3)
        learner.algorithms[1].state[name].view(-1)[-1] = value
        assert [learner.first_not_finite(seed) for seed in range(3)] == [None, name, None]


def test_the_state_is_read_once_per_update(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, reads = make_learner(), []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *a, **k: reads.append(1) or stack(*a, **k))
    learner.first_not_finite()
    first = len(reads)
    learner.first_not_finite()
    assert len(reads) == first
    learner.update(0)
    learner.algorithms[0].state["critic"][0] = math.nan
    assert learner.first_not_finite() == "critic"


def test_statistics_of_the_observations_are_checked() -> None:
    learner = make_learner(width=2)
    learner._normalizers[1].state["square_sum"][0] = math.inf
    assert learner.first_not_finite(0) is None
    assert learner.first_not_finite(1) == "normalizer.square_sum"


@pytest.mark.parametrize("error", [HUGE, math.inf, math.nan])
def test_priorities_that_overflow_are_found(error: float) -> None:
    settings = {"prioritized": True, "priority_exponent": 1.0}
    assert make_learner("dqn", **settings).first_not_finite() is None
    learner = make_learner("dqn", **settings)
    learner.source.update_priorities(torch.arange(5), torch.full((5,), error))
    assert learner.first_not_finite() == "priorities"


@pytest.mark.parametrize("part", ["largest", "a row", "a sum"])
def test_every_priority_that_is_saved_is_checked(part: str) -> None:
    learner = make_learner("dqn", prioritized=True)
    priorities = learner.source.priorities
    parts = {
        "largest": priorities.largest,
        "a row": priorities.levels[0],
        "a sum": priorities.levels[-1],
    }
    parts[part][0] = math.nan
    assert learner.first_not_finite() == "priorities"


# What environments return


class Steps(Probe):
    """Observations and rewards count the steps; `fault` replaces the values of the fifth step."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, fault: str = "", value: Any = None, reward: float | None = None) -> None:
        self.fault, self.value, self.reward = fault, value, reward
        self.shown = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        gym.Env.reset(self, seed=seed)
        self.shown[:] = 0
        return self.shown, {}

    def step(self, action: np.ndarray) -> Any:
        self.shown += 1  # the same array in every step
        number = float(self.shown[0])
        action[...] = -7  # as an environment that clips in place
        obs, reward = self.shown, number if self.reward is None else self.reward
        if number == 5:
            obs = self.value if self.fault == "observation" else obs
            reward = self.value if self.fault == "reward" else reward
        return obs, reward, False, number == 8, {}


def collect(
    factory: Callable[[], gym.Env],
    *,
    steps: int = 20,
    num_envs: int = 1,
    backend: str = "sync",
    n_step: int = 1,
    rewards: RewardTransform | None = None,
    normalizer: ObservationNormalizer | None = None,
    seeds: int = 1,
) -> tuple[torch.Tensor, dict[int, Exception], int]:
    """Return the first seed's stored rows, the first errors, and the number of steps so far."""
    environment = VectorEnvironment(
        EnvironmentFactory(factory), num_envs, range(seeds), backend=backend
    )
    population = Population(seeds, tuple(range(seeds)))
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    buffer = ReplayBuffer(1_000, 2, 1, slots=population.slots, width=seeds)
    algorithms = [SACAlgorithm(2, 1, {"hidden_sizes": [4]}) for _ in range(seeds)]
    learner = Learner(
        algorithms,
        buffer,
        Execution("cpu", False, 1, "highest"),
        population=population,
        generators=generators,
    )
    explorer = Explorer(learner, environment.spaces, num_envs, generators)
    collector = Collector(
        environment,
        [explorer],
        [buffer],
        n_step=n_step,
        gamma=0.5,
        random_steps=steps,
        rewards=rewards,
        normalizers=[normalizer] if normalizer else (),
    )
    errors: dict[int, Exception] = {}
    number = 0
    with environment:
        while number < steps and not errors:
            errors = collector.step(number, 0.0)
            number += 1
    return buffer._rows[: buffer.rows_added()], errors, number


backends = pytest.mark.parametrize(
    ("num_envs", "backend"), [(1, "sync"), (2, "sync"), (2, "async")]
)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(
    ("fault", "value"),
    [
        ("observation", np.array([np.nan, 0], np.float32)),
        ("observation", np.array([0, np.inf], np.float32)),
        ("observation", np.array([0, 1e300])),
        ("observation", np.zeros(3, np.float32)),
        ("observation", np.float32(0)),
        ("observation", None),
        ("reward", math.nan),
        ("reward", np.float32(-np.inf)),
        ("reward", 1e300),
        ("reward", np.zeros(2)),
        ("reward", None),
    ],
)
def test_unusable_values_are_caught_in_their_step_and_not_stored(
    fault: str, value: Any, n_step: int
) -> None:
    rows, errors, steps = collect(functools.partial(Steps, fault, value), n_step=n_step)
    assert isinstance(errors[0], EnvironmentRuntimeError)
    assert steps == 5
    assert len(rows) == 4 - (n_step - 1)
    assert rows.isfinite().all()


@backends
def test_unusable_values_are_caught_in_every_backend(num_envs: int, backend: str) -> None:
    fault = functools.partial(Steps, "observation", np.array([np.nan, 0], np.float32))
    rows, errors, steps = collect(fault, num_envs=num_envs, backend=backend)
    assert "observation is not finite" in str(errors[0])
    assert (steps, len(rows)) == (5, 4 * num_envs)
    assert rows.isfinite().all()


@backends
@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_are_copies_of_arrays_that_the_environment_reuses(
    num_envs: int, backend: str, n_step: int
) -> None:
    rows, errors, _ = collect(Steps, num_envs=num_envs, backend=backend, n_step=n_step)
    assert not errors
    starts = set()
    for obs, _, action, _, _, next_obs, _ in rows.tolist():
        starts.add(obs)
        assert next_obs == min(obs + n_step, 8)  # the final observation, not the next episode's
        assert -1 <= action <= 1
    assert starts == set(range(8))


@pytest.mark.parametrize(
    ("n_step", "rewards"),
    [(1, RewardTransform(scale=10.0)), (3, RewardTransform(scale=10.0)), (3, None)],
)
def test_rewards_that_overflow_when_scaled_or_summed_are_not_stored(
    n_step: int, rewards: RewardTransform | None
) -> None:
    environment = functools.partial(Steps, reward=HUGE)
    rows, errors, steps = collect(environment, n_step=n_step, rewards=rewards)
    assert "n-step summation, is not finite in float32: 3" in str(errors[0])
    assert steps == (3 if rewards is None else 1)
    assert len(rows) == 0


def test_a_seed_whose_rewards_overflow_does_not_stop_the_others() -> None:
    rewards = iter([1.0, HUGE])  # of the environments of the two seeds
    rows, errors, steps = collect(lambda: Steps(reward=next(rewards)), n_step=3, seeds=2)
    assert list(errors) == [1]
    assert (steps, len(rows)) == (3, 1)
    assert rows.isfinite().all()


@pytest.mark.parametrize("size", [1e30, HUGE])
def test_statistics_of_huge_observations_stay_finite(size: float) -> None:
    class HugeObservations(Steps):
        def step(self, action: np.ndarray) -> Any:
            obs, *rest = super().step(action)
            return np.array([size, -size], np.float32) * (-1) ** int(obs[0]), *rest

    normalizer = ObservationNormalizer(2)
    rows, errors, _ = collect(HugeObservations, normalizer=normalizer)
    assert not errors
    assert all(part.isfinite().all() for part in normalizer.state.values())
    assert normalizer.normalize(rows[:, :2]).isfinite().all()


class LargeObservations(Steps):
    def step(self, action: np.ndarray) -> Any:
        obs, *rest = super().step(action)
        return obs * np.float32(1e25), *rest


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
def test_statistics_of_a_wrapper_that_overflow_are_not_saved(tmp_path: Path) -> None:
    wrapped = lambda: gym.wrappers.NormalizeObservation(LargeObservations())  # noqa: E731
    config = short(get_algorithm_spec("sac"), tmp_path, env_id=None)
    with pytest.raises(TrainingError, match="var of NormalizeObservation is not finite at step 20"):
        rl_training.train(config, env=wrapped)
    assert checkpoints(tmp_path / "run") == [0]


def test_returns_of_huge_rewards_are_saved_and_resumed(tmp_path: Path) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path, env_id=None, total_timesteps=20)
    config |= {"eval_interval": 10, "eval_episodes": 3}
    config["algo_kwargs"]["learning_starts"] = 100
    environment = functools.partial(Steps, reward=HUGE)
    with pytest.warns(UserWarning, match="nothing will be learned"):
        result = rl_training.train(config, env=environment)
    assert result.metrics["eval_return_mean"] == pytest.approx(8 * HUGE)
    resumed = rl_training.resume_training(result.run_dir, total_timesteps=30, env=environment)
    assert resumed.metrics["rollout/ep_rew_mean"] == pytest.approx(8 * HUGE)


# What callbacks store


class Remembers(Callback):
    def __init__(self, value: Any) -> None:
        self.value, self.restored = value, None

    def state_dict(self) -> dict[str, Any]:
        return {"values": (self.value,), "again": {"values": [2.5, math.nan]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state


def test_states_of_callbacks_may_have_any_number(tmp_path: Path) -> None:
    values = [math.inf, -math.inf, math.nan, np.float32(2.5), np.int64(3), True, None, "text"]
    config = short(get_algorithm_spec("sac"), tmp_path, total_timesteps=10)
    config["algo_kwargs"]["learning_starts"] = 5
    rl_training.train(config, callbacks=[Remembers(values)])
    callback = Remembers(values)
    rl_training.resume_training(tmp_path / "run", total_timesteps=11, callbacks=[callback])
    (restored,) = callback.restored["values"]
    assert restored == [math.inf, -math.inf, pytest.approx(math.nan, nan_ok=True), *values[3:]]
    assert callback.restored["again"]["values"] == pytest.approx([2.5, math.nan], nan_ok=True)


def test_a_state_of_a_callback_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    config = short(get_algorithm_spec("sac"), tmp_path)
    with pytest.raises(UserError, match=r"callbacks: the state_dict of Remembers has array\("):
        rl_training.train(config, callbacks=[Remembers(np.zeros(3))])


# Recorded data


@pytest.mark.parametrize(
    ("section", "n_step", "message"),
    [
        ({"reward_scale": 1e30}, 1, "rewards overflow float32 when they are scaled by 1e.30;"),
        ({}, 3, "rewards overflow float32 when .* summed over n_step"),
        ({"reward_normalization": "return_range"}, 1, "too little for .*return_range"),
    ],
)
def test_recorded_rewards_that_overflow_when_loaded_are_refused(
    tmp_path: Path, section: dict[str, Any], n_step: int, message: str
) -> None:
    rewards = np.full(50, HUGE, np.float32)
    if "reward_normalization" in section:
        rewards = np.zeros(50, np.float32)
        rewards[0] = 1e-44
        section = {**section, "reward_scale": 1e300}
    path = tmp_path / "data.npz"
    np.savez(
        path,
        observations=np.zeros((50, 3), np.float32),
        actions=np.zeros((50, 1), np.float32),
        rewards=rewards,
        terminals=np.arange(50) % 10 == 9,
    )
    config = short(get_algorithm_spec("td3_bc"), tmp_path, algo_kwargs={"n_step": n_step})
    config["dataset"] = {"kind": "npz", "path": str(path), **section}
    with pytest.raises(DataError, match=message):
        rl_training.train(config)
    assert not (tmp_path / "run").exists()
