"""The small AlexNet of Zhang et al. 2017, "Understanding deep learning requires rethinking generalization"."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from dpbench.models.shapes import Size, require


class LocalResponseNorm(nn.Module):
    """Local response normalization over channels with exponent 3/4, as `torch.nn.LocalResponseNorm` computes it.

    The sum over neighboring channels is a product with a banded matrix; on the CPU that is several times faster.

    Args:
        channels: Number of channels.
        size: Channels in a neighborhood (odd).
        alpha: Weight of the mean square over the neighborhood.
        k: Additive constant.

    Shape:
        (N, channels, H, W) → the same.
    """

    band: Tensor

    def __init__(
        self,
        channels: int,
        size: int = 9,
        alpha: float = 1e-3,
        k: float = 1.0,
    ) -> None:
        super().__init__()
        index = torch.arange(channels)
        band = ((index[:, None] - index).abs() <= size // 2).float()
        self.register_buffer("band", band, persistent=False)
        self.scale = alpha / size
        self.k = k

    def forward(self, input: Tensor) -> Tensor:
        """The normalized input, channels-last in memory; in float32 at least."""
        x = input.float() if input.dtype.itemsize < 4 else input
        batch, channels, height, width = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(-1, channels)
        with torch.autocast(x.device.type, enabled=False):  # which would make powers float32 and products not
            squares = torch.addmm(rows.new_full((1,), self.k), rows.square(), self.band.to(x.dtype), alpha=self.scale)
            root = squares.rsqrt()
            normalized = rows * (root * root.sqrt())
        return normalized.view(batch, height, width, channels).permute(0, 3, 1, 2)


class CenterCrop(nn.Module):
    """The central size × size pixels; smaller images stay as they are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) → (N, C, min(H, size), min(W, size))."""
        for dim in (2, 3):
            surplus = input.shape[dim] - self.size
            if surplus > 0:
                input = input.narrow(dim, surplus // 2, self.size)
        return input


class SmallAlexNet(nn.Sequential):
    """Two [conv 5×5, ReLU, max-pool 3×3 stride 2, local response normalization], fully connected 384, 192.

    | layer | output on 3×32×32 |
    | --- | --- |
    | center crop 28×28 | 3×28×28 |
    | conv 5×5, 64 channels, ReLU, max-pool ('same'), LRN | 64×14×14 |
    | conv 5×5, 64 channels, ReLU, max-pool ('same'), LRN | 64×7×7 |
    | fully connected, ReLU | 384 |
    | fully connected, ReLU | 192 |
    | fully connected | num_classes |

    Used by three_tools_2018 (Figs. 1 and 4, Table 1) after Zhang et al. 2017, appendix A.

    Args:
        input_shape: (channels, height, width) of an image; at least 8×8.
        num_classes: Number of classes.
        channels: Output channels of both convolutions.
        crop: Side of the center crop.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        channels: Size = 64,
        crop: Annotated[int, Field(ge=8), "a whole number from 8 on"] = 28,
    ) -> None:
        in_channels, height, width = input_shape
        require(
            min(height, width) >= 8,
            "small_alexnet",
            input_shape,
            "images of at least 8×8 pixels",
        )
        height, width = (min(side, crop) // 2 // 2 for side in (height, width))
        blocks: list[nn.Module] = [CenterCrop(crop)]
        for n_in in (in_channels, channels):
            blocks += [
                nn.Conv2d(n_in, channels, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(3, stride=2, ceil_mode=True),
                LocalResponseNorm(channels),
            ]
        super().__init__(
            *blocks,
            nn.Flatten(),
            nn.Linear(channels * height * width, 384),
            nn.ReLU(),
            nn.Linear(384, 192),
            nn.ReLU(),
            nn.Linear(192, num_classes),
        )
