"""Gradients of parameters that a module uses itself, beside layers that it calls: ViT's class token, a layer's scale.

While such a module runs, hooks of the layers below it keep what these are given and what they return. Afterwards the
module's forward is run again, for each record, with those outputs in the layers' place: nothing that they compute or
draw is repeated. Gradients reach the module's own lines through its outputs and through the inputs of its layers.
Where a network needs it, functions that draw (dropout, masks, noise) and attention are answered as layers are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dpbench.errors import UnsupportedModuleError, brief
from dpbench.privacy.gradients._interception import LayerGradients
from dpbench.privacy.gradients.layers import instantiated, refuse_other_values
from dpbench.privacy.gradients.parameter import zero_gradients

_OTHER_CALLS = "it calls other layers for one record than for a batch"


@dataclass(frozen=True)
class Seen:
    """A tensor that went into or out of a module.

    Attributes:
        value: Detached.
        version: Of the value when it was seen.
        edge: Through which its gradient comes; None: it has none, or the same tensor was seen before.
    """

    value: Tensor
    version: int
    edge: GradientEdge | None = None

    @property
    def is_changed(self) -> bool:
        """Whether it was written to since."""
        return self.value._version != self.version


def _seen(leaves: Sequence[Any]) -> list[Any]:
    """Leaves with each tensor as it is now."""
    ids = set()
    seen: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            seen.append(leaf)
            continue
        is_first = leaf.requires_grad and id(leaf) not in ids
        ids.add(id(leaf))
        edge = get_gradient_edge(leaf) if is_first else None
        seen.append(Seen(leaf.detach(), leaf._version, edge))
    return seen


def _aliases(leaves: Sequence[Any]) -> list[Any]:
    """Leaves with each tensor under a name that autograd knows for this use alone."""
    names: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in names:
            names[id(leaf)] = leaf.view_as(leaf)
    return [names.get(id(leaf), leaf) for leaf in leaves]


@dataclass
class LayerCall:
    """A call of a layer by the lines of a module above it.

    Attributes:
        layer: The layer.
        inputs: Leaves of its arguments; here and below, tensors as `Seen`.
        constants: Positions of outputs that are no rows of records, as some lot has shown.
        outputs: Leaves of what it returned.
        spec: Of these.
        copies: Of the tensors among them, by position, where the module may write to them.
        is_whole: Whether the call can be left out: it returned, nobody wrote to what it was given.
        is_written: Whether the module wrote to what it returned.
    """

    layer: nn.Module
    inputs: list[Any]
    constants: set[int]
    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    copies: dict[int, Tensor] = field(default_factory=dict)
    is_whole: bool = False
    is_written: bool = False

    def returned(self, output: Any, copied: bool) -> None:
        """Keep what the layer returned."""
        leaves, self.spec = tree_flatten(output)
        self.outputs = _seen(leaves)
        if copied:
            self.copies = {i: x.detach().clone() for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        self.is_whole = True

    def restore(self) -> None:
        """Put copies in the place of outputs that the module has written to."""
        # A version tells that somebody wrote, not what was there: that only a copy knows.
        written = [i for i, leaf in enumerate(self.outputs) if isinstance(leaf, Seen) and leaf.is_changed]
        for position in written:
            copy = self.copies.get(position)
            if copy is None:
                self.is_whole = False
            else:
                self.outputs[position] = Seen(copy, copy._version, self.outputs[position].edge)
        self.copies.clear()
        # Of inputs there are no copies: a layer that writes to them (an activation in place) runs again.
        if any(seen.is_changed for seen in _tensors(self.inputs)):
            self.is_whole = False
        self.is_written = bool(written)

    @property
    def tensors(self) -> list[Seen]:
        """All that went in or out."""
        return _tensors([*self.inputs, *self.outputs])

    def is_by_record(self, records: int) -> bool:
        """Whether the call can be left out, and has the records in dimension 0 of all that has a gradient."""
        return self.is_whole and all(has_rows(seen.value, records) for seen in self.tensors if seen.edge is not None)


@dataclass
class ModuleCall:
    """A call of a module that owns parameters beside layers.

    Attributes:
        module: The module.
        names: Of the parameters that its lines use, in the module.
        inputs: Leaves of its arguments; here and below, tensors as `Seen`.
        spec: Of these.
        layers: Calls of layers by its own lines, in order.
        outputs: Leaves of what it returned.
        constants: Positions of arguments that are no rows of records, as some lot has shown.
        running: Number of the layers below it that are running, one within the other.
        counts: Of the calls in `layers`, by layer.
    """

    module: nn.Module
    names: list[str]
    inputs: list[Any]
    spec: TreeSpec
    layers: list[LayerCall] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)
    running: int = 0
    counts: Counter[nn.Module] = field(default_factory=Counter)

    @property
    def tensors(self) -> list[Seen]:
        """All that went in or out."""
        return _tensors([*self.inputs, *self.outputs])

    @property
    def with_records(self) -> list[Seen]:
        """All that should hold the records: what has a gradient, here and in its layers."""
        calls: list[ModuleCall | LayerCall] = [self, *self.layers]
        return [seen for call in calls for seen in call.tensors if seen.edge is not None]

    @property
    def with_gradients(self) -> list[Seen]:
        """Its outputs and the inputs of its layers, where they have a gradient."""
        of_layers = [seen for call in self.layers for seen in _with_gradients(call.inputs)]
        return [*_with_gradients(self.outputs), *of_layers]


def _tensors(leaves: Sequence[Any]) -> list[Seen]:
    return [leaf for leaf in leaves if isinstance(leaf, Seen)]


def _with_gradients(leaves: Sequence[Any]) -> list[Seen]:
    return [seen for seen in _tensors(leaves) if seen.edge is not None]


def has_rows(x: Tensor, records: int) -> bool:
    """Whether a tensor has a row for each record."""
    return x.dim() > 0 and len(x) == records


class OwnCode:
    """Watches modules that own parameters beside layers, by hooks of these and of all layers below them.

    Args:
        recording: Whether forward passes are those of a lot.
    """

    def __init__(self, recording: Callable[[], bool]) -> None:
        self._recording = recording
        self._running: list[ModuleCall] = []
        self._writes: dict[nn.Module, bool] = {}
        self._constants: dict[Any, set[int]] = {}  # by module, and by its calls of layers

    def clear(self) -> None:
        """Forget calls that were interrupted."""
        self._running.clear()

    def before_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before a layer; what is handed on are the same numbers."""
        if not self._running or not self._recording():
            return None
        call = self._running[-1]
        call.running += 1
        if call.running > 1:
            return None
        leaves, spec = tree_flatten((args, kwargs))
        # A tensor may be used elsewhere, too; its own gradient would be that of all uses.
        leaves = _aliases(leaves)
        # A layer may be called several times in a pass: its calls of two lots are compared by their place among them.
        number = call.counts[layer]
        call.counts[layer] += 1
        constants = self._constants.setdefault((call.module, layer, number), set())
        call.layers.append(LayerCall(layer, _seen(leaves), constants))
        return tree_unflatten(leaves, spec)

    def after_layer(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook after a layer."""
        if not self._running or not self._recording():
            return
        call = self._running[-1]
        if not call.running:
            return
        call.running -= 1
        if not call.running and output is not None:
            # Copied until it is known whether the module writes to what its layers return, and from then on if so.
            copied = self._writes.get(call.module, True)
            call.layers[-1].returned(output, copied)

    def before_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a watched module."""
        if self._recording():
            leaves, spec = tree_flatten((args, kwargs))
            names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
            call = ModuleCall(module, names, _seen(leaves), spec)
            call.constants = self._constants.setdefault(module, set())
            self._running.append(call)

    def after_module(self, module: nn.Module, output: Any) -> tuple[ModuleCall | None, Any]:
        """After a watched module.

        Returns:
            Its call, None where there is nothing to keep; and what it is to return.
        """
        if not self._running or self._running[-1].module is not module:
            return None, output
        call = self._running.pop()
        if output is None or not self._recording():
            return None, output
        for layer_call in call.layers:
            layer_call.restore()
        is_written = any(layer_call.is_written for layer_call in call.layers)
        self._writes[module] = is_written or self._writes.get(module, False)
        leaves, spec = tree_flatten(output)
        if not isinstance(output, Tensor):
            # Of several tensors the module may use one itself.
            leaves = _aliases(leaves)
            output = tree_unflatten(leaves, spec)
        call.outputs = _seen(leaves)
        return (call if _with_gradients(call.outputs) else None), output


def own_gradients(
    call: ModuleCall,
    grads: Sequence[Tensor | None],
    records: int,
) -> LayerGradients:
    """Per-record gradients of the parameters that a module owns itself.

    Args:
        call: Of the module.
        grads: Of `call.with_gradients`, in float32 at least; None where the loss does not depend on one.
        records: R.

    Raises:
        UnsupportedModuleError: The module cannot be mapped over records, or gives other numbers for one of them.
    """
    module = call.module
    dtypes = {grad.dtype for grad in grads if grad is not None}
    dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    parameters = {name: module.get_parameter(name).detach().to(dtype) for name in call.names}
    if not records:
        return {name: zero_gradients(parameter, 0) for name, parameter in parameters.items()}
    left_out = [layer_call for layer_call in call.layers if layer_call.is_by_record(records)]
    if any(seen.is_changed for layer_call in left_out for seen in layer_call.tensors):
        raise UnsupportedModuleError("what one of its layers was given or returned was changed in place")
    ends = _with_gradients(call.outputs)
    for layer_call in left_out:
        ends += _with_gradients(layer_call.inputs)
    grad_of = {id(seen): grad for seen, grad in zip(call.with_gradients, grads, strict=True)}
    cotangents = []
    for seen in ends:
        grad = grad_of[id(seen)]
        grad = torch.zeros_like(seen.value, dtype=dtype) if grad is None else grad.to(dtype)
        cotangents.append(grad[:, None])
    rows = _Rows(dtype, {len(seen.value) for seen in ends})
    inputs = rows.take(call.inputs, call.constants)
    returned = [rows.take(layer_call.outputs, layer_call.constants) for layer_call in left_out]

    def one_record(cotangents: list[Tensor], row: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        def forward(values: dict[str, Tensor]) -> list[Tensor]:
            args, kwargs = tree_unflatten(inputs(row), call.spec)
            stand_ins = _StandIns(left_out, [outputs(row) for outputs in returned])
            with stand_ins.in_place():
                output = torch.func.functional_call(module, values, args, kwargs)
            leaves = _like(call.outputs, tree_flatten(output)[0])
            return [leaf.to(dtype) for leaf in (*leaves, *stand_ins.given())]

        values, pullback, *_ = torch.func.vjp(forward, parameters)
        return values, pullback(cotangents)[0]

    try:
        with _as_before(module):
            values, gradients = torch.func.vmap(one_record)(cotangents, rows.tensors)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise UnsupportedModuleError(
            f"torch.func.vmap of its own lines over the records failed ({brief(error)}); freeze the parameters that it "
            "owns, or put them into a module without layers"
        ) from error
    for value, seen in zip(values, ends, strict=True):
        refuse_other_values(value, seen.value[:, None])
    return {name: instantiated(row) for name, row in gradients.items()}


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Within, what is written to attributes and buffers of a module and of those below it does not stay."""
    before = []
    for part in module.modules():
        before += [(vars(part), dict(vars(part))), (part._buffers, dict(part._buffers))]
    try:
        yield
    finally:
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            for name, value in values.items():
                if attributes.get(name) is not value:
                    attributes[name] = value


class _Rows:
    """Tensors that have a row for each record, and what is built of one row of each.

    Args:
        dtype: Of floating-point numbers.
        sizes: Numbers of rows; what has others is the same for all records.

    Attributes:
        tensors: Shape (R, 1, ...): a record looks to a module like a lot of one.
    """

    def __init__(self, dtype: torch.dtype, sizes: set[int]) -> None:
        self._dtype = dtype
        self._sizes = sizes
        self.tensors: list[Tensor] = []

    def take(self, leaves: Sequence[Any], constants: set[int]) -> Callable[[Sequence[Tensor]], list[Any]]:
        """A function from one row of each of `tensors` to these leaves of one record.

        Args:
            leaves: Of a lot.
            constants: Positions of those that are the same for all records, whatever their size; further ones are
                added.
        """
        values: list[Any] = []
        places: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Seen):
                values.append(leaf)
                continue
            x = leaf.value
            if x.is_floating_point():
                x = x.to(self._dtype)
            values.append(x)
            if not x.dim():
                continue
            if len(x) not in self._sizes:
                constants.add(position)
            if position not in constants:
                places[position] = len(self.tensors)
                self.tensors.append(x[:, None])

        def of_record(row: Sequence[Tensor]) -> list[Any]:
            return [row[places[i]] if i in places else value for i, value in enumerate(values)]

        return of_record


class _StandIns:
    """Answers the calls of some layers with what they returned before.

    Args:
        calls: In order.
        outputs: Leaves of what each returns.
    """

    def __init__(self, calls: Sequence[LayerCall], outputs: Sequence[list[Any]]) -> None:
        self._calls = calls
        self._outputs = outputs
        self._inputs: list[list[Any]] = []

    def given(self) -> list[Tensor]:
        """What the layers were called with, where that had a gradient before.

        Raises:
            ValueError: They were not called as before.
        """
        if len(self._inputs) != len(self._calls):
            raise ValueError(_OTHER_CALLS)
        tensors = []
        for call, leaves in zip(self._calls, self._inputs, strict=True):
            tensors += _like(call.inputs, leaves)
        return tensors

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the layers compute nothing."""
        layers = {id(call.layer): call.layer for call in self._calls}
        with ExitStack() as stack:
            for layer in layers.values():
                before = layer.__dict__.get("forward")
                layer.forward = partial(self._answer, layer)
                stack.callback(_put_back, layer, before)
            yield

    def _answer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = len(self._inputs)
        if number == len(self._calls) or self._calls[number].layer is not layer:
            raise ValueError(_OTHER_CALLS)
        call = self._calls[number]
        leaves, _ = tree_flatten((args, kwargs))
        self._inputs.append(leaves)
        outputs = self._outputs[number]
        if call.is_written:
            outputs = [x.clone() if isinstance(x, Tensor) else x for x in outputs]
        assert call.spec is not None  # of a call that returned
        return tree_unflatten(outputs, call.spec)


def _put_back(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


def _like(before: Sequence[Any], leaves: Sequence[Any]) -> list[Tensor]:
    """Those of the leaves that had a gradient before.

    Raises:
        ValueError: There are others than before.
    """
    if len(leaves) != len(before):
        raise ValueError(_OTHER_CALLS)
    return [leaf for leaf, seen in zip(leaves, before, strict=True) if isinstance(seen, Seen) and seen.edge is not None]
