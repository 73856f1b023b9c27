"""Draws of the records of each training step.

Batch t (a *lot* in Abadi et al. 2016) is a function of (key, t) alone, and the key one of the seed and of the training.
Every rank draws the same batch and takes its share of it (`PrivateBatchSampler.share`); a resumed run draws the batches
of the uninterrupted one. With `seed=None` the key comes from the operating system's entropy, for models that will be
published.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler as TorchSampler

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import KEPT
from dpbench.privacy.mechanism.schedules import CONSTANT, Factors, Schedule, check_schedule, factors_of
from dpbench.privacy.randomness import Stream, digest_of, fresh_key, keyed_sequence, source_of
from dpbench.privacy.sampling import Positions, Sampling, find_scheme

_REMEMBERED = 64  # more than worker processes draw ahead

RankShare = tuple[Positions, Positions | None]


class PrivateBatchSampler(TorchSampler[list[int]]):
    """A batch sampler that yields the remaining batches of the current epoch, from `position` on.

    Args:
        sampling: Scheme of the draws; the ledger records it.
        seed: Key of the draws, or None for the operating system's entropy.
        size_schedule: Schedule of the expected batch size over the steps of a training
            (`privacy.mechanism.schedules`); None: constant.
        members: (population,) booleans, the mask of training records in a membership experiment. The others are drawn
            like them and left out of every batch: rates, divisor and ledger are those of the population, for any
            members. None: all records.

    Attributes:
        position: Number of batches that were handed out; the whole state.
        phase: Phase of the ledger; set by the strategy, so that a batch number that was spent in a crashed run with
            other settings is drawn afresh, as the accounting assumes.
        microbatches: Number of microbatches in a batch; set by the strategy, 0 without them. Each record is put into
            one of them independently of all others, so that no record can move another one.
        in_use: True while a training draws them.
        work: (population,) cost of each record, by which processes get equal shares of a batch's work; set by the
            strategy. None: equal costs.
        added: Number of records of an audit, which are drawn like those of the data set and come after them; set by
            the strategy. They are in no batch that a loader hands out.
        size_factors: Factors of the expected size, by step; evaluated by `plan` from the schedule.
        bands: Steps over which noise is correlated; set by the strategy, None where it is not. Records are in as many
            groups that take turns.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int | None,
        size_schedule: Schedule | None = None,
        members: NDArray[np.bool_] | None = None,
    ) -> None:
        if seed is not None and (not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0):
            raise ConfigurationError(f"the seed of batches must be None or a whole number of at least 0, not {seed!r}.")
        if not isinstance(sampling, Sampling):
            raise ConfigurationError(
                f"PrivateBatchSampler takes a Sampling, not {sampling!r}: make_sampling('poisson', len(dataset), "
                "expected_batch_size) makes one, and PrivateDataLoader.poisson(dataset, expected_batch_size) does all "
                "of it."
            )
        if not isinstance(sampling.unit, str) or not sampling.unit.strip():
            raise ConfigurationError(f"unit must be a word for an item of the data set, not {sampling.unit!r}.")
        check_schedule("expected_batch_size_schedule", size_schedule)
        if members is not None:
            _check_members(members, sampling)
        self._sampling = sampling
        self.members = members
        self._size_schedule = size_schedule
        self.size_factors = CONSTANT
        self.position = 0
        self.phase = 0
        self.microbatches = 0
        self.in_use = False
        self.work: NDArray[Any] | None = None
        self.added = 0
        self.bands: int | None = None
        self.seed = seed
        self._key = seed
        self._has_kept_key = False
        self._drawn: tuple[tuple[int, int, int], Sequence[Positions]] | None = None
        self._groups: tuple[tuple[int, int, int], NDArray[Any]] | None = None
        self._shares: dict[tuple[int, ...], RankShare] = {}

    @property
    def sampling(self) -> Sampling:
        """The sampling with added records in batches of the same size; in groups where noise has bands."""
        sampling = self._sampling
        if self.bands is not None:
            sampling = sampling.in_groups(self.bands)
        return sampling.among(sampling.population + self.added) if self.added else sampling

    @property
    def expected_batch_size(self) -> float:
        """Expected number of records in a batch, without added ones if batches hold all records."""
        return self._sampling.expected_batch_size

    @property
    def source(self) -> str | None:
        """Hash of the key of batches, for ledgers; None without a seed or kept key, or if batches hold all records."""
        # Asked of the sampling with added records: batches of everybody among fewer than all are drawn again.
        holds_everybody = self.sampling.expected_batch_size >= self.sampling.population
        if self._key is None or holds_everybody:
            return None
        source = source_of((self._key, Stream.LOTS))
        if self.seed is not None:
            return source
        return f"{KEPT}{source}" if self._has_kept_key else None

    def __repr__(self) -> str:
        return f"PrivateBatchSampler({self.sampling}, seed={self.seed}, position={self.position})"

    def __len__(self) -> int:
        return self.sampling.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        end_of_epoch = self.position - self.position % len(self) + len(self)
        for step in range(self.position, end_of_epoch):
            positions, _ = self.share(step, rank, world)
            yield positions.tolist()

    def acquire(self) -> None:
        """Reserve the batches for one training.

        Raises:
            ConfigurationError: Another training does: both would share batches, and composition would say too little.
        """
        if self.in_use:
            raise ConfigurationError(
                "this PrivateDataLoader is in use by another training: make a separate one for each."
            )
        self.in_use = True

    def plan(self, steps: float) -> Factors:
        """Fix the expected sizes of all batches of a training.

        Args:
            steps: Number of steps.

        Returns:
            Factors of the expected size, by step.

        Raises:
            ConfigurationError: A batch would have no valid size, or the training no end.
        """
        self.size_factors = factors_of("expected_batch_size_schedule", self._size_schedule, steps)
        for factor in set(self.size_factors.values):
            self.sampling.resized(factor)
        return self.size_factors

    def free(self) -> None:
        """Release the batches after `acquire`."""
        self.in_use = False
        self.added = 0
        self.bands = None
        self.size_factors = CONSTANT

    def start_at(
        self,
        position: int,
        run: int | None = None,
        key: int | None = None,
    ) -> None:
        """Begin a training at a batch, with a new key if there is no seed: no two trainings share batches by chance.

        Args:
            position: Number of the batch.
            run: Key of the training, by which trainings of one seed draw different batches. None: the seed alone.
            key: Kept key, used if there is no seed; None: a new one.
        """
        self.position = position
        self._key = self.seed if self.seed is not None else key
        self._has_kept_key = key is not None
        self._drawn = None
        self._groups = None
        if run is not None and self.seed is not None:
            self._key = int.from_bytes(digest_of((self.seed, run))[:16], "big")
        self._shares.clear()

    def share(
        self,
        step: int,
        rank: int,
        world: int,
    ) -> RankShare:
        """Part of batch `step` that one rank takes; the latest are cached, since each is needed several times.

        Returns:
            Positions of its records; and with microbatches the one that each belongs to, in ascending order (a
            microbatch lies on one rank as a whole), else None.
        """
        key = (step, rank, world, self.phase, self.microbatches, id(self.work), self.added, id(self.size_factors))
        if key not in self._shares:
            if len(self._shares) >= _REMEMBERED:
                self._shares.pop(next(iter(self._shares)))
            self._shares[key] = self._share(step, rank, world)
        return self._shares[key]

    def _share(
        self,
        step: int,
        rank: int,
        world: int,
    ) -> RankShare:
        lot = self.lot(step)
        if self.work is not None and world > 1:
            return dealt(lot, self.work[lot], rank, world), None
        if not self.microbatches:
            return lot[rank::world], None
        microbatch_of = self.generator(step, Stream.MICROBATCHES).integers(self.microbatches, size=len(lot))
        order = np.argsort(microbatch_of, kind="stable")
        order = order[microbatch_of[order] % world == rank]
        return lot[order], microbatch_of[order]

    def lot(self, step: int) -> Positions:
        """Positions of all records of the data set in batch `step`, over all ranks; may be empty."""
        drawn = self._lot(step)
        return drawn[drawn < self._sampling.population] if self.added else drawn

    def added_in(self, step: int) -> Positions:
        """Numbers of the added records in batch `step`, from 0 on."""
        drawn = self._lot(step) - self._sampling.population
        return drawn[drawn >= 0]

    def added_groups(self) -> NDArray[Any]:
        """The group of each added record, where records are in groups that take turns."""
        return self._group_of(self.sampling)[self._sampling.population :]

    def size(self, step: int) -> int:
        """Number of records in batch `step`, added ones too, over all ranks."""
        return len(self._lot(step))

    def summands(self, step: int) -> int:
        """Number of vectors that the records drawn for batch `step` make: one each, or one for each microbatch."""
        positions, microbatch_of = self.share(step, 0, 1)
        if microbatch_of is not None:
            return len(np.unique(microbatch_of))
        return len(np.intersect1d(positions, self._lot(step)))

    def _lot(self, step: int) -> Positions:
        sampling = self.sampling.resized(self.size_factors.at(step)).at(step)
        if step >= sampling.most_steps:
            raise ConfigurationError(
                f"batch {step} would be one in which a {sampling.unit} takes part more often than max_participations "
                f"allows: make at most {sampling.most_steps:.0f} steps."
            )
        number, place = divmod(step, sampling.lots_per_draw)
        key = (number, self.phase, self.added)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = (key, sampling.draw(self.generator(number)))
        drawn = self._drawn[1][place]
        if sampling.cycle > 1:
            drawn = drawn[self._group_of(sampling)[drawn] == sampling.turn]
        if self.members is None:
            return drawn
        is_added = drawn >= len(self.members)
        return drawn[is_added | self.members.take(drawn, mode="clip")]

    def _group_of(self, sampling: Sampling) -> NDArray[Any]:
        """Group of each record, shape (population,): the same in all batches, for any records."""
        key = (sampling.population, sampling.cycle, self.phase)
        if self._groups is None or self._groups[0] != key:
            generator = self.generator(0, Stream.GROUPS)
            self._groups = (key, generator.integers(sampling.cycle, size=sampling.population))
        return self._groups[1]

    def key_of(self, stream: Stream, number: int) -> tuple[int, ...]:
        """Key of random numbers of batch or epoch `number`, for one use of them; the same on all ranks."""
        if self._key is None:
            key = [fresh_key()]
            if dist.is_initialized():
                dist.broadcast_object_list(key, src=0)
            self._key = key[0]
        return self._key, stream, self.phase, number

    def generator(self, number: int, stream: Stream = Stream.LOTS) -> np.random.Generator:
        """Random numbers of batch or epoch `number`, for one use of them; the same on all ranks."""
        return np.random.Generator(np.random.PCG64DXSM(keyed_sequence(self.key_of(stream, number))))


