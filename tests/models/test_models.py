"""The networks: parameter counts, shapes, adaptation, and what is special to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpbench.errors import ConfigurationError
from dpbench.models import (
    MLP,
    MNISTCNN,
    ConvGAN,
    DenseNet,
    ScatteringCNN,
    SmallAlexNet,
    TextEncoder,
    VisionTransformer,
    WideResNet,
)
from dpbench.models.small_alexnet import LocalResponseNorm
from dpbench.options import check_options

MODELS = [MNISTCNN, MLP, SmallAlexNet, DenseNet, ScatteringCNN, WideResNet]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_published_sizes() -> None:
    assert count(MNISTCNN((1, 28, 28), 10)) == 26_010  # the TensorFlow Privacy tutorial's model summary
    assert count(MLP((1, 28, 28), 10)) == 784 * 1000 + 1000 + 1000 * 10 + 10
    assert (
        count(SmallAlexNet((3, 32, 32), 10)) == (3 * 25 + 1) * 64 + (64 * 25 + 1) * 64 + 3137 * 384 + 385 * 192 + 1930
    )
    dense = DenseNet((3, 32, 32), 10)
    assert sum(isinstance(m, nn.Conv2d) for m in dense.modules()) + 1 == 40
    assert dense[-1].in_features == 215
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in dense.modules())


def test_wide_resnets() -> None:
    """De et al. 2022: 2.7 and 8.9 million parameters."""
    with torch.device("meta"):
        assert count(WideResNet((3, 32, 32), 10)) == 2_753_818
        assert count(WideResNet((3, 32, 32), 10, depth=40)) == 8_961_306
        convolutions = [m for m in WideResNet((3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 16  # 13 in the depth, where the output layer counts as another, and 3 of shortcuts
    for options, message in (
        ({"depth": 17}, "depth = 6·n"),
        ({"initialization": "keras"}, "published or torch"),
    ):
        with pytest.raises(ValueError, match=message):
            WideResNet((3, 8, 8), 10, **options)  # type: ignore[arg-type]


def test_transformers_of_the_usual_sizes() -> None:
    with torch.device("meta"):
        assert count(VisionTransformer((3, 224, 224), 1000)) == 22_050_664  # ViT-S/16
        assert count(TextEncoder(30_522, 2)) == 109_482_240 - 2 * 768 + 2 * 769  # BERT-base, segments out, output in
    with pytest.raises(ValueError, match="square images whose side model.patch_size=16 divides"):
        VisionTransformer((3, 28, 28), 10)
    with pytest.raises(ValueError, match="must be divisible by its"):
        TextEncoder(9, 2, width=10, heads=3)


def test_standardized_weights() -> None:
    torch.manual_seed(0)
    layer = WideResNet((3, 8, 8), 10)[0]
    rows = layer.weight.detach().flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(16), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(16))
    original = layer.parametrizations.weight.original
    assert abs(float(original.detach().std()) - 27**-0.5) < 0.02
    with torch.no_grad():
        layer.parametrizations.weight[0].gain.fill_(2)
        original.copy_(5 * original + 3)  # neither scale nor mean matters
    torch.testing.assert_close(layer.weight.detach().flatten(1), 2 * rows, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_adapts_to_the_data_and_mixes_no_records(model: type[nn.Module]) -> None:
    net = model((2, 17, 23), 7).to(memory_format=torch.channels_last)
    x = torch.randn(3, 2, 17, 23)
    out = net(x)
    assert out.shape == (3, 7) and net(x[:0]).shape == (0, 7)
    torch.testing.assert_close(out[:1], net(x[:1]), rtol=1e-4, atol=1e-5)


def test_mnist_cnn_with_bounded_activations() -> None:
    kinds = [type(layer).__name__ for layer in MNISTCNN((1, 28, 28), 10, activation="tanh")]
    assert kinds.count("Tanh") == 3 and "ReLU" not in kinds
    with pytest.raises(ValueError, match="relu or tanh, not 'gelu'"):
        MNISTCNN((1, 28, 28), 10, activation="gelu")


def test_mnist_cnn_as_keras_draws_it() -> None:
    net = MNISTCNN((1, 28, 28), 10, initialization="published")
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            places = layer.weight[0, 0].numel()
            fans = layer.weight.shape[0] * places + layer.weight.shape[1] * places
            most = (6 / fans) ** 0.5  # Glorot uniform
            assert 0.95 * most < float(layer.weight.detach().abs().max()) <= most and not layer.bias.any()
    with pytest.raises(ValueError, match="published or torch, not 'keras'"):
        MNISTCNN((1, 28, 28), 10, initialization="keras")


def test_scattering_cnn() -> None:
    assert count(ScatteringCNN((243, 8, 8), 10)) == (243 * 9 + 1) * 64 + (64 * 9 + 1) * 64 + 64 * 16 * 10 + 10
    with pytest.raises(ValueError, match="at least 2×2"):
        ScatteringCNN((81, 1, 1), 10)


@pytest.mark.parametrize(
    ("network", "options", "says"),
    [
        (ConvGAN, {"width": 12}, "model.width must be a width that 8 divides"),
        (DenseNet, {"compression": 2.0}, "model.compression must be a number above 0, at most 1"),
        (WideResNet, {"groups": 3}, "model.groups must be 1, 2, 4, 8 or 16"),
    ],
)
def test_sizes_are_those_of_annotations(network: type[nn.Module], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_options(network, options, "model")


def test_images_that_are_too_small() -> None:
    for model in (MNISTCNN, SmallAlexNet, DenseNet):
        with pytest.raises(ValueError, match=r"needs images of at least .* not 1×3×3"):
            model((1, 3, 3), 10)
    with pytest.raises(ValueError, match="depth = 3·n"):
        DenseNet((3, 32, 32), 10, depth=41)


def test_local_response_norm_equals_torch() -> None:
    ours, theirs = LocalResponseNorm(12, 5, 0.3, 1.5), nn.LocalResponseNorm(5, 0.3, 0.75, 1.5)
    x = (3 * torch.randn(4, 12, 5, 6, dtype=torch.float64)).requires_grad_()
    torch.testing.assert_close(ours(x), theirs(x))
    weight = torch.randn(4, 12, 5, 6, dtype=torch.float64)
    (a,) = torch.autograd.grad((ours(x) * weight).sum(), x)
    (b,) = torch.autograd.grad((theirs(x) * weight).sum(), x)
    torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(ours, (x[:1, :, :2, :2].detach().requires_grad_(),))
