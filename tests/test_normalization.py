"""Running observation statistics."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_training.data import ObservationNormalizer


@given(st.lists(st.integers(1, 7), min_size=2, max_size=10), st.floats(-1e3, 1e3))
def test_statistics_do_not_depend_on_the_batching_of_observations(
    sizes: list[int], offset: float
) -> None:
    rows = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0)) * 2 + offset
    normalizer = ObservationNormalizer(3)
    for part in rows.split(sizes):
        normalizer.observe(part)
    scaled = normalizer.normalize(rows).double().numpy()
    expected = (rows.double() - rows.double().mean(0)) / rows.double().std(0, correction=0)
    np.testing.assert_allclose(scaled, expected.clamp(-10, 10).numpy(), atol=5e-3)


def test_without_observations_normalization_is_the_identity() -> None:
    obs = torch.randn(4, 2)
    assert torch.equal(ObservationNormalizer(2).normalize(obs), obs)


def test_outliers_are_clipped() -> None:
    normalizer = ObservationNormalizer(1)
    normalizer.observe(torch.tensor([[-1.0], [1.0]]))
    assert normalizer.normalize(torch.tensor([[1e6]])).item() == 10.0


def test_arrays_are_normalized_to_the_same_bits_as_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    normalizer = ObservationNormalizer(5)
    normalizer.observe(torch.randn(20, 5, generator=generator) * 3 + 1)
    for scale in (1e-3, 1.0, 1e3):
        obs = torch.randn(4, 5, generator=generator) * scale
        found = normalizer.normalize_array(obs.numpy())
        assert found.dtype == np.float32
        assert found.tobytes() == normalizer.normalize(obs).numpy().tobytes()


def test_the_state_can_be_saved_and_loaded() -> None:
    first, second = ObservationNormalizer(2), ObservationNormalizer(2)
    first.observe(torch.randn(10, 2))
    second.load_state(first.state)
    obs = torch.randn(3, 2)
    assert torch.equal(first.normalize(obs), second.normalize(obs))
