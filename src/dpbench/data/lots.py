"""How the records of each training step are drawn.

Lot t is a function of (key, t) alone, and the key one of the seed and of the private training that the lots are for:
every rank draws the same lot and takes its share of it (`PrivateBatchSampler.share`), and a resumed run draws the lots
of the uninterrupted one. With `seed=None` the key comes from the operating system's entropy, for models that will be
published.
"""

from __future__ import annotations

import copy
import numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import Sampler as TorchSampler

from dpbench.data.collation import Collation, RecordOfRow
from dpbench.data.fetching import watched
from dpbench.data.records import RecordsOfExamples, ask_for_unit, count_of, refuse_repeated, refuse_split
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.accounting.ledger import KEPT
from dpbench.privacy.mechanism.schedules import CONSTANT, Factors, Schedule, check_schedule, factors_of
from dpbench.privacy.randomness import (
    Stream,
    digest_of,
    fresh_key,
    keyed_sequence,
    seed_global_generators,
    source_of,
)
from dpbench.privacy.sampling import Positions, Sampling, SeparatedSampling, find_scheme

_FIXED_BY_LOTS = ("batch_size", "shuffle", "sampler", "drop_last", "batch_sampler")
"""Options of a DataLoader that would say otherwise how records are drawn."""
_COPIED = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "timeout", "worker_init_fn")
_COPIED_WITH_WORKERS = ("prefetch_factor", "multiprocessing_context")
_END = object()  # of an epoch
_REMEMBERED = 64  # more than worker processes draw ahead
_LIGHTNING = ("pytorch_lightning", "lightning.pytorch")
_TRAINING_LOOPS = tuple(f"{package}.loops.fit_loop" for package in _LIGHTNING)
_EVALUATION_LOOPS = tuple(f"{package}.loops.evaluation_loop" for package in _LIGHTNING)
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")

RankShare = tuple[Positions, Positions | None]


