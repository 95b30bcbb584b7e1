"""The returns of episodes in batches: of recorded data, and of what a run collects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import StopAt, StopAtPosition, hashes, metric_rows, tiny_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_offline_data import GAMMA, episode_lists, load, recorded, rows

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.data import (
    DatasetPart,
    Mixture,
    NStepAccumulator,
    ReplayBuffer,
    RewardOptions,
    Transitions,
    array_recording,
    load_dataset,
)
from rl_training.data.episodes import episode_values
from rl_training.data.hindsight import returns as returns_module
from rl_training.data.hindsight.returns import EpisodesWithReturns
from rl_training.data.sections import read_sections
from rl_training.data.storage.stacks import FrameLayout
from rl_training.datasets.opening import build_dataset
from rl_training.errors import ConfigError, DataError
from rl_training.execution import execution
from rl_training.observations import ObservationLeaf, ObservationSpec
from rl_training.runtime.workflows import resume_together
from rl_training.types import ReturnAfterTruncation, SpaceInfo, TrainResult

SPACES = SpaceInfo(1, 1, action_low=np.full(1, -2.0), action_high=np.full(1, 2.0))
MODES: tuple[ReturnAfterTruncation, ...] = ("last_reward", "zero")
each_mode = pytest.mark.parametrize("mode", MODES)


def return_by_hand(
    rewards: list[float], terminated: bool, gamma: float, mode: ReturnAfterTruncation
) -> list[float]:
    """Return the returns of one episode, from its last step to its first."""
    after = 0.0
    if not terminated and mode == "last_reward":
        after = rewards[-1] / (1 - gamma)
    found: list[float] = []
    for reward in reversed(rewards):
        after = reward + gamma * after
        found.insert(0, after)
    return found


# Recorded data


def test_returns_at_the_end_of_an_episode_are_those_of_the_documentation() -> None:
    rewards, ends = np.array([1.0, 2.0, 3.0], np.float32), np.array([3])
    # Nothing follows a termination; 3 forever, discounted, is 6.
    cases = [("zero", True, 0), ("zero", False, 0), ("last_reward", False, 0)]
    for mode, truncated, after in [*cases, ("last_reward", True, 6)]:
        found = episode_values(rewards, ends, np.array([truncated]), 0.5, mode)  # type: ignore[arg-type]
        assert found.tolist() == [1 + 1 + 0.75 + after / 8, 2 + 1.5 + after / 4, 3 + after / 2]


def test_a_failed_sparse_episode_has_the_return_of_failing_forever() -> None:
    """As in the authors' code, which divides the reward of a failure by 1 - gamma."""
    found = episode_values(
        np.full(7, -1.0, np.float32), np.array([7]), np.array([True]), 0.99, MODES[0]
    )
    np.testing.assert_allclose(found, -100.0, rtol=1e-6)


@given(episode_lists, st.integers(1, 4), st.sampled_from(MODES), st.booleans())
def test_recorded_rows_have_the_return_from_their_own_step_on(
    episodes: list[tuple[int, bool]], n_step: int, mode: ReturnAfterTruncation, next_actions: bool
) -> None:
    arrays = recorded(episodes)
    dataset = load(arrays, n_step=n_step, returns=mode, next_actions=next_actions)
    expected, first = [], 0
    for length, terminated in episodes:
        rewards = arrays["rewards"][first : first + length].tolist()
        expected += return_by_hand(rewards, terminated, GAMMA, mode)
        first += length
    batch = rows(dataset)
    np.testing.assert_allclose(batch.returns.numpy(), expected, rtol=1e-5)
    plain = rows(load(arrays, n_step=n_step, next_actions=next_actions))
    assert plain.returns is None
    for name in ("obs", "action", "reward", "discount", "next_obs"):
        assert getattr(batch, name).equal(getattr(plain, name)), name
    if next_actions:
        torch.testing.assert_close(batch.next_action, plain.next_action, equal_nan=True)


def test_returns_do_not_cross_parts_or_subsets() -> None:
    parts = recorded([(3, False)]), recorded([(4, True), (2, False)])
    alone = [rows(load(part, returns="last_reward")).returns for part in parts]
    both = load(*parts, returns="last_reward")
    torch.testing.assert_close(rows(both).returns, torch.cat(alone))
    kept, held = load(parts[1], returns="last_reward").split(0.5)
    assert sorted(torch.cat([rows(kept).returns, rows(held).returns]).tolist()) == sorted(
        alone[1].tolist()
    )


