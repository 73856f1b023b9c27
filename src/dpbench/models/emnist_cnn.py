"""The convolutional network of the federated EMNIST task."""

from __future__ import annotations

from torch import nn

from dpbench.models.initialization import draw_as_published, is_published
from dpbench.models.shapes import require


class EMNISTCNN(nn.Sequential):
    """Two convolutions, two fully connected layers, dropout; 1,206,590 parameters at 62 classes, 1,199,882 at 10.

    | layer | output on 1×28×28 |
    | --- | --- |
    | conv 3×3, 32 channels, ReLU | 32×26×26 |
    | conv 3×3, 64 channels, ReLU | 64×24×24 |
    | max-pool 2×2, dropout 0.25 | 64×12×12 |
    | fully connected, ReLU, dropout 0.5 | 128 |
    | fully connected | num_classes |

    Used for EMNIST-CR by adaptive_quantile_clipping_2021, after Reddi et al. 2021, "Adaptive federated optimization".

    Args:
        input_shape: (channels, height, width) of an image; at least 6×6.
        num_classes: Number of classes.
        initialization: "published" (Glorot normal) or "torch".

    Raises:
        ValueError: The images are too small, or there is no such initialization.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        initialization: str = "published",
    ) -> None:
        channels, height, width = input_shape
        require(min(height, width) >= 6, "emnist_cnn", input_shape, "images of at least 6×6 pixels")
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        )
        if is_published(initialization):
            draw_as_published(self)
