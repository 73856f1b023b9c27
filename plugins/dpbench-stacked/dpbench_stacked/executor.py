"""Steps of several runs in one pass: forward and backward of all networks by `torch.func.vmap` over their parameters.

On a GPU a small network leaves most of the device idle, and most of the time goes into launching kernels. Runs that
differ in their seeds alone launch the same kernels on other numbers. Here the batches of such runs, which train in one
process (`turns`), meet: `vmap` over the stacked parameters computes what all layers see, and the gradients of their
outputs, by the kernels of one run. From there on each run is as alone: its own engine makes per-record gradients of
what its layers saw, and its own release clips, adds up, noises and records.

Poisson batches are padded to one size where the module states that its step leaves padding out (`masks_padding`), and
only the rows of records go into an engine. The number of stacked networks is always the same, whoever waits: absent
ones are computed as copies. So a run rounds alike beside others, alone, and when it is resumed, and the number is in
the executor's name, stack:N.

The Python of a step runs once for all. So a step that leaves something behind, draws numbers or reads the number of the
batch is refused at its first batch, and in some batches the step of each run is carried out by itself, compared with
the stacked one and trained on: a stacked step has no graph with which autograd could compare per-record gradients.
What cannot be stacked is carried out eagerly, with a line that says why; those runs train one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpbench.capabilities.graphs.inputs import fill, kinds
from dpbench.capabilities.graphs.recordings import Call, Draws, logging_to
from dpbench.data.octaves import is_checked
from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.source import ChosenGradients, RepeatableSums
from dpbench.records.step_state import PLAIN
from dpbench.records.training import (
    NotRepeatable,
    TrainingStep,
    loss_of,
    masks_padding,
    replaced_methods,
)
from dpbench.session.executor import Executor, SessionParts
from dpbench_stacked.turns import place
from dpbench_stacked.unread import UnreadNumber

_EAGER = "executor=stack: batches run one by one, because {reason}."
_CLOSE = 1e-3
"""Largest relative difference that rounding explains."""
_OTHER_STEP = (
    "a stacked step differed from the run's own (by {gap:.2g} in norm): it depends on a value that differs between the "
    "runs and is not a parameter or buffer; batches since the last comparison used another run's value (they are "
    "private nonetheless); train again with executor=eager"
)


_TENSOR = object()
"""Stands for a tensor among what a step leaves behind."""


class LayerCall(NamedTuple):
    """A call of a layer, as its run sees it.

    Attributes:
        name: Name of the layer.
        inputs: A row for each record.
        output_grad: Gradient of the run's loss with respect to the output, a row for each record.
    """

    name: str
    inputs: tuple[Tensor, ...]
    output_grad: Tensor


class Request:
    """The step of one run on one batch, which waits for those of others.

    Args:
        executor: Executor of the run.
        own: The module's step.
        batch: Batch of the run.
        rows: Number of rows of the stacked batches.
        arguments: Positional arguments of the step after the batch.
        options: Keyword arguments of the step.

    Attributes:
        key: Key; requests with equal keys can be stacked.
        records: Rows that are not padding.
        layer_calls: Calls of layers in the answer, in the order of the forward pass.
        output: Output of the step in the answer.
        logged: Logged values in the answer.
        error: Error in place of an answer.
    """

    def __init__(
        self,
        executor: Stacked,
        own: TrainingStep,
        batch: Any,
        rows: int,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        leaves, self.structure = tree_flatten(batch)
        self.executor = executor
        self.own = own
        self.records = _rows_of(leaves)
        self.arguments = [UnreadNumber() if isinstance(x, int) else x for x in arguments]
        self.options = options
        self.is_padded = executor.pads
        self.leaves = [_padded(leaf, rows) for leaf in leaves]
        self.tensors = _tensors_of(executor.training.module)
        self.rows = rows
        self.key = (
            str(self.structure),
            kinds(leaves),
            rows,
            len(arguments),
            tuple((name, x.shape, x.dtype) for name, x in self.tensors.items()),
            _facts_of(executor.training.module),
        )
        self.layer_calls: list[LayerCall] = []
        self.output: Any = None
        self.logged: list[Call] = []
        self.error: str | None = None


class Stacked(Executor):
    """Carries out the steps of runs together.

    Guarantee: that of the session. What a layer of a run sees, and the gradient of its output, are computed from the
    parameters and the records of that run alone.

    Args:
        size: Number of networks that are computed together.

    Attributes:
        pads: True if batches are padded to one size.
        steps: Number of steps of this run that were stacked.
    """

    def __init__(self, size: int) -> None:
        self.pads = False
        self.steps = 0
        self._size = size
        self._is_eager = True
        self._was_looked_at = False
        self._lot: int | None = None
        self._taps: dict[Any, list[Tensor]] = {}

    @property
    def _engine(self) -> PerRecordEngine:
        assert isinstance(self.source, ChosenGradients)
        engine = self.source.engine
        assert isinstance(engine, PerRecordEngine)
        return engine

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Layers with trained parameters, by name."""
        layers = self._engine.plain_layers
        assert layers is not None
        return layers

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of records that are released."""
        metrics = self.releases.recipe.metrics
        return [] if metrics is None else list(metrics.bounds)

    def unrecorded(self) -> AbstractContextManager[None]:
        """Within, the run's engine keeps nothing of what its layers see."""
        return self._engine.paused()

    def attach(self, parts: SessionParts) -> None:
        """Take note of a training; each run makes its own updates."""
        super().attach(parts)
        self._is_eager = False
        self._was_looked_at = False
        self._lot = None
        self._taps.clear()

    def detach(self) -> None:
        """Let go of it."""
        super().detach()
        self._is_eager = True
        self._taps.clear()

    def own_step(self, own: TrainingStep) -> TrainingStep:
        """Carry out the module's step together with those of other runs."""

        @functools.wraps(own)
        def stacked(batch: Any, *arguments: Any, **options: Any) -> Any:
            number = self.releases.num_releases
            is_first_call = number != self._lot  # a hook may look at a part of the lot
            self._lot = number
            request = None
            if is_first_call and not self._is_eager:
                request = self._request_of(own, batch, arguments, options)
            if request is None or not self._answer(request, batch):
                return own(batch, *arguments, **options)
            self.steps += 1
            return self._result(request)

        return stacked

    # ------------------------------------------------------------------------------------- one step

    def _request_of(
        self,
        own: TrainingStep,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> Request | None:
        """The request of a batch; None where it is carried out eagerly."""
        obstacle = self._obstacle(batch)
        if obstacle is not None:
            self._go_eager(obstacle)
            return None
        source = self.source
        assert isinstance(source, RepeatableSums) and isinstance(source, ChosenGradients)
        records = _rows_of(tree_flatten(batch)[0])
        rows = source.padded_rows
        if rows is None and source.lot().limit is not None:
            self._go_eager("batches go in pieces (max_physical_batch_size)")
            return None
        self.pads = rows is not None
        if self.pads and not masks_padding(self.training.module):
            self._go_eager("the module does not state that its training_step leaves padding out (masks_padding)")
            return None
        if rows is not None and records > rows:
            return None
        plain = getattr(own, "unwatched", own)  # within vmap, batches of several runs have no memory of their own
        request = Request(self, plain, batch, rows or records, arguments, options)
        if not self._was_looked_at:
            try:
                self._look(request, batch)
            except Exception as error:  # eager lots carry it out, or refuse it in words of their own
                self._engine.expect(records)
                self._go_eager(_reason_of(error))
                return None
        return request

    def _obstacle(self, batch: Any) -> str | None:
        """Reason why batches cannot be stacked; None if they can."""
        training = self.training
        source = self.source
        if not isinstance(source, RepeatableSums) or not isinstance(source, ChosenGradients):
            return f"{type(source).__name__} compute sums in Python"
        if source.obstacle is not None:
            return source.obstacle
        if training.world_size > 1:
            return "the run has several processes"
        if not isinstance(source.engine, PerRecordEngine) or source.engine.plain_layers is None:
            return "not all layers of the network have per-record gradients of their inputs and output gradients alone"
        if torch.is_autocast_enabled(training.device.type):
            return "the network is computed in mixed precision"
        leaves = tree_flatten(batch)[0]
        if not all(isinstance(x, Tensor) and x.device == training.device and x.dim() for x in leaves):
            return "a batch contains values that are not tensors on the model's device with a row for each record"
        return None

    def _look(self, request: Request, batch: Any) -> None:
        """Carry out the step by itself, before the first one that is stacked: as the engine's first batch has to be.

        Raises:
            NotRepeatable: Its gradients could not be compared with autograd.
            UnsupportedModuleError: The engine does not agree with autograd.
        """
        source = self.source
        assert isinstance(source, RepeatableSums)
        engine = self._engine
        losses: list[Tensor] = []

        def compute() -> Any:
            engine.expect(request.records)
            calls: list[Call] = []
            with logging_to(calls, self.training):
                output = request.own(batch, *request.arguments, **request.options)
            losses.append(_required(loss_of(output)))
            return tree_map(_detached, (output, calls))

        draws = Draws(self.training.device)
        compute()
        draws.put_back()
        with torch.no_grad():
            engine.backward(losses[-1], request.records, verify=True)
        if engine.verified:  # not where no record of the batch has a finite gradient
            source.settle()
            self._was_looked_at = True
        engine.expect(request.records)
        if not source.is_settled:
            raise NotRepeatable("the per-record gradients of the first batch could not be compared with autograd")

    def _answer(self, request: Request, batch: Any) -> bool:
        """Carry out a request together with those of others; False: this batch has to be carried out eagerly."""
        own_place = place()
        if own_place is None:
            self._carry_out({0: request})
        else:
            own_place.turns.meet(own_place.slot, request, self._carry_out)
        if request.error is not None:
            self._go_eager(request.error)
            return False
        if is_checked(self.releases.num_releases + 1):
            gap = self._gap(request, batch)
            if gap > _CLOSE:
                self._go_eager(_OTHER_STEP.format(gap=gap))
            return False  # such batches are those whose gradients the source compares with autograd's
        return True

    def _gap(self, request: Request, batch: Any) -> float:
        """The largest relative difference of what layers see, and of their gradients, from the run's own step."""
        engine = self._engine
        draws = Draws(self.training.device)
        try:
            with logging_to([], self.training):
                output = request.own(batch, *request.arguments, **request.options)
            own_calls = engine.seen(_required(loss_of(output)))
        finally:
            engine.expect(request.records)
            draws.put_back()
        if len(own_calls) != len(request.layer_calls):
            return float("inf")
        gaps = [0.0]
        for (_, own_tensors), call in zip(own_calls, request.layer_calls, strict=True):
            for own, stacked in zip(own_tensors, (*call.inputs, call.output_grad), strict=True):
                difference = (own.double() - stacked.double()).norm()
                gaps.append(float(difference / own.double().norm().clamp(min=1e-12)))
        return max(gaps)

    def _result(self, request: Request) -> Any:
        """What the step would return, after it has logged what it would log; the engine finds what layers saw."""
        engine = self._engine
        module = self.training.module
        for logged in request.logged:
            getattr(module, logged.method)(*logged.arguments, **logged.options)
        outputs = []
        for call in request.layer_calls:
            output = call.output_grad.detach().requires_grad_()  # of its shape: nobody reads the values
            engine.keep(call.name, call.inputs, output)
            outputs.append(output)
        gradients = [call.output_grad for call in request.layer_calls]
        output = request.output
        loss: Tensor = _Computed.apply(loss_of(output), gradients, *outputs)
        if isinstance(output, dict):
            return {**output, "loss": loss}
        return loss

    def _go_eager(self, reason: str) -> None:
        """Carry out all further lots eagerly, with a message."""
        self._is_eager = True
        self._taps.clear()
        self.training.warn(_EAGER.format(reason=reason))

    # ------------------------------------------------------------------------------------- all steps

    def _carry_out(self, requests: dict[int, Request]) -> None:
        """Answer the requests of runs, those together that can be."""
        by_key: dict[Any, dict[int, Request]] = {}
        for slot, request in requests.items():
            by_key.setdefault(request.key, {})[slot] = request
        for group in by_key.values():
            try:
                with torch.no_grad():
                    self._carry_out_together(group)
            except Exception as error:
                for request in group.values():
                    request.error = _reason_of(error)

    def _carry_out_together(self, group: dict[int, Request]) -> None:
        first = next(iter(group.values()))
        if max(group) >= self._size:
            raise NotRepeatable(f"more runs meet than executor=stack:{self._size} says")
        requests = [group.get(slot, first) for slot in range(self._size)]
        tensors = {name: torch.stack([x.tensors[name] for x in requests]) for name in first.tensors}
        leaves = [torch.stack(rows) for rows in zip(*(x.leaves for x in requests), strict=True)]
        device = first.leaves[0].device
        counts = torch.tensor([x.records for x in requests]).to(device, non_blocking=True)
        present = torch.arange(first.rows, device=device) < counts[:, None]
        versions = [x._version for x in tensors.values()]
        step = _StackedStep(first)
        taps = self._taps.get(first.key[:4])
        if taps is None:
            taps = step.taps(tensors, leaves, present)
            self._taps[first.key[:4]] = taps
        gradients, (inputs, left) = vmap(grad(step, has_aux=True))(taps, tensors, leaves, present)
        if versions != [x._version for x in tensors.values()]:
            raise NotRepeatable("training_step changes a buffer of the module")
        for slot, request in group.items():
            row = functools.partial(_row, slot=slot, rows=first.rows, records=request.records)
            for name, layer_inputs, gradient in zip(step.names, inputs, gradients, strict=True):
                call = LayerCall(name, tuple(map(row, layer_inputs)), row(gradient))
                request.layer_calls.append(call)
            request.output, request.logged = step.restored([row(x) for x in left], request)


def stack_of(size: str) -> Stacked:
    """The executor of `strategy.executor=stack:SIZE`.

    Raises:
        ConfigurationError: The size is no number from 1 on.
    """
    if not size.isdecimal() or int(size) < 1:
        raise ConfigurationError(f"executor stack needs a number of runs of at least 1, such as stack:4, not {size!r}.")
    return Stacked(int(size))


class _StackedStep:
    """The step of one run as a function of tensors, for `vmap` over runs.

    Args:
        request: Request of one of the runs, whose Python runs for all.

    Attributes:
        names: Names of the layers, in the order of their calls.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._training = request.executor.training
        self._layers = request.executor.layers
        self._module = _StepOf(self._training.module, request.own)
        self.names: list[str] = []
        self._structure: Any = None
        self._left: list[Any] = []

    def taps(
        self,
        tensors: dict[str, Tensor],
        leaves: list[Tensor],
        present: Tensor,
    ) -> list[Tensor]:
        """Zeros in the shapes of the layers' outputs, which are added to these: their gradients are the outputs'."""
        shapes: list[Any] = []

        def see(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            shapes.append((output.shape, output.dtype))
            return output

        def run(*arguments: Any) -> Tensor:
            return _required(loss_of(self._run(see, *arguments)[0]))

        vmap(run)(tensors, leaves, present)
        stacked = len(present)
        return [torch.zeros((stacked, *shape), dtype=dtype, device=present.device) for shape, dtype in shapes]

    def __call__(
        self,
        taps: list[Tensor],
        tensors: dict[str, Tensor],
        leaves: list[Tensor],
        present: Tensor,
    ) -> tuple[Tensor, Any]:
        """The loss of a run; beside it what its layers were given, and tensors that the step leaves behind."""
        remaining = iter(taps)
        all_inputs: list[tuple[Tensor, ...]] = []
        self.names = []

        def tap(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self.names.append(name)
            all_inputs.append(inputs)
            zeros = next(remaining, None)
            if zeros is None or zeros.shape != output.shape:
                raise NotRepeatable("layers are called in another way than in earlier batches")
            return output + zeros

        output, calls = self._run(tap, tensors, leaves, present)
        loss = _required(loss_of(output))
        if next(remaining, None) is not None:
            raise NotRepeatable("layers are called in another way than in earlier batches")
        metrics = {}
        if isinstance(output, dict):
            output = dict(output)
            functions = output.pop("record_metrics", {})
            metrics = {name: functions[name]() for name in self._request.executor.metrics if name in functions}
        left, self._structure = tree_flatten((output, calls, metrics))
        self._left = [_TENSOR if isinstance(x, Tensor) else x for x in left]
        if any(callable(x) or isinstance(x, UnreadNumber) for x in self._left):
            raise NotRepeatable("training_step logs or returns objects (a metric, a function), or the batch's number")
        return loss, (all_inputs, [x for x in left if isinstance(x, Tensor)])

    def restored(self, tensors: list[Tensor], request: Request) -> tuple[Any, list[Call]]:
        """Output and logged values of a run, from the tensors that its step has left behind."""
        remaining = iter(tensors)
        leaves = [next(remaining) if x is _TENSOR else x for x in self._left]
        output, calls, metrics = tree_unflatten(leaves, self._structure)
        for call in calls:
            if call.options.get("batch_size") == request.rows:
                call.options["batch_size"] = request.records
        if isinstance(output, dict):
            output["record_metrics"] = {name: functools.partial(_same, x) for name, x in metrics.items()}
        return output, calls

    def _run(
        self,
        on_call: Callable[[str, tuple[Tensor, ...], Tensor], Tensor],
        tensors: dict[str, Tensor],
        leaves: list[Tensor],
        present: Tensor,
    ) -> tuple[Any, list[Call]]:
        """The step with hooks on its layers."""
        calls: list[Call] = []
        request = self._request
        batch = tree_unflatten(leaves, request.structure)
        stand_ins: dict[str, Any] = {"rows_present": present} if request.is_padded else {}
        with ExitStack() as stack:
            stack.enter_context(_watched(self._layers, on_call))
            stack.enter_context(request.executor.unrecorded())
            stack.enter_context(logging_to(calls, self._training))
            stack.enter_context(replaced_methods(self._training.module, **stand_ins))
            output = functional_call(self._module, tensors, (batch, *request.arguments), request.options)
        return output, calls


class _StepOf(nn.Module):
    """A module whose forward pass is a training step.

    Args:
        module: Module with the parameters.
        own: Its step.
    """

    def __init__(self, module: nn.Module, own: TrainingStep) -> None:
        super().__init__()
        self.module = module
        self._own = own

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The step."""
        return self._own(*arguments, **options)


class _Computed(torch.autograd.Function):
    """A loss whose gradients with respect to the outputs of layers are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return None, None, *(gradient * scale for gradient in ctx.gradients)


@contextmanager
def _watched(
    layers: Mapping[str, nn.Module],
    on_call: Callable[[str, tuple[Tensor, ...], Tensor], Tensor],
) -> Iterator[None]:
    """Within, a function is given inputs and output of each layer, and returns what takes the output's place."""

    def hook(
        name: str,
        layer: nn.Module,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        output: Any,
    ) -> Tensor:
        if options or not all(isinstance(x, Tensor) for x in (*inputs, output)):
            raise NotRepeatable(f"{name} does not take and return only tensors by position")
        return on_call(name, inputs, output)

    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_hook(functools.partial(hook, name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, by their names in `_StepOf`."""
    tensors = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensors[f"module.{name}"] = tensor.detach()
    return tensors


def _facts_of(module: nn.Module) -> tuple[Any, ...]:
    """Numbers and words of a module: where runs differ in them, the Python of one cannot run for another."""
    facts: list[Any] = []
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, PLAIN):
                facts.append((name, key, value))
    return tuple(facts)


def _rows_of(leaves: Sequence[Any]) -> int:
    """Number of rows of a batch."""
    return len(leaves[0]) if leaves else 0


def _padded(leaf: Tensor, rows: int) -> Tensor:
    """A tensor of a batch with more rows, copies of the first one."""
    if len(leaf) == rows:
        return leaf
    padded = leaf.new_empty((rows, *leaf.shape[1:]))
    fill([padded], [leaf])
    return padded


def _row(x: Tensor, slot: int, rows: int, records: int) -> Tensor:
    """A tensor of one run, without the rows that are padding."""
    of_run = x[slot]
    return of_run[:records] if of_run.dim() and len(of_run) == rows else of_run


def _required(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        raise NotRepeatable("training_step gave no loss that is one number")
    return loss


def _reason_of(error: Exception) -> str:
    if isinstance(error, NotRepeatable):
        return str(error)
    return f"they could not be stacked ({type(error).__name__}: {brief(error)[:200]})"


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _same(x: Tensor) -> Tensor:
    return x
