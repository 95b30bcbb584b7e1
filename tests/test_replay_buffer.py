"""The replay buffer and n-step transitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data import NStepAccumulator, ReplayBuffer, Transitions, replay_buffer
from rl_training.data.storage.rows import RowColumns
from rl_training.types import ActionSpec


def numbered(first: int, count: int) -> Transitions:
    """Return rows in which every column is the row number."""
    numbers = np.arange(first, first + count, dtype=np.float32)
    return Transitions(
        np.stack([numbers, -numbers], 1),
        numbers[:, None] / 1e4,
        numbers,
        numbers / 2,
        np.stack([numbers + 0.5, numbers], 1),
    )


def make_buffer(capacity: int, seed: int = 0) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(seed)
    return ReplayBuffer(capacity, 2, 1, generator=generator)


@given(st.integers(1, 20), st.lists(st.integers(0, 25), max_size=12))
def test_a_full_buffer_contains_the_newest_rows(capacity: int, sizes: list[int]) -> None:
    buffer, added = make_buffer(capacity), 0
    for size in sizes:
        buffer.add(numbered(added, size))
        added += size
    assert len(buffer) == min(added, capacity)
    batch = buffer.rows(torch.arange(len(buffer)))
    assert sorted(batch.reward.tolist()) == list(range(added - len(buffer), added))
    torch.testing.assert_close(batch.obs, torch.stack([batch.reward, -batch.reward], 1))
    torch.testing.assert_close(batch.action[:, 0], batch.reward / 1e4)
    torch.testing.assert_close(batch.discount, batch.reward / 2)
    torch.testing.assert_close(batch.next_obs[:, 0], batch.reward + 0.5)


def test_sampling_is_uniform_over_filled_rows_only() -> None:
    buffer = make_buffer(1000)
    buffer.add(numbered(0, 10))
    counts = torch.bincount(buffer.sample(20_000).reward.long(), minlength=10)
    assert counts.sum() == 20_000
    assert counts.min() > 1_800
    assert counts.max() < 2_200


def test_sampling_an_empty_buffer_raises() -> None:
    with pytest.raises(ValueError, match="empty"):
        make_buffer(3).sample(1)


def test_discrete_actions_are_returned_as_indices() -> None:
    buffer = ReplayBuffer(8, 2, ActionSpec("discrete", 5))
    rows = numbered(0, 3)._replace(action=np.array([4, 0, 3]))
    buffer.add(rows)
    action = buffer.rows(torch.arange(3)).action
    assert action.dtype == torch.int64
    assert action.tolist() == [4, 0, 3]


def test_memory_equals_the_size_of_the_rows() -> None:
    buffer = ReplayBuffer(1000, 17, 6)
    raw = 1000 * 4 * (17 + 6 + 1 + 1 + 17)
    held = sum(t.untyped_storage().nbytes() for t in vars(buffer).values() if torch.is_tensor(t))
    assert raw <= held <= 1.01 * raw


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 15), min_size=1, max_size=8),
    st.lists(st.integers(0, 15), max_size=8),
)
def test_segments_are_restored_exactly_if_unchanged_ones_are_reused(
    capacity: int, first: list[int], then: list[int]
) -> None:
    buffer, added = make_buffer(capacity), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_buffer, "SEGMENT_ROWS", 4)
        for size in first:
            buffer.add(numbered(added, size))
            added += size
        kept = {index: rows.clone() for index, rows, _ in buffer.segments()}
        since = buffer.rows_added()
        for size in then:
            buffer.add(numbered(added, size))
            added += size
        for index, rows, changed in buffer.segments(since):
            if changed:
                kept[index] = rows.clone()
            else:
                assert torch.equal(kept[index], rows)
        restored = make_buffer(capacity)
        restored.load_segments([kept[index] for index in sorted(kept)], buffer.rows_added())
    everything = torch.arange(len(buffer))
    columns = zip(buffer.rows(everything)[:5], restored.rows(everything)[:5], strict=True)
    for old, new in columns:
        assert torch.equal(old, new)
    buffer.add(numbered(added, 3))
    restored.add(numbered(added, 3))
    assert torch.equal(buffer.rows(everything).reward, restored.rows(everything).reward)


def test_rows_without_new_data_are_not_marked_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "SEGMENT_ROWS", 4)
    buffer = make_buffer(12)
    buffer.add(numbered(0, 9))
    since = buffer.rows_added()
    buffer.add(numbered(9, 1))
    assert [changed for *_, changed in buffer.segments(since)] == [False, False, True]
    buffer.add(numbered(10, 3))  # wraps into the first segment
    assert [changed for *_, changed in buffer.segments(since)] == [True, False, True]


@given(
    n_step=st.integers(1, 5),
    gamma=st.floats(0.1, 1.0),
    endings=st.lists(
        st.lists(st.sampled_from(["goes on", "terminated", "truncated"]), min_size=2, max_size=2),
        min_size=1,
        max_size=25,
    ),
)
def test_n_step_transitions_match_their_definition(
    n_step: int, gamma: float, endings: list[list[str]]
) -> None:
    """Each step starts one transition. Rewards are summed up to the end of its episode."""
    accumulator = NStepAccumulator(n_step, gamma, num_envs=2)
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for time, kinds in enumerate(endings):
        # Observations and actions encode (environment, time), to identify rows.
        marks = np.array([[0.0, time], [1.0, time]], dtype=np.float32)
        rows, environments = accumulator.add(
            marks,
            marks[:, :1],
            marks[:, 1] + 1,
            np.array([kind == "terminated" for kind in kinds]),
            np.array([kind == "truncated" for kind in kinds]),
            marks + np.array([[0.0, 1.0]], dtype=np.float32),
        )
        owners = [0, 1] if environments is None else environments.tolist()
        assert owners == rows.obs[:, 0].tolist()
        for obs, reward, discount, next_obs in zip(
            rows.obs, rows.reward, rows.discount, rows.next_obs, strict=True
        ):
            key = (int(obs[0]), int(obs[1]))
            assert key not in found
            assert next_obs[0] == obs[0]
            found[key] = (float(reward), float(discount), float(next_obs[1]))

    for env in range(2):
        kinds = [row[env] for row in endings]
        for start in range(len(kinds)):
            ends = [t for t in range(start, len(kinds)) if kinds[t] != "goes on"]
            last = min([start + n_step - 1, *ends[:1]])
            if last >= len(kinds):
                assert (env, start) not in found  # not complete yet
                continue
            reward = sum(gamma**k * (start + k + 1) for k in range(last - start + 1))
            alive = 0.0 if kinds[last] == "terminated" else 1.0
            expected = (reward, alive * gamma ** (last - start + 1), last + 1)
            assert found[env, start] == pytest.approx(expected, rel=1e-4)


def test_the_environments_of_transitions_are_named_unless_each_has_one() -> None:
    accumulator, none = NStepAccumulator(2, 0.9, 3), np.zeros(3, np.bool_)
    obs = np.arange(6, dtype=np.float32).reshape(3, 2)
    step = (np.zeros(3), np.ones(3, np.float32))
    _, first = accumulator.add(obs, *step, none, none, obs + 1)
    rows, second = accumulator.add(obs + 1, *step, none, none, obs + 2)
    assert first is not None
    assert (len(first), second) == (0, None)
    assert np.array_equal(rows.obs, obs)
    assert np.array_equal(rows.next_obs, obs + 2)
    _, third = accumulator.add(obs + 2, *step, np.array([True, False, False]), none, obs + 3)
    assert third is not None
    assert third.tolist() == [0, 1, 2, 0]


def test_an_accumulator_continues_from_its_saved_state() -> None:
    def step(accumulator: NStepAccumulator, time: int) -> Transitions:
        marks = np.full((1, 1), time, dtype=np.float32)
        ended = np.array([time == 4])
        return accumulator.add(marks, marks, marks[:, 0], ended, ~ended & False, marks + 1)[0]

    uninterrupted, parted = NStepAccumulator(3, 0.9, 1), NStepAccumulator(3, 0.9, 1)
    for time in range(2):
        step(uninterrupted, time)
        step(parted, time)
    resumed = NStepAccumulator(3, 0.9, 1)
    resumed.load_state_dict({k: v.copy() for k, v in parted.state_dict().items()})
    for time in range(2, 8):
        for expected, got in zip(step(uninterrupted, time), step(resumed, time), strict=True):
            np.testing.assert_array_equal(expected, got)


def test_some_environments_of_an_accumulator_continue_beside_others() -> None:
    def step(accumulator: NStepAccumulator, time: int, envs: slice) -> Transitions:
        marks = np.array([[0.0, time], [1.0, time], [2.0, time]], dtype=np.float32)[envs]
        ended = np.array([time == 4, time == 3, False])[envs]
        return accumulator.add(marks, marks, marks[:, 1], ended, ~ended & False, marks + 1)[0]

    uninterrupted = NStepAccumulator(3, 0.9, 3)
    for time in range(2):
        step(uninterrupted, time, slice(None))
    resumed = NStepAccumulator(3, 0.9, 2)
    for place, env in enumerate((0, 2)):
        saved = uninterrupted.state_dict(slice(env, env + 1))
        resumed.load_state_dict(saved, slice(place, place + 1))
    for time in range(2, 8):
        expected = step(uninterrupted, time, slice(None))
        got = step(resumed, time, slice(None, None, 2))
        kept = expected.obs[:, 0] != 1.0
        for one, other in zip(expected.select(kept), got, strict=True):
            np.testing.assert_array_equal(one, other)


def test_inactive_environments_store_no_transitions() -> None:
    for n_step in (1, 2):
        accumulator = NStepAccumulator(n_step, 0.9, 2)
        active = np.array([True, False])
        stored = []
        for time in range(4):
            marks = np.array([[0.0, time], [1.0, time]], dtype=np.float32)
            none = np.zeros(2, dtype=np.bool_)
            rows, environments = accumulator.add(
                marks, marks, marks[:, 1], none, none, marks, active
            )
            assert environments is not None
            assert set(environments.tolist()) <= {0}
            stored += rows.obs[:, 1].tolist()
        assert stored == list(range(5 - n_step))


@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=1, max_size=6),
)
def test_each_seed_of_a_population_has_its_own_buffer(
    capacity: int, calls: list[list[int]]
) -> None:
    together = ReplayBuffer(capacity, 2, 1, slots=(2, 0, 1), width=3)
    alone = [make_buffer(capacity) for _ in range(3)]
    added = 0
    for owners in calls:
        rows = numbered(added, len(owners))
        together.add(rows, np.array(owners, dtype=np.int64))
        for seed_index, buffer in enumerate(alone):
            owned_rows = np.array(owners) == seed_index
            buffer.add(rows.select(owned_rows) if len(owners) else rows)
        added += len(owners)
    assert len(together) == min(len(buffer) for buffer in alone)
    for seed_index, buffer in enumerate(alone):
        assert together.rows_added(seed_index) == buffer.rows_added()
        pairs = zip(together.segments(seed_index=seed_index), buffer.segments(), strict=True)
        assert all(torch.equal(one, other) for (_, one, _), (_, other, _) in pairs)
    if len(together):
        bits = torch.randint(2**62, (3, 50), generator=torch.Generator().manual_seed(0))
        drawn = together.draw(bits)
        for slot, seed_index in enumerate((1, 2, 0)):
            expected = alone[seed_index].draw(bits[slot])
            assert torch.equal(drawn.reward[slot], expected.reward)


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_rows_without_owners_are_distributed_evenly(capacity: int, calls: list[int]) -> None:
    dealt, owned = (ReplayBuffer(capacity, 2, 1, slots=(0, 1, 2), width=3) for _ in range(2))
    added = 0
    for each in calls:
        rows = numbered(added, 3 * each)
        dealt.add(rows)
        owned.add(rows, np.repeat(np.arange(3), each))
        added += 3 * each
    for seed_index in range(3):
        assert dealt.rows_added(seed_index) == owned.rows_added(seed_index) == sum(calls)
        pairs = zip(
            dealt.segments(seed_index=seed_index),
            owned.segments(seed_index=seed_index),
            strict=True,
        )
        assert all(torch.equal(one, other) for (_, one, _), (_, other, _) in pairs)


def test_a_slot_without_a_seed_reads_existing_rows() -> None:
    buffer = ReplayBuffer(8, 2, 1, slots=(1,), width=3)
    buffer.add(numbered(5, 2))
    assert set(buffer.sample(100).reward.flatten().tolist()) == {5.0, 6.0}


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "flush", "stage"]))),
)
def test_pending_rows_are_written_to_the_same_places(
    capacity: int, calls: list[tuple[int, str]]
) -> None:
    """On a GPU, rows are buffered and copied together with other data."""
    at_once, waiting, added = make_buffer(capacity), make_buffer(capacity), 0
    waiting._defers = True
    positions, sizes = np.zeros(5, np.int64), np.zeros(1, np.int64)
    rows = np.zeros((5, waiting.row_width), np.float32)
    for size, then in calls:
        for buffer in (at_once, waiting):
            buffer.add(numbered(added, size))
        added += size
        if then == "flush":
            waiting.flush()
        elif then == "stage":
            waiting.stage(positions, rows, sizes)
            waiting.write(*(torch.from_numpy(array) for array in (positions, rows, sizes)))
    waiting.flush()
    bits = torch.arange(3 * capacity)
    for one, other in zip(at_once.draw(bits)[:5], waiting.draw(bits)[:5], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("returns", [False, True])
def test_words_of_the_next_observation_are_found_beside_returns(returns: bool) -> None:
    columns = RowColumns.of(4, 2, returns=returns)
    # 4 words of the observation, 2 of the action, the reward, the discount, and then the next one.
    assert columns.of_next_observation(slice(1, 3)) == slice(9, 11)
