"""Recurrent policies: their cells, sequences, advantages, acting, prediction and runs."""

from __future__ import annotations

import json
import math
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import StopAt, metric_rows, tiny_of
from observation_zoo import Zoo
from safetensors.torch import load_file
from test_interrupts import interrupting
from test_rollouts import FirstRatios, Mortal, assert_same
from typer.testing import CliRunner

import rl_training
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.format import ROLLOUT
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.cli import app
from rl_training.data.n_step import Transitions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollouts.minibatches import TARGETS, Rollouts
from rl_training.data.rollouts.steps import LOST
from rl_training.envs import VectorEnvironment, environment_factory
from rl_training.envs.hiding import KeepComponents
from rl_training.errors import ConfigError, TrainingInterrupted, UserError
from rl_training.execution import execution
from rl_training.execution.policy import Policy
from rl_training.execution.programs import MEMORY, DirectProgram
from rl_training.execution.random_streams import Stream, stream_seed
from rl_training.models.recurrent import RecurrentNetwork
from rl_training.runtime.workflows import resume_together
from rl_training.types import Batch, SpaceInfo, TrainResult

SPEC = get_algorithm_spec("ppo")
KINDS = pytest.mark.parametrize("kind", ["gru", "lstm"])


# Cells


def cell_and_network(kind: str) -> tuple[Any, RecurrentNetwork]:
    """Return PyTorch's cell, and the same one as a network."""
    torch.manual_seed(0)
    cell = (torch.nn.GRUCell if kind == "gru" else torch.nn.LSTMCell)(3, 5)
    network = RecurrentNetwork(kind, 3, 5)
    named = {
        "input_weight": cell.weight_ih.detach().T,
        "input_bias": cell.bias_ih.detach(),
        "hidden_weight": cell.weight_hh.detach().T,
        "hidden_bias": cell.bias_hh.detach(),
    }
    network.vector.data = network.flatten(named)
    return cell, network


@KINDS
def test_cells_are_those_of_pytorch(kind: str) -> None:
    cell, network = cell_and_network(kind)
    inputs, memory = torch.randn(4, 6, 3), torch.randn(6, network.memory_size)
    expected = memory if kind == "gru" else (memory[:, :5], memory[:, 5:])
    outputs, own = [], memory
    for step in inputs:
        expected, own = cell(step, expected), network.step(step, own)
        torch.testing.assert_close(own, expected if kind == "gru" else torch.cat(expected, -1))
        outputs.append(network.outputs(own))
    torch.testing.assert_close(
        network.unroll(inputs, memory, torch.ones(4, 6)), torch.stack(outputs)
    )
    torch.testing.assert_close(
        network(torch.cat([inputs[0], memory], -1)), network.step(inputs[0], memory)
    )


@KINDS
def test_a_recurrent_layer_starts_orthogonal_without_biases(kind: str) -> None:
    model = PPO(3, 2, recurrent=kind, recurrent_size=4).model
    assert model.memory is not None
    layers = model.memory.unflatten(model.memory.vector.data)
    for name in ("input_bias", "hidden_bias"):
        assert not layers[name].any()
    for name in ("input_weight", "hidden_weight"):
        weight = layers[name]
        assert torch.allclose(weight @ weight.T, torch.eye(len(weight)), atol=1e-5)


# Sequences


def make(kind: str = "gru", **settings: Any) -> PPO:
    """Return a learner whose policy has changed since the recurrent layer was drawn."""
    chosen = {"rollout_steps": 6, "sequence_length": 3, "hidden_sizes": [8], "recurrent_size": 4}
    ppo = PPO(3, 1, {**chosen, "recurrent": kind, **settings}, seed=1)
    stream = torch.Generator().manual_seed(2)
    for name in ppo.networks():
        ppo.state[name] += 0.3 * torch.randn(ppo.state[name].shape, generator=stream)
    return ppo


