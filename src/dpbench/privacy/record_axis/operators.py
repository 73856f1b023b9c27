"""Operators, their calls, and the table of rules.

A rule says for one call of an ATen operator where its outputs have their records. It is asked only if an input has
records, or is exchangeable. Write a rule in one of the chapters of `rules` and enter it by `@rule("name", ...)`; an
operator without a rule mixes. Each rule is tested against PyTorch's own samples (tests/privacy/record_axis).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpbench.privacy.record_axis.tags import Axis, Over

Outcome = Axis | Over | None
"""An output's records: along an axis, summed up, or none."""
Rule = Callable[["Call"], Outcome | Sequence[Outcome]]
"""Call → the outcome of all outputs, or a list with one for each."""

RULES: dict[str, Rule] = {}
"""Name of an ATen operator, without overload and trailing underscore → rule."""

_RULED_BY_VALUES = frozenset(["index", "_unsafe_index", "_ctc_loss"])
"""Operators whose rules see to it that values decide nothing that Python gets to know."""
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


class Operator:
    """Facts of an ATen operator's schema.

    Args:
        overload: The operator.

    Attributes:
        name: Its name without namespace and overload.
        arguments: Names of the arguments.
        defaults: Name → default.
        written: Names of the arguments that it writes to.
        is_view: True if its output shares memory with its first argument.
        reads: True if it hands values, or a shape that depends on values, to Python.
        draws: True if it draws random numbers.
        rule: Its rule, or None.
    """

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        self.namespace, _, self.name = schema.name.partition("::")
        plain = self.name.rstrip("_") if not self.name.startswith("__") else self.name
        self.arguments = [argument.name for argument in schema.arguments]
        self.defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        tags = set(overload.tags)
        is_geometry = torch.Tag.inplace_view in tags and plain != "resize"
        self.is_view = (overload.is_view and not self.written) or is_geometry
        self.reads = bool(_READS & tags) and plain not in _RULED_BY_VALUES
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.rule = RULES.get(plain) if self.namespace == "aten" else None
        if self.rule is None and torch.Tag.pointwise in tags and self.namespace == "aten":
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
        values: Arguments by name.
        output: What it returned.
        records: Number of records, R.
        axes: id of an input → where it has its records.
        exchangeable: id of a public input → the axis along which it is exchangeable, with its number of records; None
            for each dimension.
        read: Called with a reason where a rule comes upon a value that Python gets to know.

    Attributes:
        operator: The operator.
        output: What it returned.
        records: Number of records, R.
        is_in_backward: True while the gradient of the loss is computed.
    """

    def __init__(
        self,
        operator: Operator,
        values: dict[str, Any],
        output: Any,
        records: int,
        axes: dict[int, Axis],
        exchangeable: dict[int, tuple[Axis, int] | None],
        read: Callable[[str], None],
    ) -> None:
        self.operator = operator
        self.output = output
        self.records = records
        self.read = read
        self.is_in_backward = False
        self._values = values
        self._axes = axes
        self._exchangeable = exchangeable

    def __getitem__(self, name: str) -> Any:
        """An argument, or its default."""
        if name in self._values:
            return self._values[name]
        return self.operator.defaults.get(name)

    def has(self, name: str) -> bool:
        """True if the operator has an argument of that name."""
        return name in self.operator.arguments

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, those in lists included."""
        tensors = []
        for value in self._values.values():
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, (list, tuple)):
                tensors += [x for x in value if isinstance(x, Tensor)]
        return tensors

    @property
    def read_tensors(self) -> list[Tensor]:
        """Tensors among the arguments, without those that are only written to."""
        outputs = [self._values.get(name) for name in self.operator.written if name.startswith("out")]
        return [t for t in self.tensors if not any(t is output for output in outputs)]

    def axis(self, t: Any) -> Axis | None:
        """Where an input has its records; None for a public one."""
        return self._axes.get(id(t)) if isinstance(t, Tensor) else None

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
            axis: Where the others have their records.
        """
        if not isinstance(t, Tensor) or dim < 0 or dim >= t.dim() or t.shape[dim] == 1 or t.stride(dim) == 0:
            return
        if not t.numel():
            return
        if id(t) in self._exchangeable:
            own = self._exchangeable[id(t)]
            if own is None:
                return
            own_axis, own_records = own
            repeats = own_axis.inner and axis.inner % own_axis.inner == 0
            # Exchanging records has to permute what is exchangeable.
            aligned = (own_records * own_axis.inner) % (self.records * axis.inner) == 0
            if own_axis.dim == dim and repeats and aligned:
                return
        raise Mixes("numbers that differ by the place in the batch")

    def common_axis(self, *tensors: Any) -> Axis:
        """The axis of those inputs that have records, all in the same dimension; the others have to be exchangeable.

        Raises:
            Mixes: There are several axes, none, or public numbers by place.
        """
        axes = {axis for t in tensors if (axis := self.axis(t)) is not None}
        if len(axes) > 1:
            raise Mixes("records are arranged in two ways")
        if not axes:
            raise Mixes("records in an argument that all rows share")
        (axis,) = axes
        for t in tensors:
            if isinstance(t, Tensor) and self.axis(t) is None:
                self.require_exchangeable(t, axis.dim, axis)
        return axis

    def broadcast_axis(self, *tensors: Any) -> Axis:
        """The axis, in the output, of inputs that are broadcast against each other."""
        dims = max(t.dim() for t in tensors if isinstance(t, Tensor))
        axes = set()
        for t in tensors:
            axis = self.axis(t)
            if axis is not None:
                axes.add(axis._replace(dim=axis.dim + dims - t.dim()))
        if len(axes) != 1:
            raise Mixes("records are arranged in two ways" if axes else "records in an argument that all rows share")
        (axis,) = axes
        for t in tensors:
            if isinstance(t, Tensor) and self.axis(t) is None:
                self.require_exchangeable(t, axis.dim + t.dim() - dims, axis)
        return axis

    def dims(self, t: Tensor, *names: str) -> list[int] | None:
        """Dimensions that the first given of some arguments names, from 0; None for all.

        Args:
            t: The tensor that has them.
            names: Names of arguments; "dim" and "dims" if there are none.
        """
        for name in names or ("dim", "dims"):
            if self.has(name):
                value = self[name]
                if value is None or (isinstance(value, (list, tuple)) and not value):
                    return None
                listed = value if isinstance(value, (list, tuple)) else [value]
                return [dim % max(t.dim(), 1) for dim in listed]
        return None