def test_returns_are_of_transformed_rewards() -> None:
    part = DatasetPart(
        array_recording(recorded([(3, True)])), rewards=RewardOptions(scale=2.0, shift=-1.0)
    )
    dataset = load_dataset([part], SPACES, gamma=0.5, returns="zero")
    assert rows(dataset).returns.tolist() == [1 + 0.5 * 3 + 0.25 * 5, 3 + 0.5 * 5, 5.0]


def test_returns_that_overflow_are_an_error() -> None:
    arrays = recorded([(5, False)], rewards=np.full(5, 3e38, np.float32))
    assert rows(load(arrays)).returns is None
    with pytest.raises(DataError, match="reward_scale"):
        load(arrays, returns="last_reward")


# Collected data


def play(
    target: Any, episodes: list[list[tuple[int, bool]]], restart: int | None = None
) -> tuple[list[Transitions], list[int]]:
    """Play episodes of parallel environments; return what was completed, and by which one."""
    envs = len(episodes)
    rewards = np.random.default_rng(0)
    found, environments = [], []
    scripts = [
        [(step == length - 1, terminated) for length, terminated in own for step in range(length)]
        for own in episodes
    ]
    for step in range(max(map(len, scripts))):
        active = np.array([step < len(script) for script in scripts])
        ended = np.array([s[step][0] if a else False for s, a in zip(scripts, active, strict=True)])
        terminal = np.array(
            [s[step][1] if a else False for s, a in zip(scripts, active, strict=True)]
        )
        number = np.arange(envs) * 1000 + step
        result, indices = target.add(
            number[:, None].astype(np.float32),
            number[:, None].astype(np.float32) / 1e5,
            rewards.normal(size=envs).astype(np.float32),
            ended & terminal,
            ended & ~terminal,
            number[:, None].astype(np.float32) + 1,
            active,
        )
        found.append(result)
        environments += np.arange(envs)[active].tolist() if indices is None else list(indices)
    return found, environments


