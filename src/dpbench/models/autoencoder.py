"""The autoencoder of the federated EMNIST task."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from dpbench.models.initialization import draw_as_published, is_published


class Autoencoder(nn.Sequential):
    """784-1000-500-250-30-250-500-1000-784, sigmoid but for the linear code in the middle; 2,837,314 parameters.

    Used for EMNIST-AE by adaptive_quantile_clipping_2021, after Reddi et al. 2021, "Adaptive federated optimization".

    Args:
        input_shape: (channels, height, width) of an image.
        hidden: Widths from the first layer to the code; behind the code they come in reverse.
        initialization: "published" (Glorot normal) or "torch".

    Raises:
        ValueError: A width is below 1, there is none, or there is no such initialization.

    Shape:
        (N, channels, height, width) → pixels in (0, 1), (N, channels · height · width).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        hidden: tuple[int, ...] | list[int] = (1000, 500, 250, 30),
        initialization: str = "published",
    ) -> None:
        if not hidden or any(width < 1 for width in hidden):
            raise ValueError(f"model.hidden must hold widths from 1 on, at least that of the code, not {list(hidden)}.")
        pixels = math.prod(input_shape)
        widths = [pixels, *hidden, *reversed(hidden[:-1]), pixels]
        layers: list[nn.Module] = [nn.Flatten()]
        for number, (n_in, n_out) in enumerate(pairwise(widths), 1):
            layers.append(nn.Linear(n_in, n_out))
            if number != len(hidden):  # the code
                layers.append(nn.Sigmoid())
        super().__init__(*layers)
        if is_published(initialization):
            draw_as_published(self)
