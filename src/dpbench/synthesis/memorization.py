"""Whether generated images are closer to training images than to test images of the same kind."""

from __future__ import annotations

import torch
from torch import Tensor

SUSPICIOUS = 4.0  # standard deviations


def nearest(images: Tensor, others: Tensor) -> Tensor:
    """Euclidean distance of each image to the nearest of some others, shape (N,).

    Args:
        images: (N, ...).
        others: (M, ...).
    """
    flat = others.flatten(1)
    return torch.cat([torch.cdist(part, flat).min(1).values for part in torch.split(images.flatten(1), 500)])


def memorization(synthetic: Tensor, train: Tensor, test: Tensor, seed: int = 0) -> dict[str, float | bool]:
    """Compare nearest-neighbour distances to as many training as test images.

    Without memorization a generated image is as often closer to the test images as to the training images.

    Args:
        synthetic: (N, ...), in the scale of the others.
        train: (M, ...), M at least the number of test images.
        test: (K, ...).
        seed: Of the choice among training images.

    Returns:
        share_closer_to_train: ½ without memorization.
        standard_deviations: How far it lies above ½.
        median_distance_train: To the chosen training images.
        median_distance_test: To the test images.
        memorization_suspected: Whether it lies more than four standard deviations above.
    """
    size = min(len(train), len(test))
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:size]
    to_train, to_test = nearest(synthetic, train[chosen]), nearest(synthetic, test[:size])
    closer = (to_train < to_test).double() + 0.5 * (to_train == to_test).double()
    share = float(closer.mean())
    deviations = (share - 0.5) * 2 * len(synthetic) ** 0.5
    return {
        "share_closer_to_train": share,
        "standard_deviations": deviations,
        "median_distance_train": float(to_train.median()),
        "median_distance_test": float(to_test.median()),
        "memorization_suspected": deviations > SUSPICIOUS,
    }
