"""Prioritized sampling: sums, frequencies and weights after any sequence of updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data.n_step import Transitions
from rl_training.data.priorities import FAN_OUT, Priorities
from rl_training.data.replay_buffer import ReplayBuffer

EXPONENT = 0.6


def random_bits(*shape: int, seed: int = 0) -> torch.Tensor:
    bits = torch.empty(shape, dtype=torch.int64)
    return bits.random_(generator=torch.Generator().manual_seed(seed))


def priority(error: float) -> float:
    return (abs(error) + 1e-6) ** EXPONENT


def shares(priorities: Priorities, rows: int, draws: int = 40_000) -> np.ndarray:
    drawn, _ = priorities.draw(random_bits(draws), 0, torch.tensor(rows))
    return np.bincount(drawn.numpy(), minlength=rows) / draws


def transitions(rows: int, first: int = 0) -> Transitions:
    numbers = np.arange(first, first + rows, dtype=np.float32)
    return Transitions(numbers[:, None], numbers[:, None], numbers, numbers, numbers[:, None])


@settings(max_examples=25)
@given(st.data())
def test_rows_are_sampled_in_proportion_to_their_priorities(data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, 2, 7, FAN_OUT - 1, FAN_OUT, FAN_OUT + 1, 300]))
    errors = np.array(
        data.draw(st.lists(st.floats(0, 100, width=32), min_size=rows, max_size=rows)),
        dtype=np.float32,
    )
    priorities = Priorities(rows + data.draw(st.integers(0, 200)), EXPONENT, device="cpu")
    positions = torch.arange(rows)
    priorities.admit(positions)
    order = torch.randperm(rows)
    priorities.update(positions[order], torch.from_numpy(errors)[order])
    expected = np.array([priority(error) for error in errors])
    # Stratified sampling keeps the counts close to their expectation.
    np.testing.assert_allclose(shares(priorities, rows), expected / expected.sum(), atol=2e-4)


@settings(max_examples=25)
@given(st.data())
def test_every_node_is_the_sum_of_its_children_after_any_updates(data: st.DataObject) -> None:
    capacity = data.draw(st.sampled_from([1, 5, FAN_OUT, FAN_OUT**2 + 3]))
    priorities = Priorities(capacity, EXPONENT, num_seeds=2, device="cpu")
    leaves = np.zeros((2, capacity))
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, 20))
        seed = data.draw(st.integers(0, 2**31))
        stream = np.random.default_rng(seed)
        positions = stream.integers(0, 2 * capacity, count)
        if data.draw(st.booleans()):
            largest = priorities.largest.numpy().copy()
            priorities.admit(torch.from_numpy(positions))
            leaves.reshape(-1)[positions] = largest[positions // capacity]
        else:
            errors = stream.normal(size=count).astype(np.float32)
            priorities.update(torch.from_numpy(positions), torch.from_numpy(errors))
            leaves.reshape(-1)[positions] = 0
            given_ones = [priority(error) for error in errors]
            np.maximum.at(leaves.reshape(-1), positions, given_ones)
    for seed_index in range(2):
        state = priorities.state_dict(seed_index, capacity)
        np.testing.assert_allclose(state["level_0"].numpy(), leaves[seed_index], rtol=1e-5)
        below = state["level_0"].double().sum().item()
        for level in range(1, len(priorities.levels)):
            assert state[f"level_{level}"].double().sum().item() == pytest.approx(below, rel=1e-5)


def test_a_new_row_has_the_largest_priority_so_far() -> None:
    priorities = Priorities(10, EXPONENT, device="cpu")
    priorities.admit(torch.arange(2))
    priorities.update(torch.arange(2), torch.tensor([0.1, 32.0]))
    priorities.admit(torch.tensor([2]))
    assert priorities.levels[0][2] == priorities.levels[0][1] == pytest.approx(priority(32.0))


def test_the_largest_of_several_errors_of_a_row_is_used() -> None:
    priorities = Priorities(10, EXPONENT, device="cpu")
    priorities.update(torch.tensor([3, 3, 3]), torch.tensor([1.0, -5.0, 2.0]))
    assert priorities.levels[0][3].item() == pytest.approx(priority(5.0))
    priorities.update(torch.tensor([3]), torch.tensor([0.5]))
    assert priorities.levels[0][3].item() == pytest.approx(priority(0.5))


def test_importance_weights_correct_for_the_sampling() -> None:
    priorities = Priorities(10, EXPONENT, device="cpu")
    errors = torch.tensor([0.1, 1.0, 5.0, 20.0])
    priorities.update(torch.arange(4), errors)
    drawn, weights = priorities.draw(random_bits(50_000), 0, torch.tensor(4))
    values = torch.tensor([3.0, -1.0, 7.0, 2.0])
    assert (weights * values[drawn]).mean().item() == pytest.approx(values.mean().item(), rel=0.01)


def test_rows_that_were_never_added_are_never_drawn() -> None:
    priorities = Priorities(1_000, EXPONENT, device="cpu")
    priorities.admit(torch.arange(3))
    extremes = torch.tensor([0, 2**63 - 1, 2**62] * 100)
    drawn, weights = priorities.draw(extremes, 0, torch.tensor(3))
    assert set(drawn.tolist()) == {0, 1, 2}
    torch.testing.assert_close(weights, torch.ones(300))


def buffer(**settings: object) -> ReplayBuffer:
    return ReplayBuffer(8, 1, 1, priority_exponent=EXPONENT, **settings)


def test_a_buffer_samples_by_the_errors_of_the_learner() -> None:
    replay = buffer()
    replay.add(transitions(6))
    batch = replay.draw(random_bits(600))
    assert set(batch.reward.tolist()) == {0, 1, 2, 3, 4, 5}
    torch.testing.assert_close(batch.weights, torch.ones(600))
    errors = torch.where(batch.reward == 4, 1e5, 0.0)
    replay.update_priorities(batch.indices, errors)
    batch = replay.draw(random_bits(600))
    assert (batch.reward == 4).float().mean() > 0.95
    assert batch.weights[batch.reward == 4].max() < 1


def test_the_priority_of_an_overwritten_row_is_replaced() -> None:
    replay = buffer()
    replay.add(transitions(8))
    replay.update_priorities(torch.arange(8), torch.full((8,), 1e-3))
    replay.update_priorities(torch.tensor([0]), torch.tensor([1e-3]))
    replay.add(transitions(1, first=8))  # replaces row 0, with the largest priority, 1
    batch = replay.draw(random_bits(1_000))
    assert (batch.reward == 8).float().mean() > 0.85


def test_each_seed_of_a_population_has_its_own_priorities() -> None:
    replay = ReplayBuffer(8, 1, 1, priority_exponent=EXPONENT, slots=(0, 2), width=3)
    replay.add(transitions(6), np.array([0, 0, 0, 1, 1, 1]))
    batch = replay.draw(random_bits(3, 200))
    assert set(batch.reward[0].tolist()) == {0, 1, 2}
    assert set(batch.reward[2].tolist()) == {3, 4, 5}
    errors = torch.where(batch.reward == 4, 1e5, 1.0)
    errors[1] = 1e9  # a slot without a seed
    replay.update_priorities(batch.indices, errors)
    batch = replay.draw(random_bits(3, 600))
    assert (batch.reward[2] == 4).float().mean() > 0.95
    assert (batch.reward[0] == 1).float().mean() == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("seed_index", [0, 2])
def test_priorities_are_saved_and_restored_bit_for_bit(seed_index: int) -> None:
    first, second = buffer(first_seed=seed_index), buffer(first_seed=seed_index)
    first.add(transitions(7))
    first.update_priorities(torch.arange(7), torch.randn(7))
    segments = [rows.clone() for _, rows, _ in first.segments(seed_index=seed_index)]
    second.load_segments(segments, first.rows_added(seed_index), seed_index)
    second.load_priority_state(first.priority_state(seed_index), seed_index)
    bits = random_bits(64)
    for one, other in zip(first.draw(bits)[:7], second.draw(bits)[:7], strict=True):
        assert torch.equal(one, other)
    first.add(transitions(3, first=7))
    second.add(transitions(3, first=7))
    assert torch.equal(first.draw(bits).indices, second.draw(bits).indices)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("level_0", 3, float("nan")),
        ("level_0", 3, float("inf")),
        ("level_0", 3, -1.0),
        ("level_0", 3, 0.0),
        ("level_0", 3, 50.0),
        ("level_1", 0, 0.0),
        ("level_1", 100, 1e9),
        ("largest", (), float("nan")),
        ("largest", (), -1.0),
    ],
)
def test_priorities_that_could_select_a_row_that_does_not_exist_are_refused(
    name: str, index: int | tuple[()], value: float
) -> None:
    saved, restored = (ReplayBuffer(300, 1, 1, priority_exponent=EXPONENT) for _ in range(2))
    for each in (saved, restored):
        each.add(transitions(250))
    state = {key: tensor.clone() for key, tensor in saved.priority_state().items()}
    restored.load_priority_state(state)
    state[name][index] = value
    with pytest.raises(ValueError, match="not possible"):
        restored.load_priority_state(state)
