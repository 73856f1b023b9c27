"""Mechanisms that are broken, each in one way, while a context is open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dpbench.data.lots import Lots
from dpbench.privacy import releases
from dpbench.privacy.mechanism import mechanism
from dpbench.privacy.mechanism.clipping import clip_and_sum
from dpbench.privacy.mechanism.noise_process import Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records.users import Users
from tools.audits.noise_mutants import NOISE_MUTANTS
from tools.audits.record_mutants import RECORD_MUTANTS

Mutant = Callable[[], Any]

_add_noise, _lot, _train = Noise.add_, Lots._lot, Users._train


def _scaled(factor: float) -> Mutant:
    @contextmanager
    def broken() -> Iterator[None]:
        def wrong(self: Noise, total: Tensor, plan: ReleasePlan, *others: Any) -> Tensor:
            clean = total.clone()
            return total.copy_(clean + factor * (_add_noise(self, total, plan, *others) - clean))

        with mock.patch.object(Noise, "add_", wrong):
            yield

    return broken


@contextmanager
def noise_of_the_mean() -> Iterator[None]:
    """The noise is that of the mean, added to the sum."""

    def wrong(self: Noise, total: Tensor, plan: ReleasePlan, *others: Any) -> Tensor:
        clean = total.clone()
        return total.copy_(clean + (_add_noise(self, total, plan, *others) - clean) / plan.denominator)

    with mock.patch.object(Noise, "add_", wrong):
        yield


@contextmanager
def same_noise() -> Iterator[None]:
    """Every release gets the same noise."""
    with mock.patch.object(releases, "noise_key", return_value=(0,)):
        yield


@contextmanager
def no_clipping() -> Iterator[None]:
    """Records are added up as they are."""

    def wrong(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
        return clip_and_sum(gradients, groups, lambda norms, bound: torch.ones_like(norms), into)

    with mock.patch.object(mechanism, "clip_and_sum", wrong):
        yield


@contextmanager
def clips_the_mean() -> Iterator[None]:
    """Not each record but the mean of a piece of the lot is clipped."""

    def wrong(gradients: Any, groups: Any, weights_of: Any, into: list[Tensor], *_: Any) -> Any:
        norms = torch.stack([one.squared_norms() for one in gradients]).sum(0)
        count = max(len(norms), 1)
        means = [one.weighted_sum(torch.full((len(norms),), 1 / count, dtype=norms.dtype)) for one in gradients]
        norm = math.sqrt(sum(float(mean.square().sum()) for mean in means))
        weight = min(1.0, groups[0].max_grad_norm / norm) if norm else 0.0
        for total, mean in zip(into, means, strict=True):
            total.add_(mean, alpha=weight)
        return into, norms[None]

    with mock.patch.object(mechanism, "clip_and_sum", wrong):
        yield


@contextmanager
def double_rate() -> Iterator[None]:
    """Lots hold twice as many records as declared."""

    def wrong(self: Lots, step: int) -> Any:
        sampling = self.sampling
        rng = self._rng(step)
        return rng.choice(sampling.population, int(rng.binomial(sampling.population, 2 * sampling.rate)), replace=False)

    with mock.patch.object(Lots, "_lot", wrong):
        yield


@contextmanager
def shuffled() -> Iterator[None]:
    """Lots are pieces of a shuffled data set, as data loaders make them, and are accounted for as Poisson lots."""

    def wrong(self: Lots, step: int) -> Any:
        pieces = max(1, round(1 / self.sampling.rate))
        order = self._rng(step // pieces).permutation(self.sampling.population)
        return np.array_split(order, pieces)[step % pieces]

    with mock.patch.object(Lots, "_lot", wrong):
        yield


@contextmanager
def wrong_divisor() -> Iterator[None]:
    """The noised sum is divided by the square of the expected lot: nothing private about it, and useless."""
    right = ReleasePlan.denominator.fget  # type: ignore[attr-defined]
    with mock.patch.object(ReleasePlan, "denominator", property(lambda self: right(self) ** 2)):
        yield


@contextmanager
def counts_without_noise() -> Iterator[None]:
    """The count of clipped records, by which an adaptive bound moves, is released as it is."""

    def wrong(self: Noise, total: Tensor, plan: ReleasePlan, *others: Any) -> Tensor:
        statistics = total[sum(plan.sizes) :].clone()
        noised = _add_noise(self, total, plan, *others)
        noised[sum(plan.sizes) :] = statistics
        return noised

    with mock.patch.object(Noise, "add_", wrong):
        yield


@contextmanager
def users_weighted_by_examples() -> Iterator[None]:
    """A user's update counts as often as it has examples, after clipping."""
    accumulate = ReleaseEngine.accumulate

    def train(self: Users, local_step: Any) -> None:
        sizes = iter([len(self._dataset.rows(user)) for user in self._users])  # type: ignore[union-attr]

        def often(releases: ReleaseEngine, *args: Any, **options: Any) -> None:
            for _ in range(next(sizes)):
                accumulate(releases, *args, **options)

        with mock.patch.object(ReleaseEngine, "accumulate", often):
            _train(self, local_step)

    with mock.patch.object(Users, "_train", train):
        yield


MUTANTS: dict[str, Mutant] = {
    "no noise": _scaled(0.0),
    "half of the noise": _scaled(0.5),
    "0.8 of the noise": _scaled(0.8),
    "0.9 of the noise": _scaled(0.9),
    "noise of two processes": _scaled(math.sqrt(2)),
    "noise of the mean on the sum": noise_of_the_mean,
    "the same noise in every step": same_noise,
    "no clipping": no_clipping,
    "clipping of the mean": clips_the_mean,
    "lots at twice the rate": double_rate,
    "shuffled lots": shuffled,
    "another divisor": wrong_divisor,
    "counts without noise": counts_without_noise,
    "users weighted by examples": users_weighted_by_examples,
    **NOISE_MUTANTS,
    **RECORD_MUTANTS,
}
