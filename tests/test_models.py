"""Networks and their flat parameter vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_training.models import MLP, ParameterLayout
from rl_training.models.mlp import rounded_products

shapes = st.dictionaries(
    st.text(st.characters(categories=["Ll"]), min_size=1),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    min_size=1,
    max_size=6,
)


@given(shapes, st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_flattening_and_unflattening_are_inverse_with_any_leading_axes(
    named: dict[str, tuple[int, ...]], lead: tuple[int, ...]
) -> None:
    layout = ParameterLayout(named)
    tensors = {name: torch.randn(lead + shape) for name, shape in named.items()}
    vector = layout.flatten(tensors)
    assert vector.shape == (*lead, layout.size)
    restored = layout.unflatten(vector)
    assert list(restored) == list(named)
    assert all(torch.equal(restored[name], tensors[name]) for name in named)


def test_every_tensor_of_a_vector_is_aligned_like_a_new_tensor() -> None:
    layout = ParameterLayout({"a": (3,), "b": (17, 5), "c": (1,), "d": (2, 2)})
    parts = layout.unflatten(torch.zeros(layout.size))
    assert all(part.storage_offset() % 16 == 0 for part in parts.values())


def test_flattening_refuses_a_tensor_of_another_shape() -> None:
    with pytest.raises(ValueError, match="weight has shape"):
        ParameterLayout({"weight": (2, 3)}).flatten({"weight": torch.zeros(3, 2)})


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("output_size", [1, 4])
def test_an_ensemble_equals_its_separate_members(layer_norm: bool, output_size: int) -> None:
    ensemble = MLP(5, (7, 6), output_size, ensemble=3, layer_norm=layer_norm)
    single = MLP(5, (7, 6), output_size, layer_norm=layer_norm)
    inputs = torch.randn(11, 5)
    together = ensemble(inputs)
    assert together.shape == (3, 11, output_size)
    parts = ensemble.unflatten(ensemble.vector)
    for member in range(3):
        own = {
            name: parts[name][member].reshape(shape) for name, shape in single.layout.shapes.items()
        }
        alone = single(inputs, single.layout.flatten(own))
        torch.testing.assert_close(together[member], alone)


def test_ensemble_members_have_different_initial_parameters() -> None:
    outputs = MLP(5, (8,), 1, ensemble=2)(torch.randn(4, 5))
    assert not torch.allclose(outputs[0], outputs[1])


def test_the_same_seed_gives_the_same_network() -> None:
    first, again, other = (
        MLP(3, (8,), 2, generator=torch.Generator().manual_seed(seed)).vector for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_error_for_an_unknown_activation_lists_the_choices() -> None:
    with pytest.raises(ValueError, match="relu"):
        MLP(1, (1,), 1, activation="rleu")


def wide_network(*sizes: int, ensemble: int | None = None) -> MLP:
    return MLP(5, sizes, 3, ensemble=ensemble, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("ensemble", [None, 2])
def test_large_products_are_rounded_within_bfloat16_and_so_are_gradients(
    ensemble: int | None,
) -> None:
    network = wide_network(256, 256, ensemble=ensemble)
    inputs = torch.randn(128, 5, generator=torch.Generator().manual_seed(1))

    def outputs_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = network(inputs)
        return outputs.detach(), torch.autograd.grad(outputs.square().sum(), network.vector)[0]

    exact = outputs_and_gradient()
    with rounded_products():
        rounded = outputs_and_gradient()
    again = outputs_and_gradient()
    for one, other, same in zip(exact, rounded, again, strict=True):
        assert rounded[0].dtype == torch.float32
        assert 0 < (one - other).norm() / one.norm() < 2**-6
        torch.testing.assert_close(one, same, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("sizes", [(1024,), (64, 64)])
def test_first_and_last_layers_and_small_products_are_never_rounded(sizes: tuple[int, ...]) -> None:
    network = wide_network(*sizes)
    inputs = torch.randn(900, 5, generator=torch.Generator().manual_seed(1))
    exact = network(inputs)
    with rounded_products():
        torch.testing.assert_close(network(inputs), exact, rtol=0.0, atol=0.0)
