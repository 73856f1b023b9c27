"""Lots repeated as one CUDA graph: step, backward pass, norms and clipped sums, recorded once for lots of all sizes.

On a GPU most of the time of a step of a small network goes into launching its kernels one by one. A graph launches all
of them at once. It holds kernels only: the Python of a step ran when it was recorded, and does not run again. So
whatever of a step could come out otherwise in the next lot is looked for when it is recorded, and a step that has such
a thing is carried out eagerly, with a line that says why (`_repeatability`). Some lots are made by Python too, and
their sums compared: what nobody has looked for shows there.

**Padding.** Poisson lots have many sizes. Where a module says that its step leaves padding out (`masks_padding`), lots
are padded to a fixed number of rows (`_inputs`), and one recording is for all of them. Padding has weight zero in the
loss and in the sums. That the loss does not depend on it is seen in each lot, by its gradients; a lot in which it does,
and one that is larger than the room for it, is made eagerly: no record is left out. Sums of padded lots round
otherwise than those of eager ones, so that from its first lot on a training pads each lot that it can pad, recorded or
not: a resumed run rounds as the uninterrupted one does. Other modules have a recording for each size of a lot, from its
second occurrence on; these round as eager lots do.

Noise and update have graphs of their own (`_noise_graph`, `_update_graph`): guards and hooks of users look at the
gradients between release and update. Checksum and ledger are those of the reference (`executor.Executor`). A lot in
which a record is not finite is made once more, eagerly: nothing of it was released.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpbench.data.octaves import is_checked
from dpbench.records.source import RepeatableSums
from dpbench.records.training import NotRepeatable, Training, TrainingStep, loss_of, masks_padding, replaced_methods
from dpbench.session._inputs import Inputs, Padding, fill, kinds
from dpbench.session._noise_graph import NoiseGraphs
from dpbench.session._recordings import (
    Call,
    Draws,
    Outcome,
    Recording,
    aside,
    follows,
    logging_to,
    without_graph,
)
from dpbench.session._repeatability import UnreadNumber, fingerprint, refuse_python, without_collectives
from dpbench.session._update_graph import UpdateGraphs
from dpbench.session.executor import Executor, SessionParts

_SIGHTINGS = 2
"""Of a size, before it is recorded: a size that comes once would pay for nothing."""
_MOST = 256
"""Recordings; lots of further sizes are carried out eagerly."""
_LOOKS = 3
"""Recordings, for one state of a module, in which Python is looked for: a step is the same for all sizes."""
_MOST_STATES = 16
"""States of a module (numbers, objects, memory) for which there are recordings."""
_MOST_SIGHTINGS = 10_000
_EAGER = "executor=graph: batches are carried out eagerly, because {reason}. (A graph repeats kernels, and no Python.)"
_NOT_PADDED = (
    "executor=graph: batches of each size are recorded by themselves, because the loss depends on padding. (A "
    "training_step that states masks_padding must leave out the rows that rows_present leaves out.)"
)
_CLOSE = 1e-3
"""Largest relative difference of sums that rounding explains."""
_OTHER_SUMS = (
    "a replayed batch had different sums from an eager one (they differ by {gap:.2g} of their norm): the step depends "
    "on something undetected, and batches since the last comparison used its old value. They are private all the "
    "same; use executor=eager for correct training"
)


class _Lot(NamedTuple):
    """A lot whose step was called.

    Attributes:
        step: Of the source.
        leaves: Tensors of the batch.
        structure: Of the batch.
        arguments: Of the step, behind the batch.
        options: Of the step, by name.
        padding: Of the lot; None: it is as it is.
    """

    step: TrainingStep
    leaves: Sequence[Tensor]
    structure: Any
    arguments: Sequence[Any]
    options: dict[str, Any]
    padding: Padding | None


class _Buffers(NamedTuple):
    """Where the sums of a lot lie that a recording makes, the same for all.

    Attributes:
        total: Flat, of parameters and statistics.
        all_finite: Whether each record's gradient was.
    """

    total: Tensor
    all_finite: Tensor


class Graphs(Executor):
    """Records the sums of a lot, and repeats them for others.

    Guarantee: that of the session. A record moves the sums as it does eagerly: the same operations are carried out.
    """

    name = "graph of padded lots, fused update"
    needs_gpu = True
    """Checks run without one: then a recording runs its Python again."""
    repeats = 0
    """Lots whose sums a recording made, over all trainings."""
    recordings = 0
    """That were made, over all trainings."""

    def __init__(self) -> None:
        self._recordings: dict[Any, Recording] = {}
        self._sightings: Counter[Any] = Counter()
        self._states: Counter[Any] = Counter()
        self._inputs = Inputs()
        self._paddings: dict[int, Padding] = {}
        self._buffers: _Buffers | None = None
        self._is_eager = True
        self._pads = False
        self._outcome: Outcome | None = None  # of the open lot, whose sums are in `_buffers`
        self._loss: Tensor | None = None  # that was returned for it
        self._lot: int | None = None  # for which the step was called
        self._compared: Tensor | None = None  # sums of a graph, for a lot that is made eagerly, too
        self._was_doubted = False  # whether the padded sums of the open lot do not hold
        self._pool: Any = None
        self.noise = NoiseGraphs()
        self.update = UpdateGraphs()

    def attach(self, parts: SessionParts) -> None:
        """Take note of a training, and take over the updates of its optimizer."""
        super().attach(parts)
        training = parts.training
        self._is_eager = False
        self._pads = masks_padding(training.module)
        self._begin_lot(None)
        if not self.needs_gpu or training.device.type == "cuda":
            self.update.attach(parts.optimizer, training.device, training.inform)

    def detach(self) -> None:
        """Let go of it, and of the memory of its graphs."""
        super().detach()
        self._recordings.clear()
        self._sightings.clear()
        self._states.clear()
        self._inputs.clear()
        self._paddings.clear()
        self.noise.clear()
        self.update.detach()
        self._begin_lot(None)
        self._loss = None
        self._buffers = None
        self._pool = None
        self._is_eager = True

    def _begin_lot(self, number: int | None) -> None:
        self._lot = number
        self._outcome = None
        self._compared = None
        self._was_doubted = False

    def step(self, step: TrainingStep) -> TrainingStep:
        """Repeat a recording of the lot, where there is one."""

        @functools.wraps(step)
        def repeated(batch: Any, *arguments: Any, **options: Any) -> Any:
            number = self.releases.num_releases
            if number == self._lot:  # by a hook, say, which looks at a part of the lot
                return step(batch, *arguments, **options)
            self._begin_lot(number)
            if self._is_eager or not self._may_repeat():
                return step(batch, *arguments, **options)
            lot = self._lot_of(step, batch, arguments, options)
            recording = None if lot is None else self._recording_of(lot)
            if lot is None or recording is None or not self._repeat(recording, lot):
                return step(batch, *arguments, **options)
            if recording.is_recorded and is_checked(number + 1):
                repeated_sums = self._sums_of_lot.total.clone()
                self._put_back()
                if lot.padding is None:
                    self._compared = repeated_sums
                    self._outcome = None
                    output = step(batch, *arguments, **options)
                    self._loss = loss_of(output)
                    return output
                self._repeat(self._unrecorded(lot, lot.padding), lot)
                self._compare(self._sums_of_lot.total, repeated_sums)
            return self._result(lot)

        return repeated

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Add the sums of a lot that was repeated: once, as a backward pass would."""
        self._backward = backward

        def added(loss: Tensor, *arguments: Any, **options: Any) -> None:
            if self._outcome is None or not follows(loss, self._loss):
                backward(loss, *arguments, **options)
                if self._compared is not None and follows(loss, self._loss):
                    self._compare(self.releases.mechanism.total, self._compared)
                self._compared = None
                if self._was_doubted:
                    self._blame_padding()
                return
            records = self._outcome.records
            self._repeatable.complete(records[0])
            self.releases.add_sums(self._sums_of_lot.total, records)

        return added

    def release(self) -> list[Tensor]:
        """As `ReleaseEngine.release`, with the noise of a graph."""
        if self._is_eager:
            return self.releases.release()
        return self.releases.release(self.noise.add)

    # ------------------------------------------------------------------------------------- repeat

    def _repeat(self, recording: Recording, lot: _Lot) -> bool:
        """Make the sums of a lot by a recording; False where they do not hold."""
        self._draws = Draws(self.training.device)
        try:
            fill(recording.inputs, lot.leaves)
            if lot.padding is not None:
                lot.padding.count(_rows(lot.leaves))
            self._outcome = recording.repeat()
            is_valid = bool(self._sums_of_lot.all_finite)
        except NotRepeatable as error:  # of a step that was not looked at yet
            self._give_up(str(error))
            return False
        except Exception as error:
            if recording.is_recorded:
                raise
            self._give_up(f"it could not be carried out on padded batches ({_named(error)})")
            return False
        if is_valid:
            self.repeats += recording.is_recorded
            return True
        self._outcome = None
        self._was_doubted = lot.padding is not None
        self._put_back()
        return False

    def _give_up(self, reason: str) -> None:
        """Carry out all lots eagerly, the open one too."""
        self._outcome = None
        self._put_back()
        self._rewind()
        self._go_eager(reason)

    def _put_back(self) -> None:
        """Have an eager lot draw what the repeated one has drawn."""
        self._draws.put_back()
        torch.clear_autocast_cache()

    def _compare(self, made: Tensor, repeated: Tensor) -> None:
        """Compare the sums that Python has made of a lot, which are released, with those of the graph."""
        difference = (made - repeated).norm()
        gap = float(difference / made.norm().clamp(min=1e-12))
        if gap > _CLOSE:
            self._go_eager(_OTHER_SUMS.format(gap=gap), is_wrong=True)

    def _blame_padding(self) -> None:
        """Pad no lot any longer, where all records of one were finite whose padded sums did not hold."""
        records, finite = self.releases.mechanism.records_of_lot
        if finite == records and self._pads:
            self._pads = False
            self._recordings.clear()
            self.training.inform(_NOT_PADDED)

    def _result(self, lot: _Lot) -> Any:
        """What the step would return, after it has logged what it would log: copies, which nothing overwrites."""
        assert self._outcome is not None
        outcome = self._outcome
        copy = _copy
        rows = _rows(lot.leaves)
        if lot.padding is not None:
            self._outcome = outcome = outcome._replace(records=(rows, rows))
            copy = functools.partial(_records_of, padded=lot.padding.rows, records=rows)
        for call in outcome.calls:
            arguments, options = tree_map(copy, (call.arguments, call.options))
            if lot.padding is not None and options.get("batch_size") == lot.padding.rows:
                options["batch_size"] = rows
            getattr(self.training.module, call.method)(*arguments, **options)
        output = tree_map(copy, outcome.output)
        self._loss = loss_of(output).requires_grad_()
        return output

    # ------------------------------------------------------------------------------------- record

    @property
    def _sums_of_lot(self) -> _Buffers:
        assert self._buffers is not None
        return self._buffers

    @property
    def _repeatable(self) -> RepeatableSums:
        source = self.source
        assert isinstance(source, RepeatableSums)
        return source

    def _lot_of(
        self,
        step: TrainingStep,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> _Lot | None:
        """The lot of a batch, padded where that can be; None where it is carried out eagerly."""
        device = self.training.device
        leaves, structure = tree_flatten(batch)
        if not all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
            self._go_eager("a batch holds other things than tensors on the model's device, which Python reads")
            return None
        padding = None
        rows = self._repeatable.padded_rows if self._pads else None
        if rows is not None:
            if _rows(leaves) > rows:
                return None
            if rows not in self._paddings:
                self._paddings[rows] = Padding(rows, device)
            padding = self._paddings[rows]
        return _Lot(step, leaves, structure, arguments, options, padding)

    def _recording_of(self, lot: _Lot) -> Recording | None:
        """The recording of a lot like this one; None where it is carried out eagerly."""
        device = self.training.device
        is_settled = self._repeatable.is_settled
        unrecorded = None
        if lot.padding is None:
            if not is_settled:
                return None
            sizes: Any = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in lot.leaves)
        else:
            unrecorded = self._unrecorded(lot, lot.padding)
            if not is_settled:
                return unrecorded
            sizes = (kinds(lot.leaves), lot.padding.rows)
        size = (
            str(lot.structure),
            sizes,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
        )
        try:
            state = fingerprint(self.training)
        except NotRepeatable as error:
            self._go_eager(str(error))
            return None
        recording = self._recordings.get((size, state))
        if recording is not None:
            return recording
        if len(self._sightings) > _MOST_SIGHTINGS:
            self._sightings.clear()
        self._sightings[size] += 1
        is_rare = lot.padding is None and self._sightings[size] < _SIGHTINGS
        if is_rare or len(self._recordings) >= _MOST:
            return unrecorded
        self._states[state] += 1
        if len(self._states) > _MOST_STATES:
            self._go_eager("something that the module holds moves from batch to batch")
            return None
        draws = Draws(device)
        try:
            is_known = self._states[state] > _LOOKS
            recording = self._record(lot, is_known)
        except NotRepeatable as error:
            self._go_eager(str(error))
            return None
        except Exception as error:  # of a step that eager lots carry out, or refuse in words of their own
            self._go_eager(f"it could not be recorded ({_named(error)})")
            return None
        finally:
            draws.put_back()
            self._rewind()
        self._recordings[size, state] = recording
        self.recordings += 1
        return recording

    def _may_repeat(self) -> bool:
        """Whether this lot may be repeated; what stands in the way of all lots is said once."""
        source = self.source
        releases = self.releases
        if self.needs_gpu and self.training.device.type != "cuda":
            self._go_eager("there is no GPU")
            return False
        if not isinstance(source, RepeatableSums):
            self._go_eager(f"{type(source).__name__} make their sums by Python")
            return False
        if source.obstacle is not None:
            self._go_eager(source.obstacle)
            return False
        if releases.recipe.adaptation is not None or releases.mechanism.training_plan.bound_factors:
            self._go_eager("the clipping bound moves from batch to batch")
            return False
        if releases.observers:
            self._go_eager("records are looked at one by one (diagnostics, an audit)")
            return False
        return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _go_eager(self, reason: str, is_wrong: bool = False) -> None:
        """Carry out all further lots eagerly.

        Args:
            reason: Why.
            is_wrong: Whether lots were made otherwise than they should have been.
        """
        self._is_eager = True
        self._recordings.clear()
        self._inputs.clear()
        say = self.training.warn if is_wrong else self.training.inform
        say(_EAGER.format(reason=reason))

    def _rewind(self) -> None:
        """Let the open lot begin again."""
        self._repeatable.rewind()
        torch.clear_autocast_cache()

    def _inputs_of(self, lot: _Lot) -> list[Tensor]:
        if self._buffers is None:  # before anything is recorded
            total = torch.zeros_like(self.releases.mechanism.total)
            self._buffers = _Buffers(total, torch.ones((), dtype=torch.bool, device=self.training.device))
        if lot.padding is None:
            return self._inputs.of_one_size(lot.leaves)
        return self._inputs.of_all_sizes(lot.leaves, lot.padding.rows)

    def _unrecorded(self, lot: _Lot, padding: Padding) -> Recording:
        """The step of a padded lot as it is, which rounds as its recording would."""
        inputs = self._inputs_of(lot)

        def compute() -> Outcome:
            outcome = self._sums(lot, inputs, lot.arguments)
            self._rewind()
            return outcome

        return Recording(inputs, compute, padding, is_recorded=False)

    def _record(self, lot: _Lot, is_known: bool) -> Recording:
        """Record the sums of a lot.

        Args:
            lot: Open.
            is_known: Whether the step was looked at in lots of other sizes.

        Raises:
            NotRepeatable: The step is not made of kernels alone.
        """
        device = self.training.device
        inputs = self._inputs_of(lot)
        fill(inputs, lot.leaves)
        if lot.padding is not None:
            lot.padding.count(_rows(lot.leaves))
        unread = [UnreadNumber() if isinstance(x, int) else x for x in lot.arguments]
        lot = lot._replace(leaves=inputs)  # a recording holds no memory of the batch that it was made of

        def compute() -> Outcome:
            return self._sums(lot, inputs, unread)

        def look() -> Outcome:
            with aside(device):
                return compute()

        if not is_known:
            refuse_python(self.training, look)
        elif torch.backends.cudnn.benchmark:
            with aside(device):  # cuDNN tries its kernels for each size
                compute()
        if device.type != "cuda":
            return Recording(inputs, without_graph(compute, self._rewind), lot.padding)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = compute()

        def replay() -> Outcome:
            _ = compute  # a graph holds addresses: what lies there belongs to the step, its arguments, its inputs
            graph.replay()
            return outcome

        return Recording(inputs, replay, lot.padding)

    def _sums(
        self,
        lot: _Lot,
        inputs: Sequence[Tensor],
        arguments: Sequence[Any],
    ) -> Outcome:
        """The step and its backward pass, whose sums go into `_buffers`."""
        calls: list[Call] = []
        padding = lot.padding
        present = None
        self._sums_of_lot.all_finite.fill_(True)
        if padding is None:
            self._rewind()
        else:
            present = padding.present()
            self._repeatable.rewind(padding.rows, padding.counted)
            torch.clear_autocast_cache()
        logging = logging_to(calls, self.training)
        masked = _masked(self.training, present)
        apart = self.releases.sums_apart(self._sums_of_lot.total, self._sums_of_lot.all_finite, present)
        batch = tree_unflatten([buffer.detach() for buffer in inputs], lot.structure)
        with without_collectives(self.training), logging, masked, apart:
            output = lot.step(batch, *arguments, **lot.options)
            loss = loss_of(output)
            if not isinstance(loss, Tensor):
                raise NotRepeatable("training_step gave no loss")
            self._backward(loss)
            records = self.releases.mechanism.records_of_lot
        torch.clear_autocast_cache()
        output, calls = tree_map(_detached, (output, calls))
        return Outcome(output, calls, records)


def _masked(training: Training, present: Tensor | None) -> AbstractContextManager[None]:
    """Within, the module knows which rows of its batch are records."""
    if present is None:
        return nullcontext()
    stand_ins: dict[str, Any] = {"rows_present": present}
    return replaced_methods(training.module, **stand_ins)


def _rows(leaves: Sequence[Tensor]) -> int:
    """Number of rows of a batch."""
    for leaf in leaves:
        if leaf.dim():
            return len(leaf)
    return 0


def _named(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _records_of(x: Any, padded: int, records: int) -> Any:
    """A copy of what a step on a padded batch has left, without the rows that are padding."""
    if isinstance(x, Tensor):
        is_padded = x.dim() > 0 and len(x) == padded
        return x[:records].clone() if is_padded else x.clone()
    if callable(x):
        return lambda: _records_of(x(), padded, records)
    return x
