"""A number that a step may be given, but must not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpbench.records.training import NotRepeatable


class UnreadNumber:
    """The number of a batch, which a step may be given but must not read: it differs between batches."""


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise NotRepeatable("training_step uses the number of the batch")

    refuse.__name__ = name
    return refuse


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rand", "ror", "rxor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "hash", "round", "trunc", "floor", "ceil"),
    *("bool", "int", "float", "complex", "index", "str", "repr", "format"),
):
    setattr(UnreadNumber, f"__{_name}__", _refusal(f"__{_name}__"))
