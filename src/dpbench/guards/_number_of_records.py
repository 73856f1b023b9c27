"""Does the gradient of a record depend on how many others are in its batch? Asked by running half a batch.

The record axis sees which numbers are computed of which record. It does not see a line that uses `len(x)` otherwise
than as the divisor of the declared mean. So the first batch, and one of each octave, is run once more on half of its
records. That is evidence on these batches, and no proof for others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.data.octaves import next_checked
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import UnsupportedModuleError
from dpbench.guards.engine_trial import without_traces
from dpbench.guards.guard import Guard
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.count import count_records
from dpbench.records.grouping import counted_from_zero, places_of_index
from dpbench.records.physical_batches import batch_for_step, cuts, select
from dpbench.records.source import ChosenGradients, Lot, PerRecordStep
from dpbench.records.stopped_step import output_of, stopped
from dpbench.records.tagging import under_tags
from dpbench.records.training import Training, loss_of

_FEWEST = 4  # records of a batch that is asked
_TOLERANCE = 1e-3  # relative change of a record's norm that rounding explains
_TOLERANCE_OF_MIXED = 5e-2  # with 8 bits of mantissa
_SEEDS = (0, 1)
_DEPENDS = (
    "a record's gradient depends on the number of records in its batch (by {change:.2g} of its norm on half a batch), "
    "so clipping does not bound the influence of one record: the loss must be the {reduction} over the records, as "
    "loss_reduction={reduction!r} states, and nothing else may depend on len(batch) or the like."
)

_UNKNOWN = "whether gradients depend on the number of records in a batch could not be checked: {reason}."


_Run = tuple[Tensor, Tensor]
"""Norms of the gradients of the first half's rows, shape (rows,), and their sum, flat over all parameters."""