@given(
    st.lists(episode_lists, min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from(MODES),
)
def test_collected_transitions_are_those_of_the_accumulator_with_returns(
    episodes: list[list[tuple[int, bool]]], n_step: int, mode: ReturnAfterTruncation
) -> None:
    plain, owners = play(NStepAccumulator(n_step, GAMMA, len(episodes)), episodes)
    target = EpisodesWithReturns(n_step, GAMMA, len(episodes), SPACES, mode)
    waiting, own_owners = play(target, episodes)
    expected, found = Transitions.joined(plain), Transitions.joined(waiting)
    one, other = np.argsort(expected.obs[:, 0]), np.argsort(found.obs[:, 0])
    assert sorted(owners) == sorted(own_owners)
    for name in ("obs", "action", "next_obs"):
        np.testing.assert_array_equal(getattr(found, name)[other], getattr(expected, name)[one])
    for name in ("reward", "discount"):
        np.testing.assert_allclose(
            getattr(found, name)[other], getattr(expected, name)[one], rtol=1e-6, atol=1e-7
        )
    single = Transitions.joined(play(NStepAccumulator(1, GAMMA, len(episodes)), episodes)[0])
    by_step = dict(zip(single.obs[:, 0].tolist(), single.reward.tolist(), strict=True))
    expected_returns: list[float] = []
    for env, own in enumerate(episodes):
        first = 0
        for length, terminated in own:
            rewards = [by_step[float(env * 1000 + first + k)] for k in range(length)]
            expected_returns += return_by_hand(rewards, terminated, GAMMA, mode)
            first += length
    np.testing.assert_allclose(found.returns[other], expected_returns, rtol=1e-4, atol=1e-5)


def step_of(target: EpisodesWithReturns, number: float, *, ends: bool = False) -> Transitions:
    value, no = np.full((2, 1), number, np.float32), np.zeros(2, np.bool_)
    return target.add(value, value, value[:, 0], no, no | ends, value + 1)[0]


def test_transitions_wait_for_the_end_of_their_episode_and_a_lost_one_is_forgotten() -> None:
    target = EpisodesWithReturns(1, 0.5, 2, SPACES, "zero")
    assert len(step_of(target, 1.0).reward) == len(step_of(target, 2.0).reward) == 0
    target.drop(np.array([True, False]))
    found = step_of(target, 4.0, ends=True)
    assert found.reward.tolist() == [4.0, 1.0, 2.0, 4.0]  # the first environment lost two steps
    assert found.returns.tolist() == [4.0, 3.0, 4.0, 4.0]


def test_waiting_steps_are_restored() -> None:
    target, other = (EpisodesWithReturns(2, 0.9, 2, SPACES, "last_reward") for _ in range(2))
    step_of(target, 1.0)
    other.load_state_dict(target.state_dict(slice(0, 2)), slice(0, 2))
    for one, two in zip(
        step_of(target, 2.0, ends=True), step_of(other, 2.0, ends=True), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_an_endless_episode_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns_module, "MOST_STEPS", 3)
    target = EpisodesWithReturns(1, 0.5, 2, SPACES, "last_reward")
    counts = [len(step_of(target, float(step)).reward) for step in range(7)]
    assert counts == [0, 0, 6, 0, 0, 6, 0]
    found = [step_of(target, 1.0) for _ in range(2)][-1]
    assert found.discount.tolist() == [0.5] * 6  # it goes on, so targets bootstrap


# Storage and mixtures


def numbered(first: int, count: int) -> Transitions:
    numbers = np.arange(first, first + count, dtype=np.float32)
    column = numbers[:, None]
    return Transitions(column, column / 1e4, numbers, numbers / 2, column + 1, numbers * 3)


def test_a_replay_buffer_keeps_and_restores_returns() -> None:
    buffer, other = (ReplayBuffer(8, 1, 1, returns=True) for _ in range(2))
    buffer.add(numbered(0, 11))
    batch = buffer.sample(32)
    assert batch.returns.equal(3 * batch.reward)
    segments = [segment.clone() for _, segment, _ in buffer.segments()]
    other.check_rows(segments[0])
    other.load_segments(segments, 11)
    everything = torch.arange(8)
    assert other.rows(everything).returns.equal(buffer.rows(everything).returns)
    segments[0][3, -1] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        other.check_rows(segments[0])
    plain = ReplayBuffer(8, 1, 1)
    plain.add(numbered(0, 4)._replace(returns=None))
    assert plain.sample(4).returns is None


def test_frames_of_images_are_stored_with_returns() -> None:
    spec = ObservationSpec((ObservationLeaf("", "image", (2, 2, 3)),))
    images = np.random.default_rng(0).integers(0, 255, (7, 2, 2, 3), np.uint8)
    packed = np.concatenate([spec.rows_of(image)[0] for image in images])
    numbers = np.arange(6, dtype=np.float32)
    given = Transitions(packed[:-1], numbers[:, None], numbers, numbers, packed[1:], numbers * 3)
    layout = FrameLayout.of(spec, "auto", 1, 1)
    framed = ReplayBuffer(6, spec, 1, frames=layout, returns=True)
    framed.add(given)
    batch = framed.rows(torch.arange(6))
    assert batch.returns.tolist() == [0, 3, 6, 9, 12, 15]
    np.testing.assert_array_equal(batch.obs.numpy().view(np.int32), packed[:-1].view(np.int32))
    np.testing.assert_array_equal(batch.next_obs.numpy().view(np.int32), packed[1:].view(np.int32))
    other = ReplayBuffer(6, spec, 1, frames=layout, returns=True)
    other.load_frames(0, [part.clone() for _, part, _ in framed.frame_segments(0)], 7)
    other.load_segments([part.clone() for _, part, _ in framed.segments()], 6)
    np.testing.assert_array_equal(
        other.rows(torch.arange(6)).next_obs.numpy().view(np.int32), packed[1:].view(np.int32)
    )


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, "uniform"])
def test_mixtures_have_the_returns_of_both(ratio: Any) -> None:
    online = ReplayBuffer(8, 1, 1, returns=True)
    online.add(numbered(1000, 8))
    offline = load(recorded([(5, True)]), returns="zero")
    mixture = Mixture(online, offline, ratio)
    batch = mixture.draw(torch.arange(16))
    recorded_returns = dict(
        zip(rows(offline).reward.tolist(), rows(offline).returns.tolist(), strict=True)
    )
    for reward, found in zip(batch.reward.tolist(), batch.returns.tolist(), strict=True):
        assert found == (3 * reward if reward >= 1000 else recorded_returns[reward])


# Runs


