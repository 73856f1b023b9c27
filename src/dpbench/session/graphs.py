"""Lots repeated as one CUDA graph: step, backward pass, norms and clipped sums, recorded once for each size of a lot.

On a GPU most of the time of a step of a small network goes into launching its kernels one by one. A graph launches all
of them at once. It holds kernels only: the Python of a step ran when it was recorded, and does not run again. So
whatever of a step could come out otherwise in the next lot is looked for when it is recorded, and a step that has such
a thing is carried out eagerly, with a line that says why.

(`_repeatability`). Some lots are made eagerly too, and their sums compared: what nobody has looked for shows there.

Noise, ledger and update are as for `executors.Eager`. A recorded lot in which a record is not finite is made once more,
eagerly: nothing of it was released.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpbench.data.octaves import is_checked
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records.source import RecordSource, RepeatableSums
from dpbench.records.training import NotRepeatable, Training, TrainingStep, loss_of, replaced_methods
from dpbench.session._repeatability import UnreadNumber, fingerprint, refuse_python, without_collectives

_SIGHTINGS = 2
"""Of a size, before it is recorded: a size that comes once would pay for nothing."""
_MOST = 256
"""Recordings; lots of further sizes are carried out eagerly."""
_LOOKS = 3
"""Recordings, for one state of a module, in which Python is looked for: a step is the same for all sizes."""
_MOST_STATES = 16
"""States of a module (numbers, objects, memory) for which there are recordings."""
_MOST_SIGHTINGS = 10_000
_MOST_NODES = 64
"""Of the graph behind a loss, in which the loss of a repeated lot is looked for."""
_EAGER = "executor=graph: batches are carried out eagerly, because {reason}. (A graph repeats kernels, and no Python.)"
_CLOSE = 1e-3
"""Largest relative difference of sums that rounding explains."""
_OTHER_SUMS = (
    "a replayed batch had different sums from an eager one (they differ by {gap:.2g} of their norm): the step depends "
    "on something undetected, and batches since the last comparison used its old value. They are private all the "
    "same; use executor=eager for correct training"
)


class _Call(NamedTuple):
    """A call of `log` or `log_dict`.

    Attributes:
        method: Its name.
        arguments: Its arguments.
        options: Its arguments by name.
    """

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Outcome(NamedTuple):
    """What a step leaves behind beside its sums; its tensors are overwritten by each repetition.

    Attributes:
        output: Of the step.
        calls: What it logged.
        records: See `Mechanism.records_of_lot`.
    """

    output: Any
    calls: list[_Call]
    records: tuple[int, int]


class _Recording(NamedTuple):
    """A lot of one size, ready to be repeated on other records.

    Attributes:
        inputs: Tensors that records are copied into.
        outcome: Of the last repetition.
        repeat: Makes the sums of what is in `inputs`.
    """

    inputs: list[Tensor]
    outcome: _Outcome
    repeat: Callable[[], object]


class Graphs:
    """Records the sums of a lot of each size that comes again, and repeats them.

    Guarantee: that of the session. A record moves the sums as it does eagerly: the same operations are carried out.
    """

    name = "graph"
    needs_gpu = True
    """Checks run without one: then a recording runs its Python again."""
    repeats = 0
    """Lots whose sums a recording made, over all trainings."""

    def __init__(self) -> None:
        self._recordings: dict[Any, _Recording] = {}
        self._sightings: Counter[Any] = Counter()
        self._states: Counter[Any] = Counter()
        self._buffers: dict[Any, Tensor] = {}
        self._training: Training | None = None
        self._is_eager = True
        self._repeated: _Recording | None = None  # whose sums are those of the open lot
        self._loss: Tensor | None = None  # that was returned for it
        self._lot: int | None = None  # for which the step was called
        self._compared: Tensor | None = None  # sums of a graph, for a lot that is made eagerly, too
        self._pool: Any = None

    def attach(self, training: Training, releases: ReleaseEngine, source: RecordSource) -> None:
        """Take note of a training."""
        self._training = training
        self._releases = releases
        self._source = source
        self._is_eager = False
        self._repeated = None
        self._compared = None
        self._lot = None

    def detach(self) -> None:
        """Let go of it, and of the memory of its graphs."""
        self._recordings.clear()
        self._sightings.clear()
        self._states.clear()
        self._buffers.clear()
        self._repeated = None
        self._compared = None
        self._loss = None
        self._training = None
        self._pool = None
        self._is_eager = True
        for name in ("_releases", "_source", "_total", "_all_finite"):
            self.__dict__.pop(name, None)

    def step(self, step: TrainingStep) -> TrainingStep:
        """Repeat a recording of the lot's size, where there is one."""

        @functools.wraps(step)
        def repeated(batch: Any, *arguments: Any, **options: Any) -> Any:
            lot = self._releases.num_releases
            if lot == self._lot:  # by a hook, say, which looks at a part of the lot
                return step(batch, *arguments, **options)
            self._lot = lot
            self._repeated = None
            self._compared = None
            recording = self._recording_of(step, batch, arguments, options)
            if recording is None or not self._repeat(recording, batch):
                return step(batch, *arguments, **options)
            if is_checked(self._releases.num_releases + 1):
                self._compared = self._total.clone()
                self._put_back()
                output = step(batch, *arguments, **options)
                self._loss = loss_of(output)
                return output
            self._repeated = recording
            return self._result(recording.outcome)

        return repeated

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Add the sums of a lot that was repeated: once, as a backward pass would."""
        self._backward = backward

        def added(loss: Tensor, *arguments: Any, **options: Any) -> None:
            if self._repeated is None or not _follows(loss, self._loss):
                backward(loss, *arguments, **options)
                if self._compared is not None and _follows(loss, self._loss):
                    self._compare(self._compared)
                self._compared = None
                return
            records = self._repeated.outcome.records
            self._repeatable.complete(records[0])
            self._releases.add_sums(self._total, records)

        return added

    def release(self, releases: ReleaseEngine) -> list[Tensor]:
        """As `ReleaseEngine.release`."""
        return releases.release()

    # ------------------------------------------------------------------------------------- repeat

    def _repeat(self, recording: _Recording, batch: Any) -> bool:
        """Make the sums of a lot by a recording; False where they do not hold."""
        assert self._training is not None
        self._draws = _Draws(self._training.device)
        leaves, _ = tree_flatten(batch)
        for buffer, leaf in zip(recording.inputs, leaves, strict=True):
            buffer.copy_(leaf)
        recording.repeat()
        if bool(self._all_finite):
            self.repeats += 1
            return True
        self._put_back()
        return False

    def _put_back(self) -> None:
        """Have an eager lot draw what the repeated one has drawn."""
        self._draws.put_back()
        torch.clear_autocast_cache()

    def _compare(self, repeated: Tensor) -> None:
        """Compare the sums of an eager lot, which is released as it is, with those of the graph."""
        eager = self._releases.mechanism.total
        difference = (eager - repeated).norm()
        gap = float(difference / eager.norm().clamp(min=1e-12))
        if gap > _CLOSE:
            self._go_eager(_OTHER_SUMS.format(gap=gap), is_wrong=True)

    def _result(self, outcome: _Outcome) -> Any:
        """What the step would return, after it has logged what it would log: copies, which nothing overwrites."""
        assert self._training is not None
        for call in outcome.calls:
            arguments, options = tree_map(_copy, (call.arguments, call.options))
            getattr(self._training.module, call.method)(*arguments, **options)
        output = tree_map(_copy, outcome.output)
        self._loss = loss_of(output).requires_grad_()
        return output

    # ------------------------------------------------------------------------------------- record

    @property
    def _repeatable(self) -> RepeatableSums:
        source = self._source
        assert isinstance(source, RepeatableSums)
        return source

    def _recording_of(
        self,
        step: TrainingStep,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> _Recording | None:
        """The recording of a lot like this one; None where it is carried out eagerly."""
        if self._is_eager or not self._may_repeat():
            return None
        leaves, structure = tree_flatten(batch)
        assert self._training is not None
        device = self._training.device
        if not all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
            self._go_eager("a batch holds other things than tensors on the model's device, which Python reads")
            return None
        shapes = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
        size = (
            str(structure),
            tuple(shapes),
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
        )
        try:
            state = fingerprint(self._training)
        except NotRepeatable as error:
            self._go_eager(str(error))
            return None
        recording = self._recordings.get((size, state))
        if recording is not None:
            return recording
        if len(self._sightings) > _MOST_SIGHTINGS:
            self._sightings.clear()
        self._sightings[size] += 1
        if self._sightings[size] < _SIGHTINGS or len(self._recordings) >= _MOST:
            return None
        self._states[state] += 1
        if len(self._states) > _MOST_STATES:
            self._go_eager("something that the module holds moves from batch to batch")
            return None
        draws = _Draws(device)
        try:
            is_known = self._states[state] > _LOOKS
            recording = self._record(step, leaves, structure, arguments, options, is_known)
        except NotRepeatable as error:
            self._go_eager(str(error))
            return None
        except Exception as error:  # of a step that eager lots carry out, or refuse in words of their own
            self._go_eager(f"it could not be recorded ({type(error).__name__}: {_first_line(error)})")
            return None
        finally:
            draws.put_back()
            self._rewind()
        self._recordings[size, state] = recording
        return recording

    def _may_repeat(self) -> bool:
        """Whether this lot may be repeated; what stands in the way of all lots is said once."""
        assert self._training is not None
        source = self._source
        releases = self._releases
        if self.needs_gpu and self._training.device.type != "cuda":
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
        return source.is_settled and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def _go_eager(self, reason: str, is_wrong: bool = False) -> None:
        """Carry out all further lots eagerly.

        Args:
            reason: Why.
            is_wrong: Whether lots were made otherwise than they should have been.
        """
        assert self._training is not None
        self._is_eager = True
        self._recordings.clear()
        self._buffers.clear()
        say = self._training.warn if is_wrong else self._training.inform
        say(_EAGER.format(reason=reason))

    def _rewind(self) -> None:
        """Let the open lot begin again."""
        self._repeatable.rewind()
        torch.clear_autocast_cache()

    def _record(
        self,
        step: TrainingStep,
        leaves: Sequence[Tensor],
        structure: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
        is_known: bool,
    ) -> _Recording:
        """Record the sums of a lot.

        Args:
            step: Of the source.
            leaves: Tensors of the batch.
            structure: Of the batch.
            arguments: Of the step, behind the batch.
            options: Of the step, by name.
            is_known: Whether the step was looked at in lots of other sizes.

        Raises:
            NotRepeatable: The step is not made of kernels alone.
        """
        assert self._training is not None
        device = self._training.device
        if "_total" not in self.__dict__:
            self._total = torch.zeros_like(self._releases.mechanism.total)
            self._all_finite = torch.ones((), dtype=torch.bool, device=device)
        inputs = [self._input(position, leaf) for position, leaf in enumerate(leaves)]
        for buffer, leaf in zip(inputs, leaves, strict=True):
            buffer.copy_(leaf)
        unread = [UnreadNumber() if isinstance(x, int) else x for x in arguments]

        def compute() -> _Outcome:
            batch = tree_unflatten([buffer.detach() for buffer in inputs], structure)
            return self._sums(step, batch, unread, options)

        def look() -> _Outcome:
            with _aside(device):
                return compute()

        if not is_known:
            refuse_python(self._training, look)
        elif torch.backends.cudnn.benchmark:
            with _aside(device):  # cuDNN tries its kernels for each size
                compute()
        if device.type != "cuda":
            return _recording_without_graph(inputs, compute, self._rewind)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = compute()
        return _Recording(inputs, outcome, graph.replay)

    def _input(self, position: int, leaf: Tensor) -> Tensor:
        """Memory for a tensor of the batch, which recordings of other sizes share."""
        if leaf.dim() == 0:
            return torch.empty_like(leaf)
        rows = len(leaf)
        key = (position, leaf.shape[1:], leaf.stride(), leaf.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < rows:
            # A recording of a smaller size keeps the memory that it had.
            larger = (rows + rows // 4, *leaf.shape[1:])
            span = 1
            for length, stride in zip(larger, leaf.stride(), strict=True):
                span += (length - 1) * stride
            memory = leaf.new_empty(span)
            buffer = memory.as_strided(larger, leaf.stride())
            self._buffers[key] = buffer
        return buffer[:rows]

    def _sums(
        self,
        step: TrainingStep,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> _Outcome:
        """The step and its backward pass, whose sums go into `_total`."""
        assert self._training is not None
        calls: list[_Call] = []
        self._rewind()
        self._all_finite.fill_(True)
        logging = _logging_to(calls, self._training)
        apart = self._releases.sums_apart(self._total, self._all_finite)
        with without_collectives(self._training), logging, apart:
            output = step(batch, *arguments, **options)
            loss = loss_of(output)
            if not isinstance(loss, Tensor):
                raise NotRepeatable("training_step gave no loss")
            self._backward(loss)
            records = self._releases.mechanism.records_of_lot
        torch.clear_autocast_cache()
        output, calls = tree_map(_detached, (output, calls))
        return _Outcome(output, calls, records)


def _recording_without_graph(
    inputs: list[Tensor],
    compute: Callable[[], _Outcome],
    rewind: Callable[[], None],
) -> _Recording:
    """A recording that runs its Python again; its outcome is overwritten, as that of a graph is."""
    outcome = compute()
    recorded_leaves, _ = tree_flatten(outcome)

    def repeat() -> None:
        leaves, _ = tree_flatten(compute())
        rewind()  # a graph runs nothing of the source
        for recorded, leaf in zip(recorded_leaves, leaves, strict=True):
            if isinstance(recorded, Tensor):
                recorded.copy_(leaf)

    return _Recording(inputs, outcome, repeat)


def _follows(loss: Tensor, source: Tensor | None) -> bool:
    """Whether a loss is that of a step, or a few operations behind it: drivers divide losses, for one."""
    if source is None or loss is source:
        return source is not None
    pending: list[Any] = [loss.grad_fn]
    for _ in range(_MOST_NODES):
        if not pending:
            break
        node = pending.pop()
        if node is None:
            continue
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        pending += [following for following, _ in node.next_functions]
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0][:200]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


@contextmanager
def _logging_to(calls: list[_Call], training: Training) -> Iterator[None]:
    """Within, what the module logs is put into a list, and nothing is gathered from other processes."""

    def log(*arguments: Any, **options: Any) -> None:
        calls.append(_Call("log", arguments, options))

    def log_dict(*arguments: Any, **options: Any) -> None:
        calls.append(_Call("log_dict", arguments, options))

    def all_gather(*arguments: Any, **options: Any) -> None:
        raise NotRepeatable("training_step calls all_gather")

    module = training.module
    stand_ins = {"log": log, "log_dict": log_dict, "all_gather": all_gather}
    present = {name: function for name, function in stand_ins.items() if hasattr(module, name)}
    with replaced_methods(module, **present):
        yield


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Within, a GPU works in a stream of its own: libraries make their plans outside of a recording."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


class _Draws:
    """States of torch's generators, of the host and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Have the same numbers drawn again."""
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