class NumberOfRecords(Guard):
    """Runs half of the first batch, and of one batch of each octave, where the engine takes records together."""

    name = "number of records"
    prevents = "a record's gradient depends on the number of others in its batch, other than by the mean of the loss"

    _next = 0
    _has_informed = False
    _step: tuple[Any, Sequence[Any], dict[str, Any]] | None = None

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._source = session.source if isinstance(session.source, PerRecordStep) else None

    def on_attach(self) -> None:
        """Ask the first batch."""
        self._next = 0

    def on_change(self) -> None:
        """Ask the coming batch: parameters that were frozen before had no gradients."""
        self._next = 0

    def on_step(
        self,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        """Keep a batch that is due until its records are known to be separable."""
        self._step = None
        if self._source is not None and self.session.releases.num_releases >= self._next:
            self._step = (batch, arguments, options)

    def on_release(self) -> None:
        """Run the step once more, on the batch and on half of it, before anything is released.

        Raises:
            UnsupportedModuleError: Gradients differ.
        """
        step, self._step = self._step, None
        source = self._source
        if step is None or source is None or not isinstance(source.engine, PerRecordEngine):
            return
        batch, arguments, options = step
        if isinstance(batch, SeparateRecords) or (isinstance(source, ChosenGradients) and source.limit is not None):
            return  # records were run alone
        lot = source.lot()
        training = self.session.training
        own_step = training.own_step
        again = _StepAgain(training, source.engine, lambda rows: own_step(rows, *arguments, **options), batch, lot)
        if again.records < _FEWEST:
            return
        self._next = next_checked(lot.release + 1) - 1
        change = again.change(self._tolerance())
        if again.unknown is not None and not self._has_informed:
            self._has_informed = True
            training.inform(_UNKNOWN.format(reason=again.unknown))
        if change is not None:
            raise UnsupportedModuleError(_DEPENDS.format(change=change, reduction=source.loss_reduction))

    def _tolerance(self) -> float:
        training = self.session.training
        device = training.device.type
        is_half = any(parameter.dtype.itemsize < 4 for parameter in self.session.trained.parameters)
        with training.autocast():
            if is_half or torch.is_autocast_enabled(device):
                return _TOLERANCE_OF_MIXED
        return _TOLERANCE * (10 if device == "cuda" else 1)


class _StepAgain:
    """Runs the step on a batch and on half of its records. It changes nothing of a training.

    Args:
        training: The training.
        engine: The engine, attached to the module or its private part.
        step: The training step, a function of the batch alone.
        batch: The open batch.
        lot: Its facts.

    Attributes:
        records: Number of records that are run at once.
        unknown: Why there is no answer, or None.
    """

    def __init__(
        self,
        training: Training,
        engine: PerRecordEngine,
        step: Callable[[Any], Any],
        batch: Any,
        lot: Lot,
    ) -> None:
        self._training = training
        self._engine = engine
        self._step = step
        self._batch = batch
        self._rows = count_records(batch)
        # Rows of the first piece that the step would be given.
        self._count = self._rows if lot.limit is None else cuts(self._rows, lot.limit, lot.record_of)[0]
        record_of = np.arange(self._rows) if lot.record_of is None else lot.record_of
        self._record_of = record_of[: self._count]
        names = np.unique(self._record_of)
        self.unknown: str | None = None
        self.records = len(names)
        self._half = int(np.isin(self._record_of, names[: self.records // 2]).sum())
        self._index = () if lot.row_index is None else places_of_index(batch, self._rows, lot.row_index)

    def change(self, tolerance: float) -> float | None:
        """The relative change of a record's gradient on half of the records; None where it is none that lasts.

        Args:
            tolerance: A change that rounding explains.
        """
        half = self._half
        engine = self._engine
        recording = engine.recording
        # A loss may be the mean over records, of which some have more rows than others.
        rows_of_half = half * self.records / (self.records // 2 * self._count)
        try:
            with without_traces(self._training) as state:
                whole = self._run(self._count, _SEEDS[0])
                state.restore()
                part = self._run(half, _SEEDS[0])
                if whole is None or part is None:
                    return None
                change = min(_change(whole, part, scale) for scale in (1.0, 1 / rows_of_half))
                if not change > tolerance:
                    return None
                state.restore()
                other = self._run(self._count, _SEEDS[1])
                if other is None or _change(whole, other) > tolerance:
                    self.unknown = "training_step draws random numbers that cannot be assigned to records"
                    return None
                return change
        except Exception as error:  # in the words of others, which may tell of the records
            self.unknown = f"training_step raises {type(error).__name__} when it is run again on half a batch"
            return None
        finally:
            engine.discard()
            engine.recording = recording

    def _run(self, count: int, seed: int) -> _Run | None:
        """The gradients of the first rows; None without a loss."""
        training = self._training
        rows = select(self._batch, self._rows, np.arange(count))
        if self._index:
            rows = counted_from_zero(rows, self._index, self._record_of[:count])
        self._engine.expect(count)
        with _uncompiled(), _SharedDraws(seed):  # also in the backward pass, where checkpoints compute once more
            with training.autocast(), torch.enable_grad(), stopped(training):
                loss = loss_of(
                    under_tags(self._engine, lambda lot: output_of(self._step, lot), batch_for_step(rows), count)
                )
            if loss is None or not loss.requires_grad:
                return None
            with torch.no_grad(), torch.autocast(training.device.type, enabled=False):
                gradients = self._engine.backward(loss, count)
                squares = torch.stack([gradient.squared_norms().double() for gradient in gradients])
                norms = squares.sum(0).sqrt()
                weights = torch.zeros(count, device=norms.device)
                weights[: self._half] = 1
                sums = [gradient.weighted_sum(weights).double().flatten() for gradient in gradients]
                return norms[: self._half], torch.cat(sums)


class _SharedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives all elements of a draw the same number, for any size; dropout keeps everything.

    Args:
        seed: Other numbers for another one.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._next_seed = 10_000 * seed

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        self._next_seed += 1
        _seed(self._next_seed)
        drawn = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(drawn[1])
        if name == "bernoulli_" and not isinstance(args[1] if len(args) > 1 else None, Tensor):
            return drawn.fill_(1)
        if isinstance(drawn, Tensor) and drawn.numel():
            drawn.fill_(drawn.flatten()[0].clone())
        return drawn


def _seed(number: int) -> None:
    """Seed generators without `torch.manual_seed`, which the record axis takes for one of the step's own reads."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Within, compiled functions run as they were written: nothing is compiled for batches of other sizes."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _change(whole: _Run, other: _Run, scale: float = 1.0) -> float:
    """Median over records of the change of a norm, or the change of their sum, if that is larger by a lot.

    Args:
        whole: The run of the whole batch.
        other: Another run.
        scale: A factor of the other run's gradients.
    """
    norms, total = whole
    other_norms, other_total = other
    if not bool(norms.isfinite().all()) or not bool(other_norms.isfinite().all()):
        return 0.0  # nothing can be said of them
    sizes = norms.clamp(min=1e-12)
    of_norms = float(((scale * other_norms - norms).abs() / sizes).median())
    of_sum = float((total - scale * other_total).norm() / sizes.sum())
    # A single activation that rounding moves across its kink changes a sum, and no median.
    return max(of_norms, of_sum / 10)
