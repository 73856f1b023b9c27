"""Mechanisms whose noise has the declared variance, and is neither fresh nor Gaussian, while a context is open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dpbench.privacy import releases
from dpbench.privacy.mechanism.noise_process import Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.randomness import digest_of, noise_key

Noises = list[Tensor]
"""Right noise of all releases so far, the present one last."""

_add_noise = Noise.add_


@contextmanager
def _with_noise(noise_of: Callable[[Noises], Tensor]) -> Iterator[None]:
    """Release other noise: a function of the right one."""
    right: Noises = []

    def wrong(self: Noise, total: Tensor, plan: ReleasePlan, *others: Any) -> Tensor:
        clean = total.clone()
        right.append(_add_noise(self, total, plan, *others) - clean)
        return total.copy_(clean + noise_of(right))

    with mock.patch.object(Noise, "add_", wrong):
        yield


def opposite_after_five() -> AbstractContextManager[None]:
    """The noise of five releases is followed by its opposite."""
    return _with_noise(lambda right: -right[-6] if (len(right) - 1) // 5 % 2 else right[-1])


def random_signs() -> AbstractContextManager[None]:
    """The noise of seven releases comes again, each with a sign of its own."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=100_000)

    def noise(right: Noises) -> Tensor:
        release = len(right) - 1
        return float(signs[release]) * right[-8] if release // 7 % 2 else right[-1]

    return _with_noise(noise)


def taken_back() -> AbstractContextManager[None]:
    """Each tenth noise takes a third of the nine before back."""
    return _with_noise(lambda right: right[-1] if len(right) % 10 else -torch.stack(right[-10:-1]).sum(0) / 3)


def moving_average() -> AbstractContextManager[None]:
    """A moving average that leaves the variance of the sum of all, and of consecutive releases, as they should be."""

    def noise(right: Noises) -> Tensor:
        if len(right) < 5:
            return right[-1]
        return (2 * right[-1] + 2 * right[-3] - right[-5]) / 3

    return _with_noise(noise)


def cut_tails() -> AbstractContextManager[None]:
    """Noise ends at three standard deviations, and is scaled to the right variance."""
    lost = 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))  # of the variance

    def noise(right: Noises) -> Tensor:
        std = right[-1].std()
        inside = torch.where(right[-1].abs() <= 3 * std, right[-1], right[-1] / 3)
        return inside / math.sqrt(1 - lost)

    return _with_noise(noise)


def loud_and_quiet() -> AbstractContextManager[None]:
    """Every other release has 0.7 of the noise, and the others as much more."""
    return _with_noise(lambda right: right[-1] * (0.7 if len(right) % 2 else math.sqrt(2 - 0.49)))


def shared_by_neighbors() -> AbstractContextManager[None]:
    """Each coordinate has the noise of the next one, too."""

    def noise(right: Noises) -> Tensor:
        shared = right[-1].clone()
        pairs = len(shared) // 2
        shared[1 : 2 * pairs : 2] = shared[0 : 2 * pairs : 2]
        return shared

    return _with_noise(noise)


@contextmanager
def ten_bits() -> Iterator[None]:
    """The key of the noise has ten bits."""

    def short(*facts: int) -> tuple[int, ...]:
        return (int.from_bytes(digest_of(noise_key(*facts))[:2], "big") % 1024,)

    with mock.patch.object(releases, "noise_key", short):
        yield


@contextmanager
def half_for_statistics() -> Iterator[None]:
    """The statistics beside the gradients get half of their noise."""

    def wrong(self: Noise, total: Tensor, plan: ReleasePlan, *others: Any) -> Tensor:
        first = sum(plan.sizes)
        clean = total[first:].clone()
        noised = _add_noise(self, total, plan, *others)
        noised[first:] = (noised[first:] + clean) / 2
        return noised

    with mock.patch.object(Noise, "add_", wrong):
        yield


NOISE_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "noise opposite to that of five releases before": opposite_after_five,
    "noise of seven releases before, with random signs": random_signs,
    "each tenth noise takes back the nine before": taken_back,
    "a moving average of the noise": moving_average,
    "noise that ends at three deviations": cut_tails,
    "loud and quiet releases": loud_and_quiet,
    "neighboring coordinates with the same noise": shared_by_neighbors,
    "noise with a key of ten bits": ten_bits,
    "half of the noise for statistics": half_for_statistics,
}
