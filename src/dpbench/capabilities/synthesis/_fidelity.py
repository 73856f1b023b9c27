"""How good synthetic images are: how much they look like real ones, and how useful they are to learn from."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from dpbench.data.images import normalize
from dpbench.data.sources import source
from dpbench.models import MNISTCNN

NEIGHBORS = 5  # of density and coverage
_FEATURES = 32  # of the MNIST CNN before its last layer
_PUBLIC = "digits"  # scikit-learn's, part of the package
_IMAGES_AT_ONCE = 500
_EPOCHS = 5
_LEAST_STEPS = 400
_BATCH_SIZE = 128
_LEARNING_RATE = 1e-3
_ROWS = 10_000  # for logistic regression
_SEED = 0
_ROTATION = math.radians(15)
_SCALE = 0.15
_SHEAR = 0.2
_SHIFT = 0.05  # of the side


def random_affine(images: Tensor) -> Tensor:
    """Images, each rotated, scaled along both axes, sheared and shifted a little, by bilinear interpolation.

    Up to 15 degrees, 15 %, 0.2 and a twentieth of the side, uniformly; drawn from PyTorch's global generator.

    Args:
        images: (N, C, H, W).
    """
    size = len(images)

    def uniform(bound: float) -> Tensor:
        return bound * (2 * torch.rand(size, device=images.device) - 1)

    angle = uniform(_ROTATION)
    across = 1 + uniform(_SCALE)
    down = 1 + uniform(_SCALE)
    x = torch.stack([across * angle.cos(), uniform(_SHEAR) - down * angle.sin(), uniform(2 * _SHIFT)], 1)
    y = torch.stack([across * angle.sin(), down * angle.cos(), uniform(2 * _SHIFT)], 1)
    grid = F.affine_grid(torch.stack([x, y], 1).to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _train_cnn(
    images: Tensor,
    labels: Tensor,
    classes: int,
    augmented: bool = False,
) -> nn.Module:
    """The MNIST CNN after five epochs (few images: 400 steps); nothing is chosen on any data.

    Args:
        images: (N, C, H, W), in [0, 1].
        labels: (N,).
        classes: Number of classes.
        augmented: True to apply `random_affine` to each batch.
    """
    channels, height, width = images.shape[1:]
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = MNISTCNN((channels, height, width), classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
        for _ in range(max(_EPOCHS, -(-_LEAST_STEPS * _BATCH_SIZE // len(images)))):
            for rows in torch.split(torch.randperm(len(images)), _BATCH_SIZE):
                batch = random_affine(images[rows]) if augmented else images[rows]
                optimizer.zero_grad()
                F.cross_entropy(model(batch - 0.5), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return model.eval()


@torch.no_grad()
def _predict(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(part - 0.5).argmax(1) for part in torch.split(images, 1000)])


def accuracies(synthetic: tuple[Tensor, Tensor], real: tuple[Tensor, Tensor], classes: int) -> dict[str, float]:
    """Accuracy on real images of a CNN (without and with augmentation) and of logistic regression on synthetic ones.

    Args:
        synthetic: Images (N, C, H, W) in [0, 1], and labels (N,).
        real: The same, of test data.
        classes: Number of classes.
    """
    images, labels = synthetic
    real_images, real_labels = real
    regression = LogisticRegression(max_iter=200, tol=1e-2, random_state=_SEED)
    regression.fit(images[:_ROWS].flatten(1).numpy(), labels[:_ROWS].numpy())
    predictions = {
        "accuracy_cnn": _predict(_train_cnn(images, labels, classes), real_images),
        "accuracy_cnn_augmented": _predict(_train_cnn(images, labels, classes, augmented=True), real_images),
        "accuracy_logistic_regression": torch.from_numpy(regression.predict(real_images.flatten(1).numpy())),
    }
    return {name: float((predicted == real_labels).double().mean()) for name, predicted in predictions.items()}


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
        classifier = _train_cnn((data.pixels.permute(0, 3, 1, 2) + 1) / 2, data.labels, spec.num_classes)
        self.layers = nn.Sequential(*list(classifier.children())[:-1])

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, width) of images in [0, 1]."""
        features: Tensor = self.layers(images - 0.5)
        return features


def fidelity(synthetic: Tensor, real: Tensor) -> dict[str, float | str]:
    """Fréchet distance (torchmetrics), density and coverage (Naeem et al. 2020) of gray images in [0, 1].

    Args:
        synthetic: (N, 1, H, W).
        real: (M, 1, H, W), test data.
    """
    network = DigitsFeatures(real.shape[2])
    distance = FrechetInceptionDistance(feature=network, normalize=True)
    features_of = []
    with torch.no_grad():
        for images, is_real in ((synthetic, False), (real, True)):
            parts = []
            for part in torch.split(images, _IMAGES_AT_ONCE):
                distance.update(part, real=is_real)
                parts.append(network(part))
            features_of.append(torch.cat(parts).double())
    of_synthetic, of_real = features_of
    # As many of both: density counts synthetic points near real ones.
    density, coverage = density_and_coverage(of_synthetic[: len(of_real)], of_real)
    return {
        "features": "digits_cnn",
        "frechet_distance_digits_cnn": float(distance.compute()),
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
