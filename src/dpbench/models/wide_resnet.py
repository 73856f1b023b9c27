"""Wide residual network with GroupNorm and weight standardization, of De et al. 2022."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dpbench.models.initialization import is_published, lecun_normal_
from dpbench.models.shapes import Size, require

_EPS = 1e-4  # of the standardization in the authors' program


def standardized(weight: Tensor, gain: Tensor) -> Tensor:
    """The weight of a convolution with mean 0 and norm `gain` for each output channel.

    ŵ = gain · (w − mean(w)) / √max(n · var(w), 1e-4), over the n numbers of an output channel (Qiao et al. 2019; as
    scaled by Brock et al. 2021).

    Args:
        weight: (channels, ...).
        gain: (channels,).
    """
    rows = weight.flatten(1)
    centered = rows - rows.mean(1, keepdim=True)
    squares = centered.square().sum(1, keepdim=True)  # n · var
    scaled = centered * squares.clamp(min=_EPS).rsqrt() * gain[:, None]
    return scaled.view_as(weight)


class WeightStandardization(nn.Module):
    """Computes a convolution's weight from another tensor: `standardized`, with a gain that is trained.

    It is a parametrization (`torch.nn.utils.parametrize`).

    Args:
        channels: Output channels of the convolution.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, weight: Tensor) -> Tensor:
        """The standardized weight, in the weight's shape (channels, ...)."""
        return standardized(weight, self.gain)


def _convolution(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2)
    parametrize.register_parametrization(layer, "weight", WeightStandardization(n_out), unsafe=True)
    return layer


def _activated(n_in: int, n_out: int, groups: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """ReLU, GroupNorm, convolution: in this order, which is that of the authors' program."""
    return [nn.ReLU(), nn.GroupNorm(groups, n_in), _convolution(n_in, n_out, kernel, stride)]


class WideBlock(nn.Module):
    """ReLU, norm, conv 3×3, twice, and a shortcut: (N, n_in, H, W) → (N, n_out, H/stride, W/stride), rounded up.

    Args:
        n_in: Channels of the input.
        n_out: Channels of the output.
        groups: Number of groups of the normalization.
        stride: Stride of the first convolution and of the shortcut.
        is_first: True for the first block of a stage, whose shortcut is ReLU, norm and a convolution 1×1.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        groups: int,
        stride: int,
        is_first: bool,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_activated(n_in, n_out, groups, 3, stride),
            *_activated(n_out, n_out, groups, 3),
        )
        self.shortcut: nn.Module = nn.Identity()
        if is_first:
            self.shortcut = nn.Sequential(*_activated(n_in, n_out, groups, 1, stride))

    def forward(self, input: Tensor) -> Tensor:
        """Add the convolutions' output to the shortcut."""
        output: Tensor = self.shortcut(input) + self.body(input)
        return output


class WideResNet(nn.Sequential):
    """Wide ResNet (Zagoruyko and Komodakis 2016) for private training; WRN-16-4 unless told otherwise.

    | stage | output on 3×32×32 (depth 16, width 4) |
    | --- | --- |
    | conv 3×3 | 16×32×32 |
    | 2 blocks of 64 channels | 64×32×32 |
    | 2 blocks of 128 channels | 128×16×16 |
    | 2 blocks of 256 channels, ReLU, norm | 256×8×8 |
    | average over pixels, fully connected | num_classes |

    GroupNorm of 16 groups in the place of BatchNorm, weight-standardized convolutions with gain and bias, ReLU before
    each norm: the network of De et al. 2022 as their program
    (github.com/google-deepmind/jax_privacy, experiments/image_classification/models/cifar.py) has it. One difference:
    convolutions of stride 2 pad one pixel on each side, as PyTorch does, and not one at the end alone. 2,753,818
    parameters at 3×32×32 and 10 classes; the paper says 2.7M.

    Args:
        input_shape: (channels, height, width) of an image; at least 4×4.
        num_classes: Number of classes.
        depth: Number of layers, 6·n + 4.
        width: Multiplies the channels of the stages.
        groups: Groups of each GroupNorm; they divide 16.
        initialization: "published" (normal of variance 1 / fan in, cut at two deviations; biases zero) or "torch".

    Raises:
        ValueError: The images are too small, or an option is out of range.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        depth: int = 16,
        width: Size = 4,
        groups: Literal[1, 2, 4, 8, 16] = 16,
        initialization: str = "published",
    ) -> None:
        require(
            min(input_shape[1:]) >= 4,
            "wide_resnet",
            input_shape,
            "images of at least 4×4 pixels",
        )
        per_stage, remainder = divmod(depth - 4, 6)
        if remainder or not 1 <= per_stage <= 1000:
            raise ValueError(f"wide_resnet needs depth = 6·n + 4 with n from 1 to 1000, not {depth}.")
        n_in = 16
        layers: list[nn.Module] = [_convolution(input_shape[0], n_in, 3)]
        for stage in range(3):
            n_out = 16 * width * 2**stage
            for number in range(per_stage):
                stride = 2 if stage and not number else 1
                layers.append(WideBlock(n_in, n_out, groups, stride, is_first=not number))
                n_in = n_out
        super().__init__(
            *layers,
            nn.ReLU(),
            nn.GroupNorm(groups, n_in),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(n_in, num_classes),
        )
        if is_published(initialization):
            for layer in self.modules():
                if isinstance(layer, nn.Conv2d):
                    # What the weight is computed from.
                    lecun_normal_(layer.parametrizations.weight.original)  # type: ignore[union-attr, arg-type]
                    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            output: nn.Linear = self[-1]  # type: ignore[assignment]
            lecun_normal_(output.weight)
            nn.init.zeros_(output.bias)