def rows_of_a_rollout(ppo: PPO, steps: int, envs: int) -> Batch:
    """Return rows with the memories that acting gives, where episodes end or are lost."""
    stream = torch.Generator().manual_seed(0)
    memory, rows = torch.zeros(envs, ppo.memory_size), []
    kinds = torch.tensor([0.0, 1.0, LOST])
    for _ in range(steps):
        obs, next_obs = (torch.randn(envs, 3, generator=stream) for _ in range(2))
        drawn = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), envs, True, generator=stream)
        ended, terminated = kinds[drawn], torch.rand(envs, generator=stream) < 0.5
        discount = 0.99 * (1 - ((ended == 1) & terminated).float())
        action, reward = (torch.randn(envs, 1, generator=stream) for _ in range(2))
        rows.append(
            Batch(obs, action, reward[:, 0], discount, next_obs, ended=ended, memory=memory)
        )
        _, memory = ppo.remember(ppo.state, obs, memory)
        memory = torch.where(ended[:, None] > 0, 0.0, memory)
    columns = zip(*rows, strict=True)
    return Batch(*(None if part[0] is None else torch.cat(part) for part in columns))


@KINDS
@torch.no_grad()
def test_advantages_use_the_memory_of_the_episode_that_ended(kind: str) -> None:
    """A truncated episode is valued at its last observation, with what was remembered of it."""
    ppo, envs = make(kind, gae_lambda=0.8), 2
    rows = rows_of_a_rollout(ppo, 6, envs)
    targets, _ = ppo.begin_rollout(ppo.state, rows)

    def value(obs: torch.Tensor, memory: torch.Tensor) -> tuple[float, torch.Tensor]:
        inputs, after = ppo.remember(ppo.state, obs[None], memory)
        return float(ppo.model.state_values(inputs, critic=ppo.state["critic"])), after

    assert rows.ended is not None
    assert (rows.ended == 1).any()
    assert (rows.ended == LOST).any()
    assert (rows.ended[rows.discount > 0] == 1).any()
    expected = np.zeros(len(rows.obs))
    for env in range(envs):
        memory, deltas = torch.zeros(1, ppo.memory_size), []
        for row in range(env, len(rows.obs), envs):
            own, memory = value(rows.obs[row], memory)
            following, _ = value(rows.next_obs[row], memory)
            delta = float(rows.reward[row]) + float(rows.discount[row]) * following - own
            deltas.append(0.0 if rows.ended[row] == LOST else delta)
            if rows.ended[row]:
                memory = torch.zeros_like(memory)
        later = 0.0
        for step in reversed(range(6)):
            row = step * envs + env
            later = deltas[step] + (0.99 * 0.8 * later if rows.ended[row] == 0 else 0.0)
            expected[row] = later
    np.testing.assert_allclose(targets["advantages"].numpy(), expected, atol=1e-5)


@KINDS
def test_a_loss_rebuilds_memories_and_forgets_at_the_end_of_episodes(kind: str) -> None:
    ppo, steps, sequences = make(kind), 3, 2
    rows = rows_of_a_rollout(ppo, steps, sequences)
    rows = rows.with_fields(ended=torch.tensor([0.0, 1.0, 0.0, 0.0, LOST, 0.0]))
    memory = torch.randn(sequences, ppo.memory_size).tanh()
    fields = {name: torch.randn(6) for name in TARGETS}
    batch = rows.with_fields(memory=memory, **fields)
    loss, metrics = ppo.joint_loss(ppo.state, batch, {})

    features = torch.zeros(6, 4)
    for sequence in range(sequences):
        own = memory[sequence : sequence + 1]
        for step in range(steps):
            row = step * sequences + sequence
            inputs, own = ppo.remember(ppo.state, rows.obs[row : row + 1], own)
            features[row] = inputs
            if batch.ended[row]:
                own = torch.zeros_like(own)
    log_probs, entropy, values = ppo.model.evaluate(features, batch.action)
    ratio = (log_probs - batch.log_probs).exp()
    given = batch.advantages
    given = (given - given.mean()) / (given.std() + 1e-8)
    given = torch.where(batch.ended > 1, 0.0, given)
    actor = -torch.minimum(ratio * given, ratio.clamp(0.8, 1.2) * given).mean()
    critic = 0.5 * (values - batch.returns).square().mean()
    torch.testing.assert_close(metrics["actor_loss"], actor)
    torch.testing.assert_close(metrics["critic_loss"], critic)
    torch.testing.assert_close(loss, actor + 0.5 * critic - 0.0 * entropy.mean())