def _check_members(members: NDArray[np.bool_], sampling: Sampling) -> None:
    if members.shape != (sampling.population,) or members.dtype != np.bool_:
        raise ConfigurationError(
            f"members must be a boolean for each of the {sampling.population} {sampling.unit}s, not {members.dtype} of "
            f"shape {members.shape}."
        )
    check_scheme_of_members(type(sampling))


def check_scheme_of_members(scheme: type[Sampling]) -> None:
    """Raise ConfigurationError for batches that have as many records with a member as without."""
    if scheme.neighboring_relation == "replace_one":
        raise ConfigurationError(
            f"{scheme.kind!r} batches keep the number of records fixed, and who is a member changes it: draw them "
            "with data.sampling=poisson."
        )


def dealt(
    lot: Positions,
    work: NDArray[Any],
    rank: int,
    world: int,
) -> Positions:
    """Deal a batch to processes by work: the largest first, each to the process that has least.

    Args:
        lot: Positions of all records.
        work: Cost of each of them.
        rank: Rank of the process that gets the share.
        world: Number of processes.

    Returns:
        Positions of the share, in the order of the batch.

    >>> dealt(np.array([3, 5, 8, 9]), np.array([1, 9, 4, 5]), 0, 2), dealt(np.array([3, 5]), np.array([1, 9]), 1, 2)
    (array([3, 5]), array([3]))
    """
    rank_of = np.empty(len(lot), dtype=np.int64)
    totals = np.zeros(world)
    for place in np.argsort(-work, kind="stable"):
        least = totals.argmin()
        rank_of[place] = least
        totals[least] += work[place] + 1  # every record costs something
    share: Positions = lot[rank_of == rank]
    return share


