"""Whether the engine knows a network: tried on a few records, before anything is released.

The engine knows layers. A network may use weights past them, differentiate within its loss, fold rows into dimension 0
or hand on what all records share; and then the engine fails, or changes what the network computes. Such a network can
be trained record by record.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import UnsupportedModuleError
from dpbench.guards.step_state import StepState
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.records.count import count_records
from dpbench.records.physical_batches import select
from dpbench.records.training import Training, loss_of, nothing, replaced_methods

_OF_RECORDS = re.compile(r" \(off by [^)]*\)")
"""What an error tells of the records: the training goes on, and this would stay in its log."""
_SIZES = (4, 5)
"""Of the lots that are tried: two, since one could be the number of positions by chance."""
_CLOSE = 1e-3  # relative, of losses
_REPEATS = 4  # of a loss that the engine seems to change
_CHANGED = (
    "it changes what the network computes (an embedding of tokens that all records share, such as positions, whose "
    "output is used otherwise than by adding it to each record's)"
)

_SEPARATE = (
    "the records of a lot make no rows of one batch (graphs, lists, constants beside the records, other numbers of "
    "rows), and each was collated alone. A collate_fn that makes one row of each record lets it be used, or "
    "LotLoader(..., record_of_row=...) for several"
)


class Limit(NamedTuple):
    """Why the engine cannot be used.

    Attributes:
        reason: In words.
        is_refused: Whether the engine refuses the step in words of its own.
    """

    reason: str
    is_refused: bool


class EngineTrial:
    """Runs the step with and without the engine. It changes nothing of a training.

    Args:
        training: Its step is tried, in automatic optimization.
        engine: Attached to the module or its private part.
    """

    def __init__(self, training: Training, engine: GradientMethod) -> None:
        self._training = training
        self._engine = engine

    def limit(self, batch: Any) -> Limit | None:
        """Why the engine cannot be used; None: it can, or the step itself is wrong, or there are no records.

        Args:
            batch: Of a lot, on the device.
        """
        if isinstance(batch, SeparateRecords):
            return Limit(_SEPARATE, is_refused=True)
        rows = count_records(batch)
        if not rows:
            return None
        limits = []
        for size in _SIZES:
            index = np.resize(np.arange(min(rows, size)), size)
            limit = self._limit_on(select(batch, rows, index), size)
            if limit is not None:
                limits.append(limit)
        for limit in limits:
            if not limit.is_refused:
                return limit
        return limits[0] if limits else None

    def slowdown(self, batch: Any) -> float | None:
        """How much longer a lot takes record by record than in one plain step; None: it cannot be measured."""
        rows = count_records(batch)
        if not rows or isinstance(batch, SeparateRecords):
            return None
        with self._without_traces(), suppress(Exception):
            whole = self._seconds(batch)
            one = select(batch, rows, np.arange(1))
            self._seconds(one)  # the first time takes longer
            return rows * self._seconds(one) / whole
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
                loss = self._loss(lot)
                gradients = engine.backward(loss, size, verify=True)
                with torch.no_grad():
                    for gradient in gradients:
                        gradient.squared_norms()
            except Exception as error:
                reason = _OF_RECORDS.sub("", " ".join(str(error).split()))
                return Limit(reason, is_refused=isinstance(error, UnsupportedModuleError))
            if _are_close(plain, loss) or not self._is_lasting(plain, loss, lot, size, rewind):
                return None
            return Limit(_CHANGED, is_refused=False)

    def _is_lasting(self, plain: Tensor, changed: Tensor, lot: Any, size: int, rewind: Callable[[], None]) -> bool:
        """Whether both losses stay as they are: of a step that is random beyond its seeds nothing can be said."""
        engine = self._engine
        for _ in range(_REPEATS):
            rewind()
            engine.expect(size)
            if not _are_close(changed, self._loss(lot)):
                return False
            rewind()
            engine.discard()
            engine.recording = False
            if not _are_close(plain, self._loss(lot)):
                return False
        return True

    def _loss(self, lot: Any) -> Any:
        training = self._training
        with training.autocast(), torch.enable_grad():
            return loss_of(training.own_step(lot, *training.index_of_step()))

    def _seconds(self, lot: Any) -> float:
        start = time.perf_counter()
        loss = self._loss(lot)
        trainable = [parameter for parameter in self._engine.parameters if parameter.requires_grad]
        torch.autograd.grad(loss, trainable, allow_unused=True)
        if self._training.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    @contextmanager
    def _without_traces(self) -> Iterator[Callable[[], None]]:
        """Within, the engine does not look, and nothing is logged; a function puts back what was changed so far."""
        training = self._training
        engine = self._engine
        recording = engine.recording
        records = engine.records
        silent = replaced_methods(training.module, log=nothing, log_dict=nothing)
        exact = tf32.refused(training.device.type)
        with warnings.catch_warnings(), training.without_loggers(), silent, exact:
            warnings.simplefilter("ignore")  # of a network that the engine changes
            state = StepState(training)
            engine.recording = False

            def rewind() -> None:
                state.restore()
                torch.clear_autocast_cache()

            try:
                yield rewind
            finally:
                state.finish()
                torch.clear_autocast_cache()
                engine.discard()
                engine.recording = recording
                engine.records = records


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.detach().double(), other.detach().double(), rtol=_CLOSE, atol=1e-6, equal_nan=True)
