"""The network that is trained on random images, its file, and the frozen features that it gives of real ones."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.data.scattering import by_pieces, scattering
from dpbench.errors import ConfigurationError
from dpbench.files import replacing

CHANNELS = 3
_FORMAT = "dpbench random prior 1"
_GROUPS = 8  # of channels, normalized together
_CELLS = 4  # of a side: features are averages over a 4×4 grid
_SMALLEST = 1e-3  # deviation of a channel by which its features are divided


@dataclass(frozen=True)
class Settings:
    """All that a prior is made of; the same settings give the same weights on one machine and number of threads.

    Attributes:
        image_size: Side of an image, in pixels; a multiple of eight from 16 on.
        width: Channels of the first layer, a multiple of eight; the others have two, four and eight times as many.
        steps: Steps of the training.
        batch_size: Images of a step, each of which is seen in two views; a multiple of four.
        learning_rate: Learning rate of AdamW, after a warmup and before a cosine.
        seed: Seed of the images, the views and the first weights; from 0 on, below 2^32.
    """

    image_size: int = 32
    width: int = 32
    steps: int = 2500
    batch_size: int = 256
    learning_rate: float = 1.5e-3
    seed: int = 0


def _convolution(n_in: int, n_out: int, stride: int) -> tuple[nn.Conv2d, nn.GroupNorm]:
    return nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.GroupNorm(_GROUPS, n_out)


class _Block(nn.Module):
    """Two convolutions 3×3 of half the side, and a shortcut of averages."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(n_in, n_out, 2),
            nn.ReLU(),
            *_convolution(n_out, n_out, 1),
        )
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(n_in, n_out, 1, bias=False))

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(self.body(input) + self.shortcut(input))


class Extractor(nn.Module):
    """A residual network of seven convolutions; GroupNorm, so that it treats each image by itself.

    Args:
        width: Channels of the first layer.

    Shape:
        (N, 3, H, W) → the maps of its last two stages: (N, 4·width, H/4, W/4) and (N, 8·width, H/8, W/8).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(CHANNELS, width, 1), nn.ReLU())
        self.first = _Block(width, 2 * width)
        self.second = _Block(2 * width, 4 * width)
        self.third = _Block(4 * width, 8 * width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of the last two stages."""
        second = self.second(self.first(self.stem(images - 0.5)))
        return second, self.third(second)


def cells(network: Extractor, images: Tensor) -> Tensor:
    """Averages of both maps over a 4×4 grid, (N, 3, H, W) → (N, 12·width, 4, 4)."""
    maps = network(images)
    return torch.cat([F.adaptive_avg_pool2d(values, _CELLS) for values in maps], 1)


@dataclass(frozen=True, eq=False)
class Prior:
    """A trained extractor, and the statistics of its features on random images.

    Attributes:
        settings: Settings of the training.
        network: The extractor, frozen.
        means: Mean of the features of each channel, (12·width,).
        deviations: Standard deviation of the same.
        sha256: Hash of the file.
    """

    settings: Settings
    network: Extractor
    means: Tensor
    deviations: Tensor
    sha256: str

    def features(self, pixels: Tensor) -> Tensor:
        """Features of each image by itself, averaged with those of its mirror image; mean square 1 in each image.

        They are centered and scaled by their statistics on random images.

        Args:
            pixels: (N, H, W, 3) in [0, 1], of the side that the prior was trained on.

        Returns:
            (N, 4, 4, 12·width), contiguous.

        Raises:
            ConfigurationError: The images have another side or number of channels.
        """
        side = self.settings.image_size
        height, width, channels = pixels.shape[1:]
        if channels != CHANNELS:
            raise ConfigurationError(
                f"the prior was trained on color images, and the number of channels here is {channels}, not "
                f"{CHANNELS}: take data.features=scattering, or a data set of color images."
            )
        if (height, width) != (side, side):
            raise ConfigurationError(
                f"the prior was trained on images of {side}×{side} pixels, and these have {height}×{width}: set "
                f"data.image_size={side}."
            )
        return by_pieces(self._features, pixels)

    def features_and_scattering(self, pixels: Tensor) -> Tensor:
        """These and `data.scattering.scattering`, each with half of the sum of squares; mean square 1 in each image.

        Args:
            pixels: (N, H, W, 3) in [0, 1], of the side that the prior was trained on.

        Returns:
            (N, 1, 1, F): for linear models, which know no places.

        Raises:
            ConfigurationError: See `features`.
        """

        def both(images: Tensor) -> Tensor:
            piece = images.permute(0, 2, 3, 1)
            parts = [self.features(piece).flatten(1), scattering(piece).flatten(1)]
            size = sum(part.shape[1] for part in parts)
            scaled = [F.normalize(part, dim=1) * math.sqrt(size / len(parts)) for part in parts]
            return torch.cat(scaled, 1)[:, None, None]

        return by_pieces(both, pixels)

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        mirrored = images.flip(3)
        means = (cells(self.network, images) + cells(self.network, mirrored)) / 2
        centered = (means - self.means[:, None, None]) / self.deviations[:, None, None]
        size = centered.square().mean((1, 2, 3), keepdim=True).sqrt()
        return (centered / size.clamp(min=1e-6)).permute(0, 2, 3, 1)


def save(
    path: Path,
    settings: Settings,
    network: Extractor,
    **more: Any,
) -> None:
    """Write a trained network, whole or not at all.

    Args:
        path: The file.
        settings: Settings of the training.
        network: The network.
        **more: Means and deviations of the features, and facts of the training.
    """
    state = {"format": _FORMAT, "settings": asdict(settings), "network": network.state_dict(), **more}
    content = io.BytesIO()
    torch.save(state, content)
    with replacing(path) as new:
        new.write_bytes(content.getbuffer())  # a full disk is an OSError here, and a RuntimeError in torch.save


def load(path: Path) -> Prior:
    """Load a trained prior; the same file is read once.

    Args:
        path: A file that `dpbench pretrain` has written.

    Raises:
        ConfigurationError: It is missing, or something else.
    """
    if not path.is_file():
        raise ConfigurationError(f"data.prior={path} is not a file: train it with dpbench pretrain --out {path}.")
    stat = path.stat()
    return _load(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _load(path: Path, changed: int, size: int) -> Prior:
    content = path.read_bytes()  # once, so that the hash is that of the weights
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        is_prior = state["format"] == _FORMAT
        settings = Settings(**state["settings"])
        means = state["means"]
        deviations = state["deviations"].clamp(min=_SMALLEST)
        weights = state["network"]
    except Exception as error:
        # PyTorch's own words on a file that is torn are a paragraph on its archive's format.
        raise ConfigurationError(f"{path} is damaged, or not from dpbench pretrain: train it again.") from error
    if not is_prior:
        raise ConfigurationError(f"{path} is from another version of dpbench pretrain: train it again.")
    with torch.device("meta"):  # draws no first weights
        network = Extractor(settings.width)
    network.load_state_dict(weights, assign=True)
    network.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    return Prior(settings, network, means, deviations, hashlib.sha256(content).hexdigest())
