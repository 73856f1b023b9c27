"""Measurements in an audited run that canaries do not show: how its own records are clipped, summed and counted.

Canaries are vectors; a mechanism may treat the gradients of records in another way. So in some batches the part of
single records in the sums is measured by itself, against the bound, and all parts together are compared with the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpbench.capabilities.canaries.scores import ScoreSums
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.processes import Processes
from dpbench.privacy.randomness import Stream, keyed_sequence

_MOST = 8  # records of a piece that are measured alone
_LOTS = 2  # that are looked at each time their number doubles, about
_MOST_PIECES = 32  # of a lot that are measured; a user is a piece
_BEYOND = 1e12  # in bounds; also in the type of the sums, in which processes add it up


class RunProbe:
    """The measurements of one training, release by release.

    Some batches are looked at record by record: of the first ones most, later about two each time their number doubles.
    Which ones is a function of the key, so that nothing in a mechanism falls between them for certain. Statistics and
    sizes are those of all batches.

    Args:
        key: Chooses batches, the same on all processes.
        sums: Sums of the measurements.
        lots: Batches of the training.
        processes: All processes of this training.
    """

    def __init__(
        self,
        key: int,
        sums: ScoreSums,
        lots: PrivateBatchSampler,
        processes: Processes,
    ) -> None:
        self._key = key
        self._sums = sums
        self._lots = lots
        self._processes = processes
        self._statistics = torch.zeros(0)
        self._begin()

    def _begin(self) -> None:
        """Forget the batch before."""
        self._previous: Tensor | float = 0.0  # sums of the pieces before
        self._pieces = 0
        self._measured = torch.zeros(4, dtype=torch.float64)  # summands, records, largest, difference

    @property
    def _due(self) -> bool:
        """Return whether the coming release is of a batch that is looked at record by record."""
        return is_looked_at(self._key, self._sums.seen.releases)

    def observe(
        self,
        mechanism: Mechanism,
        names: Sequence[str],
        gradients: Sequence[ParameterGradients],
        norms: Tensor,
    ) -> None:
        """Measure some records of a piece of a batch alone, and its sum, as an observer of `ReleaseEngine`."""
        if not self._due:
            return
        records = len(gradients[0].squared_norms())
        self._measured[0] += records
        self._pieces += 1
        if not records or self._pieces > _MOST_PIECES:
            return
        total = _gradient_sums(mechanism, mechanism.total).clone()
        remainder = total - self._previous
        self._previous = total
        alone = _measured_alone(records, norms, mechanism)
        largest = 0.0
        for number in alone:
            part = _part(mechanism, gradients, [number])
            largest = max(largest, _over_bounds(mechanism, part))
            remainder -= part
        together = sorted(set(range(records)).difference(alone))
        if together:
            remainder -= _part(mechanism, gradients, together)
        difference = _over_bounds(mechanism, remainder) / records**0.5
        self._measured[1] += len(alone)
        worst = torch.tensor([largest, difference], dtype=torch.float64)
        self._measured[2:] = torch.maximum(self._measured[2:], worst)

    def before_noise(self, mechanism: Mechanism, release: int) -> None:
        """Note the sums of a batch, its canaries included, before noise is added."""
        sampling = mechanism.plan.sampling
        cumulants = sampling.lot_size_cumulants
        if cumulants is not None:
            size = self._lots.size(release)
            self._sums.seen.probes.add_size(size, sampling.expected_batch_size, cumulants)
        self._statistics = _statistic_sums(mechanism)
        if self._processes.world > 1 and len(self._statistics):
            self._processes.add_up(self._statistics)
        if self._due:  # also where this process has no record of the lot: all of them meet
            self._keep_records(mechanism, release)
            self._begin()

    def after_noise(self, mechanism: Mechanism) -> None:
        """Measure the noise of the statistics."""
        stds = []
        for statistic in mechanism.plan.statistics:
            stds += [statistic.noise_std] * statistic.size
        if not stds:
            return
        noise = _statistic_sums(mechanism) - self._statistics
        noise = noise.double().cpu() / torch.tensor(stds, dtype=torch.float64)
        whitened = self._sums.whiten_statistics(noise.numpy())
        self._sums.seen.probes.add_statistics(len(whitened), float(whitened @ whitened))

    def _keep_records(self, mechanism: Mechanism, release: int) -> None:
        """Keep the measurements of all processes in a batch."""
        processes = self._processes
        measured = torch.zeros(processes.world, 4, dtype=torch.float64)
        measured[processes.rank] = self._measured
        if processes.world > 1:
            shared = measured.to(mechanism.total)
            processes.add_up(shared)
            measured = shared.double().cpu()
        summands, records = measured[:, :2].sum(0).tolist()
        largest, difference = measured[:, 2:].max(0).values.tolist()
        surplus = round(summands) - self._lots.summands(release)
        self._sums.seen.probes.add_records(round(records), largest, difference, max(0, surplus))


def _gradient_sums(mechanism: Mechanism, total: Tensor) -> Tensor:
    """The part of a flat sum that belongs to parameters; the statistics follow it."""
    end = sum(mechanism.plan.sizes)
    return total[:end]


def _statistic_sums(mechanism: Mechanism) -> Tensor:
    """The statistics in the sums of a batch."""
    start = sum(mechanism.plan.sizes)
    return mechanism.total[start:].clone()


def _part(
    mechanism: Mechanism,
    gradients: Sequence[ParameterGradients],
    numbers: Sequence[int],
) -> Tensor:
    """Share of some records in the sums of gradients."""
    index = torch.tensor(numbers, device=mechanism.total.device)
    selected = [parameter.select(index) for parameter in gradients]
    contribution = mechanism.contribution(selected, len(numbers))
    return _gradient_sums(mechanism, contribution)


@lru_cache(maxsize=4)
def is_looked_at(key: int, release: int) -> bool:
    """Return whether the batch of a release is looked at: with a probability of 2 / (number + 1), by a key."""
    seeds = keyed_sequence((key, Stream.AUDIT, release))
    rng = np.random.default_rng(seeds)
    number = rng.random() * (release + 1)
    return bool(number < _LOTS)


def _measured_alone(
    records: int,
    norms: Tensor,
    mechanism: Mechanism,
) -> list[int]:
    """Records that are measured alone: half of them the largest, the others evenly spread.

    Args:
        records: R.
        norms: Squared norms by group, shape (groups, R); of fewer records where some are not finite.
        mechanism: The mechanism, with the bounds.
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


def _over_bounds(mechanism: Mechanism, part: Tensor) -> float:
    """Largest norm of a vector of all parameters over the bound, of all groups; finite."""
    pieces = torch.split(part, list(mechanism.plan.sizes))
    largest = 0.0
    for group in mechanism.plan.groups:
        scales = group.scales or (1.0,) * len(group.parameters)
        scaled = [pieces[position] / scale for position, scale in zip(group.parameters, scales, strict=True)]
        norm = float(torch.linalg.vector_norm(torch.cat(scaled)))
        ratio = norm / group.max_grad_norm
        largest = max(largest, ratio if math.isfinite(ratio) else _BEYOND)
    return min(largest, _BEYOND)