def make_sampling(
    kind: str,
    population: int,
    expected_batch_size: float,
    unit: str = "example",
) -> Sampling:
    """Make a sampling scheme by its name.

    Args:
        kind: "poisson", "cyclic_poisson", "truncated_poisson", "fixed_size", "full", "min_separation" or "shuffled", or
            the kind of another scheme.
        population: Number of training records, such as users.
        expected_batch_size: Mean batch size; a whole number where batches are of a fixed size.
        unit: Kind of the data set's items; the ledger states it as the unit of privacy.

    Raises:
        ConfigurationError: Unknown kind, or a size that does not fit.
    """
    size: Any = expected_batch_size  # as the user wrote it
    is_number = isinstance(size, numbers.Real) and not isinstance(size, bool)
    records = "records" if unit == "example" else f"{unit}s"
    if population == 0:
        raise ConfigurationError(f"the data set contains no {records}.")
    if not is_number or not 1 <= size <= population:
        hint = ""
        if is_number and 0 < size < 1 <= size * population:
            hint = f" Is it a rate? That is expected_batch_size={size * population:g}."
        raise ConfigurationError(
            f"expected_batch_size must lie between 1 and the {population} training {records}, not {size!r}: set it "
            f"(data.expected_batch_size on the command line).{hint}"
        )
    scheme = find_scheme(kind)
    if scheme.whole_lots and expected_batch_size != int(expected_batch_size):
        raise ConfigurationError(f"{kind} batches need a whole expected_batch_size, not {expected_batch_size}.")
    if scheme.everybody and expected_batch_size != population:
        raise ConfigurationError(
            f"{scheme.words[0]} batches hold all {population} training {unit}s: set expected_batch_size={population}."
        )
    return scheme.at_rate(population, expected_batch_size / population, unit)