class Short(gym.Env):
    """Episodes of 9 steps, which terminate if the action is large; rewards count the steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Box(-2, 2, (1,))

    def __init__(self) -> None:
        self.count = 0
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        self.steps += 1
        return self._obs(), float(self.count), bool(action[0] > 1.9), self.count == 9, {}

    def _obs(self) -> np.ndarray:
        return np.array([self.count], np.float32)


CAL_QL = get_algorithm_spec("cal_ql")


def config(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    arrays = recorded([(9, False), (4, True)])
    np.savez(tmp_path / "data.npz", **arrays)
    chosen = {"n_step": 2, "entropy_in_target": False, "learning_starts": 20, "gamma": 0.9}
    kwargs = {**chosen, "offline_pretrain_updates": 10, **changes.pop("algo_kwargs", {})}
    dataset = {"kind": "npz", "path": str(tmp_path / "data.npz")}
    settings = {"dataset": dataset, "regime": "mixed", "total_timesteps": 120, "num_envs": 2}
    settings["env_kwargs"] = {}
    return {
        **tiny_of(CAL_QL, tmp_path, **{**settings, **changes}, algo_kwargs=kwargs),
        "env_id": None,
    }


def stored(result: TrainResult) -> np.ndarray:
    files = sorted(result.checkpoint_path.glob("replay-*.safetensors"))
    return np.concatenate([load_file(file)["rows"].numpy() for file in files])


def test_a_run_stores_complete_episodes_with_their_returns(tmp_path: Path) -> None:
    given = config(tmp_path, algo_kwargs={"n_step": 1, "offline_pretrain_updates": 0})
    result = rl_training.train(given, env=Short)
    obs, _, reward, discount, _, found = stored(result).T
    ends = np.flatnonzero((discount == 0) | (reward == 9)) + 1
    assert ends[-1] == len(reward) <= 120
    assert len(reward) > 120 - 2 * 9
    expected, first = [], 0
    for end in ends:
        assert obs[first] == 0
        expected += return_by_hand(
            reward[first:end].tolist(), discount[end - 1] == 0, 0.9, "last_reward"
        )
        first = end
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert result.metrics["gradient_steps"] == 100  # those that waited are made up for


@pytest.mark.parametrize("position", [7, 10 + 71], ids=["pretraining", "mid-episode"])
def test_a_stopped_run_resumes_bit_for_bit(position: int, tmp_path: Path) -> None:
    given = config(tmp_path)
    complete = rl_training.train(given, env=Short)
    stopped = rl_training.train(given, env=Short, callbacks=[StopAtPosition(position)])
    assert stopped.checkpoint_path.name < complete.checkpoint_path.name
    resumed = rl_training.resume_training(stopped.run_dir, env=Short)
    assert hashes(resumed.checkpoint_path) == hashes(complete.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(complete.run_dir)


@pytest.mark.parametrize("batched", [False, True], ids=["in turn", "batched"])
def test_seeds_together_resume_bit_for_bit(
    batched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    uniform = {"offline_batch_ratio": "uniform"}
    given = config(tmp_path, seeds=[3, 1], total_timesteps=60, algo_kwargs=uniform)
    complete = rl_training.train(given, env=Short)
    stopped = rl_training.train(given, env=Short, callbacks=[StopAt(44)])
    resumed = resume_together([result.run_dir for result in stopped], env=Short)
    for one, other in zip(complete, resumed, strict=True):
        assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)


def test_the_replay_buffer_of_a_run_can_be_learned_from(tmp_path: Path) -> None:
    """Its rows are in the order of episodes, whatever the number of environments."""
    given = config(tmp_path, algo_kwargs={"n_step": 1, "offline_pretrain_updates": 0})
    first = rl_training.train(given, env=Short)
    data = {"kind": "run", "path": str(first.run_dir)}
    dataset = build_dataset(read_sections(data), gamma=0.9, returns="last_reward")
    batch = rows(dataset)
    np.testing.assert_allclose(batch.returns.numpy(), stored(first)[:, -1], rtol=1e-5)
    assert dataset.episode_lengths.max() <= 9


def test_online_rows_alone_are_enough(tmp_path: Path) -> None:
    changes = {"regime": "online", "algo_kwargs": {"offline_pretrain_updates": 0}}
    result = rl_training.train(config(tmp_path, **changes), env=Short)
    assert result.metrics["gradient_steps"] == 100
    assert result.metrics["train/bound_rate"] >= 0


def test_hindsight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"replay\.hindsight: cal_ql needs the returns"):
        rl_training.train(config(tmp_path, replay={"hindsight": {}}), env=Short)


def test_offline_evaluation_has_the_validation_losses(tmp_path: Path) -> None:
    settings = tiny_of(CAL_QL, tmp_path, total_timesteps=10)
    settings["dataset"] = {"kind": "random", "size": 700, "seed": 0}  # three episodes and a half
    run = rl_training.train(settings)
    metrics = rl_training.evaluate_offline(run.run_dir, fqe_updates=0, held_out=0.5)
    assert np.isfinite(metrics["ope_validation_critic_loss"])
