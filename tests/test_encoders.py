"""Encoders of the leaves of observations, compared with straightforward implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import ConfigError
from rl_training.models.blocks import Convolution, convolution_by_product
from rl_training.models.encoders.images import (
    DrQEncoder,
    ImageLayout,
    ImpalaEncoder,
    NatureEncoder,
)
from rl_training.models.encoders.observations import (
    DiscreteEncoder,
    NumbersEncoder,
    ObservationEncoder,
    leaf_encoder,
)
from rl_training.models.network_settings import NetworkSettings
from rl_training.observations import ObservationLeaf
from rl_training.validation import validate


def image(*shape: int) -> ObservationLeaf:
    return ObservationLeaf("camera", "image", shape)


def pixels(*shape: int, rows: int = 3) -> Tensor:
    return torch.randint(0, 256, (rows, *shape), dtype=torch.uint8)


def named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


@pytest.mark.parametrize(
    ("shape", "channels", "sizes"),
    [
        ((84, 80), "auto", (1, 84, 80)),
        ((84, 80, 3), "auto", (3, 84, 80)),
        ((3, 84, 80), "auto", (3, 84, 80)),
        ((4, 84, 84), "auto", (4, 84, 84)),
        ((7, 7, 3), "auto", (3, 7, 7)),
        ((3, 3, 3), "auto", (3, 3, 3)),
        ((4, 84, 80, 3), "auto", (12, 84, 80)),
        ((4, 3, 84, 80), "auto", (12, 84, 80)),
        ((7, 7, 20), "last", (20, 7, 7)),
        ((20, 7, 7), "first", (20, 7, 7)),
    ],
)
def test_the_axes_of_an_image_follow_from_its_shape(
    shape: tuple[int, ...], channels: Any, sizes: tuple[int, ...]
) -> None:
    layout = ImageLayout.of(shape, channels)
    assert (layout.channels, layout.height, layout.width) == sizes
    assert layout.channels_first(torch.zeros(2, *shape)).shape == (2, *sizes)


def test_frames_and_channels_become_channels_in_order() -> None:
    images = pixels(4, 10, 11, 3)
    moved = ImageLayout.of((4, 10, 11, 3)).channels_first(images)
    assert torch.equal(moved[:, 3 * 2 + 1], images[:, 2, :, :, 1])


@pytest.mark.parametrize("shape", [(84,), (2, 3, 4, 5, 6)])
def test_other_numbers_of_axes_are_no_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 to 4 axes"):
        ImageLayout.of(shape)


def test_nature_encoder_is_the_network_of_the_paper() -> None:
    encoder, images = NatureEncoder(image(84, 84, 4)), pixels(84, 84, 4)
    weights, hidden = named(encoder), images.permute(0, 3, 1, 2) / 255
    for layer, stride in enumerate((4, 2, 1)):
        name = f"convolution_{layer}"
        hidden = F.conv2d(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"], stride)
        hidden = hidden.relu()
    assert hidden.shape[1:] == (64, 7, 7)
    expected = F.linear(hidden.flatten(1), weights["output.weight"], weights["output.bias"]).relu()
    assert expected.shape == (3, 512)
    torch.testing.assert_close(encoder(images), expected)


def test_impala_encoder_is_the_network_of_the_paper() -> None:
    encoder, images = ImpalaEncoder(image(3, 20, 17), feature_size=10), pixels(3, 20, 17)
    weights, hidden = named(encoder), images / 255

    def convolve(name: str, inputs: Tensor) -> Tensor:
        return F.conv2d(inputs, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    for stage in range(3):
        hidden = F.max_pool2d(convolve(f"convolution_{stage}", hidden), 3, 2, 1)
        for block in range(2):
            name = f"block_{stage}_{block}.convolution"
            hidden = hidden + convolve(f"{name}_1", convolve(f"{name}_0", hidden.relu()).relu())
    hidden = hidden.relu().flatten(1)
    expected = F.linear(hidden, weights["output.weight"], weights["output.bias"]).relu()
    torch.testing.assert_close(encoder(images), expected)


def test_drq_encoder_is_the_network_of_the_paper() -> None:
    encoder, images = DrQEncoder(image(9, 84, 84)), pixels(9, 84, 84)
    weights, hidden = named(encoder), images / 255 - 0.5
    for layer in range(4):
        name = f"convolution_{layer}"
        stride = 1 if layer else 2
        hidden = F.conv2d(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"], stride).relu()
    assert hidden.shape[1:] == (32, 35, 35)
    hidden = F.linear(hidden.flatten(1), weights["output.weight"], weights["output.bias"])
    scale, shift = weights["normalization.weight"], weights["normalization.bias"]
    expected = F.layer_norm(hidden, (50,), scale, shift).tanh()
    torch.testing.assert_close(encoder(images), expected)


@pytest.mark.parametrize("kind", [NatureEncoder, ImpalaEncoder, DrQEncoder])
@pytest.mark.parametrize(
    "shape", [(3, 3), (7, 7, 3), (10, 10, 6), (5, 40), (35, 35), (1, 1, 1), (64, 64, 3)]
)
def test_images_of_any_size_are_encoded(kind: Any, shape: tuple[int, ...]) -> None:
    encoder = kind(image(*shape), 5)
    features = encoder(pixels(*shape))
    assert features.shape == (3, 5)
    features.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_images_of_numbers_are_not_scaled() -> None:
    leaf = ObservationLeaf("camera", "numbers", (8, 8))
    settings = validate(NetworkSettings, {"encoders": {"camera": "nature"}})
    encoder, values = leaf_encoder(leaf, settings), torch.rand(3, 8, 8)
    scaled = NatureEncoder(image(8, 8))
    scaled.load_state_dict(encoder.state_dict())
    as_bytes = (values * 255).round().to(torch.uint8)
    torch.testing.assert_close(encoder(values), scaled(as_bytes), atol=5e-3, rtol=0)


def test_numbers_are_flattened_or_pass_an_mlp() -> None:
    leaf, values = ObservationLeaf("", "numbers", (2, 3)), torch.randn(4, 2, 3)
    assert torch.equal(NumbersEncoder(leaf)(values), values.flatten(1))
    encoder = NumbersEncoder(leaf, (5, 7))
    expected = encoder.layer_1(encoder.layer_0(values.flatten(1)).relu()).relu()
    assert torch.equal(encoder(values), expected)


def test_binary_values_become_floats() -> None:
    leaf, values = ObservationLeaf("", "binary", (3,)), torch.tensor([[0, 1, 1]], dtype=torch.uint8)
    assert leaf_encoder(leaf, NetworkSettings())(values).tolist() == [[0.0, 1.0, 1.0]]


def test_discrete_values_are_one_hot_in_the_order_of_their_components() -> None:
    leaf = ObservationLeaf("", "discrete", (2,), (3, 2), (-1, 5))
    values = torch.tensor([[-1, 6], [1, 5]], dtype=torch.int32)
    features = leaf_encoder(leaf, NetworkSettings())(values)
    assert features.tolist() == [[1, 0, 0, 0, 1], [0, 0, 1, 1, 0]]


def test_many_discrete_values_are_embedded() -> None:
    leaf = ObservationLeaf("", "discrete", (2,), (5000, 2), (10, 0))
    encoder = leaf_encoder(leaf, NetworkSettings())
    assert isinstance(encoder, DiscreteEncoder)
    assert encoder.feature_size == 64 + 2
    features = encoder(torch.tensor([[17, 1]], dtype=torch.int32))
    assert torch.equal(features[0, :64], encoder.embedding_0.weight[7])
    assert features[0, 64:].tolist() == [0, 1]


def test_leaves_are_joined_in_their_order_and_may_have_any_name() -> None:
    leaves = [
        ObservationLeaf("type", "numbers", (2,)),
        ObservationLeaf("arm/a b", "discrete", (), (3,), (0,)),
        ObservationLeaf("arm/a.b", "numbers", ()),
        ObservationLeaf("1", "numbers", (1,)),
    ]
    settings = {"encoders": {"type": "mlp", "arm/a b": "embedding", "arm/a.b": "mlp", "1": "mlp"}}
    encoder = ObservationEncoder(leaves, validate(NetworkSettings, settings))
    values = {
        "type": torch.randn(4, 2),
        "arm/a b": torch.randint(0, 3, (4,), dtype=torch.int32),
        "arm/a.b": torch.randn(4),
        "1": torch.randn(4, 1),
    }
    assert encoder(values).shape == (4, 4 * 64)
    assert encoder.feature_size == 4 * 64
    parts = {name.partition(".")[0] for name in named(encoder)}
    assert parts == {"type_", "arm_a_b", "arm_a_b_", "1"}


@pytest.mark.parametrize(
    ("leaf", "chosen", "message"),
    [
        (image(8, 8), "one_hot", "'one_hot': is not for image; choose from nature, impala, drq"),
        (ObservationLeaf("camera", "numbers", (4,)), "nature", "2 to 4 axes, not 1"),
        (
            ObservationLeaf("camera", "discrete", (), (3,), (0,)),
            "mlp",
            "not for discrete; choose from one_hot, embedding",
        ),
    ],
)
def test_encoders_that_do_not_fit_are_refused(
    leaf: ObservationLeaf, chosen: str, message: str
) -> None:
    settings = validate(NetworkSettings, {"encoders": {"camera": chosen}})
    with pytest.raises(ConfigError, match=message) as raised:
        leaf_encoder(leaf, settings)
    assert "networks.encoders.camera" in str(raised.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"encoders": {"a": {"encoder": "mlp", "channels": "first"}}}, "'mlp' has no such setting"),
        ({"encoders": {"a": "cnn"}}, "encoders.a = 'cnn': must be identity, mlp"),
        ({"image_encoder": "resnet"}, "image_encoder = 'resnet'"),
        ({"random_shift": -1}, "random_shift = -1"),
        ({"actor_obs": []}, "actor_obs = "),
        ({"shared_encoder": True, "actor_obs": ["a"]}, "must be equal"),
    ],
)
def test_wrong_settings_of_networks_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(NetworkSettings, section)


CONVOLUTIONS = [
    ((4, 84, 84), (32, 8, 8), 4, 0),
    ((32, 20, 20), (64, 4, 4), 2, 0),
    ((64, 9, 9), (64, 3, 3), 1, 0),
    ((5, 11, 12), (6, 3, 3), 1, 1),
    ((3, 84, 83), (8, 3, 3), 2, 0),
    ((3, 1, 9), (4, 1, 3), 2, 0),
    ((2, 17, 19), (3, 5, 5), 3, 2),
]
"""Sizes of images and kernels, strides and paddings"""


def tensors_of_convolution(
    sizes: tuple[int, ...], kernel: tuple[int, ...], *lead: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight_shape = (kernel[0], sizes[0], *kernel[1:])
    shapes = [(3, *sizes), weight_shape, kernel[:1]]
    options: Any = {"generator": generator, "dtype": torch.float64}
    images, weight, bias = (torch.randn(*lead, *shape, **options) for shape in shapes)
    return images, weight, bias


@pytest.mark.parametrize(("sizes", "kernel", "stride", "padding"), CONVOLUTIONS)
def test_a_convolution_by_product_and_its_gradients_equal_pytorchs(
    sizes: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: int
) -> None:
    inputs = [tensor.requires_grad_() for tensor in tensors_of_convolution(sizes, kernel)]
    ours = convolution_by_product(*inputs, stride=stride, padding=padding)
    theirs = F.conv2d(*inputs, stride, padding)
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, direction), torch.autograd.grad(theirs, inputs, direction)
    )


@pytest.mark.parametrize(("sizes", "kernel", "stride", "padding"), CONVOLUTIONS[:4])
def test_a_convolution_by_product_is_mapped_over_seeds(
    sizes: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: int
) -> None:
    inputs = tensors_of_convolution(sizes, kernel, 2)

    def loss(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (
            convolution_by_product(images, weight, bias, stride=stride, padding=padding).sin().sum()
        )

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
    for seed in range(2):
        images, weight, bias = (tensor[seed].clone().requires_grad_() for tensor in inputs)
        F.conv2d(images, weight, bias, stride, padding).sin().sum().backward()
        for gradient, parameter in zip(mapped, (images, weight, bias), strict=True):
            torch.testing.assert_close(gradient[seed], parameter.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("encoder", [NatureEncoder, ImpalaEncoder, DrQEncoder])
def test_encoders_of_images_give_the_same_features_on_a_gpu(encoder: Any) -> None:
    torch.manual_seed(0)
    module, images = encoder(image(4, 84, 84)), pixels(4, 84, 84)
    assert any(isinstance(part, Convolution) for part in module.modules())
    on_gpu = encoder(image(4, 84, 84)).cuda()
    on_gpu.load_state_dict(module.state_dict())
    torch.testing.assert_close(on_gpu(images.cuda()).cpu(), module(images), rtol=1e-3, atol=1e-4)
