"""Datasets: episode ends, bootstrapping, n-step returns, mixtures, fingerprints, errors."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_training.data import (
    DatasetPart,
    Mixture,
    NStepAccumulator,
    ObservationNormalizer,
    OfflineDataset,
    ReplayBuffer,
    RewardOptions,
    Transitions,
    array_recording,
    fingerprint_difference,
    load_dataset,
)
from rl_training.errors import DataError
from rl_training.types import Batch, SpaceInfo

GAMMA = 0.5
SPACES = SpaceInfo(1, 1, action_low=np.array([-2.0]), action_high=np.array([2.0]))


def recorded(episodes: list[tuple[int, bool]], **changes: Any) -> dict[str, np.ndarray]:
    """Return arrays of episodes, given as (length, terminated). Observations count the steps."""
    obs, next_obs, terminals, timeouts, first = [], [], [], [], 0
    for length, terminated in episodes:
        obs += range(first, first + length)
        next_obs += range(first + 1, first + length + 1)
        terminals += [False] * (length - 1) + [terminated]
        timeouts += [False] * (length - 1) + [not terminated]
        first += length + 10  # so that consecutive episodes share no observation
    numbers = np.arange(len(obs), dtype=np.float32)
    arrays = {
        "observations": np.array(obs, np.float32)[:, None],
        "actions": np.linspace(-2, 2, len(obs), dtype=np.float32)[:, None],
        "rewards": numbers + 1,
        "terminals": np.array(terminals),
        "timeouts": np.array(timeouts),
        "next_observations": np.array(next_obs, np.float32)[:, None],
    }
    arrays.update(changes)
    return {key: value for key, value in arrays.items() if value is not None}


def load(*arrays: dict[str, np.ndarray], spaces: SpaceInfo | None = SPACES, **options: Any):
    options = {"gamma": GAMMA, **options}
    return load_dataset([DatasetPart(array_recording(part)) for part in arrays], spaces, **options)


def rows(dataset: OfflineDataset) -> Batch:
    return dataset.rows(torch.arange(len(dataset)))


episode_lists = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=8)


# Ends of episodes


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not() -> None:
    batch = rows(load(recorded([(3, False), (2, True)])))
    assert batch.discount.tolist() == [GAMMA, GAMMA, GAMMA, GAMMA, 0.0]
    assert batch.next_obs[:, 0].tolist() == [1, 2, 3, 14, 15]


@given(episode_lists)
def test_without_next_observations_no_row_crosses_an_episode(
    episodes: list[tuple[int, bool]],
) -> None:
    complete = rows(load(recorded(episodes)))
    kept = [  # all but the last step of a truncated episode
        terminated or step < length - 1 for length, terminated in episodes for step in range(length)
    ]
    arrays = recorded(episodes, next_observations=None)
    if not any(kept):
        with pytest.raises(DataError, match="contains no step whose"):
            load(arrays)
        return
    dataset = load(arrays)
    batch = rows(dataset)
    assert batch.obs.equal(complete.obs[torch.tensor(kept)])
    assert batch.discount.equal(complete.discount[torch.tensor(kept)])
    alive = batch.discount > 0  # the next observation of a terminated step is not used
    assert batch.next_obs[alive].equal(complete.next_obs[torch.tensor(kept)][alive])
    lengths = [length - (not terminated) for length, terminated in episodes]
    assert dataset.episode_lengths.tolist() == [length for length in lengths if length]


@given(episode_lists)
def test_episode_ends_are_found_from_any_suitable_array(
    episodes: list[tuple[int, bool]],
) -> None:
    arrays = recorded(episodes)
    expected = load(arrays)
    ended = arrays["terminals"] | arrays["timeouts"]
    by_episode_terminals = load({**recorded(episodes, timeouts=None), "episode_terminals": ended})
    by_jumps = load(recorded(episodes, timeouts=None))
    for dataset in (by_episode_terminals, by_jumps):
        assert dataset.packed.equal(expected.packed)
        assert dataset.episode_ends.tolist() == expected.episode_ends.tolist()


@pytest.mark.parametrize(
    ("types", "rounded", "scale"),
    [
        (("float64", "float16"), "float64", 1.0),
        *[
            case
            for scale in (1e-30, 1.0, 1e30)
            for case in (
                (("float32", "float64"), "float64", scale),
                (("float64", "float32"), "float64", scale),
                (("float64", "float64"), "float32", scale),  # rounded before it was stored
            )
        ],
    ],
)
def test_jumps_end_an_episode_and_rounding_errors_do_not(
    types: tuple[str, str], rounded: str, scale: float
) -> None:
    walk = scale * np.random.default_rng(0).normal(size=(3001, 4))
    obs, following = walk[:-1].astype(rounded), walk[1:].copy()
    following[999::1000] *= 1.01  # a jump to another episode
    arrays = {
        "observations": obs.astype(types[0]),
        "next_observations": following.astype(types[1]),
        "actions": np.zeros((3000, 1)),
        "rewards": np.zeros(3000),
        "terminals": np.zeros(3000),
    }
    ends = np.concatenate([steps.ended for steps in array_recording(arrays).chunks()])
    assert np.flatnonzero(ends).tolist() == [999, 1999, 2999]


@pytest.mark.parametrize("decimals", [4, None])
def test_observations_that_rarely_match_the_next_ones_give_a_warning(decimals: int | None) -> None:
    walk = np.random.default_rng(0).normal(size=(1001, 4))
    arrays = {
        "observations": walk[:-1] if decimals is None else walk[:-1].round(decimals),
        "next_observations": walk[1:],
        "actions": np.zeros((1000, 1)),
        "rewards": np.zeros(1000),
        "terminals": np.zeros(1000),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended = np.concatenate([steps.ended for steps in array_recording(arrays).chunks()])
    messages = [str(each.message) for each in caught]
    if decimals is None:
        assert (int(ended.sum()), messages) == (1, [])
    else:
        assert int(ended.sum()) == 1000
        assert len(messages) == 1
        assert re.search(r"999 of 1,000 steps end an episode.*`timeouts`", messages[0])


def test_integer_observations_that_differ_by_one_are_a_jump() -> None:
    obs = np.arange(2**40, 2**40 + 6)[:, None]
    following = obs + 1
    following[2] += 1
    arrays = recorded([(6, False)], observations=obs, next_observations=following, timeouts=None)
    (steps,) = array_recording(arrays).chunks()
    assert np.flatnonzero(steps.ended).tolist() == [2, 5]


def test_data_without_episode_ends_is_refused_unless_max_episode_steps_is_given() -> None:
    arrays = recorded([(4, False), (4, False)], timeouts=None, next_observations=None)
    with pytest.raises(
        DataError, match=r"episode ends are not marked.*timeouts.*max_episode_steps"
    ):
        load(arrays)
    recording = array_recording(arrays, max_episode_steps=4)
    dataset = load_dataset([DatasetPart(recording)], SPACES)
    assert dataset.episode_lengths.tolist() == [3, 3]


def test_termination_takes_precedence_over_truncation() -> None:
    both = np.array([False, True])
    batch = rows(load(recorded([(2, True)], terminals=both, timeouts=both)))
    assert batch.discount.tolist() == [GAMMA, 0.0]


def test_recordings_longer_than_a_chunk_are_read_completely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    episodes = [(5, True), (3, False), (4, True), (6, False)]
    variants = [
        recorded(episodes),
        recorded(episodes, next_observations=None),
        recorded(episodes, timeouts=None),
    ]
    at_once = [load(arrays, n_step=3) for arrays in variants]
    for module in ("formats.columns", "episodes"):
        monkeypatch.setattr(f"rl_training.data.{module}.CHUNK_ROWS", 2)
    for arrays, expected in zip(variants, at_once, strict=True):
        dataset = load(arrays, n_step=3)
        assert dataset.packed.equal(expected.packed)
        assert dataset.fingerprint["sha256"] == expected.fingerprint["sha256"]
        assert dataset.episode_returns.tolist() == expected.episode_returns.tolist()


# n-step returns and returns to go


@given(episode_lists, st.integers(1, 5))
def test_n_step_rows_equal_those_of_the_collector(
    episodes: list[tuple[int, bool]], n_step: int
) -> None:
    arrays = recorded(episodes)
    dataset = load(arrays, n_step=n_step)
    accumulator, expected = NStepAccumulator(n_step, GAMMA, 1), []
    steps = zip(
        arrays["observations"],
        arrays["actions"],
        arrays["rewards"],
        arrays["terminals"],
        arrays["timeouts"],
        arrays["next_observations"],
        strict=True,
    )
    for step in steps:
        transitions, _ = accumulator.add(*(np.asarray(value)[None] for value in step))
        expected.append(transitions)
    joined = Transitions.joined(expected)
    batch = rows(dataset)
    np.testing.assert_array_equal(batch.obs, joined.obs)
    np.testing.assert_allclose(batch.reward, joined.reward, rtol=1e-6)
    np.testing.assert_allclose(batch.discount, joined.discount, rtol=1e-6)
    np.testing.assert_array_equal(batch.next_obs, joined.next_obs)


@given(episode_lists, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(1, 3))
def test_returns_to_go_are_sums_to_the_end_of_the_episode(
    episodes: list[tuple[int, bool]], gamma: float, n_step: int
) -> None:
    dataset = load(recorded(episodes), n_step=n_step)
    expected, first = [], 0
    for length, _ in episodes:
        rewards = [first + step + 1 for step in range(length)]
        for start in range(length):
            expected.append(sum(gamma**k * reward for k, reward in enumerate(rewards[start:])))
        first += length
    np.testing.assert_allclose(dataset.returns_to_go(gamma), expected, rtol=1e-5)
    sums = [sum(range(e - n + 1, e + 1)) for e, n in _ends(episodes)]
    np.testing.assert_allclose(dataset.episode_returns, sums)


def _ends(episodes: list[tuple[int, bool]]) -> list[tuple[int, int]]:
    ends = np.cumsum([length for length, _ in episodes]).tolist()
    return [(end, length) for end, (length, _) in zip(ends, episodes, strict=True)]


# Actions and rewards


def test_action_bounds_come_from_the_settings_then_the_data_then_the_environment() -> None:
    arrays = recorded([(3, True)], actions=np.array([[-1.0], [0.0], [0.5]], np.float32))
    own = {**arrays, "action_low": np.array([-1.0]), "action_high": np.array([1.0])}
    explicit = DatasetPart(array_recording(own), action_bounds=(np.array(-4.0), np.array(4.0)))

    def actions(dataset: OfflineDataset) -> list[float]:
        return rows(dataset).action[:, 0].tolist()

    assert actions(load(arrays)) == [-0.5, 0.0, 0.25]
    with pytest.warns(UserWarning, match="actions range from -1 to 1, the environment's from -2"):
        assert actions(load(own)) == [-1.0, 0.0, 0.5]
    with pytest.warns(UserWarning, match="actions range"):
        assert actions(load_dataset([explicit], SPACES)) == [-0.25, 0.0, 0.125]
    assert actions(load(own, spaces=None)) == [-1.0, 0.0, 0.5]
    with pytest.raises(DataError, match="its action bounds are unknown; set action_low"):
        load(arrays, spaces=None)


def test_actions_out_of_bounds_by_more_than_rounding_are_refused() -> None:
    almost = np.array([[2.00001], [-2.00001], [0.0]], np.float32)
    assert rows(load(recorded([(3, True)], actions=almost))).action[:, 0].tolist() == [1, -1, 0]
    beyond = np.array([[2.0], [-2.1], [0.0]], np.float32)
    with pytest.raises(
        DataError, match=r"actions\[1, 0\] is -2.1; it must be in \[-2, 2\]; .*numpy.clip"
    ):
        load(recorded([(3, True)], actions=beyond))


def test_actions_out_of_bounds_are_clipped_and_counted_if_enabled() -> None:
    beyond = np.array([[2.00001], [-2.1], [50.0]], np.float32)
    arrays = recorded([(3, True)], actions=beyond)
    clipping = DatasetPart(array_recording(arrays), clip_actions=True)
    with pytest.warns(UserWarning, match="2 of 3 action components .* were clipped") as caught:
        dataset = load_dataset([clipping], SPACES)
    assert len(caught) == 1
    assert rows(dataset).action[:, 0].tolist() == [1, -1, 1]
    inside = DatasetPart(array_recording(recorded([(3, True)])), clip_actions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_dataset([inside], SPACES)


def test_normalized_actions_are_clipped_too() -> None:
    recording = array_recording(recorded([(3, True)], actions=np.array([[0.5], [1.5], [-3.0]])))
    recording.info = dataclasses.replace(recording.info, kind="run", actions_scaled=True)
    with pytest.raises(DataError, match=r"is 1.5; it must be in \[-1, 1\]; .*clip_actions: true"):
        load_dataset([DatasetPart(recording)], SPACES)
    with pytest.warns(UserWarning, match="2 of 3 action components"):
        dataset = load_dataset([DatasetPart(recording, clip_actions=True)], SPACES)
    assert rows(dataset).action[:, 0].tolist() == [0.5, 1.0, -1.0]


def test_an_invalid_discrete_action_is_refused_with_and_without_clipping() -> None:
    recording = array_recording(recorded([(3, True)], actions=np.array([0, 1, 3])))
    with pytest.raises(DataError, match="it must be one of 3 discrete actions, 0 to 2"):
        load_dataset(
            [DatasetPart(recording, clip_actions=True)], SpaceInfo(1, 3, action_kind="discrete")
        )


def test_a_fingerprint_contains_clipping_only_if_enabled() -> None:
    """Runs from before this option existed can then still be resumed."""
    recording = array_recording(recorded([(3, True)]))
    plain = load_dataset([DatasetPart(recording)], SPACES, gamma=GAMMA).fingerprint
    assert plain["sha256"] == "301ba98649be6abb1273adfefae5a0e7276a76e10c9b9ac2543bb23e53d9b14c"
    clipping = load_dataset([DatasetPart(recording, clip_actions=True)], SPACES, gamma=GAMMA)
    assert "'clip_actions': True" in str(fingerprint_difference(plain, clipping.fingerprint))


def test_discrete_actions_become_indices_from_zero() -> None:
    spaces = SpaceInfo(1, 3, action_kind="discrete", action_start=5)
    arrays = recorded([(3, True)], actions=np.array([5, 7, 6]))
    action = rows(load(arrays, spaces=spaces)).action
    assert action.tolist() == [0, 2, 1]
    assert action.dtype == torch.int64
    with pytest.raises(
        DataError, match=r"actions\[1, 0\] is 8; it must be one of 3 discrete actions, 5 to 7"
    ):
        load(recorded([(3, True)], actions=np.array([5, 8, 6])), spaces=spaces)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (RewardOptions(), [1, 2, 3, 4]),
        (RewardOptions(scale=2.0, shift=-1.0), [1, 3, 5, 7]),
        (RewardOptions(shift=-2.0, clip=1.0), [-1, 0, 1, 1]),
        # The returns are 3 and 7. Their range of 4 is scaled to 1000.
        (RewardOptions(normalize_return_range=True, scale=0.5), [125, 250, 375, 500]),
    ],
)
def test_rewards_are_normalized_scaled_shifted_and_clipped_in_that_order(
    options: RewardOptions, expected: list[float]
) -> None:
    recording = array_recording(recorded([(2, True), (2, False)]))
    dataset = load_dataset([DatasetPart(recording, rewards=options)], SPACES, gamma=GAMMA)
    assert rows(dataset).reward.tolist() == expected
    assert dataset.episode_returns.tolist() == [3, 7]  # as recorded
    nstep = load_dataset([DatasetPart(recording, rewards=options)], SPACES, gamma=GAMMA, n_step=2)
    assert rows(nstep).reward.tolist() == [
        expected[0] + GAMMA * expected[1],
        expected[1],
        expected[2] + GAMMA * expected[3],
        expected[3],
    ]


def test_equal_returns_cannot_be_normalized_by_their_range() -> None:
    part = DatasetPart(
        array_recording(recorded([(2, True)])), rewards=RewardOptions(normalize_return_range=True)
    )
    with pytest.raises(DataError, match="reward_normalization"):
        load_dataset([part], SPACES)


# Sampling


def test_rows_are_stored_and_sampled_as_in_a_replay_buffer() -> None:
    arrays = recorded([(5, True), (4, False)])
    dataset = load(arrays)
    batch = rows(dataset)
    buffer = ReplayBuffer(9, 1, 1)
    buffer.add(Transitions(*(field.numpy() for field in batch[:5])))
    bits = torch.empty(3, 50, dtype=torch.int64).random_()
    for drawn, expected in zip(dataset.draw(bits)[:5], buffer.draw(bits)[:5], strict=True):
        assert drawn.equal(expected)
    assert dataset.sample(6).obs.shape == (6, 1)
    assert len(dataset) == 9


@given(st.lists(st.sampled_from([0.1, 1.0, 3.0, 10.0]), min_size=2, max_size=4), st.integers(0, 9))
def test_a_mixture_samples_by_its_weights(weights: list[float], seed: int) -> None:
    parts = [
        DatasetPart(
            array_recording(
                recorded([(10**index, True)], observations=np.full((10**index, 1), index))
            ),
            weight,
        )
        for index, weight in enumerate(weights)
    ]
    dataset = load_dataset(parts, SPACES)
    number = 20_000
    bits = torch.empty(number, dtype=torch.int64)
    drawn = dataset.draw(bits.random_(generator=torch.Generator().manual_seed(seed))).obs[:, 0]
    counts = torch.bincount(drawn.long(), minlength=len(weights)).numpy()
    shares = np.array(weights) / sum(weights)
    assert (np.abs(counts - number * shares) < 6 * np.sqrt(number * shares) + 1).all()


def test_rows_within_a_part_of_a_mixture_are_equally_likely() -> None:
    parts = [recorded([(8, True)]), recorded([(4, True)], observations=np.full((4, 1), 100.0))]
    dataset = load(*parts)
    bits = torch.empty(2, 20_000, dtype=torch.int64).random_()
    numbers = dataset.draw(bits).obs[..., 0].flatten()
    counts = torch.bincount(numbers[numbers < 100].long(), minlength=8).numpy()
    assert (np.abs(counts - 2_500) < 250).all()


class Counting:
    """A source that always returns the same value and counts its calls."""

    def __init__(self, number: float) -> None:
        self.number, self.calls = number, 0

    def __len__(self) -> int:
        return 1

    def flush(self) -> None: ...

    def sample(self, batch_size: int) -> Batch:
        return self.draw(torch.zeros(batch_size, dtype=torch.int64))

    def draw(self, bits: torch.Tensor) -> Batch:
        self.calls += 1
        filled = torch.full(bits.shape, self.number)
        return Batch(filled[..., None], filled[..., None], filled, filled, filled[..., None])


@given(
    st.floats(0, 1),
    st.integers(1, 40),
    st.sampled_from([(), (3,)]),
)
def test_every_batch_has_its_exact_share_of_offline_rows_first(
    ratio: float, batch_size: int, population: tuple[int, ...]
) -> None:
    online, offline = Counting(0.0), Counting(1.0)
    batch = Mixture(online, offline, ratio).draw(torch.zeros(*population, batch_size).long())
    share = round(ratio * batch_size)
    expected = torch.tensor([1.0] * share + [0.0] * (batch_size - share))
    assert batch.reward.equal(expected.expand(*population, batch_size))
    assert batch.obs[..., 0].equal(batch.reward)
    assert (online.calls, offline.calls) == (int(share < batch_size), int(share > 0))


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, [0.0] * 4), (1.0, [1.0] * 4)])
def test_a_mixture_with_ratio_zero_or_one_samples_only_one_source(
    ratio: float, expected: list[float]
) -> None:
    online, offline = Counting(0.0), Counting(1.0)
    assert Mixture(online, offline, ratio).sample(4).reward.tolist() == expected
    assert (online.calls, offline.calls) == (int(ratio == 0), int(ratio == 1))
    with pytest.raises(ValueError, match=r"ratio = 1\.5"):
        Mixture(online, offline, 1.5)


@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_sampling_is_a_single_graph_of_tensor_operations(shape: tuple[int, ...]) -> None:
    offline = load(recorded([(5, True)]), recorded([(4, False)]))
    mixture = Mixture(load(recorded([(6, True)])), offline, 0.5)
    bits = torch.empty(shape, dtype=torch.int64).random_()
    traced = torch.compile(mixture.draw, fullgraph=True, backend="eager")
    for drawn, expected in zip(traced(bits)[:5], mixture.draw(bits)[:5], strict=True):
        assert drawn.equal(expected)


def replay_of(*sizes: int) -> ReplayBuffer:
    """Return a replay buffer of online rows with negative observations, for several seeds."""
    replay = ReplayBuffer(100, 1, 1, slots=range(len(sizes)), width=len(sizes))
    for seed, size in enumerate(sizes):
        column = -1.0 - np.arange(size, dtype=np.float32)[:, None] - 1000 * seed
        flat = column[:, 0]
        rows = Transitions(column, 0 * column, flat, 0 * flat, column)
        replay.add(rows, np.full(size, seed) if len(sizes) > 1 else None)
    replay.flush()
    return replay


def test_a_uniform_mixture_samples_all_rows_of_both_sources_equally() -> None:
    offline = load(recorded([(5, True)]), recorded([(4, False)]))
    mixture = Mixture(replay_of(3), offline, "uniform")
    batch = mixture.draw(torch.arange(24))
    assert sorted(batch.reward.tolist()) == sorted(2 * rows_of_both(offline, 3))
    assert batch.is_offline is not None
    assert int(batch.is_offline.sum()) == 18
    assert batch.is_offline.equal(batch.obs[:, 0] >= 0)
    assert mixture.needs_online_rows(24)
    assert mixture.offline_rows(24) == 18
    sampled = mixture.sample(2_000)
    assert sampled.is_offline.float().mean() == pytest.approx(0.75, abs=0.05)


def rows_of_both(offline: OfflineDataset, live: int) -> list[float]:
    return [*rows(offline).reward.tolist(), *(-1.0 - number for number in range(live))]


def test_each_seed_of_a_population_has_its_own_uniform_mixture() -> None:
    offline = load(recorded([(6, True)]))
    mixture = Mixture(replay_of(2, 6), offline, "uniform")
    bits = torch.arange(24).expand(2, 24)
    batch = mixture.draw(bits)
    assert batch.is_offline.sum(-1).tolist() == [18, 12]
    live = [batch.obs[seed, ~batch.is_offline[seed], 0] for seed in range(2)]
    assert sorted(set(live[0].tolist())) == [-2.0, -1.0]
    assert set(live[1].tolist()) == {-1001.0 - number for number in range(6)}
    traced = torch.compile(mixture.draw, fullgraph=True, backend="eager")
    for drawn, expected in zip(traced(bits)[:5], batch[:5], strict=True):
        assert drawn.equal(expected)


# Statistics, splits, fingerprints


def test_a_normalizer_is_fitted_to_the_datas_observations() -> None:
    dataset = load(recorded([(50, True)]), recorded([(30, False)]))
    normalizer = ObservationNormalizer(1)
    dataset.fit(normalizer)
    seen = ObservationNormalizer(1)
    seen.observe(rows(dataset).obs)
    for name, tensor in seen.state.items():
        torch.testing.assert_close(normalizer.state[name], tensor)
    normalized = normalizer.normalize(rows(dataset).obs)
    assert abs(float(normalized.mean())) < 1e-6
    assert float(normalized.std(correction=0)) == pytest.approx(1.0)


def test_data_are_split_by_complete_episodes() -> None:
    dataset = load(recorded([(n, n % 2 == 0) for n in range(1, 11)]), recorded([(3, True)] * 4))
    kept, held = dataset.split(0.3, seed=1)
    assert len(kept) + len(held) == len(dataset)
    assert [len(part.ends) for part in held.parts] == [3, 1]
    combined = torch.cat([kept.packed, held.packed])
    assert sorted(map(tuple, combined.tolist())) == sorted(map(tuple, dataset.packed.tolist()))
    assert sorted([*kept.episode_lengths, *held.episode_lengths]) == sorted(dataset.episode_lengths)
    for part in (kept, held):
        starts = part.episode_ends - part.episode_lengths
        batch = rows(part)
        inside = np.setdiff1d(np.arange(1, len(part)), starts)
        assert (batch.obs[inside] == batch.next_obs[inside - 1]).all()
        expected = np.add.reduceat(batch.reward.numpy(), starts)
        np.testing.assert_allclose(part.episode_returns, expected)
    again = dataset.split(0.3, seed=1)[1]
    assert again.packed.equal(held.packed)
    assert again.fingerprint == held.fingerprint
    assert len({part.fingerprint["sha256"] for part in (dataset, kept, held)}) == 3
    with pytest.raises(DataError, match="one episode"):
        load(recorded([(5, True)])).split(0.5)


def test_a_fingerprint_depends_on_the_contents_and_differences_are_named() -> None:
    arrays = recorded([(5, True), (4, False)])
    saved = load(arrays).fingerprint
    assert (
        fingerprint_difference(saved, load(recorded([(5, True), (4, False)])).fingerprint) is None
    )
    shorter = load(recorded([(5, True), (3, False)])).fingerprint
    assert "rows 9, now 8" in str(fingerprint_difference(saved, shorter))
    changed = {**arrays, "rewards": arrays["rewards"] + 1}
    assert "sum of rewards 45.0, now 54.0" in str(
        fingerprint_difference(saved, load(changed).fingerprint)
    )
    swapped = {**arrays, "rewards": arrays["rewards"][::-1].copy()}
    assert "values of some of the" in str(fingerprint_difference(saved, load(swapped).fingerprint))
    other_ends = recorded([(5, True), (4, False)], timeouts=np.arange(9) == 6)
    assert "episodes 2, now 3" in str(fingerprint_difference(saved, load(other_ends).fingerprint))
    assert "gamma" in str(fingerprint_difference(saved, load(arrays, gamma=0.9).fingerprint))
    assert "number of datasets 1, now 2" in str(
        fingerprint_difference(saved, load(arrays, arrays).fingerprint)
    )


# Bad data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, "rewards missing; found actions"),
        ({"terminals": None}, "terminals missing"),
        ({"rewards": np.zeros(3)}, r"rewards has shape \(3,\), observations \(4, 1\)"),
        (
            {"observations": np.zeros((4, 2, 2))},
            r"next_observations has shape .*it must be \(steps, 2, 2\)",
        ),
        ({"observations": np.zeros((4, 2))}, "next_observations has shape"),
        ({"actions": np.zeros((4, 1), object)}, "actions has type object; it must be numeric"),
        ({"rewards": np.zeros(4, complex)}, "rewards has type complex128"),
        ({"rewards": np.zeros((4, 2))}, r"rewards has shape \(4, 2\)"),
        ({"terminals": np.array([0, 0, 2, 1])}, r"terminals\[2\] is 2; it must be 0 or 1"),
        ({"actions": np.zeros((4, 3))}, "actions have 3 components, the environment's have 1"),
        ({"rewards": np.array([0, 1, np.nan, 0])}, r"rewards\[2\] is nan, not a finite number"),
        ({"rewards": np.array([0, 1, 1e300, 0])}, r"rewards\[2\] is 1e\+300"),
        (
            {"observations": np.array([[0], [1], [2], [np.inf]])},
            r"arrays: observations\[3, 0\] is inf",
        ),
        ({"next_observations": np.array([[np.nan], [1], [2], [3]])}, r"next_observations\[0, 0\]"),
    ],
)
def test_the_error_for_invalid_data_names_key_and_row(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(recorded([(4, True)], **changes))


def test_empty_data_and_data_of_another_environment_are_refused() -> None:
    empty = {key: values[:0] for key, values in recorded([(4, True)]).items()}
    with pytest.raises(DataError, match="contains no steps"):
        load(empty)
    with pytest.raises(DataError, match="observations have 1 components, the environment's have 3"):
        load(recorded([(4, True)]), spaces=SpaceInfo(3, 1))
    with pytest.raises(DataError, match="actions are continuous, the environment's are discrete"):
        load(recorded([(4, True)]), spaces=SpaceInfo(1, 2, action_kind="discrete"))


# Cost

MEASURE = """
import sys, time
import numpy as np
from rl_training.data import DatasetPart, load_dataset
from rl_training.data.formats.npz import open_npz
from rl_training.types import SpaceInfo

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

