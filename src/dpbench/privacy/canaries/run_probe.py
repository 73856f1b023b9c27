"""Measures in an audited run what canaries do not show: how its own records are clipped, summed and counted.

Canaries are vectors; a mechanism may treat the gradients of records in another way. So in some lots the part of single
records in the sums is measured by itself, against the bound, and all parts together are compared with the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbench.privacy.canaries.scores import ScoreSums
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.processes import Processes
from dpbench.privacy.randomness import Stream, keyed_sequence

_MOST = 8  # records of a piece that are measured alone
_LOTS = 2  # that are looked at each time their number doubles, about
_MOST_PIECES = 32  # of a lot that are measured; a user is a piece


class LotCounts(NamedTuple):
    """What is known of the lot of a release.

    Attributes:
        size: Number of records and canaries, over all processes.
        summands: Number of vectors that its records make: records, or microbatches.
    """

    size: Callable[[int], int]
    summands: Callable[[int], int]


class RunProbe:
    """The measurements of one training, release by release.

    Some lots are looked at record by record: of the first ones most, later about two each time their number doubles.
    Which ones is a function of the key, so that nothing in a mechanism falls between them for certain. Statistics and
    sizes are those of all lots.

    Args:
        key: Chooses lots, the same on all processes.
        sums: Holds what was measured.
        counts: Of the lots.
        processes: All of this training.
    """

    def __init__(
        self,
        key: int,
        sums: ScoreSums,
        counts: LotCounts,
        processes: Processes,
    ) -> None:
        self._key = key
        self._sums = sums
        self._counts = counts
        self._processes = processes
        self._release = -1
        self._previous: Tensor | None = None  # sums of the pieces before
        self._pieces = 0
        self._statistics = torch.zeros(0)
        self._measured = torch.zeros(4, dtype=torch.float64)  # summands, records, largest, difference

    def observe(
        self,
        mechanism: Mechanism,
        names: Sequence[str],
        gradients: Sequence[ParameterGradients],
        norms: Tensor,
    ) -> None:
        """Measure the records of a piece of a lot, as an observer of `ReleaseEngine`."""
        if not self._due:
            return
        self._begin()
        records = len(gradients[0].squared_norms())
        self._measured[0] += records
        self._pieces += 1
        if records and self._pieces <= _MOST_PIECES:
            self._measure(
                mechanism,
                gradients,
                norms,
                records,
            )

    def _measure(
        self,
        mechanism: Mechanism,
        gradients: Sequence[ParameterGradients],
        norms: Tensor,
        records: int,
    ) -> None:
        """Measure some of the records of a piece alone, and their sum with that of the others."""
        total = self._gradient_sums(mechanism, mechanism.total).clone()
        remainder = total
        if self._previous is not None:
            remainder = total - self._previous
        self._previous = total.clone()
        alone = _measured_alone(records, norms, mechanism)
        largest = 0.0
        for number in alone:
            part = self._part(mechanism, gradients, [number])
            over_bounds = _over_bounds(mechanism, part)
            largest = _largest(largest, float(over_bounds.max()))
            remainder -= part
        together = set(range(records)).difference(alone)
        if together:
            remainder -= self._part(mechanism, gradients, sorted(together))
        over_bounds = _over_bounds(mechanism, remainder)
        difference = float(over_bounds.max()) / records**0.5
        _, _, earlier_largest, earlier_difference = self._measured.tolist()
        self._measured[1] += len(alone)
        self._measured[2] = _largest(earlier_largest, largest)
        self._measured[3] = _largest(earlier_difference, difference)

    def before_noise(self, mechanism: Mechanism, release: int) -> None:
        """Note what the sums of a lot hold, its canaries too, before noise is added."""
        probes = self._sums.probes
        if probes is None:
            return
        sampling = mechanism.plan.sampling
        cumulants = sampling.lot_size_cumulants
        if cumulants is not None:
            probes.add_size(self._counts.size(release), sampling.expected_batch_size, cumulants)
        self._statistics = self._statistic_sums(mechanism)
        if self._processes.world > 1 and len(self._statistics):
            self._processes.add_up(self._statistics)
        if self._due:  # also where this process has no record of the lot: all of them meet
            self._begin()
            self._keep_records(mechanism, release)
            self._previous = None

    def after_noise(self, mechanism: Mechanism) -> None:
        """Measure the noise of the statistics."""
        probes = self._sums.probes
        statistics = mechanism.plan.statistics
        if probes is None or not statistics:
            return
        stds = []
        for statistic in statistics:
            std = torch.full(
                (statistic.size,),
                statistic.noise_std,
                dtype=torch.float64,
            )
            stds.append(std)
        noise = self._statistic_sums(mechanism) - self._statistics
        noise = noise.double().cpu() / torch.cat(stds)
        whitened = torch.from_numpy(self._sums.whiten_statistics(noise.numpy()))
        squared = float(whitened.square().sum())
        probes.add_statistics(len(whitened), squared)

    def _begin(self) -> None:
        """Forget the lot before, once."""
        if self._release != self._sums.releases:
            self._release = self._sums.releases
            self._previous = None
            self._pieces = 0
            self._measured.zero_()

    @property
    def _due(self) -> bool:
        """Whether the coming release is of a lot that is looked at record by record."""
        if self._sums.probes is None:
            return False
        return is_looked_at(self._key, self._sums.releases)

    def _keep_records(self, mechanism: Mechanism, release: int) -> None:
        """Keep what all processes measured in a lot."""
        processes = self._processes
        measured = torch.zeros(processes.world, 4, dtype=torch.float64)
        # Finite also in the type of the sums, in which the processes add it up.
        finite = self._measured.clamp(max=1e12).nan_to_num(nan=1e12)
        measured[processes.rank] = finite
        if processes.world > 1:
            shared = measured.to(mechanism.total)
            processes.add_up(shared)
            measured = shared.double().cpu()
        totals = measured[:, :2].sum(0)
        maxima = measured[:, 2:].max(0).values
        summands, records = totals.tolist()
        largest, difference = maxima.tolist()
        surplus = round(summands) - self._counts.summands(release)
        probes = self._sums.probes
        assert probes is not None
        probes.add_records(round(records), largest, difference, max(0, surplus))

    @staticmethod
    def _gradient_sums(mechanism: Mechanism, total: Tensor) -> Tensor:
        """The part of a flat sum that belongs to parameters; the statistics follow it."""
        end = sum(mechanism.plan.sizes)
        return total[:end]

    @staticmethod
    def _statistic_sums(mechanism: Mechanism) -> Tensor:
        """The statistics in the sums of a lot."""
        start = sum(mechanism.plan.sizes)
        return mechanism.total[start:].clone()

    def _part(
        self,
        mechanism: Mechanism,
        gradients: Sequence[ParameterGradients],
        numbers: Sequence[int],
    ) -> Tensor:
        """What some of the records add to the sums of gradients."""
        index = torch.tensor(numbers, device=mechanism.total.device)
        selected = [parameter.select(index) for parameter in gradients]
        contribution = mechanism.contribution(selected, len(numbers))
        return self._gradient_sums(mechanism, contribution)


@lru_cache(maxsize=4)
def is_looked_at(key: int, release: int) -> bool:
    """Whether the lot of a release is looked at: with a probability of 2 / (number + 1), by a key."""
    seeds = keyed_sequence((key, Stream.CANARIES, release))
    rng = np.random.default_rng(seeds)
    number = rng.random() * (release + 1)
    return bool(number < _LOTS)


def _largest(first: float, second: float) -> float:
    """The larger number, or the second if it is NaN."""
    if math.isnan(second):
        return second
    return max(first, second)


def _measured_alone(
    records: int,
    norms: Tensor,
    mechanism: Mechanism,
) -> list[int]:
    """Records that are measured alone: half of them the largest, the others evenly spread.

    Args:
        records: R.
        norms: Squared, by group, shape (groups, R); of fewer records where some are not finite.
        mechanism: With the bounds.
    """
    half = min(records, _MOST // 2)
    evenly = torch.linspace(0, records - 1, half)
    spread = {int(number) for number in evenly}
    if norms.shape[1] != records:
        return sorted(spread)
    max_grad_norms = [group.max_grad_norm for group in mechanism.plan.groups]
    bounds = torch.tensor(max_grad_norms, device=norms.device)
    bounds = bounds.to(norms)[:, None]
    ratios = norms / bounds.square()
    over_bounds = ratios.max(0).values
    largest = over_bounds.topk(half).indices.tolist()
    return sorted(spread.union(largest))


def _over_bounds(mechanism: Mechanism, part: Tensor) -> Tensor:
    """Norms of a vector of all parameters over the bounds, one for each group."""
    pieces = torch.split(part, list(mechanism.plan.sizes))
    ratios = []
    for group in mechanism.plan.groups:
        scales = group.scales
        if not scales:
            scales = (1.0,) * len(group.parameters)
        scaled = []
        for position, scale in zip(group.parameters, scales, strict=True):
            scaled.append(pieces[position] / scale)
        norm = torch.linalg.vector_norm(torch.cat(scaled))
        ratios.append(norm / group.max_grad_norm)
    return torch.stack(ratios)
