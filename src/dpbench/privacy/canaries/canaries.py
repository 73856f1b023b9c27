"""Canaries: made-up records whose vectors join each lot, and what the release shows of them.

A canary is a row of per-record vectors, never an example: a spike far beyond the bound at coordinates of its own, in
every group that is clipped. It is drawn by the run's own sampling and goes through the run's own transform, clipping,
sum, noise and all-reduce; it is read where the ledger takes its checksum (after Nasr et al. 2023, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.canaries.run_probe import LotCounts, RunProbe
from dpbench.privacy.canaries.scores import ScoreSums
from dpbench.privacy.gradients.parameter import InstantiatedGradients, ParameterGradients
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.processes import ALONE, Processes
from dpbench.privacy.randomness import Stream, keyed_sequence
from dpbench.privacy.sampling import Sampling

_DEFAULT = 2000
_LENGTHS = torch.logspace(2, 9, 8, dtype=torch.float64)  # of a spike, in bounds: what is not clipped is seen
_WHOLE = 0.9995  # of the bound: what a spike moves at least, the shortest one that does
_FEWEST = 20  # below, no bound says anything


@dataclass(frozen=True)
class GradientCanaries:
    """How a training is audited: by canaries that are vectors, not examples; see `Canaries`.

    The population of an audited run counts the canaries, and its model has learned from them: train again without.

    Attributes:
        canaries: How many; each exists by the flip of a coin. None: 2,000, or as many as there is room for.
        seed: Of coins and coordinates; None takes the operating system's entropy.

    Raises:
        ConfigurationError: A value is out of range.
    """

    canaries: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.canaries is not None and (type(self.canaries) is not int or self.canaries < _FEWEST):
            raise ConfigurationError(f"canaries must be a whole number from {_FEWEST} on, not {self.canaries!r}.")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise ConfigurationError(f"the seed of an audit must be a whole number from 0 on, not {self.seed!r}.")


class SparseGradients(ParameterGradients):
    """Rows with few coordinates that are not zero.

    Args:
        rows: Row of each entry, shape (E,).
        places: Coordinate of each entry in the flattened parameter, shape (E,); a row has each at most once.
        values: Shape (E,).
        records: R, number of rows.
        shape: Of the parameter.
    """

    def __init__(self, rows: Tensor, places: Tensor, values: Tensor, records: int, shape: torch.Size) -> None:
        self._rows, self._places, self._values = rows, places, values
        self._records, self._shape = records, shape

    def squared_norms(self) -> Tensor:
        return self._values.new_zeros(self._records).index_add_(0, self._rows, self._values.square())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._values.new_zeros(self._shape.numel())
        return total.index_add_(0, self._places, self._values * weights.to(self._values)[self._rows]).view(self._shape)

    def per_record(self) -> Tensor:
        dense = self._values.new_zeros(self._records, self._shape.numel())
        dense[self._rows, self._places] = self._values
        return dense.view(self._records, *self._shape)

    def select(self, records: Tensor) -> ParameterGradients:
        rows = self.per_record()[records]
        return InstantiatedGradients(lambda: rows)


@dataclass(frozen=True)
class _Places:
    """Coordinates of one parameter that belong to canaries: entry e is canary owner[e]'s, and no other's."""

    owner: NDArray[np.int64]
    place: NDArray[np.int64]


class Canaries:
    """The canaries of one training: who exists, where each spikes, and the sums of what was seen.

    Guarantee: none; it measures that of the release. Between neighbors that differ in one canary, the sum of each group
    with room moves by its declared sensitivity, or by as much as the transform leaves of a spike.

    Args:
        options: How many, and the seed.
        key: Of coins and coordinates, the same on all processes.
        recipe: What is done with records.
        sampling: How lots of the training data alone are drawn. Where neighbors differ in the content of a record, a
            canary that does not exist is there with the opposite sign.
        names: Of the trained parameters.
        sizes: Number of coordinates of each.
        added_in: Numbers of the added records in the lot of a release.
        counts: Of the records in the lot of a release.
        processes: All of this training.

    Attributes:
        member: Coin of each canary, shape (m,).
        sums: What was seen so far.
        probe: Measures what canaries do not show.
        left_out: Group without room for all canaries, which shows nothing of them → number of its coordinates.

    Raises:
        ConfigurationError: There are more canaries than records, or than coordinates that they can have alone.
    """

    def __init__(
        self,
        options: GradientCanaries,
        key: int,
        recipe: Recipe,
        sampling: Sampling,
        names: Sequence[str],
        sizes: Sequence[int],
        added_in: Callable[[int], NDArray[np.int64]],
        counts: LotCounts,
        processes: Processes = ALONE,
    ) -> None:
        if not recipe.private:
            raise ConfigurationError(
                "an audit asks what private releases show, and this strategy makes none: audit=none."
            )
        self.key, self._added_in, self._processes, self._recipe = key, added_in, processes, recipe
        groups, bounded, population = recipe.groups(names, sizes), recipe.transform is not None, sampling.population
        replace_one = self._replace_one = sampling.neighboring_relation == "replace_one"
        coordinates = max(math.ceil(2 * group.max_grad_norm**2) for group in groups) if bounded else 1
        self._coordinates = coordinates
        # Signs of a spike are as long as it has coordinates; what else there is leaves it as it is, for clipping.
        self._signs = bounded and getattr(recipe.transform, "values", "signs") == "signs"
        room = [sum(sizes[p] // coordinates for p in group.parameters) for group in groups]
        most = min(population, max(room))
        count = min(_DEFAULT, most) if options.canaries is None else options.canaries
        if not _FEWEST <= count <= most:
            raise ConfigurationError(
                f"{population} records and the coordinates of this model ({coordinates} for each canary, in parameters "
                f"that are clipped together) have room for {most} canaries, not {max(count, _FEWEST)}: "
                + (f"take at most {most}." if most >= _FEWEST else "an audit needs a larger model or data set.")
            )
        rng = np.random.default_rng(keyed_sequence((key, Stream.CANARIES)))
        self.member = rng.random(count) < 0.5
        # What a record moves by itself; where it makes others come or go, the declared sensitivity counts them too.
        self._reach = 1 / sampling.records_affected
        self.sums = ScoreSums(self.member, replace_one, self._reach)
        self.probe = RunProbe(key, self.sums, counts, processes)
        self._places: dict[int, _Places] = {}
        self._group_of: dict[int, int] = {}
        self._index: list[tuple[Tensor, ...]] = []
        self.left_out: dict[str, int] = {}
        for number, group in enumerate(groups):
            if room[number] >= count:
                self._settle(number, group, sizes, count, rng)
            else:
                self.left_out[group.name] = sum(sizes[p] for p in group.parameters)

    def _settle(
        self, number: int, group: VectorGroup, sizes: Sequence[int], count: int, rng: np.random.Generator
    ) -> None:
        """Give each canary coordinates of its own in a group, all in one parameter."""
        slots = np.array([sizes[p] // self._coordinates for p in group.parameters])
        drawn = rng.choice(int(slots.sum()), count, replace=False)
        at = np.searchsorted(slots.cumsum(), drawn, side="right")
        for index, parameter in enumerate(group.parameters):
            owner = np.flatnonzero(at == index)
            if len(owner):
                place = rng.choice(sizes[parameter], len(owner) * self._coordinates, replace=False)
                self._places[parameter] = _Places(np.repeat(owner, self._coordinates), place)
                self._group_of[parameter] = number

    @property
    def in_lots(self) -> int:
        """How many records the canaries add to the population."""
        return len(self.member) if self._replace_one else int(self.member.sum())

    def _in_lot(self, release: int) -> NDArray[np.bool_]:
        """Which canaries are in the lot of a release, shape (m,)."""
        numbers = self._added_in(release)
        there = np.zeros(len(self.member), dtype=np.bool_)
        there[numbers if self._replace_one else np.flatnonzero(self.member)[numbers]] = True
        return there

    def insert(self, mechanism: Mechanism, release: int) -> None:
        """Add the canaries of a lot to its sums, before its noise; note what everybody else put there.

        Args:
            mechanism: With this process's sums of all other records.
            release: Number of the release.
        """
        drawn = self._drawn = self._in_lot(release)
        self._background = self._read(mechanism)
        if self._processes.world > 1:
            self._processes.add_up(self._background)
        plan, changes = mechanism.plan, mechanism.plan.summands.changes(mechanism.plan.sampling)
        self._changes = changes
        numbers = np.flatnonzero(drawn)
        bounds = [group.max_grad_norm for group in plan.groups]
        self._moves = tuple(map(self._of_signs, bounds)) if self._signs else tuple(bounds)
        if self._processes.rank == 0 and len(numbers):
            rows = self._rows(mechanism, numbers)
            values = {name: torch.zeros(len(numbers), size) for name, size in mechanism.metric_sizes.items()}
            times = round(changes * self._reach)
            for _ in range(times // 2 if self._replace_one else times):
                mechanism.accumulate(rows, len(numbers), None, values)
        self.probe.before_noise(mechanism, release)

    def _of_signs(self, bound: float) -> float:
        """How far a spike moves a sum of signs, which are as long as it has coordinates."""
        longest = torch.tensor([float(self._coordinates)], dtype=torch.float64).sqrt()
        return float(self._recipe.contributions(longest, bound))

    def _length(self, bound: float) -> float:
        """Of a spike that moves a sum by the bound, in bounds; a normalized one has to be far longer than γ."""
        whole = self._recipe.contributions(_LENGTHS * bound, bound) >= _WHOLE * bound
        return float(_LENGTHS[whole].min() if whole.any() else _LENGTHS[0])

    def _rows(self, mechanism: Mechanism, numbers: NDArray[np.int64]) -> list[ParameterGradients]:
        row_of = np.full(len(self.member), -1)
        row_of[numbers] = np.arange(len(numbers))
        sign = np.where(self.member, 1.0, -1.0) if self._replace_one else np.ones(len(self.member))
        rows: list[ParameterGradients] = []
        lengths = [self._length(group.max_grad_norm) for group in mechanism.plan.groups]
        for parameter, view in enumerate(mechanism.gradients):
            places = self._places.get(parameter, _Places(np.empty(0, np.int64), np.empty(0, np.int64)))
            mine = row_of[places.owner] >= 0
            owner, place = places.owner[mine], places.place[mine]
            length = lengths[self._group_of.get(parameter, 0)]
            height = length * mechanism.plan.parameter_bounds[parameter] / math.sqrt(self._coordinates)
            arrays = row_of[owner], place, height * sign[owner]
            one, two, three = (torch.from_numpy(array).to(view.device) for array in arrays)
            rows.append(SparseGradients(one, two, three.to(view.dtype), len(numbers), view.shape))
        return rows

    def read(self, mechanism: Mechanism) -> None:
        """See the noised sums of all processes, as they are released and before anything is made of them."""
        plan = mechanism.plan
        self.probe.after_noise(mechanism)
        noised = (self._read(mechanism) - self._background).double().cpu().numpy()
        power = dict.fromkeys(self._group_of.values(), 0.0)
        score, start = np.zeros(len(self.member)), 0
        for parameter, places in self._places.items():
            group = self._group_of[parameter]
            ratio = self._moves[group] / plan.noise_stds[group]
            power[group] = ratio**2
            values = noised[start : start + len(places.owner)] / plan.parameter_stds[parameter]
            np.add.at(score, places.owner, values * ratio / math.sqrt(self._coordinates))
            start += len(places.owner)
        total = sum(power.values())
        noise_multiplier = 1 / (math.sqrt(total) * self._changes)
        self.sums.add(score / (total * self._changes), self._drawn, noise_multiplier, plan.sampling.rate)

    def _read(self, mechanism: Mechanism) -> Tensor:
        """The sums at the canaries' coordinates, one parameter after the other."""
        views = [mechanism.gradients[parameter] for parameter in self._places]
        if not self._index:
            for view, places in zip(views, self._places.values(), strict=True):
                where = np.unravel_index(places.place, view.shape) if view.dim() else ()
                self._index.append(tuple(torch.from_numpy(index).to(view.device) for index in where))
        return torch.cat([view[index].reshape(-1) for view, index in zip(views, self._index, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """Coins, coordinates (by their key) and sums, for a checkpoint."""
        return {"key": self.key, "sums": self.sums.state_dict(), "left_out": self.left_out}
