"""ResNet-18 with GroupNorm, of the federated CIFAR-100 task."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.models.initialization import he_normal_, is_published
from dpbench.models.shapes import require

_GROUPS, _EPS = 32, 1e-3  # of the normalization in the task's program
_STAGES = (64, 128, 256, 512)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, channels, eps=_EPS)


class PreActivationBlock(nn.Module):
    """Norm, ReLU, conv 3×3, twice, and a shortcut (He et al. 2016, "Identity mappings in deep residual networks").

    Args:
        n_in: Channels of the input.
        n_out: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.
        normalized: True if the input comes from a norm and ReLU already: the first ones are left out.

    Shape:
        (N, n_in, H, W) → (N, n_out, H/stride, W/stride), rounded up.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        stride: int,
        normalized: bool,
    ) -> None:
        super().__init__()
        self.before = nn.Identity() if normalized else nn.Sequential(_norm(n_in), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            _norm(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(
                    n_in,
                    n_out,
                    1,
                    stride,
                    bias=False,
                ),
                _norm(n_out),
            )

    def forward(self, input: Tensor) -> Tensor:
        """Add the convolutions' output to the shortcut."""
        output: Tensor = self.shortcut(input) + self.body(self.before(input))
        return output


class ResNet18GN(nn.Module):
    """ResNet-18, version 2, with GroupNorm of 32 groups; 11,227,812 parameters at 3×24×24 and 100 classes.

    | stage | output on 3×24×24 | without `downsample` |
    | --- | --- | --- |
    | conv 7×7, stride 2, norm, ReLU, max-pool 3×3, stride 2 | 64×6×6 | the same |
    | 2 blocks of 64 channels | 64×6×6 | 64×6×6 |
    | 2 blocks of 128 channels | 128×3×3 | 128×6×6 |
    | 2 blocks of 256 channels | 256×2×2 | 256×6×6 |
    | 2 blocks of 512 channels, norm, ReLU | 512×1×1 | 512×6×6 |
    | average over pixels, fully connected | num_classes | |

    Used for CIFAR-100 by adaptive_quantile_clipping_2021, after Reddi et al. 2021, "Adaptive federated optimization".
    The published program never passes a stride to its blocks, so that it halves the sides in the stem only: that is
    `downsample=False`, which costs several times as much. Both have the same parameters.

    Args:
        input_shape: (channels, height, width) of an image; at least 8×8.
        num_classes: Number of classes.
        downsample: True to halve the sides before each stage but the first, as in He et al. 2016.
        initialization: "published" (He normal, the last layer normal of deviation 0.01) or "torch".

    Raises:
        ValueError: The images are too small, or there is no such initialization.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        downsample: bool = True,
        initialization: str = "published",
    ) -> None:
        super().__init__()
        require(
            min(input_shape[1:]) >= 8,
            "resnet18_gn",
            input_shape,
            "images of at least 8×8 pixels",
        )
        n_in = _STAGES[0]
        self.stem = nn.Sequential(
            nn.Conv2d(
                input_shape[0],
                n_in,
                7,
                2,
                3,
                bias=False,
            ),
            _norm(n_in),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        for stage, n_out in enumerate(_STAGES):
            for number in range(2):
                stride = 2 if downsample and stage and not number else 1
                blocks.append(PreActivationBlock(n_in, n_out, stride, normalized=not blocks))
                n_in = n_out
        self.blocks = nn.Sequential(*blocks, _norm(n_in), nn.ReLU())
        self.output = nn.Linear(n_in, num_classes)
        if is_published(initialization):
            for layer in self.modules():
                if isinstance(layer, nn.Conv2d):
                    he_normal_(layer.weight)
            nn.init.normal_(self.output.weight, std=0.01)
            nn.init.zeros_(self.output.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes)."""
        features = F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1)
        logits: Tensor = self.output(features.flatten(1))
        return logits
