"""Images of random processes: range, spectrum, occlusions, and the same ones for the same generator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpbench.capabilities.prior.processes import (
    SHAPES,
    dead_leaves,
    labeled_shapes,
    mixed_images,
    noise_images,
    shader_images,
)
from dpbench.capabilities.prior.views import random_views


def _leaves(count: int, side: int, generator: torch.Generator) -> Tensor:
    return dead_leaves(count, side, generator, shader_images(count, side, generator))


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("process", [noise_images, shader_images, _leaves, mixed_images])
def test_images_are_a_function_of_the_generator_and_differ_from_one_another(process) -> None:
    images = process(8, 24, _generator())
    assert images.shape == (8, 3, 24, 24)
    assert images.min() >= 0 and images.max() <= 1
    assert torch.equal(images, process(8, 24, _generator()))
    assert not torch.equal(images, process(8, 24, _generator(1)))
    assert torch.pdist(images.flatten(1)).min() > 0.5
    assert images.flatten(1).std(1).min() > 0.01  # none is of one color


def test_shapes_are_labeled_by_what_they_look_like() -> None:
    images, labels = labeled_shapes(400, 32, _generator())
    again, same = labeled_shapes(400, 32, _generator())
    assert torch.equal(images, again) and torch.equal(labels, same)
    counts = torch.bincount(labels, minlength=SHAPES)
    assert len(counts) == SHAPES
    assert counts.min() > 15


def test_views_are_other_images_of_the_same_thing() -> None:
    images = mixed_images(40, 40, _generator())
    generator = _generator(1)
    first, second = (random_views(images, 32, generator) for _ in range(2))
    assert first.shape == (40, 3, 32, 32)
    assert not torch.equal(first, second)
    # What is left of the whole: the mean brightness of a view follows that of its image.
    means = torch.stack([first.mean((1, 2, 3)), images.mean((1, 2, 3))])
    assert torch.corrcoef(means)[0, 1] > 0.4
