"""Whether generated images are closer to training images than test images of the same kind are."""

from __future__ import annotations

import torch
from scipy.stats import betabinom
from torch import Tensor

EXPECTED = 0.01  # share of unusually close images without memorization
_IMPROBABLE = 1e-4
_COMPARED = 2000


def nearest(images: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Euclidean distance of each image to the nearest of some others, and which one that is: both (N,).

    Args:
        images: (N, ...).
        others: (M, ...).
    """
    flat = others.flatten(1)
    found = [torch.cdist(part, flat).argmin(1) for part in torch.split(images.flatten(1), 250)]
    places = torch.cat(found)
    # By subtraction: the products by which many distances are fast leave rounding errors where images are the same.
    return torch.linalg.vector_norm(images.flatten(1) - flat[places], dim=1), places


def memorization(synthetic: Tensor, train: Tensor, test: Tensor, seed: int = 0) -> dict[str, float | bool]:
    """Compare nearest-neighbor distances to the training images and to test images.

    The ratio of the two distances says how much closer an image is to what was trained on than to what was not; blurred
    images are close to both. The test images are parted: one half is what distances are taken to, the other says which
    ratios are usual. An image is *unusually close* to a training image where its ratio is below those of 99 % of them.
    Without memorization their number is beta-binomial. It is counted over distinct training neighbors, because images
    of a collapsed generator share theirs and are no independent witnesses. All this supposes that training and test
    images are alike, and that synthetic ones are of the same classes in about the same shares.

    Args:
        synthetic: (N, ...), in the scale of the others; the first 2,000 are compared.
        train: (M, ...), all of them.
        test: (K, ...).
        seed: Of the parting.

    Returns:
        unusually_close: Share of images; about 0.01 without memorization.
        p_value: Probability of so many of them, counted over distinct neighbors, without memorization.
        median_distance_train: To the training images.
        median_distance_test: To half of the test images.
        memorization_suspected: Whether the p-value lies below 0.0001.
    """
    parted = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))
    usual, held_out = (test[part] for part in parted.chunk(2))
    synthetic = synthetic[:_COMPARED]

    def ratios(images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        to_train, neighbors = nearest(images, train)
        to_test, _ = nearest(images, held_out)
        return to_train / to_test.clamp_min(torch.finfo(to_test.dtype).tiny), to_train, to_test, neighbors

    usually = ratios(usual[:_COMPARED])[0]
    usually = usually[usually > 0]  # duplicates of training images among the test images say nothing
    rank = max(round(EXPECTED * len(usually)), 1)
    threshold = usually.kthvalue(rank).values
    ratio, to_train, to_test, neighbors = ratios(synthetic)
    close = ratio < threshold
    first = torch.full((len(train),), len(synthetic)).scatter_reduce(
        0, neighbors, torch.arange(len(synthetic)), "amin", include_self=True
    )
    witnesses = close[first[first < len(synthetic)]]
    p_value = float(betabinom.sf(int(witnesses.sum()) - 1, len(witnesses), rank, len(usually) - rank + 1))
    return {
        "unusually_close": float(close.double().mean()),
        "p_value": p_value,
        "median_distance_train": float(to_train.median()),
        "median_distance_test": float(to_test.median()),
        "memorization_suspected": p_value < _IMPROBABLE,
    }
