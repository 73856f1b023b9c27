"""Batches of all sizes repeated as one CUDA graph: step, backward pass, norms and clipped sums, recorded once.

On a GPU most of the time of a step of a small network goes into launching its kernels one by one. A graph launches all
of them at once. It holds kernels only: the Python of a step ran when it was recorded, and does not run again. So a
module declares that its step may be repeated (`masks_padding`): it leaves out the rows that `rows_present` leaves out,
computes the same in each batch, and leaves nothing behind. Steps of other modules are carried out eagerly.

Poisson batches have many sizes; they are padded to a fixed number of rows. Padding has weight zero in the loss and in
the sums. A batch is made eagerly if its gradients depend on padding, if a record is not finite, or if it is larger than
the room for it: no record is left out. Sums of padded batches round otherwise than those of eager ones, so that from
its first batch on a training pads each batch that it can pad, recorded or not: a resumed run rounds as the
uninterrupted one does.

The first batches and one of each octave are made by Python too, without padding, and their sums compared: evidence, and
no proof, that the declaration holds. A step that divides by padded rows too, say, would weigh a record by how many
others there are. Each record is clipped, and noise and ledger are those of the reference (`executor.Executor`).

The update is that of the optimizer, by PyTorch's fused kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpbench.capabilities.graphs.inputs import Padding, fill, inputs_of, kinds
from dpbench.capabilities.graphs.recordings import (
    Call,
    Draws,
    Outcome,
    Recording,
    aside,
    follows,
    logging_to,
    state_of,
    without_graph,
)
from dpbench.data.octaves import is_checked
from dpbench.errors import ConfigurationError
from dpbench.records.source import RepeatableSums
from dpbench.records.training import NotRepeatable, TrainingStep, loss_of, masks_padding, replaced_methods
from dpbench.session.executor import Executor, SessionParts

_MOST = 8
"""Recordings: one for each state of a module; batches of further states are carried out as they are."""
_EAGER = "executor=graph: batches run eagerly, because {reason}."
_COMPARISONS = 3
"""Lots, at least, that are made without padding, too: the first ones."""
_CLOSE = 1e-3
"""Largest relative difference of sums that rounding explains."""
_OTHER_SUMS = (
    "a replayed batch had other sums than an eager one (difference: {gap:.2g} of the norm): the step depends on "
    "padding, although the module states masks_padding, or on a value that changed unnoticed; batches since the last "
    "comparison used its old value; train again with executor=eager"
)


class _Lot(NamedTuple):
    """A batch on which the step was called.

    Attributes:
        step: Step of the record source.
        leaves: Tensors of the batch.
        structure: Structure of the batch.
        arguments: Positional arguments of the step after the batch.
        options: Keyword arguments of the step.
        padding: Padding of the batch.
        rows: Number of rows of the batch, all of them records.
    """

    step: TrainingStep
    leaves: Sequence[Tensor]
    structure: Any
    arguments: Sequence[Any]
    options: dict[str, Any]
    padding: Padding
    rows: int


def graphs(options: str) -> Graphs:
    """The executor "graph"; it takes no options.

    Raises:
        ConfigurationError: There are some.
    """
    if options:
        raise ConfigurationError(f"executor=graph takes no options, such as {options!r}: remove them.")
    return Graphs()


class Graphs(Executor):
    """Records the sums of a batch, and repeats them for others.

    Guarantee: that of the session. A record moves the sums as it does eagerly: the same operations are carried out.
    """

    name = "padded lots of all kinds, fused=True"
    needs_gpu = True
    """Checks run without one: then a recording runs its Python again."""
    repeats = 0
    """Number of batches with sums from a recording, over all trainings."""
    recordings = 0
    """That were made, over all trainings."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Begin as before any training."""
        self._recordings: dict[Any, Recording] = {}
        self._paddings: dict[int, Padding] = {}
        self._total: Tensor | None = None  # of the open lot: flat, of parameters and statistics
        self._all_finite: Tensor | None = None  # whether each of its records' gradients is
        self._is_eager = True
        self._outcome: Outcome | None = None  # of the open lot, whose sums are in `_total`
        self._loss: Tensor | None = None  # that was returned for it
        self._lot: int | None = None  # for which the step was called
        self._comparisons = 0
        self._was_doubted = False  # whether the padded sums of the open lot do not hold
        self._pool: Any = None

    def attach(self, parts: SessionParts) -> None:
        """Take note of a training, and have its optimizer use fused kernels from now on, in later checkpoints too."""
        super().attach(parts)
        self._is_eager = False
        if not self.needs_gpu or parts.training.device.type == "cuda":
            fuse(parts.optimizer)

    def detach(self) -> None:
        """Let go of it, and of the memory of its graphs."""
        super().detach()
        self._forget()

    def step(self, step: TrainingStep) -> TrainingStep:
        """Repeat a recording of the batch, where there is one."""

        @functools.wraps(step)
        def repeated(batch: Any, *arguments: Any, **options: Any) -> Any:
            number = self.releases.num_releases
            if number == self._lot:  # by a hook, say, which looks at a part of the lot
                return step(batch, *arguments, **options)
            self._lot = number
            self._outcome = None
            self._was_doubted = False
            lot = self._lot_of(step, batch, arguments, options)
            recording = None if lot is None else self._recording_of(lot)
            if lot is None or recording is None or not self._repeat(recording, lot):
                return step(batch, *arguments, **options)
            if self._comparisons < _COMPARISONS or is_checked(number + 1):
                self._comparisons += 1
                repeated_sums = self._sums_of_lot.clone()
                # Without padding, of which a loss may not depend, nor on how many rows are padding; then as it is
                # released, which rounds as on other batches.
                for other in (lot._replace(padding=Padding(lot.rows, self.training.device)), lot):
                    self._put_back()
                    if not self._repeat(self._unrecorded(other), other):
                        return step(batch, *arguments, **options)
                    self._compare(self._sums_of_lot, repeated_sums)
                    if self._is_eager:
                        self._give_back()
                        return step(batch, *arguments, **options)
            return self._result(lot)

        return repeated

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Add the sums of a batch that was repeated: once, as a backward pass would."""
        self._backward = backward

        def added(loss: Tensor, *arguments: Any, **options: Any) -> None:
            if self._outcome is None or not follows(loss, self._loss):
                backward(loss, *arguments, **options)
                if self._was_doubted:
                    self._blame_padding()
                return
            records = self._outcome.records
            self._repeatable.complete(records[0])
            self.releases.add_sums(self._sums_of_lot, records)

        return added

    # ------------------------------------------------------------------------------------- repeat

    def _repeat(self, recording: Recording, lot: _Lot) -> bool:
        """Make the sums of a lot by a recording; False where they do not hold."""
        self._draws = Draws(self.training.device)
        try:
            fill(recording.inputs, lot.leaves)
            lot.padding.count(lot.rows)
            self._outcome = recording.repeat()
            is_valid = bool(self._all_finite)
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
        self._was_doubted = True
        self._put_back()
        return False

    def _give_up(self, reason: str) -> None:
        """Carry out all lots eagerly, the open one too."""
        self._give_back()
        self._go_eager(reason)

    def _give_back(self) -> None:
        """Leave the open lot to an eager step."""
        self._outcome = None
        self._put_back()
        self._rewind()

    def _put_back(self) -> None:
        """Have an eager batch draw the same numbers as the repeated one."""
        self._draws.put_back()
        torch.clear_autocast_cache()

    def _compare(self, made: Tensor, repeated: Tensor) -> None:
        """Compare the sums that Python has made of a lot with those of the graph."""
        difference = (made - repeated).norm()
        gap = float(difference / made.norm().clamp(min=1e-12))
        if gap > _CLOSE:
            self._go_eager(_OTHER_SUMS.format(gap=gap), is_wrong=True)

    def _blame_padding(self) -> None:
        """Stop padding once padded sums were not finite although all records of the batch were."""
        records, finite = self.releases.mechanism.records_of_lot
        if finite == records and not self._is_eager:
            self._go_eager(
                "the loss depends on padding, which a training_step that states masks_padding must leave out"
            )

    def _result(self, lot: _Lot) -> Any:
        """Log the values that the step would log, and return copies of its result, which nothing overwrites."""
        assert self._outcome is not None
        self._outcome = outcome = self._outcome._replace(records=(lot.rows, lot.rows))
        copy = functools.partial(_records_of, padded=lot.padding.rows, records=lot.rows)
        for call in outcome.calls:
            arguments, options = tree_map(copy, (call.arguments, call.options))
            if options.get("batch_size") == lot.padding.rows:
                options["batch_size"] = lot.rows
            getattr(self.training.module, call.method)(*arguments, **options)
        output = tree_map(copy, outcome.output)
        self._loss = loss_of(output).requires_grad_()
        return output

    # ------------------------------------------------------------------------------------- record

    @property
    def _sums_of_lot(self) -> Tensor:
        assert self._total is not None
        return self._total

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
        """The lot of a batch, padded; None where it is carried out eagerly."""
        if self._is_eager or not self._may_repeat():
            return None
        device = self.training.device
        leaves, structure = tree_flatten(batch)
        if not all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
            self._go_eager("a batch contains values that are not tensors on the model's device")
            return None
        room = self._repeatable.padded_rows
        rows = next((len(leaf) for leaf in leaves if leaf.dim()), 0)
        if room is None or rows > room:
            return None
        if room not in self._paddings:
            self._paddings[room] = Padding(room, device)
        return _Lot(step, leaves, structure, arguments, options, self._paddings[room], rows)

    def _recording_of(self, lot: _Lot) -> Recording | None:
        """The recording for a lot, or its step as it is; None where it is carried out eagerly."""
        unrecorded = self._unrecorded(lot)
        if not self._repeatable.is_settled:
            return unrecorded
        device = self.training.device
        state = (
            str(lot.structure),
            kinds(lot.leaves),
            lot.padding.rows,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            state_of(self.training.module),
        )
        recording = self._recordings.get(state)
        if recording is not None or len(self._recordings) >= _MOST:
            return recording or unrecorded
        draws = Draws(device)
        try:
            recording = self._record(lot)
        except NotRepeatable as error:
            self._go_eager(str(error))
            return None
        except Exception as error:  # of a step that eager lots carry out, or refuse in words of their own
            self._go_eager(f"it could not be recorded ({_named(error)})")
            return None
        finally:
            draws.put_back()
            self._rewind()
        self._recordings[state] = recording
        self.recordings += 1
        return recording

    def _may_repeat(self) -> bool:
        """Return whether this batch may be repeated; a reason that holds for all batches is stated once."""
        source = self.source
        releases = self.releases
        reason = None
        if self.needs_gpu and self.training.device.type != "cuda":
            reason = "there is no GPU"
        elif not masks_padding(self.training.module):
            reason = "the class of training_step does not state masks_padding = True"
        elif not isinstance(source, RepeatableSums):
            reason = f"{type(source).__name__} compute sums in Python"
        elif source.obstacle is not None:
            reason = source.obstacle
        elif releases.recipe.adaptation is not None or releases.mechanism.training_plan.bound_factors:
            reason = "the clipping bound changes from batch to batch"
        elif releases.observers:
            reason = "records are looked at one by one (diagnostics, an audit)"
        if reason is not None:
            self._go_eager(reason)
            return False
        return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _go_eager(self, reason: str, is_wrong: bool = False) -> None:
        """Carry out all further lots eagerly.

        Args:
            reason: Reason, for the message.
            is_wrong: True if earlier batches were made wrongly.
        """
        self._is_eager = True
        self._recordings.clear()
        say = self.training.warn if is_wrong else self.training.inform
        say(_EAGER.format(reason=reason))

    def _rewind(self) -> None:
        """Let the open lot begin again."""
        self._repeatable.rewind()
        torch.clear_autocast_cache()

    def _unrecorded(self, lot: _Lot) -> Recording:
        """The step of a padded lot as it is, which rounds as its recording would."""
        if self._total is None:  # before anything is recorded
            self._total = torch.zeros_like(self.releases.mechanism.total)
            self._all_finite = torch.ones((), dtype=torch.bool, device=self.training.device)
        inputs = inputs_of(lot.leaves, lot.padding.rows)

        def compute() -> Outcome:
            outcome = self._sums(lot, inputs)
            self._rewind()
            return outcome

        return Recording(inputs, compute, is_recorded=False)

    def _record(self, lot: _Lot) -> Recording:
        """Record the sums of a lot.

        Raises:
            NotRepeatable: The step is not made of kernels alone.
        """
        device = self.training.device
        inputs = inputs_of(lot.leaves, lot.padding.rows)
        fill(inputs, lot.leaves)
        lot.padding.count(lot.rows)
        lot = lot._replace(leaves=inputs)  # a recording holds no memory of the batch that it was made of
        compute = functools.partial(self._sums, lot, inputs)
        if device.type != "cuda":
            return Recording(inputs, without_graph(compute, self._rewind))
        with aside(device):  # libraries make their plans
            compute()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = compute()
        module = self.training.module
        read = [*module.parameters(), *module.buffers()]

        def replay() -> Outcome:
            _ = compute, read  # a graph holds addresses: their memory belongs to the step and to the module's tensors
            graph.replay()
            return outcome

        return Recording(inputs, replay)

    def _sums(self, lot: _Lot, inputs: Sequence[Tensor]) -> Outcome:
        """Run the step and its backward pass, and add the sums to `_total`."""
        assert self._all_finite is not None
        calls: list[Call] = []
        padding = lot.padding
        present = padding.present()
        self._all_finite.fill_(True)
        self._repeatable.rewind(padding.rows, padding.counted)
        torch.clear_autocast_cache()
        logging = logging_to(calls, self.training)
        masked = replaced_methods(self.training.module, rows_present=present)  # type: ignore[arg-type]
        apart = self.releases.sums_apart(self._sums_of_lot, self._all_finite, present)
        batch = tree_unflatten([buffer.detach() for buffer in inputs], lot.structure)
        with logging, masked, apart:
            output = lot.step(batch, *lot.arguments, **lot.options)
            loss = loss_of(output)
            if not isinstance(loss, Tensor):
                raise NotRepeatable("training_step gave no loss")
            self._backward(loss)
            records = self.releases.mechanism.records_of_lot
        torch.clear_autocast_cache()
        output, calls = tree_map(_detached, (output, calls))
        return Outcome(output, calls, records)


def fuse(optimizer: Optimizer) -> bool:
    """Have SGD, Adam and AdamW of torch.optim update by one fused kernel for all parameters; others stay as they are.

    Args:
        optimizer: Optimizer of the private part.

    Returns:
        Whether it does.
    """
    if type(optimizer) not in (SGD, Adam, AdamW):
        return False
    for group in optimizer.param_groups:
        parameters = group["params"]
        # Fused SGD takes the momentum of all parameters or of none: parts that are unfrozen later have none at first.
        momenta = ["momentum_buffer" in optimizer.state.get(parameter, {}) for parameter in parameters]
        is_frozen = not all(parameter.requires_grad for parameter in parameters)
        has_some = bool(group.get("momentum")) and (is_frozen or (any(momenta) and not all(momenta)))
        is_plain = all(x.is_floating_point() and torch.empty_like(x).stride() == x.stride() for x in parameters)
        if has_some or group["differentiable"] or not is_plain:
            return False
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # of a checkpoint: fused kernels count on the device
                state["step"] = torch.as_tensor(state["step"]).to(parameter.device, torch.float32)
    return True


def _named(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _records_of(x: Any, padded: int, records: int) -> Any:
    """Copy of the results of a step on a padded batch, without the rows that are padding."""
    if isinstance(x, Tensor):
        is_padded = x.dim() > 0 and len(x) == padded
        return x[:records].clone() if is_padded else x.clone()
    if callable(x):
        return lambda: _records_of(x(), padded, records)
    return x