spaces = SpaceInfo(17, 6, action_low=-np.ones(6), action_high=np.ones(6))
before = status("VmRSS")
dataset = load_dataset([DatasetPart(open_npz(sys.argv[1]))], spaces)
assert len(dataset) == 1_000_000
print((status("VmHWM") - before) / (len(dataset) * 42 * 4))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_million_rows_need_little_more_memory_than_their_size(tmp_path: Any) -> None:
    number = 1_000_000
    obs = np.zeros((number, 17), np.float32)
    np.savez(
        tmp_path / "big.npz",
        observations=obs,
        next_observations=obs,
        actions=obs[:, :6],
        rewards=obs[:, 0],
        terminals=np.zeros(number, np.bool_),
        timeouts=np.arange(number) % 1000 == 999,
    )
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "big.npz")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1.0 <= float(measured.stdout) <= 1.15


# Next actions


@given(episode_lists, st.integers(1, 4))
def test_next_actions_are_those_of_the_episode_and_nan_after_it(
    episodes: list[tuple[int, bool]], n_step: int
) -> None:
    arrays = recorded(episodes)
    batch = rows(load(arrays, n_step=n_step, next_actions=True))
    actions, expected, first = arrays["actions"][:, 0] / 2, [], 0
    for length, _ in episodes:
        expected += [
            actions[first + step + n_step] if step + n_step < length else np.nan
            for step in range(length)
        ]
        first += length
    np.testing.assert_allclose(batch.next_action[:, 0].numpy(), expected, rtol=1e-6)