@pytest.mark.parametrize(("seeds", "width"), [(1, 1), (2, 3)])
def test_minibatches_are_sequences_in_a_new_order(seeds: int, width: int) -> None:
    steps, envs, length = 6, 2, 3
    storage = ReplayBuffer(
        steps * envs, 2, 1, ended=True, memory=2, num_envs=envs, slots=range(seeds), width=width
    )
    source = Rollouts(storage, 6, 2, sequence_steps=length, num_envs=envs)
    for step in range(steps):
        names = np.arange(seeds * envs, dtype=np.float32) + 100 * step
        both, zeros = np.stack([names, -names], axis=1), np.zeros_like(names)
        storage.add(
            Transitions(both, names[:, None], names, zeros, both, ended=zeros, memory=both + 0.5)
        )
    source.flush()
    rows = source.all_rows()
    source.keep(rows, dict.fromkeys(TARGETS, rows.reward))
    lead, orders = () if width == 1 else (width,), []
    for key in (5, 6):
        source.shuffle(torch.full((*lead, 1), key))
        seen = []
        for minibatch in range(source.num_minibatches):
            source.seek(minibatch)
            batch = source.draw()
            assert batch.memory is not None
            names = batch.reward.view(*lead, length, 2)
            assert torch.equal(
                names[..., 1:, :] - names[..., :-1, :], torch.full_like(names[..., 1:, :], 100)
            )
            assert (names[..., 0, :] % 300 < 100).all()
            assert torch.equal(batch.memory[..., 0], names[..., 0, :] + 0.5)
            assert torch.equal(batch.memory[..., 1], -names[..., 0, :] + 0.5)
            seen.append(batch.reward)
        drawn = torch.cat(seen, dim=-1)
        orders.append(drawn)
        assert torch.equal(drawn.sort(-1).values, rows.reward.sort(-1).values)
    assert not torch.equal(*orders)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_steps": 20}, r"sequence_length = 16: must divide rollout_steps = 20; use .* 10"),
        ({"batch_size": 8}, r"batch_size = 8: must be at least sequence_length = 16"),
        (
            {"networks": {"actor_obs": ["a"]}},
            r"recurrent = 'gru': networks.actor_obs and networks.critic_obs must be equal",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO(3, 1, {"recurrent": "gru", **settings})
    PPO(3, 1, {key: value for key, value in settings.items() if key != "networks"})


# Runs


def config_of(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    own = {
        "recurrent": "gru",
        "recurrent_size": 8,
        "sequence_length": 4,
        **changes.pop("algo_kwargs", {}),
    }
    return tiny_of(SPEC, tmp_path, **changes, algo_kwargs=own)


OPTIONS: dict[str, dict[str, Any]] = {
    "gru": {"env_id": "CartPole-v1", "num_envs": 2},
    "lstm": {
        "normalize_observations": True,
        "num_envs": 3,
        "algo_kwargs": {
            "recurrent": "lstm",
            "batch_size": 9,  # rounded down to two sequences
            "normalize_rewards": True,
            "target_kl": 1e-4,
        },
    },
}


def train(config: dict[str, Any], **options: Any) -> TrainResult:
    result = rl_training.train(config, **options)
    assert isinstance(result, TrainResult)
    return result


@KINDS
def test_sequences_are_rebuilt_as_they_were_acted(tmp_path: Path, kind: str) -> None:
    """One update per rollout, whose policy is the one that acted; episodes end within sequences."""
    once = {"num_epochs": 1, "batch_size": 64, "learning_rate": 0.01, "rollout_steps": 32}
    changes = {"env_id": "CartPole-v1", "num_envs": 2, "total_timesteps": 320}
    config = config_of(tmp_path, **changes, algo_kwargs={**once, "recurrent": kind})
    ratios = FirstRatios()
    result = train({**config, "normalize_observations": True}, callbacks=[ratios])
    assert len(ratios.seen) == 5
    assert max(ratios.seen) < 1e-6
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    ended, memory = rows[:, 11], rows[:, 12:]
    assert memory.shape[1] == (8 if kind == "gru" else 16)
    begins = torch.cat([torch.zeros(2, dtype=torch.bool), ended[:-2] > 0])
    assert begins.any()
    assert not memory[begins].any()
    assert memory[2:][~begins[2:]].any(-1).all()


@pytest.mark.parametrize(("options", "step"), [("gru", 5), ("lstm", 59)])
def test_a_run_that_stops_within_a_sequence_continues_with_the_same_bits(
    tmp_path: Path, options: str, step: int
) -> None:
    config = config_of(tmp_path, **OPTIONS[options])
    uninterrupted, stopped = train(config), train(config, callbacks=[StopAt(step)])
    state = json.loads((stopped.checkpoint_path / "state.json").read_text())
    assert MEMORY in json.dumps(state["exploration"])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert_same(uninterrupted, resumed)


def test_a_block_of_updates_is_left_and_completed_with_the_same_bits(tmp_path: Path) -> None:
    config = config_of(tmp_path, **OPTIONS["gru"])
    uninterrupted = train(config)
    with (
        interrupting(DirectProgram, "__call__", 7, signal.SIGTERM),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        rl_training.train(config)
    saved = load_file(stopped.value.result.checkpoint_path / ROLLOUT)
    assert len(saved["order"]) == len(saved["advantages"]) // 4
    assert_same(uninterrupted, rl_training.resume_training(stopped.value.result.run_dir))


class Restarting(gym.Wrapper[Any, Any, Any, Any]):
    """Cannot be captured, so that a resumed run begins a new episode."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.unwrapped.cannot_be_saved = open(__file__)  # noqa: SIM115


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_remembered_of_an_episode_that_restarts(tmp_path: Path) -> None:
    config = {**config_of(tmp_path), "env_id": None, "total_timesteps": 48}
    stopped = train(config, env=Restarting, callbacks=[StopAt(13)])
    resumed = rl_training.resume_training(
        stopped.run_dir, env=Restarting, callbacks=[StopAt(stopped.metrics["global_step"] + 2)]
    )
    rows = load_file(resumed.checkpoint_path / "replay-00000.safetensors")["rows"]
    first = int(stopped.metrics["global_step"]) % 8
    assert rows[first - 1, 11] == 1
    assert not rows[first, 12:].any()
    assert rows[first + 1, 12:].any()


def test_nothing_is_remembered_of_a_lost_episode(tmp_path: Path) -> None:
    changes = {"vectorization": "async", "env_restarts": 1, "num_envs": 2, "total_timesteps": 52}
    config = config_of(
        tmp_path / "runs",
        **changes,
        algo_kwargs={"rollout_steps": 26, "sequence_length": 13, "batch_size": 26},
    )
    config |= {"env_id": None, "env_kwargs": {"marker": str(tmp_path / "died")}}
    with pytest.warns(UserWarning, match="new episode"):
        result = train(config, env=Mortal)
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    ended, memory = rows[:, -9], rows[:, -8:]
    assert LOST in ended
    for environment in range(2):
        own = slice(environment, None, 2)
        begins = ended[own][:-1] > 0
        assert not memory[own][1:][begins].any()
        assert memory[own][1:][~begins].any(-1).all()


@pytest.mark.thorough
def test_a_population_agrees_with_single_seeds_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, seeds=[4, 2], **OPTIONS["lstm"])
    short = {**config, "total_timesteps": 72}
    alone = rl_training.train(short)
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    together = rl_training.train(short)
    for one, other in zip(alone, together, strict=True):
        first, second = (load_file(r.checkpoint_path / "model.safetensors") for r in (one, other))
        for name, tensor in first.items():
            torch.testing.assert_close(tensor, second[name], rtol=1e-4, atol=1e-4)
    complete = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(77)])
    resumed = resume_together([result.run_dir for result in stopped])
    for one, other in zip(complete, resumed, strict=True):
        assert_same(one, other)


def test_sequences_of_tensor_worlds_are_rebuilt_as_they_were_acted(tmp_path: Path) -> None:
    own = {"rollout_steps": 32, "batch_size": 256, "num_epochs": 1, "learning_rate": 0.01}
    task = {"env_id": "tensors/CartPole-v1", "num_envs": 4, "total_timesteps": 640}
    ratios = FirstRatios()
    result = train(config_of(tmp_path, **task, algo_kwargs=own), callbacks=[ratios])
    assert len(ratios.seen) == 5
    assert max(ratios.seen) < 1e-6
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    assert (rows[:, 11] > 0).any()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.thorough
def test_worlds_of_tensors_resume_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    own = {"rollout_steps": 16, "batch_size": 32, "recurrent": "lstm"}
    task = {"env_id": "tensors/CartPole-v1", "num_envs": 4, "total_timesteps": 320}
    config = config_of(tmp_path, **task, seeds=[3, 4], algo_kwargs=own)
    complete = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(100)])
    resumed = resume_together([each.run_dir for each in stopped])
    for one, other in zip(complete, resumed, strict=True):
        assert_same(one, other)


@pytest.mark.compiled
@pytest.mark.parametrize(("kind", "batched"), [("lstm", False), ("gru", True)])
def test_a_compiled_run_agrees_with_an_eager_one_and_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    changes = {"seeds": [4, 2], "num_envs": 2, "algo_kwargs": {"recurrent": kind}}
    eager = rl_training.train(config_of(tmp_path, **changes))
    config = config_of(tmp_path, compile="on", **changes)
    compiled = rl_training.train(config)
    for one, other in zip(eager, compiled, strict=True):
        first, second = (load_file(r.checkpoint_path / "model.safetensors") for r in (one, other))
        for name, tensor in first.items():
            torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-3)
    stopped = rl_training.train(config, callbacks=[StopAt(30)])
    resumed = resume_together([result.run_dir for result in stopped])
    for one, other in zip(compiled, resumed, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    "networks", [{}, pytest.param({"shared_encoder": True}, marks=pytest.mark.thorough)]
)
def test_dictionaries_are_encoded_before_the_recurrent_layer(
    tmp_path: Path, networks: dict[str, Any]
) -> None:
    env = partial(Zoo, "dictionary", gym.spaces.MultiDiscrete([3, 2]))
    settings = {"recurrent": "lstm", "networks": networks or None}
    config = {**config_of(tmp_path, algo_kwargs=settings), "env_id": None, "total_timesteps": 60}
    stopped = train(config, env=env, callbacks=[StopAt(43)])
    resumed = rl_training.resume_training(stopped.run_dir, env=env)
    assert_same(train(config, env=env), resumed)
    policy = load_policy(find_checkpoint(resumed.run_dir))
    names = {name.partition(".")[0] for name in policy.tensors()}
    assert names == {"memory", "actor", "critic"}
    assert any(name.startswith("memory.encoder.") for name in policy.tensors())
    path = rl_training.export(resumed.run_dir, tmp_path / "policy.pt2", format="torch")
    assert path.exists()


# Prediction


def policy_of(kind: str = "gru") -> Policy:
    algorithm = make(kind)
    spaces = SpaceInfo(3, 1, action_low=np.float32([-2]), action_high=np.float32([2]))
    return Policy(algorithm, spaces, algorithm_name="ppo")


@KINDS
def test_a_state_is_carried_from_step_to_step(kind: str) -> None:
    policy = policy_of(kind)
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    action, state = policy.predict(obs[0], episode_start=True)
    assert (action.shape, state.shape) == ((1,), (policy.memory_size,))
    player = policy.player(1)
    assert policy.act_in_environment(obs[:1], policy.initial_state(1))[0][0] == action
    player.act(obs[:1])
    np.testing.assert_array_equal(player.memory[0], state)
    second, later = policy.predict(obs[1], state=state)
    first, _ = policy.predict(obs[1], episode_start=True)
    assert second != first
    np.testing.assert_array_equal(policy.predict(obs[1], state=state)[1], later)  # not changed
    # Of a batch, one episode begins and another one goes on.
    both, states = policy.predict(
        obs[[1, 1]], state=np.stack([state, state]), episode_start=np.array([True, False])
    )
    np.testing.assert_allclose(both[:, 0], [first[0], second[0]], atol=1e-6)
    assert states.shape == (2, policy.memory_size)
    # As in Stable-Baselines3, the first call may have no state.
    given: Any = None
    for step in range(2):
        found, given = policy.predict(obs[[step]], state=given, episode_start=np.array([step == 0]))
    np.testing.assert_allclose(found[0], second, atol=1e-6)


def test_what_is_no_state_is_refused() -> None:
    policy, obs = policy_of(), np.zeros(3, np.float32)
    with pytest.raises(UserError, match="recurrent; begin an episode with"):
        policy.predict(obs)
    with pytest.raises(UserError, match="recurrent; begin an episode with"):
        policy.predict(obs, episode_start=False)
    for wrong in (np.zeros(3), np.full(4, np.nan), "state", np.zeros((1, 4))):
        with pytest.raises(UserError, match=r"^state"):
            policy.predict(obs, state=wrong)  # type: ignore[call-overload]
    for starts in ([True, False], "yes", 1):
        with pytest.raises(UserError, match=r"^episode_start"):
            policy.predict(obs, state=policy.initial_state(), episode_start=starts)  # type: ignore[call-overload]


def test_the_state_of_other_policies_has_no_numbers() -> None:
    spaces = SpaceInfo(3, 1, action_low=np.float32([-2]), action_high=np.float32([2]))
    policy = Policy(PPO(3, 1, {"hidden_sizes": [4]}), spaces, algorithm_name="ppo")
    obs = np.ones((2, 3), np.float32)
    actions, state = policy.predict(obs, episode_start=True)
    assert state.shape == (2, 0)
    again, _ = policy.predict(obs, state=state)
    np.testing.assert_array_equal(again, policy.predict(obs))
    np.testing.assert_array_equal(actions, again)


def test_players_remember_each_episode_alone() -> None:
    """Evaluations play several episodes at a time, of which each ends when it ends."""
    policy, number = policy_of("lstm"), 3
    player, states = policy.player(number), [None] * number
    random = np.random.default_rng(0)
    for _ in range(12):
        obs = random.normal(size=(number, 3)).astype(np.float32)
        expected = []
        for index in range(number):
            state: Any = states[index]
            action, states[index] = policy.predict(
                obs[index], state=state, episode_start=state is None
            )
            expected.append(action)
        found = policy._in_environment_units(player.act(obs))
        np.testing.assert_allclose(found, np.stack(expected), atol=1e-6)
        ended = random.random(number) < 0.3
        player.end(ended)
        states = [None if over else state for over, state in zip(ended, states, strict=True)]


def test_an_evaluation_is_what_predictions_reach(tmp_path: Path) -> None:
    """Its first episode has the same return as one that is played by hand."""
    run = train(config_of(tmp_path, **OPTIONS["lstm"])).run_dir
    policy = load_policy(find_checkpoint(run))
    evaluated = rl_training.evaluate_checkpoint(run, num_episodes=1, seed=7)
    factory = environment_factory("Pendulum-v1", {}, None)
    seed, total = stream_seed(7, Stream.REPORT_ENVIRONMENT), 0.0
    with VectorEnvironment(factory, 1, seed, seed_every_reset=True) as environment:
        obs, state, episodes = environment.reset(), None, []
        while not episodes:
            action, state = policy.predict(obs, state=state, episode_start=state is None)
            environment.start(action / 2)  # from torques to [-1, 1]
            step = environment.finish()
            obs, episodes = step.obs, step.episodes
            total += float(step.reward[0])
    assert total == pytest.approx(evaluated["eval_return_mean"], rel=1e-5)


def test_lines_are_the_steps_of_an_episode(tmp_path: Path) -> None:
    run = train(config_of(tmp_path, **OPTIONS["lstm"])).run_dir
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    expected, state = [], None
    for row in obs:
        action, state = rl_training.predict_checkpoint(
            run, row, state=state, episode_start=state is None
        )
        expected.append(action.tolist())
    lines = "\n".join(json.dumps(row.tolist()) for row in obs)
    found = CliRunner().invoke(app, ["predict", str(run)], input=lines)
    assert [json.loads(line) for line in found.stdout.splitlines()] == expected
    alone = CliRunner().invoke(app, ["predict", str(run), "--obs", json.dumps(obs[0].tolist())])
    assert json.loads(alone.stdout) == expected[0]
    assert len({json.dumps(each) for each in expected}) == 5
    mixed = f"{json.dumps(obs[0].tolist())}\n{json.dumps(obs.tolist())}"
    refused = CliRunner().invoke(app, ["predict", str(run)], input=mixed)
    assert "line 2: state has shape (16,), but these observations need (5, 16)" in str(
        refused.exception
    )


def test_lines_of_other_policies_do_not_depend_on_each_other(tmp_path: Path) -> None:
    run = train(config_of(tmp_path, algo_kwargs={"recurrent": "none"})).run_dir
    given = [[0.1, 0.2, 0.3], [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], [0.1, 0.2, 0.3]]
    found = CliRunner().invoke(app, ["predict", str(run)], input="\n".join(map(json.dumps, given)))
    first, both, last = (json.loads(line) for line in found.stdout.splitlines())
    assert first == last
    np.testing.assert_allclose(both[0], first, atol=1e-6)


@KINDS
def test_a_module_agrees_with_prediction(kind: str) -> None:
    policy, obs = policy_of(kind), np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    module, states = policy.module, torch.zeros(2, policy.memory_size)
    state = policy.initial_state(2)
    for _ in range(3):
        actions, state = policy.predict(obs, state=state)
        found, states = module(torch.tensor(obs), states)
        np.testing.assert_allclose(found.detach().numpy(), actions, atol=1e-6)
        np.testing.assert_allclose(states.detach().numpy(), state, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "stochastic"), [("policy.onnx", False), ("policy.pt2", False), ("policy.pt2", True)]
)
@pytest.mark.fast_cases("policy.pt2-True")
def test_an_exported_policy_takes_and_returns_the_state(
    tmp_path: Path, file: str, stochastic: bool
) -> None:
    run, name = train(config_of(tmp_path, **OPTIONS["lstm"])).run_dir, "onnx"
    if file.endswith(".onnx"):
        onnxruntime = pytest.importorskip("onnxruntime")
    else:
        name = "torch"
    path = rl_training.export(run, tmp_path / file, format=name, stochastic=stochastic)
    policy = load_policy(find_checkpoint(run))
    obs = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    given = {"obs": obs, "state": policy.initial_state(2)}
    if stochastic:
        given["noise"] = np.zeros((2, 1), np.float32)
    state = policy.initial_state(2)
    for _ in range(3):
        actions, state = policy.predict(obs, state=state)
        if name == "onnx":
            found, after = onnxruntime.InferenceSession(path).run(None, given)
        else:
            program = torch.export.load(path).module()
            found, after = (
                each.numpy(force=True) for each in program(*map(torch.tensor, given.values()))
            )
        np.testing.assert_allclose(found, actions, atol=1e-5)
        np.testing.assert_allclose(after, state, atol=1e-5)
        given["state"] = after


def test_recorded_data_cannot_evaluate_a_recurrent_policy(tmp_path: Path) -> None:
    run = train(config_of(tmp_path)).run_dir
    with pytest.raises(UserError, match="its policy is recurrent"):
        rl_training.evaluate_offline(run, {"kind": "random", "size": 50, "seed": 0})


def test_the_health_of_a_recurrent_policy_is_that_of_its_states(tmp_path: Path) -> None:
    found = train(config_of(tmp_path, eval_interval=60, **OPTIONS["gru"]))
    last = metric_rows(found.run_dir)[-1]
    assert 0 < last["health/entropy"] <= math.log(2) + 0.1
    assert {"health/dead_units_actor", "health/weight_norm_memory"} <= last.keys()


# Hidden components


def test_hidden_components_are_left_out() -> None:
    env = KeepComponents(gym.make("CartPole-v1"), [2, 0])
    obs, _ = env.reset(seed=0)
    full, _ = gym.make("CartPole-v1").reset(seed=0)
    np.testing.assert_array_equal(obs, full[[2, 0]])
    assert env.observation_space.contains(obs)


@pytest.mark.parametrize("components", [[], [4], [0, 0], [-1], [True]])
def test_components_that_do_not_exist_are_refused(components: list[int]) -> None:
    with pytest.raises(ValueError, match="components = "):
        KeepComponents(gym.make("CartPole-v1"), components)
