"""Mechanisms that treat records otherwise than declared, and otherwise than canaries, while a context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dpbench.data.lots import Lots
from dpbench.privacy.canaries.canaries import SparseGradients
from dpbench.privacy.mechanism import mechanism
from dpbench.privacy.mechanism.clipping import clip_and_sum
from dpbench.privacy.mechanism.mechanism import Mechanism

Clip = Callable[[Any, Any, Any, Any], Any]

_lot_of_all, _lot = Lots._lot, Lots.lot


@contextmanager
def _clipping(wrong: Clip) -> Iterator[None]:
    """Clip records by another function, and canaries by the right one."""

    def clip(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
        if any(isinstance(one, SparseGradients) for one in gradients):
            return clip_and_sum(gradients, groups, weights_of, into)
        return wrong(gradients, groups, weights_of, into)

    with mock.patch.object(mechanism, "clip_and_sum", clip):
        yield


def ten_bounds() -> AbstractContextManager[None]:
    """Records are clipped at ten times the bound of canaries."""

    def wrong(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
        wide = tuple(replace(group, max_grad_norm=10 * group.max_grad_norm) for group in groups)
        return clip_and_sum(gradients, wide, weights_of, into)

    return _clipping(wrong)


def each_parameter_by_itself() -> AbstractContextManager[None]:
    """Each parameter is clipped at the bound of all together; a canary has coordinates in one of them only."""

    @contextmanager
    def clipping() -> Iterator[None]:
        def wrong(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
            alone = tuple(
                replace(group, parameters=(position,), scales=()) for group in groups for position in group.parameters
            )
            sums, norms = clip_and_sum(gradients, alone, weights_of, into)
            return sums, norms.sum(0, keepdim=True)

        with mock.patch.object(mechanism, "clip_and_sum", wrong):
            yield

    return clipping()


def largest_coordinate() -> AbstractContextManager[None]:
    """The largest coordinate of a record is clipped, not its norm: the same for a canary, which has only one."""

    @contextmanager
    def clipping() -> Iterator[None]:
        def wrong(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
            rows = [one.per_record().flatten(1) for one in gradients]
            most = torch.cat(rows, 1).abs().amax(1).square()
            weights = weights_of(most, groups[0].max_grad_norm)
            for total, one in zip(into, gradients, strict=True):
                one.add_weighted_sum(weights, total)
            return into, most[None]

        with mock.patch.object(mechanism, "clip_and_sum", wrong):
            yield

    return clipping()


def norm_without_first_layer() -> AbstractContextManager[None]:
    """The norm of a record leaves out the first layer."""

    def wrong(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
        squares = torch.stack([one.squared_norms() for one in gradients[2:]]).sum(0)
        weights = weights_of(squares, groups[0].max_grad_norm)
        for total, one in zip(into, gradients, strict=True):
            one.add_weighted_sum(weights, total)
        return into, squares[None]

    return _clipping(wrong)


def large_records_twice() -> AbstractContextManager[None]:
    """After clipping, records whose norm is above the median of their lot count twice."""

    def wrong(gradients: Any, groups: Any, weights_of: Any, into: Any, *_: Any) -> Any:
        def weights(squares: Tensor, bound: float) -> Tensor:
            right: Tensor = weights_of(squares, bound)
            return torch.where(squares > squares.median(), 2 * right, right) if len(squares) > 1 else right

        return clip_and_sum(gradients, groups, weights, into)

    return _clipping(wrong)


@contextmanager
def leftovers() -> Iterator[None]:
    """A tenth of the sum of a lot, before noise, stays in the sums of the next one."""
    exact: list[Tensor] = []
    clear, add_noise = Mechanism.clear, Mechanism.add_noise

    def keep(self: Mechanism, key: Any) -> None:
        exact[:] = [self.total.clone()]
        add_noise(self, key)

    def wrong(self: Mechanism, into: Tensor | None = None) -> None:
        clear(self, into)
        for total in exact:
            self.total.add_(total, alpha=0.1)

    with mock.patch.object(Mechanism, "clear", wrong), mock.patch.object(Mechanism, "add_noise", keep):
        yield


@contextmanager
def each_lot_twice() -> Iterator[None]:
    """Two consecutive releases are made on one lot."""
    with mock.patch.object(Lots, "_lot", lambda self, step: _lot_of_all(self, step // 2)):
        yield


@contextmanager
def fixed_size() -> Iterator[None]:
    """Lots have a fixed size, and are accounted for as Poisson lots."""

    def wrong(self: Lots, step: int) -> Any:
        sampling = self.sampling
        size = round(sampling.expected_batch_size)
        return self._rng(step).choice(sampling.population, size, replace=False)

    with mock.patch.object(Lots, "_lot", wrong):
        yield


@contextmanager
def with_replacement() -> Iterator[None]:
    """Records are drawn with replacement, so that one may be twice in a lot; canaries are not."""

    def wrong(self: Lots, step: int) -> Any:
        right = _lot(self, step)
        drawn = np.random.default_rng(step).integers(0, max(1, self.sampling.population - self.added), len(right))
        return np.sort(drawn)

    with mock.patch.object(Lots, "lot", wrong):
        yield


RECORD_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "records clipped at ten bounds, canaries at one": ten_bounds,
    "each parameter clipped by itself": each_parameter_by_itself,
    "clipping by the largest coordinate": largest_coordinate,
    "norms without the first layer": norm_without_first_layer,
    "large records twice": large_records_twice,
    "a tenth of each sum stays for the next lot": leftovers,
    "each lot twice": each_lot_twice,
    "lots of a fixed size as Poisson lots": fixed_size,
    "records drawn with replacement": with_replacement,
}
