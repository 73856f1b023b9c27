"""Gradients of shared tensors (prompts, positions, computed weights) that functions combine with records.

A tensor that belongs to no record, and has a gradient, meets records in some call of a function. `torch.func.vmap` of
that call gives each record's gradient with respect to it; one batched backward pass takes these on to the parameters
that it was computed from, by the graph of the forward pass. Tags (`record_axis`) tell which tensors are shared, and
where all other tensors have their records.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpbench.errors import UnsupportedModuleError, brief
from dpbench.privacy.gradients._parametrized import silent_fallbacks
from dpbench.privacy.gradients.folds import by_row
from dpbench.privacy.gradients.layers import refuse_other_values
from dpbench.privacy.record_axis.host import running_axis
from dpbench.privacy.record_axis.mode import RecordAxis
from dpbench.privacy.record_axis.public import public_axis
from dpbench.privacy.record_axis.tags import Axis, Exchangeable, Over, Rows, Total, tag_of

_SUMS = frozenset(["add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"])
"""Functions for which the gradient with respect to one argument does not depend on the others."""
_NO_TAGS = "it combines what all records share with records where no tags tell them apart"


@dataclass(frozen=True)
class SharedCall:
    """Call of a function that combines records with tensors that they share.

    Attributes:
        function: The function, which writes to no argument.
        leaves: Leaves of its arguments; tensors are detached.
        spec: Structure of the arguments.
        shared: Position among the leaves → tensor that all records share, with its graph.
        axes: Position among the leaves → axis of the records in a tensor; None if it is the only record's.
        drawn: Position among the leaves → axis along which a shared tensor differs by record, as it was drawn for each.
        versions: Versions of the tensors when they were seen.
        outputs: Outputs with a gradient, detached.
        output_versions: Versions of the outputs when they were seen.
        places: Axes of the records in the outputs; the mean over them if a penalty is added to it.
        edges: Gradient edges of the outputs.
        records: Number of records of the tags.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    shared: dict[int, Tensor]
    axes: dict[int, Axis | None]
    drawn: dict[int, Axis]
    versions: list[int]
    outputs: list[Tensor]
    output_versions: list[int]
    places: list[Axis | Total | None]
    edges: list[GradientEdge]
    records: int

    def __str__(self) -> str:
        """The function, as messages name it."""
        return f"a call of {self.function.__name__} with what all records share"

    def gradients(self, grads: Sequence[Tensor | None], rows: int) -> list[tuple[Tensor, Tensor]]:
        """Gradients of each row with respect to the shared tensors.

        Args:
            grads: Gradients of the outputs; None where the loss does not depend on one.
            rows: Number of rows of the batch.

        Returns:
            Pairs of a shared tensor, with its graph, and its gradients (rows, *shape).

        Raises:
            UnsupportedModuleError: The function cannot be mapped over records, or gives other numbers for each alone.
        """
        if self.versions != _versions(self.leaves):
            raise UnsupportedModuleError(f"the input of {self} was changed in place afterwards")
        dtype = max((grad.dtype for grad in grads if grad is not None), key=lambda dtype: dtype.itemsize)

        def in_front(x: Tensor, place: Axis | Total | None) -> Tensor:
            if isinstance(place, Total):
                return x.expand(rows, *x.shape)
            return by_row(x.to(dtype) if x.is_floating_point() else x, place, self.records, rows)

        cotangents = []
        for output, grad, place in zip(self.outputs, grads, self.places, strict=True):
            cotangent = torch.zeros_like(output) if grad is None else grad
            cotangents.append(in_front(cotangent / rows if isinstance(place, Total) else cotangent, place))
        of_records = {position: in_front(self.leaves[position], axis) for position, axis in self.axes.items()}
        of_records |= {
            position: in_front(self.shared[position].detach(), axis) for position, axis in self.drawn.items()
        }
        shared = {}
        for position, x in self.shared.items():
            shared[position] = (
                torch.zeros_like(of_records[position][0]) if position in self.drawn else x.detach().to(dtype)
            )

        def one_row(cotangents: list[Tensor], own: dict[int, Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
            def forward(shared: dict[int, Tensor]) -> list[Tensor]:
                leaves = list(self.leaves)
                for position, x in (own | shared).items():
                    leaves[position] = x + own[position] if position in self.drawn else x
                args, kwargs = tree_unflatten(leaves, self.spec)
                outputs = [x for x in tree_leaves(self.function(*args, **kwargs)) if isinstance(x, Tensor)]
                return [x for x in outputs if x.is_floating_point()][: len(self.outputs)]

            values, pullback, *_ = torch.func.vjp(forward, shared)
            return values, pullback(cotangents)[0]

        try:
            values, gradients = torch.func.vmap(one_row)(cotangents, of_records)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise UnsupportedModuleError(f"torch.func.vmap of {self} failed ({brief(error)})") from error
        for value, output, version, place in zip(values, self.outputs, self.output_versions, self.places, strict=True):
            if output._version == version:
                refuse_other_values(value, in_front(output, place))
        for position, axis in self.drawn.items():
            gradients[position] = _in_own_rows(gradients[position], self.shared[position], axis, self.records)
        return [(x, gradients[position]) for position, x in self.shared.items()]


def parameter_gradients(
    ends: Sequence[tuple[Tensor, Tensor]],
    parameters: Sequence[nn.Parameter],
) -> list[Tensor | None]:
    """Gradients of each row with respect to parameters, (rows, *shape); None where nothing depends on one.

    Args:
        ends: Tensors computed from the parameters, with their graph, and their gradients (rows, *shape).
        parameters: The parameters.
    """
    tensors = [x for x, _ in ends]
    cotangents = [rows.to(x.dtype) for x, rows in ends]
    try:
        with silent_fallbacks():
            return list(torch.autograd.grad(tensors, parameters, cotangents, is_grads_batched=True, allow_unused=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedModuleError(
            f"a batched backward pass through what all records share failed ({brief(error)})"
        ) from error


class SharedCalls(TorchFunctionMode):
    """Keeps calls of functions that combine records with shared tensors, while modules or a step run.

    Args:
        is_recording: Function that returns whether forward passes are those of a batch.
        known: Layers that answer for their parameters in another way.

    Attributes:
        calls: The calls since they were last taken.
    """

    def __init__(self, is_recording: Callable[[], bool], known: Collection[nn.Module]) -> None:
        super().__init__()
        self.calls: list[SharedCall] = []
        self._is_recording = is_recording
        self._known = known
        self._problem: str | None = None
        self._running: list[bool] = []

    def clear(self) -> None:
        """Forget the calls that were kept."""
        self.calls = []
        self._problem = None

    def take(self) -> list[SharedCall]:
        """The calls of a forward pass.

        Raises:
            UnsupportedModuleError: There is one of which no gradient can be had.
        """
        calls, problem = self.calls, self._problem
        self.clear()
        if problem is not None:
            raise UnsupportedModuleError(problem)
        return calls

    @contextmanager
    def within(self) -> Iterator[None]:
        """Inside, calls outside of modules are kept, too."""
        self._enter(False)
        try:
            yield
        finally:
            self._leave()

    def before(self, layer: nn.Module, args: Any) -> None:
        """Hook before each module."""
        self._enter(layer in self._known)

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Hook after each module, also where its forward pass fails."""
        self._leave()

    def _enter(self, is_known: bool) -> None:
        if self._is_recording():
            if not self._running:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._running.append(is_known)

    def _leave(self) -> None:
        if self._running:
            self._running.pop()
            if not self._running and torch.overrides._get_current_function_mode() is self:  # type: ignore[no-untyped-call]
                self.__exit__(None, None, None)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(self._running) or not self._running or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        if len(tensors) < 2 or not any(x.requires_grad for x in tensors.values()):
            return function(*args, **kwargs)
        axis = running_axis()
        if axis is None:
            self._problem = _NO_TAGS
            return function(*args, **kwargs)
        places = {position: axis.place_of(x) for position, x in tensors.items()}
        shared = [position for position, place in places.items() if place is None and tensors[position].requires_grad]
        if not shared or all(place is None for place in places.values()):
            return function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:  # which may draw, and cannot be repeated then
            leaves = [self._expanded(axis, x, i, places, tensors) if i in shared else x for i, x in enumerate(leaves)]
            args, kwargs = tree_unflatten(leaves, spec)
            return function(*args, **kwargs)
        written = _writes(function)
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if written:
            kept[0] = kept[0].clone()
        output = function(*args, **kwargs)
        if not written and (not isinstance(output, Tensor) or output._is_view()):
            # One output may be computed from another, and writing to a view changes its path in autograd.
            output = tree_map(partial(_copy, axis), output)
        try:
            call = _call_of(axis, _out_of_place(function), kept, spec, places, shared, leaves, output)
            if call is not None:
                self.calls.append(call)
        except UnsupportedModuleError as error:
            self._problem = str(error)
        return output

    def _expanded(
        self,
        axis: RecordAxis,
        x: Tensor,
        position: int,
        places: dict[int, Any],
        tensors: dict[int, Tensor],
    ) -> Tensor:
        """An argument of attention that all records share, once for each: its gradient is that of each then."""
        place, other = next((place, tensors[i]) for i, place in places.items() if place is not None)
        dims = other.dim() - 1
        own = x[:1] if x.dim() > dims and x.stride(0) == 0 else x
        if place not in (0, Axis(0)) or (x.dim() > dims and len(own) > 1):
            self._problem = "attention gets what all records share neither once nor once for each record"
            return x
        shape = (*[1] * (dims - x.dim()), *own.shape[-dims:])
        expanded = own.expand(len(other), *shape)
        leaves, spec = tree_flatten(((own.detach(),), {}))
        call = SharedCall(
            lambda x: x.expand(1, *shape),
            leaves,
            spec,
            {0: own},
            axes={},
            drawn={},
            versions=_versions(leaves),
            outputs=[expanded.detach()],
            output_versions=[expanded._version],
            places=[place or None],
            edges=[get_gradient_edge(expanded)],
            records=axis.records,
        )
        self.calls.append(call)
        return expanded


def _call_of(
    axis: RecordAxis,
    function: Callable[..., Any],
    kept: list[Any],
    spec: TreeSpec,
    places: dict[int, Any],
    shared: Sequence[int],
    leaves: Sequence[Any],
    output: Any,
) -> SharedCall | None:
    """Make the record of a call; None if its output has no gradient, or no records.

    Raises:
        UnsupportedModuleError: Some tensor has no rows of records.
    """
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if all(axis.place_of(x) is None for x in outputs):
        return None  # records gave a shape
    name = function.__name__
    output_places = [_axis_of(axis, axis.place_of(x), name) for x in outputs]
    axes: dict[int, Axis | None] = {}
    drawn: dict[int, Axis] = {}
    ends: dict[int, Tensor] = {}
    for position, place in places.items():
        x = leaves[position]
        along = None
        if place is not None:
            own = _axis_of(axis, place, name)
            if not isinstance(own, Total):
                axes[position] = own
            continue
        if isinstance(output_places[0], Axis):
            along = _public_axis(axis, x, outputs[0], output_places[0])
        if position not in shared:
            if along is not None:
                axes[position] = along
        elif along is None:
            ends[position] = x
        elif getattr(tag_of(x), "is_random", False):
            ends[position] = x
            drawn[position] = along
        else:  # the same for each record
            ends[position] = by_row(x, along, axis.records, axis.records)[0]
    return SharedCall(
        function,
        kept,
        spec,
        ends,
        axes,
        drawn,
        versions=_versions(kept),
        outputs=[x.detach() for x in outputs],
        output_versions=[x._version for x in outputs],
        places=output_places,
        edges=[get_gradient_edge(x) for x in outputs],
        records=axis.records,
    )


def _axis_of(axis: RecordAxis, place: object, name: str) -> Axis | Total | None:
    """Axis of a tensor's records, or the mean over them that a penalty is added to; None if it is the only record's."""
    if isinstance(place, Axis) or (isinstance(place, Total) and place.over is Over.MEAN and name in _SUMS):
        return place
    if place == 0 and axis.records == 1:
        return None
    raise UnsupportedModuleError(f"{name} combines what all records share with a tensor that has no row of each record")


def _public_axis(mode: RecordAxis, x: Tensor, output: Tensor, axis: Axis) -> Axis | None:
    """The axis along which a public tensor goes with the records of an output; None if it is the same for all."""
    tag = tag_of(x)
    dim = axis.dim + x.dim() - output.dim()
    is_alike = isinstance(tag, Exchangeable) or (0 <= dim < x.dim() and x.stride(dim) == 0)
    if isinstance(tag, Rows):
        place, count = public_axis(x, tag, mode.records) or (None, 0)
        if place is not None and count == mode.records:
            return place
        is_alike = place is not None
        dim = -1 if place is None else place.dim
    if not is_alike or dim < 0 or x.shape[dim] != output.shape[axis.dim]:
        return None
    return axis._replace(dim=dim)


def _in_own_rows(gradients: Tensor, x: Tensor, axis: Axis, records: int) -> Tensor:
    """Gradients (rows, *shape of a row) with respect to all rows of a tensor, (rows, *x.shape): zero in all others."""
    rows = len(gradients)
    inner = axis.inner * records // rows
    wide = gradients.new_zeros(rows, *x.shape)
    for row in range(rows):
        of_row = wide[row].unflatten(axis.dim, (axis.outer, rows, inner)).select(axis.dim + 1, row)  # type: ignore[no-untyped-call]
        of_row.copy_(gradients[row].unflatten(axis.dim, (axis.outer, inner)))  # type: ignore[no-untyped-call]
    return wide


def _copy(axis: RecordAxis, x: Any) -> Any:
    is_of_records = isinstance(x, Tensor) and x.requires_grad and axis.place_of(x) is not None
    return x.clone() if is_of_records else x


def _versions(leaves: Iterable[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


def _writes(function: Callable[..., Any]) -> bool:
    """True if a function writes to its first argument."""
    name = function.__name__
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
    return name.endswith("_")


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Find the function that returns the result that another one writes to its first argument.

    Raises:
        UnsupportedModuleError: There is none.
    """
    if not _writes(function):
        return function
    name = function.__name__
    name = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    other = getattr(Tensor, name, None)
    if other is None:
        raise UnsupportedModuleError(f"{function.__name__} writes what all records share into a tensor of records")
    return other  # type: ignore[no-any-return]
