"""Images are stored as frames, and sampled as if they were not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from frame_patterns import Pictures, bits_of, stacked, transitions_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.data import ReplayBuffer, Transitions
from rl_training.data.storage import frame_ring, recent_frames
from rl_training.data.storage.recent_frames import RecentFrames
from rl_training.data.storage.stacks import FrameLayout, frames_in
from rl_training.observations import ObservationSpec
from rl_training.types import ActionSpec, Batch

ATARI = stacked((4, 84, 84))
SPECS = st.sampled_from(
    [
        stacked((4, 3, 5)),  # 15 bytes per frame: no multiple of a word
        stacked((4, 2, 8)),
        stacked((2, 2, 3, 3), numbers=2),
        stacked((4, 2, 6), (5, 4, 3), numbers=1),  # a stack and a single image
    ]
)


@pytest.fixture(autouse=True)
def without_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the replay buffer keeps fewer")
        yield


def assert_equal(first: Batch, second: Batch) -> None:
    for name, one, other in zip(Batch._fields, first, second, strict=True):
        if one is not None or other is not None:
            assert torch.equal(bits_of(one), bits_of(other)), name


def sampled_positions(buffer: ReplayBuffer, seed: int = 0) -> torch.Tensor:
    """The storage positions of all rows that can be sampled."""
    added, frames = buffer.rows_added(seed), buffer._frames
    oldest = 0 if frames is None else int(frames.oldest[seed])
    rows = np.arange(max(oldest, added - buffer.capacity), added)
    return torch.from_numpy(rows % buffer.capacity + seed * buffer.capacity)


@st.composite
def patterns(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "spec": draw(SPECS),
        "capacity": draw(st.integers(1, 60)),
        "num_envs": draw(st.integers(1, 3)),
        "num_seeds": draw(st.integers(1, 2)),
        "n_step": draw(st.integers(1, 6)),
        "longest": draw(st.sampled_from([1, 2, 5, 30, 200])),
        "still": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "padded": draw(st.booleans()),
        "lost": draw(st.sampled_from([0.0, 0.1])),
        "steps": draw(st.integers(1, 90)),
        "seed": draw(st.integers(0, 2**20)),
    }


def filled_buffers(pattern: dict[str, Any], **options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    """A buffer that stores frames, and one that stores the same transitions as they are."""
    spec, num_envs, num_seeds = pattern["spec"], pattern["num_envs"], pattern["num_seeds"]
    layout = FrameLayout(spec, num_envs=num_envs, n_step=pattern["n_step"])
    seeds = {"slots": tuple(range(num_seeds)), "width": num_seeds}
    framed, plain = (
        ReplayBuffer(pattern["capacity"], spec, 2, frames=frames, **seeds, **options)
        for frames in (layout, None)
    )
    pictures = [
        Pictures(
            layout, pattern["seed"] + i, **{k: pattern[k] for k in ("longest", "still", "padded")}
        )
        for i in range(num_envs * num_seeds)
    ]
    steps = transitions_of(
        pictures, pattern["steps"], pattern["n_step"], pattern["lost"], pattern["seed"]
    )
    for rows, environments in steps:
        for buffer in (framed, plain):
            buffer.add(rows, environments // num_envs)
    return framed, plain


@settings(deadline=None, max_examples=150)
@given(patterns())
def test_every_row_that_is_sampled_is_bit_equal_to_that_of_a_plain_buffer(
    pattern: dict[str, Any],
) -> None:
    framed, plain = filled_buffers(pattern)
    for seed in range(pattern["num_seeds"]):
        chosen = sampled_positions(framed, seed)
        assert len(chosen) <= len(sampled_positions(plain, seed))
        assert (len(chosen) > 0) == (plain.rows_added(seed) > 0)
        assert_equal(framed.rows(chosen), plain.rows(chosen))
    if len(plain) and len(framed) == len(plain):
        bits = torch.randint(0, 2**62, (*framed.random_bits(1).shape[:-1], 50))
        complete = [len(sampled_positions(framed, s)) for s in range(pattern["num_seeds"])]
        if complete == [len(sampled_positions(plain, s)) for s in range(pattern["num_seeds"])]:
            assert_equal(framed.draw(bits), plain.draw(bits))


@settings(deadline=None, max_examples=60)
@given(patterns())
def test_only_complete_rows_are_drawn(pattern: dict[str, Any]) -> None:
    framed, plain = filled_buffers({**pattern, "longest": 2, "num_seeds": 2})
    if not len(framed):
        return
    drawn = framed.draw(torch.arange(4 * pattern["capacity"]).expand(2, -1))
    for seed in range(2):
        rewards = plain.rows(sampled_positions(framed, seed)).reward
        assert set(drawn.reward[seed].tolist()) == set(rewards.tolist())


@settings(deadline=None, max_examples=40)
@given(patterns())
def test_prioritized_sampling_leaves_out_incomplete_rows(pattern: dict[str, Any]) -> None:
    framed, plain = filled_buffers({**pattern, "num_seeds": 1}, priority_exponent=0.6)
    if not len(framed):
        return
    bits = torch.randint(0, 2**62, (40,))
    batch = framed.draw(bits)
    assert batch.indices is not None
    assert set(batch.indices.tolist()) <= set(sampled_positions(framed).tolist())
    assert_equal(Batch(*batch[:5]), plain.rows(batch.indices))
    framed.update_priorities(batch.indices, torch.rand(40))
    assert framed.priorities is not None
    assert framed.priorities.extremes().isfinite().all()


def restored_copy(buffer: ReplayBuffer, **options: Any) -> ReplayBuffer:
    copy = ReplayBuffer(
        buffer.capacity, buffer.columns.observation, 2, frames=buffer.columns.frames, **options
    )
    frames = buffer.frames_added()
    for index, added in enumerate(frames):
        copy.load_frames(
            index, [part.clone() for _, part, _ in buffer.frame_segments(index)], added
        )
    segments = [rows.clone() for _, rows, _ in buffer.segments()]
    for rows in segments:
        copy.check_rows(rows, frames)
    copy.load_segments(segments, buffer.rows_added())
    copy.load_priority_state(buffer.priority_state())
    return copy


@settings(deadline=None, max_examples=60)
@given(patterns(), st.booleans())
def test_a_restored_buffer_continues_exactly(pattern: dict[str, Any], prioritized: bool) -> None:
    options = {"priority_exponent": 0.6} if prioritized else {}
    pattern = {**pattern, "num_seeds": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_ring, "SEGMENT_BYTES", 60)
        first, plain = filled_buffers(pattern, **options)
        if not plain.rows_added():
            return
        second = restored_copy(first, **options)
        layout = FrameLayout(pattern["spec"], num_envs=1)
        more = Pictures(layout, 1, longest=3, still=0.3, padded=True)
        for rows, _ in transitions_of([more], 40):
            for buffer in (first, second, plain):
                buffer.add(rows)
        assert second.frames_added() == first.frames_added()
        chosen = sampled_positions(second)
        assert torch.equal(chosen, sampled_positions(first))
        assert_equal(second.rows(chosen), plain.rows(chosen))
        bits = torch.randint(0, 2**62, (30,))
        assert_equal(first.draw(bits), second.draw(bits))
        for one, other in zip(first.segments(), second.segments(), strict=True):
            assert torch.equal(bits_of(one[1]), bits_of(other[1]))


@settings(deadline=None, max_examples=40)
@given(patterns(), st.integers(0, 60))
def test_only_segments_with_new_frames_are_marked_as_changed(
    pattern: dict[str, Any], then: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_ring, "SEGMENT_BYTES", 60)
        buffer, _ = filled_buffers({**pattern, "num_seeds": 1})
        since = buffer.frames_added()
        kept = [
            {index: part.clone() for index, part, _ in buffer.frame_segments(ring)}
            for ring in range(len(since))
        ]
        layout = FrameLayout(pattern["spec"])
        more = Pictures(layout, 1, longest=9, still=0.0, padded=False)
        for rows, _ in transitions_of([more], then):
            buffer.add(rows)
        for ring, added in enumerate(since):
            for index, part, changed in buffer.frame_segments(ring, added):
                assert changed or torch.equal(part, kept[ring][index])


def test_each_frame_of_a_stack_is_stored_once() -> None:
    layout = FrameLayout(ATARI)
    buffer = ReplayBuffer(400, ATARI, 2, frames=layout)
    pictures = Pictures(layout, 0, longest=1, still=0.0, padded=False)
    pictures._left = 300
    for rows, _ in transitions_of([pictures], 300):
        buffer.add(rows)
    assert buffer.frames_added() == [301]


@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 8])
def test_long_episodes_need_hardly_more_frames_than_transitions(n_step: int, num_envs: int) -> None:
    spec = stacked((4, 6, 6))
    layout = FrameLayout(spec, num_envs=num_envs, n_step=n_step)
    buffer = ReplayBuffer(8_000, spec, 2, frames=layout)
    pictures = [Pictures(layout, i, longest=200, still=0.0, padded=True) for i in range(num_envs)]
    for rows, _ in transitions_of(pictures, 4_000 // num_envs, n_step):
        buffer.add(rows)
    assert buffer.frames_added()[0] < 1.06 * buffer.rows_added()


def test_a_million_transitions_of_atari_take_less_than_eight_gigabytes() -> None:
    layout = FrameLayout(ATARI, num_envs=8, n_step=3)
    rows = ReplayBuffer.row_bytes(
        ATARI, ActionSpec("discrete", 18), frames=layout, prioritized=True
    )
    counters = 8 * len(layout.stacks)
    assert 1_000_000 * (rows + counters) + layout.bytes_of(1_000_000) < 8e9


def test_a_buffer_that_has_no_room_for_all_frames_says_so_once() -> None:
    spec = stacked((4, 6, 6))
    layout = FrameLayout(spec)
    buffer = ReplayBuffer(50, spec, 2, frames=layout)
    pictures = Pictures(layout, 0, longest=1, still=0.0, padded=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows, _ in transitions_of([pictures], 400):
            buffer.add(rows)
    [warning] = [each for each in caught if "replay buffer" in str(each.message)]
    assert "replay_frame_stack" in str(warning.message)
    assert 20 < len(buffer) < 50


def test_frames_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_frames, "_weights", lambda width: np.zeros(width, np.uint64))
    recent = RecentFrames(np.zeros((20, 1), np.uint64), 10)
    frames = np.array([[1], [2], [2], [1], [2]], np.uint64)
    numbers, is_new = recent.place(frames)
    memory = recent._memory[numbers]
    assert np.array_equal(memory, frames)
    assert is_new.sum() == recent.added


def test_a_frame_is_found_again_within_the_window_only() -> None:
    recent = RecentFrames(np.zeros((6, 1), np.uint64), 3)
    assert recent.place(np.array([[7], [8], [7]], np.uint64))[0].tolist() == [0, 1, 0]
    assert recent.place(np.array([[9], [10]], np.uint64))[0].tolist() == [2, 3]
    assert recent.place(np.array([[7], [8]], np.uint64))[0].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("shape", "choice", "frames"),
    [
        ((4, 84, 84), "auto", 4),
        ((4, 84, 84, 3), "auto", 4),
        ((84, 84, 3), "auto", 1),
        ((84, 84), "auto", 1),
        ((3, 84, 84), "auto", 1),
        ((9, 84, 84), "auto", 1),
        ((9, 84, 84), 3, 3),
        ((3, 84, 84), 3, 3),
        ((4, 84, 84), 1, 1),
        ((5, 84, 84), 2, 1),
    ],
)
def test_stacks_are_recognized_by_their_shape(
    shape: tuple[int, ...], choice: Any, frames: int
) -> None:
    assert frames_in(shape, choice) == frames


@pytest.mark.parametrize("position", [-1, 2**31 - 1])
def test_rows_that_refer_to_missing_frames_are_refused(position: int) -> None:
    pattern = {
        **{"spec": stacked((4, 2, 8), numbers=2), "capacity": 20, "num_envs": 1, "num_seeds": 1},
        **{"n_step": 1, "longest": 5, "still": 0.0, "padded": True, "lost": 0.0, "seed": 0},
    }
    buffer, _ = filled_buffers({**pattern, "steps": 8})
    [(_, rows, _)] = buffer.segments()
    buffer.check_rows(rows, buffer.frames_added())
    for column in (2, rows.shape[1] - 2):
        wrong = rows.clone()
        wrong.view(torch.int32)[3, column] = position
        with pytest.raises(ValueError, match="refers to frames"):
            buffer.check_rows(wrong, buffer.frames_added())
    wrong = rows.clone()
    wrong[2, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        buffer.check_rows(wrong, buffer.frames_added())
    wrong = rows.clone()
    wrong.view(torch.int32)[2, -1] = 9
    with pytest.raises(ValueError, match="counts frames"):
        buffer.check_rows(wrong, buffer.frames_added())


def test_words_of_other_leaves_may_look_like_nan() -> None:
    buffer = ReplayBuffer(4, stacked((2, 2, 2)), 1)
    image = np.full((1, 2), np.float32("nan"))
    buffer.add(Transitions(image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), image))
    [(_, rows, _)] = buffer.segments()
    buffer.check_rows(rows)
    vector = ReplayBuffer(4, ObservationSpec.vector(2), 1)
    with pytest.raises(ValueError, match="not finite"):
        vector.check_rows(rows)
