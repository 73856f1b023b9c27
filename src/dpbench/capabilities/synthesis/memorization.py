"""Test whether generated images are closer to training images than test images of the same kind are."""

from __future__ import annotations

import torch
from scipy.stats import betabinom
from torch import Tensor

from dpbench.harness.run.samples import nearest

EXPECTED = 0.01  # share of unusually close images without memorization
_IMPROBABLE = 1e-4  # p-value below which memorization is suspected
_COMPARED = 2000  # images: all distances take memory of the product


def memorization(synthetic: Tensor, train: Tensor, test: Tensor, seed: int = 0) -> dict[str, float | bool]:
    """Compare nearest-neighbor distances to the training images and to test images.

    The ratio of the two distances says how much closer an image is to training images than to others; blurred images
    are close to both. The test images are split: distances are taken to one half, and the other shows the usual
    ratios. An image is *unusually close* to a training image where its ratio is below those of 99 % of them.
    Without memorization their number is beta-binomial. It is counted over distinct training neighbors, because images
    of a collapsed generator share theirs and are no independent witnesses. All this supposes that training and test
    images are alike, and that synthetic ones are of the same classes in about the same shares.

    Args:
        synthetic: (N, ...), in the scale of the others; the first 2,000 are compared.
        train: (M, ...), all of them.
        test: (K, ...).
        seed: Seed of the split.

    Returns:
        unusually_close: Share of images; about 0.01 without memorization.
        p_value: Probability of so many of them, counted over distinct neighbors, without memorization.
        median_distance_train: Median distance to the training images.
        median_distance_test: Median distance to half of the test images.
        memorization_suspected: True if the p-value lies below 0.0001.
    """
    shuffled = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))
    usual_rows, reference_rows = shuffled.chunk(2)
    references = test[reference_rows]
    synthetic = synthetic[:_COMPARED]

    def ratios(to_train: Tensor, to_test: Tensor) -> Tensor:
        return to_train / to_test.clamp_min(torch.finfo(to_test.dtype).tiny)

    usual = test[usual_rows][:_COMPARED]
    usual_to_train, _ = nearest(usual, train)
    usual_to_test, _ = nearest(usual, references)
    usual_ratios = ratios(usual_to_train, usual_to_test)
    # Duplicates of training images among the test images say nothing.
    usual_ratios = usual_ratios[usual_ratios > 0]
    rank = max(round(EXPECTED * len(usual_ratios)), 1)
    threshold = usual_ratios.kthvalue(rank).values
    to_train, neighbors = nearest(synthetic, train)
    to_test, _ = nearest(synthetic, references)
    is_close = ratios(to_train, to_test) < threshold
    # The first synthetic image of each training neighbor speaks for all of them; neighbors of none stay at the end.
    count = len(synthetic)
    first = torch.full((len(train),), count)
    first = first.scatter_reduce(0, neighbors, torch.arange(count), "amin", include_self=True)
    witnesses = is_close[first[first < count]]
    # The threshold is an order statistic of as many ratios: Beta(rank, n − rank + 1) is what lies below it.
    p_value = betabinom.sf(
        int(witnesses.sum()) - 1,
        len(witnesses),
        rank,
        len(usual_ratios) - rank + 1,
    )
    return {
        "unusually_close": float(is_close.double().mean()),
        "p_value": float(p_value),
        "median_distance_train": float(to_train.median()),
        "median_distance_test": float(to_test.median()),
        "memorization_suspected": bool(p_value < _IMPROBABLE),
    }
