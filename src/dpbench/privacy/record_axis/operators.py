"""Operators, their calls, and the table of rules.

A rule says for one call of an ATen operator where its outputs have their records. It is asked only if an input has
records, or is exchangeable. Write a rule in one of the chapters of `rules` and enter it by `@rule("name", ...)`; an
operator without a rule mixes. Each rule is tested against PyTorch's own samples (tests/privacy/record_axis).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpbench.privacy.record_axis.tags import Axis, Over, tag_of_storage

Outcome = Axis | Over | None
"""An output's records: along an axis, summed up, or none."""
Rule = Callable[["Call"], Outcome | Sequence[Outcome]]
"""Call → the outcome of all outputs, or a list with one for each."""

RULES: dict[str, Rule] = {}
"""Name of an ATen operator, without overload and trailing underscore → rule."""

_RULED_BY_VALUES = frozenset(["index", "_unsafe_index", "_ctc_loss"])
"""Operators with rules that make sure that values decide nothing which Python gets to know."""
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Mixes(Exception):
    """Raised by a rule: the operator mixes records."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for operators.

    Args:
        names: Names of ATen operators, several separated by spaces.
    """

    def enter(function: Rule) -> Rule:
        for name in " ".join(names).split():
            assert name not in RULES, name
            RULES[name] = function
        return function

    return enter


_CONSTANT = frozenset(
    [
        "ones",
        "zeros",
        "full",
        "new_ones",
        "new_zeros",
        "new_full",
        "ones_like",
        "zeros_like",
        "full_like",
        "fill",
        "zero",
        "scalar_tensor",
    ]
)
_DRAWN = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "uniform",
        "normal",
        "bernoulli",
        "exponential",
        "random",
        "cauchy",
        "geometric",
        "log_normal",
    ]
)
_EMPTY = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"])
_MADE = {"constant": _CONSTANT, "drawn": _DRAWN, "empty": _EMPTY}


