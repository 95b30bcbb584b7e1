"""Random numbers drawn for many updates at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.algorithms.base import Draw
from rl_training.execution.random_streams import ROUNDS, RandomPool

DRAWS = {
    "action": Draw("normal", (3, 2)),
    "subset": Draw("uniform", (4,)),
    "rows": Draw("bits", (5,)),
    "more": Draw("normal", ()),
}


def make_pool(*seeds: int) -> RandomPool:
    return RandomPool(DRAWS, [torch.Generator().manual_seed(seed) for seed in seeds], "cpu")


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, numbers in one.items():
        assert torch.equal(numbers, other[name]), name


def test_numbers_have_the_requested_shapes_and_ranges_and_never_repeat() -> None:
    pool = make_pool(0)
    rounds = [{k: v.clone() for k, v in pool.take().items()} for _ in range(2 * ROUNDS + 3)]
    for name, draw in DRAWS.items():
        numbers = torch.stack([one[name] for one in rounds])
        assert numbers.shape[1:] == draw.shape
        assert numbers.flatten().unique().numel() == numbers.numel()
    uniform = torch.stack([one["subset"] for one in rounds])
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert min(one["rows"].min() for one in rounds) >= 0
    assert abs(torch.stack([one["action"] for one in rounds]).mean()) < 0.2


def test_a_seed_draws_the_same_numbers_alone_and_in_a_population() -> None:
    alone, together = make_pool(7), make_pool(3, 7)
    for _ in range(ROUNDS + 2):
        among = {name: numbers[1] for name, numbers in together.take().items()}
        assert_equal(alone.take(), among)


@settings(deadline=None)
@given(st.integers(0, 2 * ROUNDS + 2), st.integers(1, ROUNDS + 2))
def test_a_pool_continues_from_its_saved_state(before: int, after: int) -> None:
    uninterrupted, resumed = make_pool(1, 2), make_pool(8, 9)
    for _ in range(before):
        uninterrupted.take()
    for slot in range(2):
        resumed.load_state_dict(uninterrupted.state_dict(slot), slot)
    for _ in range(after):
        assert_equal(uninterrupted.take(), resumed.take())


def test_streams_at_different_rounds_are_refused() -> None:
    ahead, pool = make_pool(1), make_pool(1, 2)
    ahead.take()
    pool.load_state_dict(make_pool(1).state_dict(), 0)
    with pytest.raises(ValueError, match="rounds 0 and 1"):
        pool.load_state_dict(ahead.state_dict(), 1)


def test_the_cursor_reads_the_current_round() -> None:
    pool = make_pool(4, 5)
    for _ in range(3):
        read = {name: numbers.clone() for name, numbers in pool.at_cursor().items()}
        pool.cursor.add_(1)
        assert_equal(read, pool.take())
