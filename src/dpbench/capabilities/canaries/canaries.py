"""Canaries: artificial records with vectors that are added to batches, and their observation in the release.

A canary is a row of per-record vectors, never an example: a spike far beyond the bound at coordinates of its own, in
every group that is clipped. It is drawn by the run's own sampling and goes through the run's own transform, clipping,
sum, noise and all-reduce; it is read where the ledger takes its checksum (after Nasr et al. 2023, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dpbench.capabilities.canaries.file import FILE_NAME, write_scores
from dpbench.capabilities.canaries.run_probe import RunProbe
from dpbench.capabilities.canaries.scores import ScoreSums
from dpbench.capabilities.canaries.whitening import Rounds
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError
from dpbench.options import Count, check_options
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.noise_process import Noise
from dpbench.privacy.randomness import Stream, fresh_key, keyed_sequence
from dpbench.privacy.releases import HOOK_STATE, ReleaseEngine, TrainableParameters
from dpbench.privacy.sampling import Sampling
from dpbench.session.audit import Audit

_DEFAULT = 2000
# Of a spike, in bounds: what is not clipped is seen.
_LENGTHS = torch.logspace(
    start=2,
    end=9,
    steps=8,
    dtype=torch.float64,
)
_WHOLE = 0.9995  # of the bound: what a spike moves at least, the shortest one that does
_FEWEST = 20  # below, no bound says anything


@dataclass(frozen=True)
class GradientCanaries(Audit):
    """Options of an audit by canaries that are vectors, not examples; see `Canaries`.

    The population of an audited run counts the canaries, and its model has learned from them: train again without.

    Attributes:
        canaries: Number of canaries, each included with probability 1/2. None: 2,000, or as many as there is room for.
        seed: Seed of coins and coordinates; None takes the operating system's entropy.

    Raises:
        ConfigurationError: A value is out of range.
    """

    canaries: Annotated[int, Field(ge=_FEWEST), f"a whole number from {_FEWEST} on"] | None = None
    seed: Count | None = None

    def __post_init__(self) -> None:
        check_options(GradientCanaries, vars(self))

    def hook(self, releases: ReleaseEngine, lots: PrivateBatchSampler, trained: TrainableParameters) -> Canaries:
        """Make the canaries of a training; a resumed one has those that it began with.

        Raises:
            ConfigurationError: There is no room for so many, nothing to audit, or the checkpoint has others.
        """
        memory = releases.memory.get(HOOK_STATE) or {}
        key = memory.get("key", fresh_key() if self.seed is None else self.seed)
        canaries = Canaries(self.canaries, releases.processes.broadcast(key), releases, lots, trained)
        if memory:
            canaries.sums.load_state_dict(memory["sums"])
        releases.observers.append(canaries.probe.observe)
        return canaries


class SparseGradients(ParameterGradients):
    """Rows with few coordinates that are not zero.

    Args:
        rows: Row of each entry, shape (E,).
        places: Coordinate of each entry in the flattened parameter, shape (E,); a row has each at most once.
        values: Shape (E,).
        records: R, number of rows.
        shape: Shape of the parameter.
    """

    def __init__(
        self,
        rows: Tensor,
        places: Tensor,
        values: Tensor,
        records: int,
        shape: torch.Size,
    ) -> None:
        self._rows = rows
        self._places = places
        self._values = values
        self._records = records
        self._shape = shape

    def squared_norms(self) -> Tensor:
        norms = self._values.new_zeros(self._records)
        squares = self._values.square()
        return norms.index_add_(0, self._rows, squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._values.new_zeros(self._shape.numel())
        entry_weights = weights.to(self._values)[self._rows]
        weighted = self._values * entry_weights
        total.index_add_(0, self._places, weighted)
        return total.view(self._shape)

    def per_record(self) -> Tensor:
        coordinates = self._shape.numel()
        dense = self._values.new_zeros(self._records, coordinates)
        dense[self._rows, self._places] = self._values
        return dense.view(self._records, *self._shape)


@dataclass(frozen=True)
class _Places:
    """Coordinates of one parameter that belong to canaries: entry e is canary owner[e]'s, and no other's.

    Attributes:
        owner: Canary of each entry, shape (E,).
        place: Its coordinate in the flattened parameter, shape (E,).
    """

    owner: NDArray[np.int64]
    place: NDArray[np.int64]


class Canaries:
    """The canaries of one training: their coins, the coordinates of each, and the sums of the observations.

    Guarantee: none; it measures that of the release. Between neighbors that differ in one canary, the sum of each group
    with room moves by its declared sensitivity, or by as much as the transform leaves of a spike.

    Args:
        requested: Number of canaries; None: the default, or as many as there is room for.
        key: Key of coins and coordinates, the same on all processes.
        releases: Release engine of the training.
        lots: Batches of the training. Where neighbors differ in the content of a record, a canary that is not a member
            is present with the opposite sign.
        trained: Parameters that are updated.

    Attributes:
        member: Coin of each canary, shape (m,).
        sums: The observations so far.
        probe: Probe of properties that canaries do not show.
        left_out: Group without room for all canaries, which shows nothing of them → number of its coordinates.

    Raises:
        ConfigurationError: There are more canaries than records, or than coordinates that they can have alone.
    """

    def __init__(
        self,
        requested: int | None,
        key: int,
        releases: ReleaseEngine,
        lots: PrivateBatchSampler,
        trained: TrainableParameters,
    ) -> None:
        recipe = releases.recipe
        processes = releases.processes
        sizes = trained.sizes
        if not recipe.private:
            raise ConfigurationError("this strategy makes no private releases to audit: set audit=none.")
        if lots.members is not None:
            raise ConfigurationError(
                "an audit requires the full batch sizes, which data.membership halves: audit a run without it, or "
                "attack one without canaries (audit=none)."
            )
        self.key = key
        self._releases = releases
        self._lots = lots
        self._processes = processes
        sampling = lots.sampling
        self._replace_one = sampling.neighboring_relation == "replace_one"
        groups = recipe.groups(trained.names, sizes)
        bounded = recipe.transform is not None
        # Signs of a spike are as long as it has coordinates; what else there is leaves it as it is, for clipping.
        values = getattr(recipe.transform, "values", "signs")
        self._signs = bounded and values == "signs"
        self._coordinates = 1
        if bounded:
            largest_bound = max(group.max_grad_norm for group in groups)
            self._coordinates = math.ceil(2 * largest_bound**2)
        room = [sum(self._slots(group, sizes)) for group in groups]
        count = self._number(
            requested,
            sampling.population,
            room=max(room),
        )
        seeds = keyed_sequence((key, Stream.AUDIT))
        rng = np.random.default_rng(seeds)
        self.member = rng.random(count) < 0.5
        # What a record moves by itself; where it makes others come or go, the declared sensitivity counts them too.
        self._reach = 1 / sampling.records_affected
        self.sums = ScoreSums(
            self.member,
            self._replace_one,
            self._reach,
        )
        self.probe = RunProbe(
            key,
            self.sums,
            lots,
            processes,
        )
        lots.added = len(self.member) if self._replace_one else int(self.member.sum())
        self._places: dict[int, _Places] = {}
        self._group_of: dict[int, int] = {}
        self.left_out: dict[str, int] = {}
        for number, group in enumerate(groups):
            if room[number] >= count:
                self._place_in(
                    number,
                    group,
                    sizes,
                    rng,
                )
                continue
            group_sizes = [sizes[parameter] for parameter in group.parameters]
            self.left_out[group.name] = sum(group_sizes)
        # Of canaries that are not among the records; the others have those that the lots give them.
        self._group = rng.integers(sampling.cycle, size=count)

    def _follow(self, noise: Noise, sampling: Sampling) -> None:
        """Score rounds, in whitened releases, from the first release on, where groups of records take turns."""
        if sampling.cycle == 1 or self.sums.rounds is not None:
            return
        assert noise.whitening is not None
        group = self._group.copy()
        group[self.member] = self._lots.added_groups()
        self.sums.rounds = Rounds.beginning(noise.whitening, sampling.cycle, group)

    def _slots(self, group: VectorGroup, sizes: Sequence[int]) -> list[int]:
        """Number of canaries with room in each parameter of a group, at coordinates of their own."""
        return [sizes[parameter] // self._coordinates for parameter in group.parameters]

    def _number(
        self,
        requested: int | None,
        population: int,
        room: int,
    ) -> int:
        """Number of canaries.

        Args:
            requested: Number that the user asked for; None: the default, or as many as there is room for.
            population: Number of records.
            room: Most canaries that have coordinates of their own in one group.

        Raises:
            ConfigurationError: So many have no room, or the room is too small.
        """
        most = min(population, room)
        count = min(_DEFAULT, most) if requested is None else requested
        if _FEWEST <= count <= most:
            return count
        remedy = f"take at most {most}." if most >= _FEWEST else "an audit needs a larger model or data set."
        raise ConfigurationError(
            f"{population} records and the coordinates of this model ({self._coordinates} for each canary, in "
            f"parameters that are clipped together) have room for {most} canaries, not {max(count, _FEWEST)}: {remedy}"
        )

    def _place_in(
        self,
        number: int,
        group: VectorGroup,
        sizes: Sequence[int],
        rng: np.random.Generator,
    ) -> None:
        """Give each canary coordinates of its own in a group, all in one parameter.

        Args:
            number: Number of the group.
            group: The group.
            sizes: Number of coordinates of each parameter.
            rng: Draws.
        """
        # A slot is room for one canary: first all draw slots, which gives the parameter, then its coordinates.
        ends = np.cumsum(self._slots(group, sizes))
        slot_of = rng.choice(
            int(ends[-1]),
            len(self.member),
            replace=False,
        )
        index_of = np.searchsorted(ends, slot_of, side="right")
        for index, parameter in enumerate(group.parameters):
            owners = np.flatnonzero(index_of == index)
            if not len(owners):
                continue
            place = rng.choice(
                sizes[parameter],
                len(owners) * self._coordinates,
                replace=False,
            )
            owner = np.repeat(owners, self._coordinates)
            self._places[parameter] = _Places(owner, place)
            self._group_of[parameter] = number

    def _in_lot(self, release: int) -> NDArray[np.bool_]:
        """Mask of the canaries in the batch of a release, shape (m,)."""
        numbers = self._lots.added_in(release)
        if not self._replace_one:  # only members are among the records
            numbers = np.flatnonzero(self.member)[numbers]
        in_lot = np.zeros(len(self.member), dtype=np.bool_)
        in_lot[numbers] = True
        return in_lot

    def insert(self, mechanism: Mechanism, release: int) -> None:
        """Add the canaries of a batch to its sums, before its noise; note the sums of all other records.

        Args:
            mechanism: The mechanism, with this process's sums of all other records.
            release: Number of the release.
        """
        self._follow(mechanism.training_plan.noise, mechanism.plan.sampling)
        self._drawn = self._in_lot(release)
        self._background = self._read(mechanism)
        if self._processes.world > 1:
            self._processes.add_up(self._background)
        plan = mechanism.plan
        self._changes = plan.summands.changes(plan.sampling)
        bounds = [group.max_grad_norm for group in plan.groups]
        self._moves = bounds
        if self._signs:
            self._moves = [self._sign_move(bound) for bound in bounds]
        numbers = np.flatnonzero(self._drawn)
        if self._processes.rank == 0 and len(numbers):
            self._add(mechanism, numbers)
        self.probe.before_noise(mechanism, release)

    def _add(self, mechanism: Mechanism, numbers: NDArray[np.int64]) -> None:
        """Add some canaries to the sums, as often as a record moves them by its bound."""
        rows = self._rows(mechanism, numbers)
        count = len(numbers)
        metrics = {}
        for name, size in mechanism.metric_sizes.items():
            metrics[name] = torch.zeros(count, size)
        times = round(self._changes * self._reach)
        if self._replace_one:
            times //= 2  # the replacement makes the other half
        for _ in range(times):
            mechanism.accumulate(
                rows,
                count,
                merge=None,
                values=metrics,
            )

    def _sign_move(self, bound: float) -> float:
        """Distance by which a spike moves a sum of signs, which are as long as it has coordinates."""
        coordinates = float(self._coordinates)
        length = torch.tensor([coordinates], dtype=torch.float64).sqrt()
        contribution = self._releases.recipe.contributions(length, bound)
        return float(contribution)

    def _length(self, bound: float) -> float:
        """Length of a spike that moves a sum by the bound, in bounds; a normalized one has to be far longer than γ."""
        contributions = self._releases.recipe.contributions(_LENGTHS * bound, bound)
        suffices = contributions >= _WHOLE * bound
        if not suffices.any():
            return float(_LENGTHS[0])
        sufficient = _LENGTHS[suffices]
        return float(sufficient.min())

    def _rows(self, mechanism: Mechanism, numbers: NDArray[np.int64]) -> list[ParameterGradients]:
        """Gradients of some canaries by all parameters."""
        count = len(self.member)
        row_of = np.full(count, -1)
        row_of[numbers] = np.arange(len(numbers))
        sign = np.ones(count)
        if self._replace_one:
            sign = np.where(self.member, 1.0, -1.0)
        plan = mechanism.plan
        lengths = [self._length(group.max_grad_norm) for group in plan.groups]
        no_entry = np.empty(0, np.int64)
        nowhere = _Places(no_entry, no_entry)
        rows: list[ParameterGradients] = []
        for parameter, view in enumerate(mechanism.gradients):
            places = self._places.get(parameter, nowhere)
            in_rows = row_of[places.owner] >= 0
            owner = places.owner[in_rows]
            place = places.place[in_rows]
            group = self._group_of.get(parameter, 0)
            length = lengths[group] * plan.parameter_bounds[parameter]
            height = length / math.sqrt(self._coordinates)
            values = _moved(height * sign[owner], view)
            gradients = SparseGradients(
                rows=_moved(row_of[owner], view),
                places=_moved(place, view),
                values=values.to(view.dtype),
                records=len(numbers),
                shape=view.shape,
            )
            rows.append(gradients)
        return rows

    def read(self, mechanism: Mechanism) -> None:
        """See the noised sums of all processes, as they are released and before anything is made of them."""
        plan = mechanism.plan
        self.probe.after_noise(mechanism)
        difference = self._read(mechanism) - self._background
        noised = difference.double().cpu().numpy()
        power = dict.fromkeys(self._group_of.values(), 0.0)
        score = np.zeros(len(self.member))
        start = 0
        for parameter, places in self._places.items():
            group = self._group_of[parameter]
            ratio = self._moves[group] / plan.noise_stds[group]
            power[group] = ratio**2
            end = start + len(places.owner)
            values = noised[start:end] / plan.parameter_stds[parameter]
            projections = values * ratio / math.sqrt(self._coordinates)
            np.add.at(score, places.owner, projections)
            start = end
        total = sum(power.values())
        noise_multiplier = 1 / (math.sqrt(total) * self._changes)
        observed = score / (total * self._changes)
        self.sums.add(
            observed,
            self._drawn,
            noise_multiplier,
            plan.sampling.group_rate,
        )

    def _read(self, mechanism: Mechanism) -> Tensor:
        """The sums at the canaries' coordinates, one parameter after the other."""
        parts = []
        for parameter, places in self._places.items():
            view = mechanism.gradients[parameter]
            parts.append(view.reshape(-1)[_moved(places.place, view)])
        return torch.cat(parts)

    def end(self) -> None:
        """Write the canaries' observations next to the ledger, on rank 0."""
        observers = self._releases.observers
        if self.probe.observe in observers:
            observers.remove(self.probe.observe)
        budget = self._releases.budget
        is_first = self._processes.rank == 0  # after a resume the others know the checkpoint's seal
        if is_first and self._releases.num_releases and budget.path is not None and budget.seal is not None:
            write_scores(budget.path.with_name(FILE_NAME), self.sums.scores(), budget.seal, self.left_out)

    def state_dict(self) -> dict[str, Any]:
        """Coins, coordinates (by their key) and sums, for a checkpoint."""
        return {
            "key": self.key,
            "sums": self.sums.state_dict(),
            "left_out": self.left_out,
        }


def _moved(array: NDArray[Any], view: Tensor) -> Tensor:
    """An array as a tensor on the device of another one."""
    return torch.from_numpy(array).to(view.device)