class PrivateBatchSampler(TorchSampler[list[int]]):
    """A batch sampler that yields the lots of one epoch, from where it stands.

    Args:
        sampling: Scheme of the draws; the ledger records it.
        seed: Key of the draws, or None for the operating system's entropy.
        size_schedule: How the expected size of lots moves over the steps of a training, see
            `privacy.mechanism.schedules`; None: not.
        members: (population,) of booleans: mask of the training records, in an experiment on membership. The
            others are drawn like them, and left out of every lot; rates, divisor and ledger are those of the
            population, for any members. None: all are.

    Attributes:
        position: Number of lots that were handed out; the whole state.
        phase: Phase of the ledger; set by the strategy, so that a lot number that was spent in a crashed run with
            other settings is drawn afresh, as the accounting assumes.
        microbatches: Number of microbatches of a lot; set by the strategy, 0 without them. Each record of a lot is put
            into one of them independently of all others, so that no record can move another one.
        in_use: True while a training draws them.
        work: Cost of each record, by its position, so that processes get equal shares of a lot's work; set by the
            strategy. None: the same.
        added: Records of an audit, which are drawn like those of the data set and come after them; set by the strategy.
            They are in no lot that a loader hands out.
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
            raise ConfigurationError(f"the seed of batches must be a whole number from 0 on, or None, not {seed!r}.")
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
        """The sampling, of added records too, in lots of the same size, by groups where noise has bands."""
        sampling = self._sampling
        if self.bands is not None:
            sampling = sampling.in_groups(self.bands)
        return sampling.among(sampling.population + self.added) if self.added else sampling

    @property
    def expected_batch_size(self) -> float:
        """Expected number of records in a lot, as asked for: without added ones if lots hold all records."""
        return self._sampling.expected_batch_size

    @property
    def source(self) -> str | None:
        """Hash by which ledgers tell lots of one seed or kept key; None without one, or if lots hold all records."""
        # Asked of the sampling with added records: lots of everybody among fewer than all are drawn again.
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
        """Attend to the lots for one training.

        Raises:
            ConfigurationError: Another training does: both would share lots, and composition would say too little.
        """
        if self.in_use:
            raise ConfigurationError(
                "this PrivateDataLoader is in use by another training: make a separate one for each."
            )
        self.in_use = True

    def plan(self, steps: float) -> Factors:
        """Fix the sizes of all lots of a training.

        Args:
            steps: Their number.

        Returns:
            Factors of the expected size, by step.

        Raises:
            ConfigurationError: A lot would have no valid size, or the training no end.
        """
        self.size_factors = factors_of("expected_batch_size_schedule", self._size_schedule, steps)
        for factor in set(self.size_factors.values):
            self.sampling.resized(factor)
        return self.size_factors

    def free(self) -> None:
        """Release the lots after `acquire`."""
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
        """Begin a training at a lot, with a new key where none was given: no two trainings share lots by chance.

        Args:
            position: Number of the lot.
            run: Key of the training: another one draws other lots from the same seed. None: the seed alone is the key.
            key: Kept, in the place of a seed where there is none; None: a new one.
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
        """Part of lot `step` that one rank takes; the last ones are remembered, since they are asked for again.

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
        """Positions of all records of the data set in lot `step`, over all ranks; may be empty."""
        drawn = self._lot(step)
        return drawn[drawn < self._sampling.population] if self.added else drawn

    def added_in(self, step: int) -> Positions:
        """Numbers of the added records in lot `step`, from 0 on."""
        drawn = self._lot(step) - self._sampling.population
        return drawn[drawn >= 0]

    def added_groups(self) -> NDArray[Any]:
        """The group of each added record, where records are in groups that take turns."""
        return self._group_of(self.sampling)[self._sampling.population :]

    def size(self, step: int) -> int:
        """Number of records in lot `step`, added ones too, over all ranks."""
        return len(self._lot(step))

    def summands(self, step: int) -> int:
        """Number of vectors that the records drawn for lot `step` make: one each, or one for each microbatch."""
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
        """Group of each record, shape (population,): the same in all lots, for any records."""
        key = (sampling.population, sampling.cycle, self.phase)
        if self._groups is None or self._groups[0] != key:
            generator = self.generator(0, Stream.GROUPS)
            self._groups = (key, generator.integers(sampling.cycle, size=sampling.population))
        return self._groups[1]

    def key_of(self, stream: Stream, number: int) -> tuple[int, ...]:
        """Key of random numbers of lot or epoch `number`, for one use of them; the same on all ranks."""
        if self._key is None:
            key = [fresh_key()]
            if dist.is_initialized():
                dist.broadcast_object_list(key, src=0)
            self._key = key[0]
        return self._key, stream, self.phase, number

    def generator(self, number: int, stream: Stream = Stream.LOTS) -> np.random.Generator:
        """Random numbers of lot or epoch `number`, for one use of them; the same on all ranks."""
        return np.random.Generator(np.random.PCG64DXSM(keyed_sequence(self.key_of(stream, number))))


class PrivateDataLoader(DataLoader[Any]):
    """A data loader with a sampling that the ledger knows; the only kind that private strategies accept.

    It hands out empty lots (with `(0, …)` tensors), and resumes in mid-epoch from its state.

    Args:
        dataset: Map-style data set; its `__getitems__(positions)`, if there is one, returns a list of samples as for
            torch's `DataLoader`, or `data.records.Collated`. Its `begin_lot(generator)`, if there is one, is given
            random numbers before each lot, a function of the lot's key and the same in all processes.
        lots: Draws of the records.
        collate_fn: Function as for `torch.utils.data.DataLoader`. It is given a list of one record at a time, and
            makes one row of it, unless `record_of_row` says otherwise.
        record_of_row: For a `collate_fn` that makes several rows of a record (augmented views, windows of a text), or
            none: the record of each row of a batch, by its position in the list that the `collate_fn` was given, in
            ascending order; the name of an entry of a dictionary (tokenizers call it "overflow_to_sample_mapping"), or
            a function that returns an entry of the batch. The gradient of a record is the mean over its rows, which are
            clipped together; a record without a row contributes zero. None: each row is a record.
        data_id: Name and version of the records, for seeded runs on a data set that reads them when they are asked
            for: with it such a run draws the same noise again. Another version needs another name: two training sets
            of one name share noise, which protects neither. Records in memory are known by their bytes, named or not.
        **options: Further options of `torch.utils.data.DataLoader`, such as num_workers.

    Attributes:
        before_lot: Called before each lot is handed out, where a private strategy watches.

    Raises:
        ConfigurationError: The data set has no positions, another number of records than the lots, or (where an
            epsilon is due) records that are there twice.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lots: PrivateBatchSampler,
        collate_fn: Callable[[Any], Any] | None = None,
        record_of_row: RecordOfRow | None = None,
        data_id: str | None = None,
        **options: Any,
    ) -> None:
        if hasattr(type(dataset), "iloc"):
            raise ConfigurationError(
                f"a {type(dataset).__name__} is indexed by column: make a TensorDataset of its values, or train on its "
                "file with data=table."
            )
        size = count_of(dataset)
        if not isinstance(lots, PrivateBatchSampler):
            raise ConfigurationError(
                f"PrivateDataLoader takes a PrivateBatchSampler, not {lots!r}: PrivateDataLoader.poisson(dataset, "
                "expected_batch_size) makes both."
            )
        if size != lots.sampling.population:
            raise ConfigurationError(
                f"the sampler draws from {lots.sampling.population} records, but the data set has {size}."
            )
        refuse_split(dataset)
        if getattr(dataset, "unit", lots.sampling.unit) != lots.sampling.unit:
            raise ConfigurationError(
                f"an item of the {type(dataset).__name__} is a {dataset.unit}, "  # type: ignore[attr-defined]
                f"but the loader's unit is {lots.sampling.unit}: "
                f"make_sampling(kind, len(dataset), size, unit={dataset.unit!r})."  # type: ignore[attr-defined]
            )
        if lots.sampling.record_changes:
            refuse_repeated(dataset)
            ask_for_unit(dataset, lots.sampling.unit)
        for name in _FIXED_BY_LOTS:
            if name in options:
                raise ConfigurationError(
                    f"PrivateDataLoader takes no {name}, because the ledger states how batches are drawn. Remove it; "
                    "expected_batch_size is the mean size of a batch."
                )
        if hasattr(dataset, "begin_lot") and options.get("num_workers"):
            raise ConfigurationError(
                f"the {type(dataset).__name__} has begin_lot, which worker processes do not call: leave "
                "num_workers at 0."
            )
        self._items = _ItemRandomness(options.pop("worker_init_fn", None))
        options["worker_init_fn"] = self._items
        try:
            super().__init__(
                dataset,
                batch_sampler=lots,
                collate_fn=Collation(dataset, collate_fn, record_of_row, lots.sampling.record_changes > 0),
                **options,
            )
        except (TypeError, ValueError) as error:  # torch's, of an option that it does not have or take
            raise ConfigurationError(f"PrivateDataLoader cannot be made: {brief(error)}") from error
        self.lots = lots
        self.record_of_row = record_of_row
        self.data_id = data_id
        self.collation = collate_fn
        self._source = watched(dataset) if lots.sampling.record_changes else dataset
        if lots.sampling.record_changes and isinstance(dataset, RecordsOfExamples):
            dataset.watch()
        self.before_lot: Callable[[], None] | None = None

    def __repr__(self) -> str:
        sampling = self.lots.sampling
        return (
            f"PrivateDataLoader({type(self.dataset).__name__} of {sampling.population} {sampling.unit}s, {self.lots})"
        )

    @property
    def expected_batch_size(self) -> float:
        """Mean number of records in a lot."""
        return self.lots.expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, size: float) -> None:
        raise ConfigurationError(
            "expected_batch_size cannot change once the PrivateDataLoader is made, because epsilon depends on it: let "
            "it move over the steps by expected_batch_size_schedule, or make a new loader with "
            f"expected_batch_size={size!r}."
        )

    @classmethod
    def poisson(
        cls,
        dataset: Dataset[Any],
        expected_batch_size: float,
        seed: int | None = None,
        unit: str | None = None,
        expected_batch_size_schedule: Schedule | None = None,
        **options: Any,
    ) -> PrivateDataLoader:
        """Poisson sampling: each record is in each lot with probability `expected_batch_size` / len(dataset).

        Args:
            dataset: Map-style data set.
            expected_batch_size: Mean number of records in a lot.
            seed: Reproduces the lots; None takes the operating system's entropy.
            unit: Kind of the data set's items, such as "patient"; the ledger states it as the unit of privacy. None:
                the data set's attribute `unit` ("user"), or an example. A data set without that
                attribute is asked about: all of a patient has to be one item.
            expected_batch_size_schedule: How the expected size moves over the steps, such as "linear:4".
            **options: Further options of this class and of `torch.utils.data.DataLoader`.
        """
        unit = unit or str(getattr(dataset, "unit", "example"))
        sampling = make_sampling("poisson", count_of(dataset), expected_batch_size, unit)
        return cls(dataset, PrivateBatchSampler(sampling, seed, expected_batch_size_schedule), **options)

    @classmethod
    def cyclic_poisson(
        cls,
        dataset: Dataset[Any],
        expected_batch_size: float,
        seed: int | None = None,
        unit: str | None = None,
        cycle_length: int | None = None,
        **options: Any,
    ) -> PrivateDataLoader:
        """Cyclic Poisson sampling: records are in groups that take turns, for noise that is correlated among steps.

        Args:
            dataset: Map-style data set.
            expected_batch_size: Mean number of records in a lot.
            seed: Reproduces groups and lots; None takes the operating system's entropy.
            unit: Kind of the data set's items, as for `poisson`.
            cycle_length: Number of groups; None: as many as the strategy's noise has bands.
            **options: Further options of this class and of `torch.utils.data.DataLoader`.
        """
        unit = unit or str(getattr(dataset, "unit", "example"))
        sampling = make_sampling("cyclic_poisson", count_of(dataset), expected_batch_size, unit)
        if cycle_length is not None:
            sampling = sampling.in_groups(cycle_length)
        return cls(dataset, PrivateBatchSampler(sampling, seed), **options)

    @classmethod
    def min_separation(
        cls,
        dataset: Dataset[Any],
        min_separation: int,
        max_participations: int | None = None,
        seed: int | None = None,
        unit: str | None = None,
        **options: Any,
    ) -> PrivateDataLoader:
        """Batches in which a record takes part once in `min_separation` steps, for good: nothing is amplified.

        Args:
            dataset: Map-style data set, such as one of users.
            min_separation: Steps from one participation of a record to the next.
            max_participations: Most of a record; a longer training is refused. None: as many as it is long.
            seed: Reproduces the participations; None takes the operating system's entropy.
            unit: Kind of the data set's items, as for `poisson`.
            **options: Further options of this class and of `torch.utils.data.DataLoader`.
        """
        unit = unit or str(getattr(dataset, "unit", "example"))
        sampling = SeparatedSampling(count_of(dataset), min_separation, max_participations, unit=unit)
        return cls(dataset, PrivateBatchSampler(sampling, seed), **options)

    @classmethod
    def from_dataloader(
        cls,
        loader: DataLoader[Any],
        seed: int | None = None,
        data_id: str | None = None,
    ) -> PrivateDataLoader:
        """Make Poisson lots of `loader.batch_size` records on average, with a loader's data, collation and workers.

        Args:
            loader: A data loader of torch.
            seed: Reproduces the lots; None takes the operating system's entropy.
            data_id: Name of the records, as for the class.

        Raises:
            ConfigurationError: The loader draws otherwise than each record of its data set once an epoch.
        """
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"PrivateDataLoader.from_dataloader takes a torch.utils.data.DataLoader, not a "
                f"{type(loader).__name__}; for a data set, use PrivateDataLoader.poisson(dataset, expected_batch_size)."
            )
        count_of(loader.dataset)
        _refuse_other_draws(loader)
        if loader.batch_size is None:
            raise ConfigurationError("the data loader has no batch_size to expect; use PrivateDataLoader.poisson.")
        # Torch refuses options of workers where there are none.
        names = _COPIED + _COPIED_WITH_WORKERS if loader.num_workers else _COPIED
        options = {name: getattr(loader, name) for name in names}
        return cls.poisson(loader.dataset, loader.batch_size, seed, data_id=data_id, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        _refuse_unattended(self.lots.in_use)
        if self.lots.sampling.record_changes:
            refuse_repeated(self.dataset)  # again: the indices of a Subset may be others by now
        self._begin_items()  # of workers, which start now
        # A data set of this package draws no random numbers when it makes an item.
        may_draw = not type(self.dataset).__module__.startswith("dpbench.")
        begin_lot = getattr(self.dataset, "begin_lot", None)
        batches = super().__iter__()
        while True:
            if begin_lot is not None:
                begin_lot(self.lots.generator(self.lots.position, Stream.VIEWS))
            if may_draw and not self.num_workers:
                self._begin_items()
            batch = next(batches, _END)
            if batch is _END:
                return
            # Counted here and not in the sampler: worker processes draw lots ahead of those that were trained on.
            self.lots.position += 1
            know_as_tree(batch)
            if self.before_lot is not None:
                self.before_lot()
            yield batch

    def _get_iterator(self) -> Any:
        """Torch's iterator, which reads a watched data set; `dataset` stays as it is."""
        reader = copy.copy(self)
        reader.__dict__["dataset"] = self._source  # torch refuses to set the attribute of a loader that exists
        return DataLoader._get_iterator(reader)

    def _begin_items(self) -> None:
        """Make the random numbers of the coming items a function of a key, where a private strategy watches."""
        is_private = self.before_lot is not None
        self._items.begin(self.lots.key_of(Stream.ITEMS, self.lots.position) if is_private else None)

    def prepare_collation(self, may_separate: bool = False) -> None:
        """Choose the form of batches.

        Args:
            may_separate: True if records that make no rows of one batch may be handed out as `SeparateRecords`.

        Raises:
            ConfigurationError: The `collate_fn` is not the one that keeps records apart.
        """
        if not isinstance(self.collate_fn, Collation):
            raise ConfigurationError(
                "the collate_fn of the PrivateDataLoader was replaced, and might mix records: pass it to the "
                "constructor, PrivateDataLoader(..., collate_fn=...)."
            )
        self.collate_fn.may_separate = may_separate

    def state_dict(self) -> dict[str, Any]:
        """Position in the sequence of lots; Lightning puts it into checkpoints."""
        return {"lots": self.lots.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the lots that were handed out."""
        self.lots.position = int(state["lots"])


class _ItemRandomness:
    """Seeds the global generators for the items of lots, in this process and in the workers of a data loader.

    Which numbers an item gets (for its augmentation, say) depends on its place in a lot, and so on the other records:
    if they were known, one record more would visibly change the items of all others.

    Args:
        worker_init_fn: The user's function, called afterwards in each worker; it stays available under that name.
    """

    def __init__(self, worker_init_fn: Callable[[int], object] | None) -> None:
        self.worker_init_fn = worker_init_fn
        self._key: tuple[int, ...] | None = None

    def begin(self, key: tuple[int, ...] | None) -> None:
        """Make all numbers from here on, and those of workers that are started from here on, a function of a key.

        Args:
            key: The same on all ranks, each of which draws other numbers; None leaves random numbers to others.
        """
        self._key = None
        if key is not None:
            self._key = (*key, dist.get_rank() if dist.is_initialized() else 0)
            seed_global_generators(self._key, torch.device("cpu"))

    def __call__(self, worker_id: int) -> None:
        """Stand in for the `worker_init_fn`: torch's own seeds of workers have 32 bits that count."""
        if self._key is not None:
            seed_global_generators((*self._key, worker_id), torch.device("cpu"))
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _check_members(members: NDArray[np.bool_], sampling: Sampling) -> None:
    if members.shape != (sampling.population,) or members.dtype != np.bool_:
        raise ConfigurationError(
            f"members must be a boolean for each of the {sampling.population} {sampling.unit}s, not {members.dtype} of "
            f"shape {members.shape}."
        )
    check_scheme_of_members(type(sampling))


def check_scheme_of_members(scheme: type[Sampling]) -> None:
    """Raise ConfigurationError for lots that have as many records with a member as without."""
    if scheme.neighboring_relation == "replace_one":
        raise ConfigurationError(
            f"{scheme.kind!r} batches keep the number of records fixed, and who is a member changes it: draw them "
            "with data.sampling=poisson."
        )


def _refuse_unattended(in_use: bool) -> None:
    """Refuse lots to a caller that would train on them without a strategy.

    The call stack tells the caller, since nothing else does. Without an owner (`PrivateBatchSampler.in_use`), lots are
    rightly iterated by hand, by a Trainer that validates, tests or predicts on them, and by a plain loop without
    privacy. Lightning calls nothing of a loader that would tell these from a Trainer that fits without a strategy, and
    Fabric has no moment at which a strategy could become the owner. So ownership alone would either let those two train
    without privacy, or refuse all others.

    Args:
        in_use: True if a strategy owns the lots.

    Raises:
        ConfigurationError: Lightning Fabric, which knows no strategy; or a Trainer's training without one.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in _FABRIC:
            raise ConfigurationError(
                "Lightning Fabric cannot train privately on a PrivateDataLoader: use a Lightning Trainer with a "
                "private strategy among its callbacks, or a DataLoader for training without privacy."
            )
        if module in _EVALUATION_LOOPS or (module in _TRAINING_LOOPS and in_use):
            return
        if module in _TRAINING_LOOPS:
            raise ConfigurationError(
                "this training on a PrivateDataLoader has no private strategy: add callbacks=[strategy] to the trainer "
                "(dpbench.DPSGD, ...; dpbench.strategies.NonPrivate() where privacy is not wanted). If there is one, "
                "the training loader was replaced during the run (reload_dataloaders_every_n_epochs?), or hooks of "
                "the strategy did not run (a subclass that overrides one must call super()'s)."
            )
        frame = frame.f_back  # type: ignore[assignment]


def dealt(
    lot: Positions,
    work: NDArray[Any],
    rank: int,
    world: int,
) -> Positions:
    """Deal a lot to processes by work: the largest first, each to the process that has least.

    Args:
        lot: Positions of all records.
        work: Cost of each of them.
        rank: Rank of the process that gets the share.
        world: Number of processes.

    Returns:
        Positions of the share, in the order of the lot.

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


def _refuse_other_draws(loader: DataLoader[Any]) -> None:
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            "leave out the DistributedSampler: a PrivateDataLoader draws from the whole data set and shares each batch "
            "among the processes."
        )
    if type(sampler) not in (RandomSampler, SequentialSampler):
        raise ConfigurationError(
            f"the data loader draws by a {type(sampler).__name__}; wrap the records that it may draw in a "
            "torch.utils.data.Subset, and use PrivateDataLoader.poisson."
        )
    if sampler.data_source is not loader.dataset:
        raise ConfigurationError(
            f"the sampler of the data loader ({type(sampler).__name__}) does not draw from its data set but from "
            f"something else of length {len(sampler.data_source)}, so that batches would hold other records: wrap the "
            "records that it may draw in a torch.utils.data.Subset, and use PrivateDataLoader.poisson."
        )
    if getattr(sampler, "replacement", False) or len(sampler) != count_of(loader.dataset):
        raise ConfigurationError(
            "the data loader's RandomSampler draws with replacement, or another number of records (num_samples) than "
            "the data set has; Poisson sampling does neither: use PrivateDataLoader.poisson(dataset, "
            "expected_batch_size)."
        )


def make_sampling(
    kind: str,
    population: int,
    expected_batch_size: float,
    unit: str = "example",
) -> Sampling:
    """The sampling of a kind for lots of a size.

    Args:
        kind: "poisson", "cyclic_poisson", "truncated_poisson", "fixed_size", "full", "min_separation" or "shuffled", or
            the kind of another scheme.
        population: Number of training records, such as users.
        expected_batch_size: Mean lot size; a whole number where lots are of a fixed size.
        unit: Kind of the data set's items; the ledger states it as the unit of privacy.

    Raises:
        ConfigurationError: Unknown kind, or a size that does not fit.
    """
    size: Any = expected_batch_size  # whatever the user wrote
    is_number = isinstance(size, numbers.Real) and not isinstance(size, bool)
    records = "records" if unit == "example" else f"{unit}s"
    if population == 0:
        raise ConfigurationError(f"the data set contains no {records}.")
    if not is_number or not 1 <= size <= population:
        hint = ""
        if is_number and 0 < size < 1 <= size * population:
            hint = f" Is it a rate? That is expected_batch_size={size * population:g}."
        raise ConfigurationError(
            f"expected_batch_size must lie between 1 and the {population} training {records}, not {size!r}.{hint}"
        )
    scheme = find_scheme(kind)
    if scheme.whole_lots and expected_batch_size != int(expected_batch_size):
        raise ConfigurationError(f"{kind} batches need a whole expected_batch_size, not {expected_batch_size}.")
    if scheme.everybody and expected_batch_size != population:
        raise ConfigurationError(
            f"{scheme.words[0]} batches hold all {population} training {unit}s: set expected_batch_size={population}."
        )
    return scheme.at_rate(population, expected_batch_size / population, unit)
