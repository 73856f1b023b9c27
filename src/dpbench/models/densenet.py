"""DenseNet for small images, with GroupNorm instead of BatchNorm."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from dpbench.models.shapes import Size, require


def _norm_relu(channels: int, growth: int) -> list[nn.Module]:
    """GroupNorm with groups that do not straddle the features of different layers."""
    return [nn.GroupNorm(channels // math.gcd(channels, growth), channels), nn.ReLU()]


class DenseLayer(nn.Module):
    """Norm, ReLU, conv 3×3; the output is appended to the input: (N, c, H, W) → (N, c + growth, H, W)."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_norm_relu(channels, growth),
            nn.Conv2d(
                channels,
                growth,
                3,
                padding=1,
                bias=False,
            ),
        )

    def forward(self, input: Tensor) -> Tensor:
        """Concatenate the input and the new features, channel by channel."""
        return torch.cat([input, self.body(input)], 1)


class DenseNet(nn.Sequential):
    """Three dense blocks with two transitions (Huang et al. 2017), for images of about 32×32.

    | stage | output on 3×32×32 (depth 40, growth 10, compression 0.5) |
    | --- | --- |
    | conv 3×3 (CIFAR stem) | 20×32×32 |
    | 12 dense layers | 140×32×32 |
    | transition: norm, ReLU, conv 1×1, average pool | 70×16×16 |
    | 12 dense layers | 190×16×16 |
    | transition | 95×8×8 |
    | 12 dense layers, norm, ReLU, average over pixels | 215 |
    | fully connected | num_classes |

    GroupNorm takes the place of BatchNorm, which mixes the records of a batch. Used by
    gradient_compression_denoising_2020, Table 2 (depth 40, growth 10, compression 2, that is: a transition keeps half).

    Args:
        input_shape: (channels, height, width) of an image; at least 4×4.
        num_classes: Number of classes.
        depth: Number of layers, 3·n + 4.
        growth: Channels that each dense layer adds.
        compression: Share of the channels that a transition keeps.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        depth: int = 40,
        growth: Size = 10,
        compression: Annotated[float, Field(gt=0, le=1), "a number above 0, at most 1"] = 0.5,
    ) -> None:
        require(
            min(input_shape[1:]) >= 4,
            "densenet40",
            input_shape,
            "images of at least 4×4 pixels",
        )
        per_block, remainder = divmod(depth - 4, 3)
        if remainder or not 1 <= per_block <= 1000:
            raise ValueError(f"densenet40 needs depth = 3·n + 4 with n from 1 to 1000, not {depth}.")
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range(per_block):
                layers.append(DenseLayer(channels, growth))
                channels += growth
            layers += _norm_relu(channels, growth)
            if block < 2:
                reduced = int(channels * compression)
                layers += [nn.Conv2d(channels, reduced, 1, bias=False), nn.AvgPool2d(2)]
                channels = reduced
        super().__init__(
            *layers,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, num_classes),
        )
