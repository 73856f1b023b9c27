"""Trial of the engine on a network, with a few records, before anything is released.

The engine knows layers. A network may use weights past them, differentiate within its loss or hand on what all records
share; then the engine fails, or changes the network's results. Such a network can be trained record by record.
Layers that see several rows of a record stay with the engine, since the record axis tells the records' rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from dpbench.data.collation import RecordOfRow
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.gradients.validation import reason_of
from dpbench.privacy.randomness import seed_global_generators
from dpbench.privacy.record_axis.tags import Over
from dpbench.records.count import count_records
from dpbench.records.physical_batches import select
from dpbench.records.step_state import StepState
from dpbench.records.stopped_step import output_of, stopped
from dpbench.records.tagging import under_tags, watch
from dpbench.records.training import Training, gathered_alone, loss_of, nothing, replaced_methods
from dpbench.records.watched_step import refusal

_SEED = 0  # of what is drawn in all trials
_SIZES = (4, 5)
"""Of the lots that are tried: two, since one could be the number of positions by chance."""
_CLOSE = 1e-3  # relative, of losses
_CHANGED = "it changes what the network computes"

_SEPARATE = (
    "the records cannot be rows of one batch (graphs, lists, constants beside the records, varying numbers of "
    "rows), so each was collated alone. To use the engine, let the collate_fn make one row of each record, or "
    "declare several with PrivateDataLoader(..., record_of_row=...)"
)


class Limit(NamedTuple):
    """Why the engine cannot be used.

    Attributes:
        reason: Reason in words.
        is_refused: True if the engine refuses the step in words of its own.
    """

    reason: str
    is_refused: bool


class EngineTrial:
    """Runs the step with and without the engine. It changes nothing of a training.

    Args:
        training: Its step is tried.
        engine: Attached to the module or its private part.
    """

    def __init__(self, training: Training, engine: GradientMethod) -> None:
        self._training = training
        self._engine = engine
        self._index: RecordOfRow | None = None

    def limit(
        self,
        batch: Any,
        record_of: NDArray[np.int64] | None = None,
        index: RecordOfRow | None = None,
    ) -> Limit | None:
        """Why the engine cannot be used; None: it can, or the step itself is wrong, or there are no records.

        Args:
            batch: Batch, on the device.
            record_of: Record of each row, ascending; None if each row is one.
            index: Key of the batch's entry that says so, if there is one.
        """
        if isinstance(batch, SeparateRecords):
            return Limit(_SEPARATE, is_refused=True)
        rows = count_records(batch)
        if not rows:
            return None
        # What a step draws for a lot may decide which layers it calls: drawn alike in a run that is resumed.
        self._index = index
        with isolate_rng():
            seed_global_generators([_SEED], self._training.device)
            return self._limit_of(batch, rows, record_of is None)

    def _limit_of(self, batch: Any, rows: int, is_padded: bool) -> Limit | None:
        """Why the engine cannot be used.

        Args:
            batch: Batch.
            rows: Number of its rows.
            is_padded: True if an executor may pad such lots, which are not judged then.
        """
        engine = self._engine
        if isinstance(engine, PerRecordEngine) and is_padded:
            reason = self._mixing(batch, rows, engine)
            if reason is not None:
                return Limit(reason, is_refused=False)
        limit = self._limit(batch, rows)
        if limit is None or not isinstance(engine, PerRecordEngine) or engine.needs_tags:
            return limit
        engine.follow_tags()
        limit = self._limit(batch, rows)
        if limit is not None:
            engine.follow_tags(False)
        return limit

    def is_agreed(self) -> bool:
        """Return whether all processes agree on the layers; each has to ask."""
        needs_tags = isinstance(self._engine, PerRecordEngine) and self._engine.needs_tags
        return self._training.largest(needs_tags) == -self._training.largest(-needs_tags)

    def _limit(self, batch: Any, rows: int) -> Limit | None:
        limits = []
        for size in _SIZES:
            limit = self._limit_on(select(batch, rows, _index(rows, size)), size)
            if limit is not None:
                limits.append(limit)
        for limit in limits:
            if not limit.is_refused:
                return limit
        return limits[0] if limits else None

    def _mixing(self, batch: Any, rows: int, engine: PerRecordEngine) -> str | None:
        """Why records are not separable in the step, as its tags say; None: they are."""
        size = _SIZES[0]
        lot = select(batch, rows, _index(rows, size))
        with self._without_traces():
            try:
                loss, verdict = watch(self._loss, lot, size, over=Over(engine.loss_reduction))
            except Exception:
                return None  # its own step says what is wrong
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                return None
        if verdict.kind in ("mixed", "reads"):
            return reason_of(refusal(verdict))
        return None

    def _limit_on(self, lot: Any, size: int) -> Limit | None:
        engine = self._engine
        with self._without_traces() as rewind:
            try:
                plain = self._loss(lot)
            except Exception:
                return None  # its own step says what is wrong
            if not isinstance(plain, Tensor) or plain.numel() != 1 or not plain.requires_grad:
                return None
            rewind()
            engine.expect(size)
            try:
                loss = under_tags(engine, self._loss, lot, size, self._index)
                gradients = engine.backward(loss, size, verify=True)
                with torch.no_grad():
                    for gradient in gradients:
                        gradient.squared_norms()
            except UnsupportedModuleError as error:
                return Limit(reason_of(error), is_refused=True)
            except Exception as error:  # in somebody else's words, which may tell of the records
                reason = f"with it the step raises {type(error).__name__}"
                return Limit(reason, is_refused=False)
            if _are_close(plain, loss) or not self._is_lasting(plain, loss, lot, size, rewind):
                return None
            return Limit(_CHANGED, is_refused=False)

    def _is_lasting(self, plain: Tensor, changed: Tensor, lot: Any, size: int, rewind: Callable[[], None]) -> bool:
        """Return whether both losses stay as they are: a step that is random beyond its seeds cannot be judged."""
        engine = self._engine
        rewind()
        engine.expect(size)
        if not _are_close(changed, under_tags(engine, self._loss, lot, size, self._index)):
            return False
        rewind()
        engine.discard()
        engine.recording = False
        return _are_close(plain, self._loss(lot))

    def _loss(self, lot: Any) -> Any:
        return loss_of_step(self._training, lot)

    @contextmanager
    def _without_traces(self) -> Iterator[Callable[[], None]]:
        """Within, the engine does not look, and nothing is logged; the function yielded undoes the changes so far."""
        engine = self._engine
        recording = engine.recording
        records = engine.records
        try:
            with without_traces(self._training) as state:
                engine.recording = False

                def rewind() -> None:
                    state.restore()
                    torch.clear_autocast_cache()

                yield rewind
        finally:
            engine.discard()
            engine.recording = recording
            engine.records = records


@contextmanager
def without_traces(training: Training) -> Iterator[StepState]:
    """Within, a step may run without training: nothing is logged, and in the end everything is put back.

    Args:
        training: The training.
    """
    silent = replaced_methods(training.module, **_stand_ins(training))
    exact = tf32.refused(training.device.type)
    with warnings.catch_warnings(), training.without_loggers(), silent, exact:
        warnings.simplefilter("ignore")  # of a network that is run otherwise than in training
        state = StepState(training)
        weights = [(p, p.data, p.data.clone()) for p in training.module.parameters()]
        try:
            yield state
        finally:
            state.finish()
            _put_back(weights)
            torch.clear_autocast_cache()


def loss_of_step(training: Training, batch: Any) -> Any:
    """The loss of the training's own step on a batch; in manual optimization the first one that it differentiates."""
    with training.autocast(), torch.enable_grad(), stopped(training):
        return loss_of(output_of(training.own_step, batch, *training.index_of_step()))


def _stand_ins(training: Training) -> dict[str, Callable[..., Any]]:
    """Methods that log, or wait for other processes, which may have no records to try."""
    methods: dict[str, Callable[..., Any]] = {"log": nothing, "log_dict": nothing}
    if training.world_size > 1:
        methods["all_gather"] = functools.partial(gathered_alone, training.world_size)
    return methods


@torch.no_grad()
def _put_back(weights: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Undo the step's own writes to parameters (a first value from the first batch): in a training they are refused."""
    for parameter, data, before in weights:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data
        if not torch.equal(data, before):
            data.copy_(before)


def _index(rows: int, size: int) -> NDArray[np.int64]:
    """Rows of a batch of `size`: the first, from the beginning again where there are fewer."""
    return np.resize(np.arange(min(rows, size)), size)


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.detach().double(), other.detach().double(), rtol=_CLOSE, atol=1e-6, equal_nan=True)