class Operator:
    """Facts of an ATen operator's schema.

    Args:
        overload: The operator.

    Attributes:
        name: Its name without namespace and overload.
        plain_name: Name without the underscore of operators that write.
        arguments: Names of the arguments.
        defaults: Name → default.
        written: Names of the arguments that it writes to.
        is_view: True if its output shares memory with its first argument.
        reads: True if it hands values, or a shape that depends on values, to Python.
        draws: True if it draws random numbers.
        makes: "constant", "drawn" or "empty" where it fills memory by itself; or None.
        is_like: True if it allocates a tensor of the same shape without reading its numbers.
        rule: Its rule, or None.
    """

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        namespace, _, self.name = schema.name.partition("::")
        plain = self.name if self.name.startswith("__") else self.name.rstrip("_")
        self.plain_name = plain
        self.arguments = [argument.name for argument in schema.arguments]
        self.defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        tags = set(overload.tags)
        is_geometry = torch.Tag.inplace_view in tags and plain != "resize"
        self.is_view = (overload.is_view and not self.written) or is_geometry
        self.reads = bool(_READS & tags) and plain not in _RULED_BY_VALUES
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.makes = next((kind for kind, names in _MADE.items() if plain in names), None)
        self.is_like = self.makes is not None and (plain.startswith("new_") or plain.endswith("_like"))
        self.rule = RULES.get(plain) if namespace == "aten" else None
        if self.rule is None and torch.Tag.pointwise in tags and namespace == "aten":
            self.rule = RULES["pointwise"]

    def bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name, without defaults."""
        values = dict(zip(self.arguments, args, strict=False))
        values.update(kwargs)
        return values


class Call:
    """A call of an operator, as its rule sees it.

    Args:
        operator: The operator.
        args: Positional arguments.
        kwargs: Named arguments.
        tensors: All tensors among them, those in lists included.
        batch: Number of the batch.
        records: Number of records, R.

    Attributes:
        operator: The operator.
        values: Arguments by name, without defaults.
        tensors: All tensors among the arguments, those in lists included.
        storages: Their memory.
        tags: Its tags.
        output: Its result.
        outputs: All tensors of it.
        batch: Number of the batch.
        records: Number of records, R.
        axes: id of an input → where it has its records.
        exchangeable: id of a public input → the axis along which it is exchangeable, with its number of records; None
            for each dimension.
        is_in_backward: True while the gradient of the loss is computed.
    """

    def __init__(
        self,
        operator: Operator,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        batch: int,
        records: int,
    ) -> None:
        self.operator = operator
        self.values = operator.bound(args, kwargs)
        self.tensors = tensors
        self.storages = [t.untyped_storage() for t in tensors]
        self.tags = [tag_of_storage(storage) for storage in self.storages]
        self.output: Any = None
        self.outputs: list[Tensor] = []
        self.batch = batch
        self.records = records
        self.axes: dict[int, Axis] = {}
        self.exchangeable: dict[int, tuple[Axis, int] | None] = {}
        self.is_in_backward = False

    def __getitem__(self, name: str) -> Any:
        """An argument, or its default."""
        if name in self.values:
            return self.values[name]
        return self.operator.defaults.get(name)

    def has(self, name: str) -> bool:
        """True if the operator has an argument of that name."""
        return name in self.operator.arguments

    @property
    def written(self) -> list[Any]:
        """Tensor that the operator writes to."""
        return [self.values.get(name) for name in self.operator.written]

    @property
    def read_tensors(self) -> list[Tensor]:
        """Tensors among the arguments, without those that are only written to."""
        if not self.operator.written:
            return self.tensors
        outputs = [self.values.get(name) for name in self.operator.written if name.startswith("out")]
        return [t for t in self.tensors if not is_among(t, outputs)]

    @property
    def tagged(self) -> Iterator[tuple[Tensor, Any]]:
        """Inputs with their tags."""
        return zip(self.tensors, self.tags, strict=True)

    def shares(self, t: Tensor) -> bool:
        """True if a tensor lies in the memory of an input."""
        return is_among(t.untyped_storage(), self.storages)

    def axis(self, t: Any) -> Axis | None:
        """Axis of an input's records; None for a public one."""
        return self.axes.get(id(t)) if isinstance(t, Tensor) else None

    def has_records(self, *values: Any) -> bool:
        """True if any of some inputs has records."""
        return any(self.axis(value) is not None for value in values)

    def require_public(self, *values: Any) -> None:
        """Refuse records in arguments that all rows share."""
        if self.has_records(*values):
            raise Mixes("records are used for all rows")

    def require_exchangeable(self, t: Any, dim: int, axis: Axis) -> None:
        """Refuse public numbers that differ by the place of a record in its batch.

        Args:
            t: A public input; anything else passes.
            dim: The dimension of it that runs along the records.
            axis: Axis of the others' records.
        """
        if not isinstance(t, Tensor) or dim < 0 or dim >= t.dim() or t.shape[dim] == 1 or t.stride(dim) == 0:
            return
        if not t.numel():
            return
        if id(t) in self.exchangeable:
            own = self.exchangeable[id(t)]
            if own is None:
                return
            own_axis, own_records = own
            repeats = own_axis.inner and axis.inner % own_axis.inner == 0
            # Exchanging records has to permute the exchangeable elements.
            aligned = (own_records * own_axis.inner) % (self.records * axis.inner) == 0
            if own_axis.dim == dim and repeats and aligned:
                return
        raise Mixes("numbers that differ by position in the batch")

    def require_along(self, t: Any, axis: Axis, dims: int | None = None) -> None:
        """Refuse an input that has its records elsewhere than along an axis, or public numbers that differ along it.

        Args:
            t: An input; anything but a tensor passes.
            axis: Required axis of the records.
            dims: Number of dimensions that the input is broadcast to, in which the axis is one; None: its own.
        """
        if not isinstance(t, Tensor):
            return
        if dims is not None:
            axis = axis._replace(dim=axis.dim + t.dim() - dims)
        own = self.axis(t)
        if own is None:
            self.require_exchangeable(t, axis.dim, axis)
        elif own != axis:
            raise Mixes("records are arranged in two ways")

    def common_axis(self, *tensors: Any) -> Axis:
        """The axis of those inputs that have records, all in the same dimension; the others have to be exchangeable.

        Raises:
            Mixes: There are several axes, none, or public numbers by place.
        """
        return self._aligned(tensors, None)

    def broadcast_axis(self, *tensors: Any) -> Axis:
        """The axis, in the output, of inputs that are broadcast against each other."""
        return self._aligned(tensors, max(t.dim() for t in tensors if isinstance(t, Tensor)))

    def _aligned(self, tensors: Sequence[Any], dims: int | None) -> Axis:
        """The common axis of tensors; of those with fewer dimensions than `dims`, the last ones are compared."""
        axis = None
        public = []
        for t in tensors:
            if not isinstance(t, Tensor):
                continue
            shift = 0 if dims is None else dims - t.dim()
            own = self.axes.get(id(t))
            if own is None:
                public.append((t, shift))
                continue
            if shift:
                own = own._replace(dim=own.dim + shift)
            if axis not in (None, own):
                raise Mixes("records are arranged in two ways")
            axis = own
        if axis is None:
            raise Mixes("records in an argument that all rows share")
        for t, shift in public:
            self.require_exchangeable(t, axis.dim - shift, axis)
        return axis

    def dims(self, t: Tensor) -> list[int] | None:
        """Dimensions of a tensor that the argument "dim" or "dims" names, from 0; None for all."""
        for name in ("dim", "dims"):
            if self.has(name):
                value = self[name]
                if value is None or (isinstance(value, (list, tuple)) and not value):
                    return None
                listed = value if isinstance(value, (list, tuple)) else [value]
                return [dim % max(t.dim(), 1) for dim in listed]
        return None


def is_among(x: object, others: Sequence[object]) -> bool:
    """True if an object is one of some others."""
    return id(x) in map(id, others)


def tensors_among(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors among the arguments of an operator, those in lists included."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [x for x in value if isinstance(x, Tensor)]
    return tensors
