"""A U-Net that is small enough for private training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpbench.models.shapes import check_sizes, require

_GROUPS = 4  # of channels; BatchNorm would mix the records of a lot


def _block(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1),
        nn.GroupNorm(_GROUPS, n_out),
        nn.ReLU(),
        nn.Conv2d(n_out, n_out, 3, padding=1),
        nn.GroupNorm(_GROUPS, n_out),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Convolutions down and up again, with what was seen at each size beside (Ronneberger et al. 2015).

    With GroupNorm, padded convolutions, and widths that double from `width` on; 117,698 parameters at 3×32×32 and two
    classes.

    Args:
        input_shape: (channels, height, width) of an image; its sides are multiples of 2^depth.
        num_classes: Number of classes.
        width: Channels at the full size, a multiple of 4.
        depth: How often the sides are halved.

    Raises:
        ValueError: The sides are no multiples of 2^depth, or a size is below 1.

    Shape:
        (N, channels, height, width) → logits (N, num_classes, height, width).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        width: int = 16,
        depth: int = 2,
    ) -> None:
        super().__init__()
        check_sizes("unet", num_classes=num_classes, width=width, depth=depth)
        if width % _GROUPS:
            raise ValueError(f"model.width must be a multiple of {_GROUPS}, not {width}.")
        channels, height, image_width = input_shape
        step = 2**depth
        fits = height % step == 0 and image_width % step == 0
        require(fits, "unet", input_shape, f"images whose sides are multiples of {step} (2^model.depth)")
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList()
        for n_out in widths:
            self.down.append(_block(channels, n_out))
            channels = n_out
        self.halve = nn.MaxPool2d(2)
        self.enlarge = nn.ModuleList()
        self.up = nn.ModuleList()
        for n_out in reversed(widths[:-1]):
            self.enlarge.append(nn.ConvTranspose2d(2 * n_out, n_out, 2, stride=2))
            self.up.append(_block(2 * n_out, n_out))
        self.output = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes, H, W)."""
        features = images
        beside = []
        for level, block in enumerate(self.down):
            features = block(self.halve(features) if level else features)
            beside.append(features)
        beside.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            features = block(torch.cat([beside.pop(), enlarge(features)], 1))
        logits: Tensor = self.output(features)
        return logits