@given(episode_lists, st.integers(1, 4))
def test_next_actions_change_nothing_else(episodes: list[tuple[int, bool]], n_step: int) -> None:
    arrays = recorded(episodes)
    plain = load(arrays, n_step=n_step)
    more = load(arrays, n_step=n_step, next_actions=True)
    assert rows(plain).next_action is None
    assert plain.layout.width == plain.packed.shape[1] == 5
    assert more.packed[:, :5].equal(plain.packed)
    assert more.fingerprint == plain.fingerprint
    for one, other in zip(rows(more)[:5], rows(plain)[:5], strict=True):
        assert one.equal(other)


def test_next_actions_cross_chunks_of_reading_but_not_parts_or_subsets() -> None:
    long = load(recorded([(9_000, False)]), recorded([(2, True)]), next_actions=True)
    batch = rows(long)
    assert batch.next_action[:8_999].equal(batch.action[1:9_000])  # chunks have 8,192 steps
    assert batch.next_action[:, 0].isnan().nonzero()[:, 0].tolist() == [8_999, 9_001]
    whole = load(recorded([(3, False), (4, True), (2, False), (5, True)]), next_actions=True)
    for part in whole.split(0.5):
        chosen = rows(part)
        last = torch.from_numpy(part.episode_ends - 1)
        assert chosen.next_action[last].isnan().all()
        inner = torch.ones(len(part), dtype=torch.bool).index_fill(0, last, False)
        assert chosen.next_action[inner].equal(chosen.action[1:][inner[:-1]])


def test_a_step_before_a_dropped_one_has_no_next_action() -> None:
    arrays = recorded([(3, False), (2, True)], next_observations=None)
    batch = rows(load(arrays, next_actions=True))  # the last step of the first episode is dropped
    assert batch.obs[:, 0].tolist() == [0, 1, 13, 14]
    assert batch.next_action[:, 0].isnan().tolist() == [False, True, False, True]
