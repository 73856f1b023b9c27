"""`max_physical_batch_size=auto`: how many rows go through the network at once, measured before the first batch.

What is measured are made-up rows (`data.blank`), by a copy of the engine and sums apart: neither the number nor
anything that the training goes on with depends on a record.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from dpbench.data.blank import blank_batch
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError, UnsupportedModuleError, brief
from dpbench.guards.engine_trial import EngineTrial
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism.mechanism import Mechanism, Merge
from dpbench.records.record_gradients import record_gradients
from dpbench.records.source import MeasuredPieces, PieceFacts
from dpbench.records.step_state import StepState
from dpbench.records.training import Training, gathered_alone, replaced_methods
from dpbench.session import _memory

_SHARE_OF_GPU = 0.85  # of the free memory: cuDNN's workspaces, holes between blocks, what the optimizer still allocates
_SHARE_OF_HOST = 0.5  # which other programs use, too, and where nothing but the end of the process tells of its end
_FIRST = 2  # records of the first measurement
_SECOND = 6  # of the second one
_TRIAL = 3  # records on which the engine is tried
_MULTIPLE = 8  # of which large pieces have rows
_MORE = 1.2  # times as many rows are tried
_LESS = 0.9  # of the rows that were too many, at most
_SEED = 0
_TOO_SMALL = (
    "max_physical_batch_size=auto: one record does not fit into the memory that is free on {device}: take a smaller "
    "network or shorter records, set gradients=one_by_one, or free memory."
)
_FAILED = (
    "max_physical_batch_size=auto runs the step on made-up rows, and it fails on them ({error}): give a number instead."
)


def physical_batch_size(
    training: Training,
    source: MeasuredPieces,
    mechanism: Mechanism,
    loader: LotLoader,
) -> int | None:
    """The most rows whose forward pass, backward pass, norms and sums fit into memory; the same on all processes.

    Memory is measured at two sizes; the line through both gives a third, which is run, too, and made smaller until it
    fits. No more than a lot needs, with room for all but some 1 in 30,000.

    Args:
        training: Its step is run; afterwards everything is as it was.
        source: Says how rows become records.
        mechanism: Of the coming release.
        loader: Makes the rows.

    Returns:
        It; None where the engine does not know the network, which is then trained record by record.

    Raises:
        ConfigurationError: One record does not fit; or shapes of records are private, or the step fails on others.
    """
    facts = source.piece_facts()
    try:
        engine = PerRecordEngine(facts.part, source.loss_reduction)
    except UnsupportedModuleError:
        return None
    try:
        with _apart(training):
            pieces = _Pieces(training, facts, mechanism, loader, engine)
            if not pieces.are_known:
                return None
            return pieces.largest()
    finally:
        engine.close()


class _Measured(NamedTuple):
    """A piece that fits.

    Attributes:
        rows: Its rows.
        memory: Bytes that it takes.
    """

    rows: int
    memory: int


class _Pieces:
    """Pieces of made-up rows, of several sizes.

    Args:
        training: Its step is run.
        facts: How rows become records.
        mechanism: Its sums are made apart.
        loader: Makes the rows.
        engine: Of its own.
    """

    def __init__(
        self,
        training: Training,
        facts: PieceFacts,
        mechanism: Mechanism,
        loader: LotLoader,
        engine: PerRecordEngine,
    ) -> None:
        self._training = training
        self._mechanism = mechanism
        self._loader = loader
        self._engine = engine
        self._per_record = facts.rows_per_record
        self._most = facts.most_rows
        device = training.device
        self._device = device
        share = _SHARE_OF_GPU if device.type == "cuda" else _SHARE_OF_HOST / training.world_size
        self._budget = -self._largest(-int(share * _memory.available(device)))

    @property
    def are_known(self) -> bool:
        """Whether the engine knows the network, as far as made-up rows tell; on all processes."""
        trial = EngineTrial(self._training, self._engine)
        record_of = np.arange(_TRIAL).repeat(self._per_record)
        index = self._loader.record_of_row
        limit = trial.limit(self._batch(len(record_of)), record_of, index)
        return not self._largest(int(limit is not None))

    def largest(self) -> int:
        """The largest that fits."""
        one = self._per_record
        first = self._fitting(_FIRST * one)
        in_proportion = first.rows * self._budget // max(first.memory, 1)
        second = self._fitting(min(_SECOND * one, max(in_proportion, first.rows + one)))
        third = self._larger(first, second)
        # Layers may be computed otherwise in large batches, so that the line through small ones is too steep.
        return self._larger(second, third).rows

    def _larger(self, small: _Measured, large: _Measured) -> _Measured:
        """What fills the budget, by the line through two measurements; where that is not much more, the second one."""
        if large.rows <= small.rows:
            return large
        rows = self._most
        if large.memory > small.memory:
            per_row = (large.memory - small.memory) / (large.rows - small.rows)
            rows = large.rows + int((self._budget - large.memory) / per_row)
        rows = self._rounded(rows)
        if rows <= large.rows or (rows < _MORE * large.rows and rows < self._most):
            return large
        return max(large, self._fitting(rows))

    def _fitting(self, rows: int) -> _Measured:
        """So many rows, or fewer, that were run and fit."""
        rows = self._rounded(rows)
        while True:
            memory = self._measure(rows)
            if memory is not None and memory <= self._budget:
                return _Measured(rows, memory)
            if rows == self._per_record:
                raise ConfigurationError(_TOO_SMALL.format(device=self._device))
            share = 0.5 if memory is None else min(self._budget / memory, _LESS)
            rows = self._rounded(int(rows * share))

    def _rounded(self, rows: int) -> int:
        """Down to whole records, at least one; no more than are needed."""
        if rows >= self._most:
            return self._most
        step = self._per_record
        if rows >= _MULTIPLE * step:
            step *= _MULTIPLE
        return max(rows // step * step, self._per_record)

    def _largest(self, count: int) -> int:
        return self._training.largest(count) if self._training.world_size > 1 else count

    def _measure(self, rows: int) -> int | None:
        """Bytes that a piece takes, the most of all processes; None: it does not fit on one of them."""
        memory = 0
        try:
            memory = _memory.peak_of(self._device, functools.partial(self._run, rows))
        except UnsupportedModuleError:
            raise
        except Exception as error:
            if not _memory.is_out_of_memory(error):
                raise ConfigurationError(_FAILED.format(error=brief(error))) from error
            memory = -1
        self._engine.discard()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._largest(int(memory < 0)):
            return None
        return self._largest(memory)

    def _batch(self, rows: int) -> Any:
        return self._training.to_device(blank_batch(self._loader, rows))

    def _run(self, rows: int) -> None:
        batch = self._batch(rows)
        self._engine.expect(rows)
        gradients, _ = record_gradients(self._training, self._engine, batch, _SEED, verify=True)
        merge: Merge | None = None
        records = rows
        if self._per_record > 1:
            records = rows // self._per_record
            record_of = torch.arange(rows, device=self._device) // self._per_record
            merge = (record_of, records, 1 / self._per_record)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            self._mechanism.contribution(gradients, rows, merge)


@contextmanager
def _apart(training: Training) -> Iterator[None]:
    """Within, steps are run of which nothing stays: no state, no logs, no warnings, no wait for other processes."""
    stand_ins = {}
    if training.world_size > 1:
        stand_ins["all_gather"] = functools.partial(gathered_alone, training.world_size)
    with training.without_loggers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = StepState(training)
        try:
            with replaced_methods(training.module, **stand_ins):
                yield
        finally:
            state.finish()
