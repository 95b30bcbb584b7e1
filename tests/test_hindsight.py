"""Transitions are repeated with goals that their episode reached, exactly and repeatably."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goal_environments import PointGoal
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data import DatasetPart, array_recording, load_dataset
from rl_training.data.hindsight.episodes import Episode, UnfinishedEpisodes
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.n_step import NStepAccumulator, Transitions
from rl_training.datasets.workflows import convert_dataset
from rl_training.envs import EnvironmentFactory, describe_spaces
from rl_training.envs.goals import GoalEnvironment
from rl_training.errors import DataError
from rl_training.types import SpaceInfo

GAMMA = 0.9
ACHIEVED, DESIRED = slice(0, 2), slice(2, 4)


class LineGoals:
    """Goals on a grid, so that they are often reached; only the nearest one ends an episode."""

    achieved, desired = ACHIEVED, DESIRED

    def __init__(self, *, terminates: bool) -> None:
        self.terminates = terminates

    def rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return -np.abs(achieved - desired).sum(-1).astype(np.float32)

    def terminations(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray | None:
        return (achieved == desired).all(-1) if self.terminates else None


def an_episode(length: int, seed: int, *, terminated: bool) -> Episode:
    generator = np.random.default_rng(seed)
    rows = generator.integers(-1, 2, (length + 1, 5)).astype(np.float32)
    rows[:, 4] = np.arange(length + 1)
    ends = np.zeros(length, np.bool_)
    ends[-1] = terminated
    action = generator.normal(size=(length, 2)).astype(np.float32)
    reward = generator.normal(size=length).astype(np.float32)
    return Episode(rows[:-1], action, reward, ends, rows[1:])


def naive_return(
    episode: Episode, goals: LineGoals, first: int, goal: np.ndarray, n_step: int
) -> tuple[int, float, float]:
    """Last step, reward and discount of a transition with a new goal, one step at a time."""
    total, last = 0.0, first
    for step in range(first, min(first + n_step, len(episode.reward))):
        last, achieved = step, episode.next_obs[step, ACHIEVED]
        total += GAMMA ** (step - first) * -float(np.abs(achieved - goal).sum())
        ended = bool(episode.terminated[step])
        if goals.terminates:
            ended = bool((achieved == goal).all())
        if ended:
            return last, total, 0.0
    return last, total, GAMMA ** (last - first + 1)


@given(
    length=st.integers(1, 30),
    seed=st.integers(0, 1000),
    terminated=st.booleans(),
    terminates=st.booleans(),
    strategy=st.sampled_from(["future", "final", "episode"]),
    copies=st.integers(1, 5),
    n_step=st.integers(1, 6),
)
@settings(max_examples=150, deadline=None)
def test_relabelled_transitions_equal_those_computed_one_by_one(
    length: int,
    seed: int,
    terminated: bool,
    terminates: bool,
    strategy: Any,
    copies: int,
    n_step: int,
) -> None:
    episode, goals = (
        an_episode(length, seed, terminated=terminated),
        LineGoals(terminates=terminates),
    )
    hindsight = Hindsight(goals, strategy, copies, GAMMA, n_step)
    new = hindsight.relabel(episode, (seed, 3))
    rows = hindsight.transitions(episode, (seed, 3))
    assert new.first.tolist() == [step for step in range(length) for _ in range(copies)]
    for index, first in enumerate(new.first.tolist()):
        goal = new.goal[index]
        earliest = {"future": first, "final": length - 1, "episode": 0}[strategy]
        assert any((goal == episode.next_obs[s, ACHIEVED]).all() for s in range(earliest, length))
        last, reward, discount = naive_return(episode, goals, first, goal, n_step)
        assert last == new.last[index]
        np.testing.assert_allclose(rows.reward[index], reward, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rows.discount[index], discount, rtol=1e-6)
        for given_rows, step_rows in (
            (rows.obs, episode.obs[first]),
            (rows.next_obs, episode.next_obs[last]),
        ):
            expected = step_rows.copy()
            expected[DESIRED] = goal
            np.testing.assert_array_equal(given_rows[index], expected)
        np.testing.assert_array_equal(rows.action[index], episode.action[first])


def test_the_future_of_the_last_transition_is_the_goal_that_it_reached() -> None:
    episode = an_episode(8, 1, terminated=False)
    hindsight = Hindsight(LineGoals(terminates=False), "future", 4, GAMMA)
    last = hindsight.relabel(episode, (0, 0)).goal[-4:]
    np.testing.assert_array_equal(last, np.repeat(episode.next_obs[-1:, ACHIEVED], 4, axis=0))


def test_goals_are_spread_evenly_over_the_future() -> None:
    episode = an_episode(10, 1, terminated=False)
    episode.next_obs[:, 0] = np.arange(10)
    hindsight = Hindsight(LineGoals(terminates=False), "future", 1, GAMMA)
    found = [hindsight.relabel(episode, (0, number)).goal[2, 0] for number in range(2000)]
    counts = np.bincount(np.array(found, np.int64), minlength=10)
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:].min() > 190
    assert counts[2:].max() < 310


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not() -> None:
    hindsight = Hindsight(LineGoals(terminates=False), "future", 2, GAMMA)
    cut = hindsight.relabel(an_episode(5, 0, terminated=False), (0, 0)).discount
    ended = hindsight.relabel(an_episode(5, 0, terminated=True), (0, 0)).discount
    np.testing.assert_allclose(cut, GAMMA)
    np.testing.assert_allclose(ended, [GAMMA] * 8 + [0] * 2)


def test_rewards_are_transformed_before_they_are_summed() -> None:
    episode, goals = an_episode(6, 0, terminated=False), LineGoals(terminates=False)
    plain = Hindsight(goals, "final", 1, GAMMA, 3).relabel(episode, (0, 0))
    scaled = Hindsight(goals, "final", 1, GAMMA, 3, lambda x: 2 * x + 1).relabel(episode, (0, 0))
    counted = plain.last - plain.first + 1
    ones = np.array([sum(GAMMA**k for k in range(number)) for number in counted])
    np.testing.assert_allclose(scaled.reward, 2 * plain.reward + ones, rtol=1e-5)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2**6 - 1), st.integers(0, 2**3 - 1), st.integers(0, 2**3 - 1)),
        min_size=1,
        max_size=120,
    )
)
@settings(max_examples=60, deadline=None)
def test_episodes_are_those_of_the_steps_and_survive_a_restart(
    steps: list[tuple[int, int, int]],
) -> None:
    """Each step: which of three environments end or terminate, step at all, and lose an episode."""
    spaces = SpaceInfo(2, 1)
    kept, naive = UnfinishedEpisodes(3, spaces), [[] for _ in range(3)]  # type: ignore[var-annotated]
    obs = np.zeros((3, 2), np.float32)
    for number, (ends, active_bits, lost_bits) in enumerate(steps):
        bits = [bool(ends >> bit & 1) for bit in range(6)]
        terminated, truncated = np.array(bits[:3]), np.array(bits[3:])
        active = np.array([bool(active_bits >> bit & 1) for bit in range(3)])
        lost = np.array([bool(lost_bits >> bit & 1) for bit in range(3)]) & (number % 7 == 0)
        kept.drop(lost)
        for index in np.flatnonzero(lost):
            naive[index].clear()
        next_obs = np.full((3, 2), number + 1, np.float32) + np.arange(3)[:, None] * 1000
        action, reward = next_obs[:, :1] / 2, next_obs[:, 0] / 4
        active &= ~lost
        found = kept.add(obs, action, reward, terminated, truncated, next_obs, active)
        for index in np.flatnonzero(active):
            naive[index].append((obs[index], action[index], reward[index], next_obs[index]))
        ended = np.flatnonzero(active & (terminated | truncated))
        assert list(found) == ended.tolist()
        for index, episode in found.items():
            expected = [np.array(column) for column in zip(*naive[index], strict=True)]
            for given_values, values in zip(
                (episode.obs, episode.action, episode.reward, episode.next_obs),
                expected,
                strict=True,
            ):
                np.testing.assert_array_equal(given_values, values)
            assert episode.terminated.tolist() == [False] * (len(episode.reward) - 1) + [
                bool(terminated[index])
            ]
            naive[index].clear()
        obs = np.where(active[:, None] | lost[:, None], next_obs, obs)
        for index in ended:  # the first observation of the next episode
            obs[index] = -next_obs[index]
        if number % 5 == 0:
            again = UnfinishedEpisodes(3, spaces)
            for part in (slice(0, 1), slice(1, 3)):
                again.load_state_dict(kept.state_dict(part), part)
            kept = again


@pytest.mark.parametrize("name", ["lengths", "obs", "action", "reward"])
def test_damaged_unfinished_episodes_are_refused(name: str) -> None:
    spaces = SpaceInfo(2, 1)
    kept = UnfinishedEpisodes(2, spaces)
    ones, no = np.ones((2, 2), np.float32), np.zeros(2, np.bool_)
    kept.add(ones, ones[:, :1], ones[:, 0], no, no, ones)
    state = kept.state_dict(slice(0, 2))
    damaged = {**state, name: state[name][:-1]}
    with pytest.raises(ValueError, match="unfinished episodes"):
        kept.load_state_dict(damaged, slice(0, 2))
    if name != "lengths":
        with pytest.raises(ValueError, match="finite"):
            kept.load_state_dict({**state, name: np.full_like(state[name], np.nan)}, slice(0, 2))


def test_the_own_goal_gives_the_transitions_that_were_stored() -> None:
    """Relabelling with the desired goal itself agrees with n-step accumulation."""
    goals = GoalEnvironment(EnvironmentFactory(PointGoal, {"episodic": True, "near": 0.4}))
    environment = PointGoal(episodic=True, near=0.4)
    spec = describe_spaces(environment).observation
    rows, done = [spec.rows_of(environment.reset(seed=4)[0])[0][0]], False
    steps: list[tuple[np.ndarray, float, bool, bool]] = []
    environment.action_space.seed(4)
    while not done:
        action = environment.action_space.sample()
        observation, reward, terminated, truncated, _ = environment.step(action)
        rows.append(spec.rows_of(observation)[0][0])
        steps.append((action, reward, terminated, truncated))
        done = terminated or truncated
    accumulator, stored = NStepAccumulator(3, GAMMA, 1), []
    for index, (action, reward, terminated, truncated) in enumerate(steps):
        arrays = (
            np.array([value]) for value in (action, np.float32(reward), terminated, truncated)
        )
        found, _ = accumulator.add(rows[index][None], *arrays, rows[index + 1][None])
        stored.append(found)
    expected = Transitions.joined(stored)
    first = np.arange(len(steps))
    episode = Episode(
        np.stack(rows[:-1]),
        np.stack([step[0] for step in steps]),
        np.array([step[1] for step in steps], np.float32),
        np.array([step[2] for step in steps]),
        np.stack(rows[1:]),
    )
    hindsight = Hindsight(goals, "future", 1, GAMMA, 3)
    goal = episode.obs[:, goals.desired]
    last, reward, discount = hindsight._returns(
        episode, episode.next_obs[:, goals.achieved], first, goal
    )
    np.testing.assert_allclose(reward, expected[2], rtol=1e-6)
    np.testing.assert_allclose(discount, expected[3], rtol=1e-6)
    np.testing.assert_array_equal(episode.next_obs[last], expected[4])
    goals.close()


class OneNumber:
    """Goals of `RECORDED`: the first number of an observation is to become the second."""

    achieved, desired = slice(0, 1), slice(1, 2)

    def rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.where((achieved == desired).all(-1), 0, -1).astype(np.float32)

    def terminations(self, achieved: np.ndarray, desired: np.ndarray) -> None:
        return None

    def tensor_rewards(self, achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        return torch.where((achieved == desired).all(-1), 0.0, -1.0)

    def tensor_terminations(self, achieved: torch.Tensor, desired: torch.Tensor) -> None:
        return None


STARTS, GOALS = [10, 11, 12, 20, 21, 22], [13, 13, 13, 23, 23, 23]
RECORDED = {
    "observations": np.stack([STARTS, GOALS], 1).astype(np.float32),
    "actions": np.zeros((6, 1), np.float32),
    "rewards": np.array([-1, -1, 0, -1, -1, 0], np.float32),
    "terminals": np.array([0, 0, 1, 0, 0, 1]),
    "action_low": -np.ones(1),
    "action_high": np.ones(1),
}
"""Two episodes that reach 13 and 23, which no observation shows"""

KINDS = [
    pytest.param(Hindsight(OneNumber(), "future", 4, 0.9), id="stored"),
    pytest.param(SampledHindsight(OneNumber(), "future", 4, 0.9), id="sampled"),
]


@pytest.mark.parametrize("hindsight", KINDS)
def test_data_that_does_not_say_which_goals_were_reached_is_refused(hindsight: Any) -> None:
    part = DatasetPart(array_recording(RECORDED))
    with pytest.raises(DataError, match=r"after terminal steps; add next_observations"):
        load_dataset([part], gamma=0.9, hindsight=hindsight)
    # What a policy learns without hindsight does not depend on it.
    assert len(load_dataset([part], gamma=0.9)) == 6


@pytest.mark.parametrize("hindsight", KINDS)
@pytest.mark.parametrize("layout", ["next_observations", "valids", "truncated"])
def test_goals_of_recorded_episodes_are_those_that_they_reached(
    hindsight: Any, layout: str
) -> None:
    data: dict[str, Any] = dict(RECORDED)
    following = data["observations"] + np.array([1, 0], np.float32)
    reached = {10: {11, 12, 13}, 20: {21, 22, 23}}
    if layout == "next_observations":
        data["next_observations"] = following
    elif layout == "valids":  # a row after each episode holds its last observation
        rows = np.insert(data["observations"], [3, 6], following[[2, 5]], axis=0)
        valids = np.array([1, 1, 1, 0, 1, 1, 1, 0])
        data |= {"observations": rows, "valids": valids}
        data["actions"] = np.zeros((8, 1), np.float32)
        data["rewards"] = np.insert(data["rewards"], [3, 6], 0)
        data["terminals"] = np.insert(data["terminals"], [3, 6], 0)
    else:  # the last steps are left out
        data |= {"terminals": np.zeros(6), "timeouts": RECORDED["terminals"]}
        reached = {10: {11, 12}, 20: {21, 22}}
    dataset = load_dataset(
        [DatasetPart(array_recording(data))],
        gamma=0.9,
        hindsight=hindsight,
        generator=torch.Generator().manual_seed(0),
    )
    batch = dataset.sample(400)
    for start, goals in reached.items():
        chosen = (batch.obs[:, 0] >= start) & (batch.obs[:, 0] < start + 10)
        found = set(batch.obs[chosen, 1].tolist())
        assert found <= goals | {start + 3}
        assert max(goals) in found


def test_a_conversion_says_that_observations_are_missing(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **RECORDED)
    with pytest.warns(UserWarning, match=r"no observations after its terminal steps.*placeholders"):
        convert_dataset(str(tmp_path / "data.npz"), tmp_path / "copy.npz")
