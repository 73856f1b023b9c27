"""How much synthetic images look like real ones, in the features of a network that was trained on public data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from dpbench.data.images import normalize
from dpbench.data.sources import source
from dpbench.errors import ConfigurationError, brief
from dpbench.synthesis.downstream import train_cnn

NEIGHBORS = 5  # of density and coverage
_FEATURES = 32  # of the MNIST CNN before its last layer
_PUBLIC = "digits"  # scikit-learn's, part of the package


class DigitsFeatures(nn.Module):
    """The last hidden layer of the MNIST CNN after training on scikit-learn's digits: public, of the same kind.

    A GAN of those very digits is judged in features that saw its training images.

    Args:
        image_size: Side of the images; gray ones.

    Shape:
        (N, 1, H, W) in [0, 1] → (N, 32).
    """

    num_features = _FEATURES

    def __init__(self, image_size: int) -> None:
        super().__init__()
        spec = source(_PUBLIC)
        data = normalize(spec.load(Path(), "train", False), spec, image_size, "symmetric")
        whole = train_cnn((data.pixels.permute(0, 3, 1, 2) + 1) / 2, data.labels, spec.num_classes)
        self.layers = nn.Sequential(*list(whole.children())[:-1])

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, width) of images in [0, 1]."""
        features: Tensor = self.layers(images - 0.5)
        return features


Network = tuple[str, Callable[[Tensor], Tensor], FrechetInceptionDistance]


def feature_network(shape: tuple[int, int, int], name: str) -> Network:
    """Name, feature function and an empty Fréchet distance.

    Args:
        shape: (channels, height, width) of the images.
        name: "digits" or "inception".

    Raises:
        ConfigurationError: The network does not fit the images, or its weights are not at hand.
    """
    if name == "digits":
        if shape[0] != 1:
            raise ConfigurationError("--features digits knows gray images only: take --features inception.")
        network = DigitsFeatures(shape[1])
        return "digits_cnn", network, FrechetInceptionDistance(feature=network, normalize=True)
    if name != "inception":
        raise ConfigurationError(f"--features must be digits or inception, not {name!r}.")
    try:
        distance = FrechetInceptionDistance(feature=2048, normalize=True)
    except Exception as error:  # not installed, or weights that cannot be downloaded
        raise ConfigurationError(
            f"the Inception network is not at hand ({brief(error)}): pip install torch-fidelity and let "
            "it download its weights, or take --features digits."
        ) from error

    def features(images: Tensor) -> Tensor:
        found: Tensor = distance.inception((255 * images.expand(-1, 3, -1, -1)).byte())
        return found

    return "inception", features, distance


def fidelity(synthetic: Tensor, real: Tensor, features: Network) -> dict[str, float | str]:
    """Fréchet distance (torchmetrics), density and coverage (Naeem et al. 2020) of images in [0, 1].

    Args:
        synthetic: (N, C, H, W).
        real: (M, C, H, W), test data.
        features: A new one of `feature_network`.
    """
    name, network, distance = features
    with torch.no_grad():
        for images, is_real in ((synthetic, False), (real, True)):
            for part in torch.split(images, 500):
                distance.update(part.expand(-1, 3, -1, -1) if name == "inception" else part, real=is_real)
        ours, theirs = (torch.cat([network(part) for part in torch.split(x, 500)]).double() for x in (synthetic, real))
        density, coverage = density_and_coverage(ours[: len(theirs)], theirs)
    return {
        "features": name,
        f"frechet_distance_{name}": float(distance.compute()),
        "density": density,
        "coverage": coverage,
    }


def density_and_coverage(synthetic: Tensor, real: Tensor, neighbors: int = NEIGHBORS) -> tuple[float, float]:
    """How densely synthetic points lie among real ones, and the share of real ones with a synthetic one nearby.

    Both are about 1 for equal distributions.

    Args:
        synthetic: Features (N, D).
        real: Features (M, D).
        neighbors: k: a real point's surroundings reach to its k-th neighbor.
    """
    within = torch.cdist(real, real).kthvalue(neighbors + 1).values  # the first is the point itself
    near = torch.cdist(synthetic, real) < within
    return float(near.sum()) / (neighbors * len(synthetic)), float(near.any(0).double().mean())
