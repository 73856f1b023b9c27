"""`PrivateDataLoader`: batches for private training, drawn by a `PrivateBatchSampler`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from dpbench.data.collation import Collation, RecordOfRow
from dpbench.data.fetching import watched
from dpbench.data.records import RecordsOfExamples, ask_for_unit, count_of, refuse_repeated, refuse_split
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.mechanism.schedules import Schedule
from dpbench.privacy.randomness import Stream, seed_global_generators
from dpbench.privacy.sampling import SeparatedSampling

_FIXED_BY_LOTS = ("batch_size", "shuffle", "sampler", "drop_last")
"""Options of a DataLoader that would say otherwise how records are drawn."""
_COPIED = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "timeout", "worker_init_fn")
_COPIED_WITH_WORKERS = ("prefetch_factor", "multiprocessing_context")
_UNATTENDED = (
    "a PrivateDataLoader hands out batches only to a private training: add callbacks=[strategy] to the Trainer "
    "(dpbench.DPSGD, ...; dpbench.strategies.NonPrivate() for training without privacy); in a loop of your own or in "
    "Lightning Fabric, use dpbench.PrivateLoop. To evaluate or to look at records, use DataLoader(loader.dataset). "
    "If the Trainer has a strategy, the loader was replaced during the run (reload_dataloaders_every_n_epochs?), or a "
    "subclass of the strategy overrides a hook without calling super()."
)
_END = object()  # of an epoch


class PrivateDataLoader(DataLoader[Any]):
    """A data loader with a sampling that the ledger knows; the only kind that private strategies accept.

    It hands out empty batches (with `(0, …)` tensors), and resumes in mid-epoch from its state.

    Args:
        dataset: Map-style data set; its `__getitems__(positions)`, if there is one, returns a list of samples as for
            torch's `DataLoader`, or `data.records.Collated`. Its `begin_lot(generator)`, if there is one, is given
            random numbers before each batch, a function of the batch's key and the same in all processes.
        batch_sampler: Draws of the records; also the attribute `lots`.
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
        before_lot: Function that a private strategy has called before each batch is handed out.

    Raises:
        ConfigurationError: The data set has no positions or another number of records than the sampler, or (unless
            training is without privacy) the same records twice.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_sampler: PrivateBatchSampler,
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
        if not isinstance(batch_sampler, PrivateBatchSampler):
            raise ConfigurationError(
                f"PrivateDataLoader takes a PrivateBatchSampler, not {batch_sampler!r}: "
                "PrivateDataLoader.poisson(dataset, expected_batch_size) makes both."
            )
        if size != batch_sampler.sampling.population:
            raise ConfigurationError(
                f"the sampler draws from {batch_sampler.sampling.population} records, but the data set has {size}."
            )
        refuse_split(dataset)
        if getattr(dataset, "unit", batch_sampler.sampling.unit) != batch_sampler.sampling.unit:
            raise ConfigurationError(
                f"an item of the {type(dataset).__name__} is a {dataset.unit}, "  # type: ignore[attr-defined]
                f"but the loader's unit is {batch_sampler.sampling.unit}: "
                f"make_sampling(kind, len(dataset), size, unit={dataset.unit!r})."  # type: ignore[attr-defined]
            )
        if batch_sampler.sampling.record_changes:
            refuse_repeated(dataset)
            ask_for_unit(dataset, batch_sampler.sampling.unit)
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
                batch_sampler=batch_sampler,
                collate_fn=Collation(dataset, collate_fn, record_of_row, batch_sampler.sampling.record_changes > 0),
                **options,
            )
        except (TypeError, ValueError) as error:  # torch's, of an option that it does not have or take
            raise ConfigurationError(f"PrivateDataLoader cannot be made: {brief(error)}") from error
        self.lots = batch_sampler
        self.record_of_row = record_of_row
        self.data_id = data_id
        self.collation = collate_fn
        self._source = watched(dataset) if batch_sampler.sampling.record_changes else dataset
        if batch_sampler.sampling.record_changes and isinstance(dataset, RecordsOfExamples):
            dataset.watch()
        self.before_lot: Callable[[], None] | None = None

    def __repr__(self) -> str:
        sampling = self.lots.sampling
        return (
            f"PrivateDataLoader({type(self.dataset).__name__} of {sampling.population} {sampling.unit}s, {self.lots})"
        )

    @property
    def expected_batch_size(self) -> float:
        """Mean number of records in a batch."""
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
        """Poisson sampling: each record is in each batch with probability `expected_batch_size` / len(dataset).

        Args:
            dataset: Map-style data set.
            expected_batch_size: Mean number of records in a batch.
            seed: Reproduces the batches; None takes the operating system's entropy.
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
            expected_batch_size: Mean number of records in a batch.
            seed: Reproduces groups and batches; None takes the operating system's entropy.
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
        """Make Poisson batches of `loader.batch_size` records on average, with a loader's data, collation and workers.

        Args:
            loader: A data loader of torch.
            seed: Reproduces the batches; None takes the operating system's entropy.
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
        if not self.lots.in_use:
            raise ConfigurationError(_UNATTENDED)
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
            # Counted here and not in the sampler: worker processes draw batches ahead of those that were trained on.
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
        """Position in the sequence of batches; Lightning puts it into checkpoints."""
        return {"lots": self.lots.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that were handed out."""
        self.lots.position = int(state["lots"])


class _ItemRandomness:
    """Seeds the global generators for the items of batches, in this process and in the workers of a data loader.

    Which numbers an item gets (for its augmentation, say) depends on its place in a batch, and so on the other records:
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
