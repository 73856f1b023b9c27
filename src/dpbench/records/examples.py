"""Records that are examples, or are made of examples: gradients of each by one backward pass over the batch."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpbench.data.collation import RecordOfRow
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.octaves import is_checked
from dpbench.data.records import require_examples
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import (
    CarriedRecordsError,
    ConfigurationError,
    DPBenchError,
    OutOfMemory,
    UnsupportedModuleError,
    brief,
)
from dpbench.privacy.events import MICROBATCH, UNITS, Summands
from dpbench.privacy.gradients.engine import LossReduction, PerRecordEngine
from dpbench.privacy.gradients.method import GRADIENTS, GradientMethod, GradientsName
from dpbench.privacy.gradients.one_by_one import OneByOne
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.gradients.validation import reason_of
from dpbench.privacy.processes import Processes
from dpbench.privacy.record_axis.tags import Over
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters
from dpbench.privacy.sampling import Sampling
from dpbench.records.count import count_records
from dpbench.records.counters import Counters
from dpbench.records.grouping import RowsOfLot, grouped_lots, merge_of, rows_of_lot
from dpbench.records.local_logs import LocalLogs
from dpbench.records.noise_step import noise_batch
from dpbench.records.physical_batches import batch_for_step, cut
from dpbench.records.piece_sizes import FILE_NAME, PieceSizes, is_out_of_memory
from dpbench.records.record_gradients import record_gradients
from dpbench.records.source import SECOND_RELEASE, Lot, Piece
from dpbench.records.step_state import PublicState, StepState
from dpbench.records.stopped_step import output_of, stopped
from dpbench.records.training import Training, TrainingStep, loss_of, nothing, replaced_methods
from dpbench.records.watched_step import WatchedStep

_NO_LOSS = (
    "training_step returned no loss for a batch that is not empty: skipping batches by their contents is not private. "
    "Always return the loss."
)
_NO_GRADIENT = (
    "no record of the first batch has a gradient, so its release is pure noise: if the loss is detached, or computed "
    "without gradients, nothing is trained."
)
_SECOND_BACKWARD = (
    "backward was called twice for one batch, so a record could count twice: sum the losses and call it once."
)
_OWN_BACKWARD = (
    "training_step calls backward() itself, so p.grad contains unclipped gradients of records: return the loss (in "
    "manual optimization call self.manual_backward), and compute other gradients by torch.autograd.grad."
)
_NEEDS_A_GPU = (
    "max_physical_batch_size=auto needs a GPU, and this training runs on {device}: set it to a number of rows."
)
_ONE_ROW = (
    "out of memory on {device} within a batch, of which nothing was released: a single row does not fit, so use a "
    "smaller network, shorter records, or gradients=one_by_one."
)
_OBSERVED = (
    "out of memory on {device} within a batch, of which nothing was released; it cannot be restarted, since "
    "diagnostics or an audit have seen some of its records: set max_physical_batch_size to a number of rows, or turn "
    "these off."
)
_RECORD_BY_RECORD = "gradients=auto: record by record, since the engine cannot be used: {reason}"
_NEITHER = (
    "the engine cannot be used ({reason}), and record by record training_step fails on a batch of one record ({error})"
)
_ONE_RECORD = (
    "record by record, training_step gets each record as a batch of one; if it fails only on such batches, squeeze() "
    "without a dimension is a common cause."
)
_RAISES_WHEN_FULL = ("cuda",)
"""Types of devices on which an error says that memory is over."""
_DEVIATIONS = 4  # standard deviations of the size of a lot that padded lots have room for
_MULTIPLE = 8  # of which padded lots have rows, which suits matrix products
_ON_NOISE = 64  # records of the step that first bounds are found by


class Examples:
    """Records of one row each; or of the rows that `record_of_row` of the loader gives them; or microbatches.

    Guarantee: the unit of privacy is that of the sampling, an example. A microbatch is a record to which each of its
    examples may do anything within the bound, so that an example moves the sum by two bounds.

    Args:
        loss_reduction: How `training_step` combines records: "mean" or "sum".
        max_physical_batch_size: Largest number of rows processed at once; the result is the same. "auto": all rows
            until the memory of the GPU runs out, then pieces of half as many, see `PieceSizes`.
        microbatch_size: μ. Above 1 the gradients of the examples that were drawn into one microbatch are added up,
            divided by μ and clipped instead of each example's.
        gradients: How they are computed: "engine", all in one backward pass; "one_by_one", each by an ordinary one,
            for every network and loss that is a function of one record; or "auto", the engine where it knows the
            network.
    """

    unit: str | None = None

    def __init__(
        self,
        loss_reduction: LossReduction = "mean",
        max_physical_batch_size: int | Literal["auto"] | None = None,
        microbatch_size: int = 1,
        gradients: GradientsName = "auto",
    ) -> None:
        self.loss_reduction: LossReduction = loss_reduction
        self.gradients: str = gradients
        self.is_chosen = False
        self._most_rows = None if max_physical_batch_size == "auto" else max_physical_batch_size
        self._sizes = PieceSizes() if max_physical_batch_size == "auto" else None
        self._at_once: int | None = None
        self._microbatch_size = microbatch_size
        self.summands = Summands(MICROBATCH, microbatch_size) if microbatch_size > 1 else UNITS
        self.engine: GradientMethod | None = None
        self.method: str | None = None
        self._loader: PrivateDataLoader | None = None
        self._record_of_row: RowsOfLot | None = None
        self._next_row = 0
        self._rows = 0
        self._rows_of_lot = 0
        self._verified = False
        self._accumulated = False
        self._released = False
        self._is_separate = False
        self._is_summed = False
        self._run_alone: Callable[[], None] | None = None
        self.limit: str | None = None
        self.reason: str | None = None
        self._is_padded = False
        self._was_looked_at = False
        self._values: Any = {}
        self._watched = WatchedStep()

    def check(self, training: Training) -> None:
        """Batches in pieces need automatic optimization."""
        _refuse_in_manual_optimization(training, max_physical_batch_size=self._most_rows or self._sizes)
        self.is_chosen = False
        self.limit = None
        if self._sizes is not None:
            self._sizes = PieceSizes()

    def attach(self, training: Training, part: nn.Module, releases: ReleaseEngine) -> TrainableParameters:
        """Attach the engine, which records its inputs."""
        if self._sizes is not None and training.device.type not in _RAISES_WHEN_FULL:
            raise ConfigurationError(_NEEDS_A_GPU.format(device=training.device.type))
        _refuse_in_manual_optimization(training, metrics=releases.recipe.metrics)
        self._training = training
        self._releases = releases
        self._verified = False
        self._logs = LocalLogs(training.module)
        self._part = part
        self._watched.begin(training)
        resumed = self.method if self.gradients == "auto" and self.is_chosen else None
        self.use(resumed or ("engine" if self.gradients == "auto" else self.gradients))
        assert self.engine is not None
        return TrainableParameters(self.engine.parameters, self.engine.names)

    def use(self, name: str, reason: str | None = None) -> None:
        """Compute gradients by the method of that name from now on; an engine that refuses the network gives way.

        Args:
            name: Name of the method.
            reason: Why it takes the place of the engine, which is said in one line; None: it was asked for.

        Raises:
            UnsupportedModuleError: No method takes the network.
        """
        try:
            engine = GRADIENTS[name](self._part, self.loss_reduction)
        except UnsupportedModuleError as error:
            if name == "one_by_one" or self.gradients != "auto":
                raise
            self.use("one_by_one", str(error))
            return
        if self.engine is not None:
            self.engine.close()
        self.engine = engine
        self.method = name
        self.limit = None
        self.reason = reason
        self._at_once = engine.at_once or self._most_rows
        if reason is not None:
            self._training.inform(_RECORD_BY_RECORD.format(reason=reason))

    @property
    def next_method(self) -> str | None:
        """Record by record after a batch that had to be; several processes, of which one may, go on with the engine."""
        is_alone = self.limit is not None and self._training.world_size == 1
        return "one_by_one" if is_alone else self.method

    def watched(self, own: TrainingStep) -> TrainingStep:
        """Wrap the module's own step, to be judged in each batch of which the engine takes the records together."""

        @functools.wraps(own)
        def followed(*args: Any, **kwargs: Any) -> Any:
            step = self.engine.within(own) if isinstance(self.engine, PerRecordEngine) else own
            return step(*args, **kwargs)

        return self._watched.step(followed)

    def hide(self) -> None:
        """Have hooks before the backward pass see nothing that the step has made of values that it read."""
        if self._training.automatic_optimization:  # else the step is over
            self._watched.hide()

    def step(self, own: TrainingStep) -> TrainingStep:
        """The same step on pieces of a batch that is large; in manual optimization the step itself, after them."""
        if self._training.automatic_optimization:
            in_pieces: TrainingStep = self._in_pieces(own)
            return in_pieces
        after_records: TrainingStep = self._after_records(own)
        return after_records

    def begin(self, loader: PrivateDataLoader) -> None:
        """Have microbatches drawn where they are the records."""
        assert self.engine is not None
        require_examples(loader.dataset)
        self._loader = loader
        loader.lots.microbatches, self._divisor = grouped_lots(loader, self._microbatch_size)
        loader.prepare_collation(self._may_separate(loader))
        self.engine.recording = False  # until a lot is opened
        self._rows = 0

    def _may_separate(self, loader: PrivateDataLoader) -> bool:
        """Return whether records that make no rows of one batch may come alone: each is one item of the data set."""
        is_one_item = self._microbatch_size == 1 and loader.record_of_row is None
        return is_one_item and self.gradients != "engine" and self._training.automatic_optimization

    def on_noise(self, generator: torch.Generator) -> Piece:
        """Run a step on the result of `noise_batch(size, generator)` of the data module or the module."""
        assert self.engine is not None
        size = self._microbatch_size
        batch = noise_batch(self._training, _ON_NOISE * size, generator)
        gradients, rows = self._gradients_on_noise(batch)
        if size == 1:
            return Piece(gradients, rows, None)
        record_of = torch.arange(rows, device=self.engine.parameters[0].device) // size
        return Piece(gradients, rows, (record_of, rows // size, 1 / size))

    def _gradients_on_noise(self, batch: Any) -> tuple[Sequence[ParameterGradients], int]:
        """Of the engine where it knows the network, which is not tried on a batch yet; else record by record."""
        engine = self.engine
        assert engine is not None
        verified = engine.verified
        engine.recording = True
        try:
            return record_gradients(self._training, engine, batch, seed=0, verify=True)
        except Exception:
            if self.gradients != "auto":
                raise
            one_by_one = OneByOne(self._part, self.loss_reduction)
        finally:
            engine.recording = False
            engine.verified = verified  # on lots, by `EngineTrial`
            engine.discard()
        return record_gradients(self._training, one_by_one, batch, seed=0)

    # ------------------------------------------------------------------------------------- one lot

    def open_lot(self, batch: Any) -> None:
        """Find the rows of each record, and let the engine record their forward passes."""
        assert self.engine is not None and self._loader is not None
        self._rows = count_records(batch)
        self._is_separate = isinstance(batch, SeparateRecords)
        self._record_of_row = rows_of_lot(
            self._loader,
            self._releases.num_releases,
            self._training,
            batch,
            self._rows,
        )
        self._rows_of_lot = self._rows
        if self._sizes is not None:
            self._at_once = self.engine.at_once or self._sizes.at(self._releases.num_releases)
        self._next_row = 0
        self._values = {}
        self._accumulated = False
        self._is_summed = False
        self._released = False
        self._run_alone = None
        self._is_padded = False
        self._watched.open()
        self.engine.expect(self._rows)

    def close_lot(self) -> None:
        """Put the records of the batch out of reach; their sums are complete."""
        assert self.engine is not None
        self._run_alone = None  # it holds the batch
        self._values = {}  # they hold losses of its records
        if self._next_row < self._rows_of_lot:
            raise ConfigurationError(_NO_LOSS)
        if self._next_row > self._rows_of_lot:
            raise ConfigurationError(_SECOND_BACKWARD)
        self._released = True
        self.engine.recording = False
        if self._training.automatic_optimization:  # else the step goes on
            self._watched.withhold()
        self._warn_without_gradients()

    def end_lot(self) -> None:
        """Give values back that were withheld from the update, as they were before the step."""
        self._watched.give_back()

    def _warn_without_gradients(self) -> None:
        """Say once, of the first batch with records, that none of them has a gradient: it may be so by chance."""
        if self._was_looked_at or not self._rows_of_lot or not isinstance(self.engine, OneByOne):
            return
        if not self.engine.has_gradients:
            self._training.warn(_NO_GRADIENT)
        self._was_looked_at = True

    @property
    def obstacle(self) -> str | None:
        """Why batches of one size are not made by the same operations; None where they are."""
        training = self._training
        if not training.automatic_optimization:
            return "manual optimization makes the update itself"
        if self._divisor is None or self._microbatch_size > 1:
            return "which rows make a record differs from batch to batch"
        if self._sizes is not None:
            return "a batch may begin again in smaller pieces (max_physical_batch_size=auto)"
        if self._at_once is not None and training.world_size > 1:
            return "processes agree on the pieces of each batch (max_physical_batch_size)"
        if isinstance(self.engine, PerRecordEngine) and self.engine.needs_tags:
            return "gradients of what all records share are found by tags"
        return None

    @property
    def is_settled(self) -> bool:
        """Return whether the engine was compared with autograd, and the batch has records."""
        return self._verified and self._rows_of_lot > 0 and not self._is_separate

    def settle(self) -> None:
        """Note that the caller has compared the engine with autograd."""
        self._verified = self.engine is not None and self.engine.verified

    @property
    def padded_rows(self) -> int | None:
        """Room for all but some 1 in 30,000 batches; None where they go in pieces."""
        assert self._loader is not None
        if self._is_separate or not self._rows_of_lot:
            return None
        lots = self._loader.lots
        sampling = lots.sampling.resized(lots.size_factors.at(self._releases.num_releases))
        cumulants = sampling.lot_size_cumulants
        has_one_size = cumulants is not None and not cumulants[0]
        rows = self._rows_of_lot if has_one_size else self._room(sampling)
        if self._at_once is not None and self._at_once < rows:
            return None
        return rows

    @property
    def physical_batch_size(self) -> int | None:
        """Most rows of a piece, as it was given; None: it was not."""
        return self._most_rows

    def keep_sizes(self, folder: Path, processes: Processes, goes_on: bool) -> None:
        """Keep the sizes of pieces that are found during the training in a folder; see `PieceSizes`."""
        if self._sizes is not None:
            self._sizes.keep(folder / FILE_NAME, processes, goes_on)

    def _room(self, sampling: Sampling) -> int:
        """Records that all but some 1 in 30,000 batches have at most, on one process."""
        expected = sampling.expected_batch_size
        cumulants = sampling.lot_size_cumulants
        variance = expected if cumulants is None else cumulants[0]
        room = (expected + _DEVIATIONS * math.sqrt(variance)) / self._training.world_size
        return math.ceil(room / _MULTIPLE) * _MULTIPLE

    def rewind(self, padded_rows: int | None = None, counted: Tensor | None = None) -> None:
        """Let the open batch begin again: nothing was accumulated."""
        assert self.engine is not None
        self._rows = self._rows_of_lot if padded_rows is None else padded_rows
        self._is_padded = padded_rows is not None
        self._next_row = 0
        self._accumulated = False
        self.engine.expect(self._rows, counted)

    def complete(self, rows: int) -> None:
        """Take note that so many rows of the open batch, all of it, were added to the sums."""
        if self._released:
            raise ConfigurationError(SECOND_RELEASE)
        if self._accumulated:
            raise ConfigurationError(_SECOND_BACKWARD)
        self._next_row += rows
        self._accumulated = True

    def detach(self) -> None:
        """Let go of the module."""
        self._run_alone = None
        self._watched.end()
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def lot(self) -> Lot:
        """Facts of the open batch."""
        return Lot(
            release=self._releases.num_releases,
            record_of=self._record_of_row,
            row_index=self._index,
            limit=self._at_once,
        )

    @property
    def _index(self) -> RecordOfRow | None:
        """Index of the record of each row of a batch; None if a record is one row."""
        assert self._loader is not None
        return self._loader.record_of_row

    def _in_pieces(self, training_step: Any) -> Any:
        """Split a batch that is larger than a physical batch; Lightning still sees one step.

        An empty batch asks nothing of the model, which need not be able to handle it; its release is noise. (Among
        several processes it does: logging may wait for all of them. Records that are run one by one log together.)
        """

        @functools.wraps(training_step)
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            assert self.engine is not None
            one_by_one = self.engine.at_once is not None
            logs = self._logs.collected(self._releases.processes) if one_by_one else nullcontext()
            waits = self._training.world_size > 1 and not one_by_one
            if self._sizes is not None and not one_by_one and (self._rows or waits):
                return self._in_pieces_that_fit(training_step, batch, *args, **kwargs)
            with logs:
                if not self._rows and not waits:
                    return torch.zeros((), device=self._training.device, requires_grad=True)
                training = self._training if waits else None
                *pieces, last = cut(batch, self._rows, self._at_once, self._record_of_row, training, self._index)
                with self._each_alone() as begin:
                    for piece in pieces:
                        begin()
                        output = self._one_piece(training_step, piece, *args, **kwargs)
                        self._accumulate(_require_loss(output))
                    begin()
                    output = self._one_piece(training_step, last, *args, **kwargs)
                    if one_by_one:
                        _require_loss(output)
                    return output

        return step

    def _in_pieces_that_fit(self, training_step: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch and add up its gradients, of which nothing is released yet.

        Where memory is over on a process, all put everything back and begin again, in pieces of half as many rows.
        """
        training = self._training
        self._watched.begin_step()
        state = StepState(training)
        state.finish()  # gradients stay where they are
        as_drawn = copy.deepcopy(tree_map(_detached, batch))  # the step may write to it
        is_over = True
        with self._logs.collected(self._releases.processes):
            while is_over:
                try:
                    output = self._all_pieces(training_step, batch, *args, **kwargs)
                    is_over = False
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    is_over = True
                if training.world_size > 1:
                    is_over = training.largest(int(is_over)) > 0
                if is_over:
                    state.finish()
                    self._begin_again()
                    batch = copy.deepcopy(as_drawn)
        self._is_summed = True
        return output

    def _all_pieces(self, training_step: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        training = self._training if self._training.world_size > 1 else None
        for piece in cut(batch, self._rows, self._at_once, self._record_of_row, training, self._index):
            self._logs.weight = count_records(piece)
            output = self._one_piece(training_step, piece, *args, **kwargs)
            self._accumulate(_require_loss(output))
        return output

    def _begin_again(self) -> None:
        """Have the open batch begin again, in pieces of half as many rows.

        Raises:
            OutOfMemory: A piece of one row does not fit, or observers have seen the pieces.
        """
        assert self._sizes is not None
        training = self._training
        rows = self._rows_of_lot
        if training.world_size > 1:
            rows = training.largest(rows)
        rows = min(rows, self._at_once or rows)
        if rows <= 1:
            raise OutOfMemory(_ONE_ROW.format(device=training.device))
        if self._releases.observers:
            raise OutOfMemory(_OBSERVED.format(device=training.device))
        self._at_once = rows // 2
        self._sizes.lower(self._releases.num_releases, rows // 2)
        self._releases.open_lot()
        self._watched.begin_again()
        self._logs.forget()
        self.rewind()
        torch.cuda.empty_cache()

    def _after_records(self, training_step: Any) -> Any:
        """In manual optimization: each record alone up to its backward pass; then the step of the batch goes on.

        The first backward pass of that step has nothing left to do, and the release follows it.
        """

        @functools.wraps(training_step)
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            assert self.engine is not None
            if self.engine.at_once is not None and self._rows:
                rows = self._rows
                self._records_alone(training_step, batch, *args, **kwargs)
                self._is_summed = True
                self._watched.expect(rows, None, self._index, is_one=True)
                output = training_step(batch, *args, **kwargs)
            else:
                output = self._one_piece(training_step, batch, *args, **kwargs)
            self._watched.put_back()
            return output

        return step

    def _records_alone(self, training_step: Any, piece: Any, *args: Any, **kwargs: Any) -> None:
        """Run the step on each record up to its backward pass, in silence, and add its gradient."""
        assert self.engine is not None
        training = self._training
        record_of = self._record_of_piece()
        silent = replaced_methods(training.module, log=nothing, log_dict=nothing)
        with silent, training.autocast(), torch.enable_grad(), self._each_alone() as begin:
            for record in cut(piece, self._rows, self.engine.at_once, record_of, None, self._index):
                begin()
                with stopped(training):
                    output = output_of(self._one_piece, training_step, record, *args, **kwargs)
                    self._accumulate(_require_loss(output))
            begin()

    def _accumulate_alone(self, error: UnsupportedModuleError) -> None:
        """Run the step of the present piece once more, record by record: its records cannot be taken together.

        Args:
            error: Why the engine cannot be used.
        """
        engine = self.engine
        assert isinstance(engine, PerRecordEngine) and self._run_alone is not None
        run_alone, self._run_alone = self._run_alone, None
        if self.limit is None and self._training.world_size > 1:  # else `use` says so before the next lot
            self._training.inform(_RECORD_BY_RECORD.format(reason=reason_of(error)))
        self.limit = self.reason = reason_of(error)
        # In manual optimization the step goes on, with what it has set.
        goes_on = None if self._training.automatic_optimization else PublicState(self._training)
        self._watched.put_back()
        self.engine = OneByOne(self._part, self.loss_reduction)
        try:
            with engine.paused():
                run_alone()
        except UnsupportedModuleError as failure:
            raise failure from error
        finally:
            self.engine = engine
            engine.discard()
        if goes_on is not None:
            goes_on.put_back()

    @contextmanager
    def _each_alone(self) -> Iterator[Callable[[], None]]:
        """Within, a function is called before each piece; record by record it puts back what the step counts.

        Raises:
            UnsupportedModuleError: The step has added to gradients by itself, which the records before are in, too.
        """
        assert self.engine is not None
        if self.engine.at_once is None:
            yield nothing
            return
        gradients = [p.grad for p in self.engine.parameters]
        versions = [None if grad is None else grad._version for grad in gradients]
        yield Counters(self._training.module).before_record
        for p, grad, version in zip(self.engine.parameters, gradients, versions, strict=True):
            is_other = p.grad is not grad or (grad is not None and grad._version != version)
            if p.grad is not None and is_other and bool(p.grad.any()):
                raise UnsupportedModuleError(_OWN_BACKWARD)

    def _one_piece(self, training_step: Any, piece: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.engine is not None
        self._rows = self.engine.records = count_records(piece)
        self._run_alone = functools.partial(self._records_alone, training_step, piece, *args, **kwargs)
        is_one = self.engine.at_once is not None
        is_seen = is_one or not (self._is_padded or isinstance(piece, SeparateRecords))
        self._watched.expect(
            self._rows if is_seen else 0,
            self._record_of_piece(),
            self._index,
            is_one,
            has_own_shape=self._is_separate,
        )
        with self._failures_of_one_record_explained() if is_one else nullcontext():
            output = training_step(batch_for_step(piece), *args, **kwargs)
        self._values = output.get("record_metrics", {}) if isinstance(output, dict) else {}
        return output

    @contextmanager
    def _failures_of_one_record_explained(self) -> Iterator[None]:
        """Within, an error of a step on one record says why the step is given one, or gets a note that it is.

        Raises:
            UnsupportedModuleError: The engine cannot be used either.
        """
        try:
            yield
        except DPBenchError:
            raise
        except Exception as error:
            if self.reason is None or not isinstance(error, (ValueError, TypeError, IndexError)):
                error.add_note(_ONE_RECORD)
                if self.reason is not None:
                    error.add_note(_RECORD_BY_RECORD.format(reason=self.reason))
                raise
            raise UnsupportedModuleError(_NEITHER.format(reason=self.reason, error=brief(error))) from error

    def _record_of_piece(self) -> NDArray[np.int64] | None:
        """Record of each row of the piece that is about to run."""
        if self._record_of_row is None:
            return None
        return np.asarray(self._record_of_row)[self._next_row : self._next_row + self._rows]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Per-record gradients instead of their sum."""
        self._watched.show()
        if self._released:
            raise ConfigurationError(SECOND_RELEASE)
        if self._is_summed:
            self._is_summed = False
            self._watched.stop()
            return
        assert self.engine is not None
        in_step = self._sizes is not None and self.engine.at_once is None
        if self._accumulated and (self._at_once is None or in_step or not self._training.automatic_optimization):
            raise ConfigurationError(_SECOND_BACKWARD)
        self._accumulate(loss)

    def _accumulate(self, loss: Tensor) -> None:
        """Clip the records of a (piece of a) batch and add them to the sums."""
        assert self.engine is not None
        records = self._rows
        device = self._training.device
        # Weights that are zero hide what depends on them, and some layers are called in some batches only.
        is_due = not self._verified or is_checked(self._releases.num_releases + 1)
        verify = is_due and records > 0
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # norms and sums in full precision
            try:
                gradients = self._gradients(loss, records, verify)
            except CarriedRecordsError:
                raise
            except UnsupportedModuleError as error:
                if self.gradients != "auto" or self.engine.at_once is not None:
                    raise
                self._accumulate_alone(error)
                return
            self._accumulated = True
            if verify:
                self._verified = self.engine.verified
            rows = slice(self._next_row, self._next_row + records)
            merge = merge_of(self._record_of_row, rows, self._divisor, self.engine.parameters[0].device)
            self._releases.accumulate(gradients, records, merge, self._values)
        self._next_row += records
        if self.engine.at_once is not None:
            self._watched.put_back()

    def _gradients(self, loss: Tensor, records: int, verify: bool) -> Sequence[ParameterGradients]:
        """Gradients of the records of a piece.

        Raises:
            UnsupportedModuleError: The engine cannot tell the records apart.
        """
        engine = self.engine
        assert engine is not None
        over = Over(self.loss_reduction)
        of_rows = self._releases.recipe.metrics
        metrics = None if of_rows is None else functools.partial(of_rows.of_rows, self._values, records)
        if not isinstance(engine, PerRecordEngine):
            self._watched.refuse_carried(loss, over, metrics)
            with self._failures_of_one_record_explained():
                return engine.backward(loss, records, verify=verify)
        if loss.numel() == 1 and loss.requires_grad:  # else it is refused
            engine.axis = self._watched.separable(loss, over, metrics)
        return engine.backward(loss, records, verify=verify)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _require_loss(output: Any) -> Tensor:
    """The loss that a step has returned; ConfigurationError where it is none."""
    loss = loss_of(output)
    if loss is None:
        raise ConfigurationError(_NO_LOSS)
    return loss  # type: ignore[no-any-return]


def _refuse_in_manual_optimization(training: Training, **options: object) -> None:
    """Raise ConfigurationError for options that need automatic optimization, where the module has none."""
    for name, value in options.items():
        if value and not training.automatic_optimization:
            raise ConfigurationError(
                f"{name} needs automatic optimization: in manual optimization training_step makes the update "
                "itself. Leave it out, or use automatic optimization."
            )
