"""Transitions that get other goals when they are sampled: which goals, and how likely each is."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from goal_environments import PointGoal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_training.data.hindsight.episodes import Episode
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.hindsight.rings import RingEpisodes
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.mixture import Mixture
from rl_training.data.n_step import Transitions
from rl_training.data.offline_dataset import LoadedPart, OfflineDataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs import EnvironmentFactory
from rl_training.envs.goals import GoalEnvironment
from rl_training.types import Batch, SpaceInfo

GAMMA = 0.9
COPIES = 2
STRATEGIES = ["future", "final", "episode"]
MOST_STEPS = 6
"""Longest episode of the random histories: all choices among its steps divide `EVEN`"""
EVEN = math.lcm(*range(1, MOST_STEPS + 1))


class NumberGoals:
    """Observations are an achieved number, a desired one, and nothing else."""

    achieved, desired = slice(0, 1), slice(1, 2)

    def __init__(self, *, terminates: bool = True) -> None:
        self.terminates = terminates

    def tensor_rewards(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return -(achieved - desired).abs().squeeze(-1)

    def tensor_terminations(self, achieved: Tensor, desired: Tensor) -> Tensor | None:
        return (achieved == desired).squeeze(-1) if self.terminates else None

    def rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return self.tensor_rewards(*map(torch.from_numpy, (achieved, desired))).numpy()

    def terminations(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray | None:
        return (achieved == desired).squeeze(-1) if self.terminates else None


class Row(NamedTuple):
    """A stored row: the number that its step achieved, its episode, and the step in it."""

    number: int
    episode: int
    step: int
    is_terminated: bool


def hindsight(strategy: Any, *, terminates: bool = True) -> SampledHindsight:
    return SampledHindsight(NumberGoals(terminates=terminates), strategy, COPIES, GAMMA)


def transitions(rows: list[Row]) -> Transitions:
    """Rows whose own goal is -1, whose action is their number, and whose reward is 7."""
    numbers = np.array([row.number for row in rows], np.float32)
    own = np.full_like(numbers, -1)
    left = np.array([0 if row.is_terminated else GAMMA for row in rows], np.float32)
    return Transitions(
        np.stack([numbers - 0.5, own], 1),
        numbers[:, None],
        np.full_like(numbers, 7),
        left,
        np.stack([numbers, own], 1),
    )


def all_draws(buffer: ReplayBuffer | OfflineDataset, size: int) -> Batch:
    """Draw with every combination of row, kept goal and choice, each equally often."""
    return buffer.draw(torch.arange(size * (1 + COPIES) * EVEN))


def found(batch: Batch) -> Counter[tuple[int, int]]:
    """How often each row was drawn with each goal."""
    rows, goals = batch.action.squeeze(-1).long().tolist(), batch.obs[:, 1].long().tolist()
    return Counter(zip(rows, goals, strict=True))


def expected(rows: list[Row], strategy: str) -> Counter[tuple[int, int]]:
    """The same by its definition, from all rows that are stored."""
    counts: Counter[tuple[int, int]] = Counter()
    for row in rows:
        counts[row.number, -1] += EVEN
        same = [other for other in rows if other.episode == row.episode]
        last = max(other.step for other in same)
        possible = [
            other
            for other in same
            if strategy == "episode" or other.step >= (row.step if strategy == "future" else last)
        ]
        for other in possible:
            counts[row.number, other.number] += COPIES * EVEN // len(possible)
    return counts


def assert_exact(batch: Batch, rows: list[Row], *, terminates: bool = True) -> None:
    """Check the rewards and ends of all drawn rows, and that their goals are in both states."""
    by_number = {row.number: row for row in rows}
    number, goal = batch.action.squeeze(-1), batch.obs[:, 1]
    assert torch.equal(batch.next_obs[:, 1], goal)
    assert torch.equal(batch.obs[:, 0], number - 0.5)
    assert torch.equal(batch.next_obs[:, 0], number)
    own = goal == -1
    reward = torch.where(own, torch.tensor(7.0), -(number - goal).abs())
    assert torch.equal(batch.reward, reward)
    ended = torch.tensor([by_number[int(each)].is_terminated for each in number])
    if terminates:
        ended = torch.where(own, ended, goal == number)
    torch.testing.assert_close(batch.discount, GAMMA * (1 - ended.float()))


class History:
    """Adds steps of two environments to a buffer, and remembers which rows it must have."""

    def __init__(self, buffer: ReplayBuffer, num_envs: int = 2, seed_index: int = 0) -> None:
        self.buffer, self.num_envs, self.seed_index = buffer, num_envs, seed_index
        self.rows: list[Row] = []
        self.number, self.episodes = 0, num_envs
        self.current = list(range(num_envs))
        self.steps = [0] * num_envs

    def step(self, ends: list[bool], terminates: list[bool], lost: list[bool]) -> None:
        new, ended = [], []
        if all(lost):  # else the buffer sees that a row is missing
            self.buffer.interrupt(self.seed_index)
        if any(lost):
            self._renew(range(self.num_envs))
        for env in range(self.num_envs):
            if lost[env]:
                continue
            end = ends[env] or self.steps[env] == MOST_STEPS - 1
            new.append(
                Row(self.number, self.current[env], self.steps[env], end and terminates[env])
            )
            ended.append(end)
            self.number += 1
            self.steps[env] += 1
            if end:
                self._renew([env])
        self.rows += new
        if new:
            self.buffer.add(transitions(new), np.full(len(new), self.seed_index), np.array(ended))
        if any(lost):  # rows of an incomplete step are continued by none
            self._renew(range(self.num_envs))

    def _renew(self, environments: Any) -> None:
        for env in environments:
            self.current[env], self.steps[env] = self.episodes, 0
            self.episodes += 1

    @property
    def stored(self) -> list[Row]:
        return self.rows[-self.buffer.capacity :]


SELDOM = st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3])
STEP = st.tuples(SELDOM, st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))


def bits(number: int) -> list[bool]:
    return [bool(number & 1), bool(number & 2)]


@given(
    steps=st.lists(STEP, min_size=1, max_size=25),
    strategy=st.sampled_from(STRATEGIES),
    capacity=st.integers(1, 13),
    terminates=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_every_stored_goal_of_the_episode_is_equally_likely_and_no_other_is_chosen(
    steps: list[tuple[int, int, int, int]], strategy: Any, capacity: int, terminates: bool
) -> None:
    """Episodes end, are cut or lost at random, and the ring overwrites them at any place."""
    chosen = hindsight(strategy, terminates=terminates)
    buffer = ReplayBuffer(capacity, 2, 1, hindsight=chosen, num_envs=2)
    history = History(buffer)
    for ends, terminated, lost, rarely in steps:
        history.step(bits(ends), bits(terminated), bits(lost if rarely == 0 else 0))
        if not history.rows:
            continue
        batch = all_draws(buffer, len(buffer))
        assert found(batch) == expected(history.stored, strategy)
        assert_exact(batch, history.rows, terminates=terminates)


@given(
    steps=st.lists(STEP, min_size=1, max_size=20),
    stops=st.sets(st.integers(0, 19)),
    capacity=st.integers(1, 13),
)
@settings(max_examples=40, deadline=None)
def test_a_restored_buffer_goes_on_in_the_middle_of_episodes(
    steps: list[tuple[int, int, int, int]], stops: set[int], capacity: int
) -> None:
    chosen = hindsight("episode")
    buffer = ReplayBuffer(capacity, 2, 1, hindsight=chosen, num_envs=2)
    history = History(buffer)
    for index, (ends, terminated, lost, rarely) in enumerate(steps):
        history.step(bits(ends), bits(terminated), bits(lost if rarely == 0 else 0))
        if index in stops and history.rows:
            again = ReplayBuffer(capacity, 2, 1, hindsight=chosen, num_envs=2)
            segments = [rows for _, rows, _ in history.buffer.segments()]
            again.load_segments(segments, history.buffer.rows_added())
            again.load_episode_state(history.buffer.episode_state())
            history.buffer = again
    if history.rows:
        batch = all_draws(history.buffer, len(history.buffer))
        assert found(batch) == expected(history.stored, "episode")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_terminated", [True, False])
def test_the_distribution_is_that_of_transitions_that_are_stored_again(
    strategy: Any, is_terminated: bool
) -> None:
    """One finished episode: goals of rows, rewards and discounts are as frequent either way."""
    steps, repeats = 4, 3000
    rows = [Row(step, 0, step, is_terminated and step == steps - 1) for step in range(steps)]
    stored = transitions(rows)
    ends = np.array([row.is_terminated for row in rows])
    episode = Episode(stored.obs, stored.action, stored.reward, ends, stored.next_obs)
    for terminates in (True, False):
        inserted = Hindsight(NumberGoals(terminates=terminates), strategy, COPIES, GAMMA)
        counts: Counter[Any] = Counter()
        for seed in range(repeats):
            new = inserted.transitions(episode, (seed, 0))
            for part in (stored, new):
                columns = part.action[:, 0], part.obs[:, 1], part.reward, part.discount
                counts.update(zip(*(column.tolist() for column in columns), strict=True))
        buffer = ReplayBuffer(
            8, 2, 1, hindsight=hindsight(strategy, terminates=terminates), num_envs=1
        )
        for row in rows:
            buffer.add(transitions([row]), ended=np.array([row.step == steps - 1]))
        batch = all_draws(buffer, steps)
        columns = batch.action[:, 0], batch.obs[:, 1], batch.reward, batch.discount
        sampled = Counter(zip(*(column.tolist() for column in columns), strict=True))
        assert set(sampled) == set(counts)
        total, drawn = sum(counts.values()), sum(sampled.values())
        for key, count in sampled.items():
            assert counts[key] / total == pytest.approx(count / drawn, abs=0.005)


def test_a_sampled_batch_has_the_expected_share_of_other_goals() -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(100, 2, 1, hindsight=hindsight("future"), num_envs=1, generator=generator)
    for step in range(10):
        buffer.add(transitions([Row(step, 0, step, False)]), ended=np.array([step == 9]))
    batch = buffer.sample(60_000)
    assert (batch.obs[:, 1] >= 0).float().mean() == pytest.approx(2 / 3, abs=0.01)
    of_third = batch.obs[(batch.action[:, 0] == 3) & (batch.obs[:, 1] >= 0), 1].long()
    counts = torch.bincount(of_third, minlength=10)
    assert counts[:3].sum() == 0
    assert counts[3:].min() > 0.8 * counts[3:].max()


def test_each_slot_of_a_population_takes_the_goals_of_its_own_seed() -> None:
    chosen = hindsight("episode")
    buffer = ReplayBuffer(9, 2, 1, hindsight=chosen, num_envs=2, slots=(2, 0), width=3)
    histories = [History(buffer, seed_index=seed) for seed in (0, 1)]
    for step in range(7):
        for seed, history in enumerate(histories):
            history.number = max(history.number, 1000 * seed)
            history.step([step == 3 + seed, False], [True, True], [False, False])
    assert len(buffer) == 9
    random = torch.arange(9 * (1 + COPIES) * EVEN)
    batch = buffer.draw(random.expand(3, -1))
    for slot, history in ((2, histories[0]), (0, histories[1])):
        of_slot = Batch(*(part if part is None else part[slot] for part in batch))  # type: ignore[arg-type]
        assert found(of_slot) == expected(history.stored, "episode")
        assert_exact(of_slot, history.rows)


def recorded(parts: list[int], strategy: Any, weights: list[float]) -> tuple[Any, list[Row]]:
    """A dataset of parts with one episode of each of these lengths, and its rows."""
    rows: list[Row] = []
    loaded = []
    for episode, (length, weight) in enumerate(zip(parts, weights, strict=True)):
        rows += [Row(len(rows) + step, episode, step, step == length - 1) for step in range(length)]
        loaded.append(
            LoadedPart(length, np.array([length]), np.zeros(1), weight, {"source": "test"})
        )
    packed = ReplayBuffer(1, 2, 1).columns.pack(transitions(rows))
    dataset = OfflineDataset(
        torch.from_numpy(packed),
        loaded,
        SpaceInfo(2, 1),
        step_rewards=torch.zeros(len(rows)),
        hindsight=hindsight(strategy),
    )
    return dataset, rows


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_rows_get_goals_of_their_own_episode(strategy: Any) -> None:
    dataset, rows = recorded([5], strategy, [1.0])
    batch = all_draws(dataset, 5)
    assert found(batch) == expected(rows, strategy)
    assert_exact(batch, rows)


def test_weighted_parts_get_goals_of_their_own_episode() -> None:
    dataset, rows = recorded([3, 6], "future", [3.0, 1.0])
    dataset.generator = torch.Generator().manual_seed(0)
    number = 200_000
    batch = dataset.sample(number)
    assert_exact(batch, rows)
    for (row, goal), count in found(batch).items():
        episode = rows[row].episode
        likely = (0.75 / 3, 0.25 / 6)[episode] / (1 + COPIES)
        if goal >= 0:
            later = [other for other in rows if other.episode == episode and other.number >= row]
            assert goal in [other.number for other in later]
            likely *= COPIES / len(later)
        assert count / number == pytest.approx(likely, abs=0.004)


def test_a_uniform_mixture_gives_goals_to_recorded_and_collected_rows() -> None:
    dataset, rows = recorded([3], "future", [1.0])
    buffer = ReplayBuffer(20, 2, 1, hindsight=hindsight("future"), num_envs=1)
    collected = [Row(100 + step, 9, step, False) for step in range(4)]
    for row in collected:
        buffer.add(transitions([row]), ended=np.array([row.step == 3]))
    mixture = Mixture(buffer, dataset, "uniform")
    batch = mixture.draw(torch.arange(7 * (1 + COPIES) * EVEN))
    assert found(batch) == expected([*rows, *collected], "future")
    assert_exact(batch, [*rows, *collected])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("marks", lambda marks: marks[:-1]),
        ("marks", lambda marks: marks.long()),
        ("marks", lambda marks: marks + torch.tensor([0, 5], dtype=torch.int32)),
        ("marks", lambda marks: marks - torch.tensor([9, 0], dtype=torch.int32)),
        ("lengths", lambda lengths: lengths + 1),
        ("first_rows", lambda rows: rows + 1),
        ("first_rows", lambda rows: rows[:1]),
    ],
)
def test_damaged_episodes_are_refused(name: str, change: Any) -> None:
    buffer = ReplayBuffer(20, 2, 1, hindsight=hindsight("future"), num_envs=2)
    history = History(buffer)
    for step in range(4):
        history.step([step == 1, False], [True, True], [False, False])
    state = buffer.episode_state()
    state[name] = change(state[name])
    again = ReplayBuffer(20, 2, 1, hindsight=hindsight("future"), num_envs=2)
    again.load_segments([rows for _, rows, _ in buffer.segments()], buffer.rows_added())
    with pytest.raises(ValueError, match="episodes"):
        again.load_episode_state(state)


def test_marks_wait_until_they_are_flushed_and_the_newest_counts() -> None:
    """As on a GPU, where rows and marks of many steps are written together."""
    device = torch.device("cpu")
    late, early = (
        RingEpisodes(hindsight("future"), 5, 1, num_seeds=1, device=device) for _ in range(2)
    )
    for step in range(12):
        for ring in (late, early):
            ring.add(np.array([step % 4 == 3]), np.array([1]))
        early.flush()
    late.flush()
    assert torch.equal(late.state_dict(0)["marks"], early.state_dict(0)["marks"])


class TensorGoals(PointGoal):
    """Has both kinds of functions, of which those of tensors are used."""

    def compute_reward_torch(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return -(torch.linalg.vector_norm(achieved - desired, dim=-1) > self.near).float()

    def compute_terminated_torch(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return torch.zeros_like(achieved[..., 0], dtype=torch.bool)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sampling_is_one_graph_for_a_population(strategy: Any) -> None:
    """As in a CUDA graph, nothing is read back to the host."""
    goals = GoalEnvironment(EnvironmentFactory(TensorGoals))
    chosen = SampledHindsight(goals, strategy, COPIES, GAMMA)
    buffer = ReplayBuffer(50, 6, 2, hindsight=chosen, num_envs=2, slots=(0, 1), width=2)
    generator = np.random.default_rng(0)
    for step in range(40):
        obs, next_obs = generator.uniform(-1, 1, (2, 4, 6)).astype(np.float32)
        action, reward = np.zeros((4, 2), np.float32), np.zeros(4, np.float32)
        rows = Transitions(obs, action, reward, np.ones(4, np.float32), next_obs)
        buffer.add(rows, ended=np.full(4, step % 7 == 6))
    random = torch.randint(2**63 - 1, (2, 64), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(buffer.draw, fullgraph=True, backend="aot_eager")
    for part, expected in zip(compiled(random)[:5], buffer.draw(random)[:5], strict=True):
        torch.testing.assert_close(part, expected)
    goals.close()
