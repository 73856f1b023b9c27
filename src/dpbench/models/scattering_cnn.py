"""The convolutional network on scattering features of Tramèr and Boneh 2021."""

from __future__ import annotations

from torch import nn

from dpbench.models.shapes import Size, require


class ScatteringCNN(nn.Sequential):
    """Two convolutions and a linear layer on features of a coarse grid, with tanh.

    | layer | output on 243×8×8 (CIFAR-10) |
    | --- | --- |
    | conv 3×3, 64 channels, padding 1, tanh | 64×8×8 |
    | max-pool 2×2 | 64×4×4 |
    | conv 3×3, 64 channels, padding 1, tanh | 64×4×4 |
    | fully connected | num_classes |

    Used on the scattering features of CIFAR-10 (`data.features=scattering`, see `dpbench.data.scattering`) by Tramèr
    and Boneh 2021, "Differentially private learning needs better features (or much more data)", with 69.3 % at ε = 3.

    Args:
        input_shape: (features, height, width); at least 2×2.
        num_classes: Number of classes.
        channels: Output channels of both convolutions.

    Raises:
        ValueError: The grid is too small.

    Shape:
        (N, features, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        channels: Size = 64,
    ) -> None:
        features, height, width = input_shape
        require(
            min(height, width) >= 2,
            "scattering_cnn",
            input_shape,
            "features on a grid of at least 2×2",
        )
        super().__init__(
            nn.Conv2d(features, channels, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(channels * (height // 2) * (width // 2), num_classes),
        )
