"""Parts of a recipe as plain JSON data: names of classes and functions, and the options they were made with.

For people who read a plan, and for nothing that is computed: no key and no cost depends on it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Mapping, Set
from functools import partial
from typing import Any

from dpbench.canonical import name_of

_JSON = (type(None), bool, int, str)
_NAMED = type | types.FunctionType | types.BuiltinFunctionType


def describe(value: Any) -> Any:
    """Plain JSON data for an option: what it is called, and what differs from its defaults.

    Args:
        value: Plain data, a container, a function, a `partial`, or an instance of any class.

    Returns:
        Data that `json` writes. A class or a function that its name and options do not describe (a lambda, a method of
        an object, a class with a state of its own) is stated by its qualified name, with `"described": false`.

    >>> from dpbench.privacy.mechanism.adaptive import QuantileBounds
    >>> describe(QuantileBounds(quantile=0.7))
    {'name': 'dpbench.QuantileBounds', 'options': {'quantile': 0.7}}
    """
    if isinstance(value, _JSON):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            # NaN and infinities are no JSON.
            return str(value)
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe(entry) for entry in value]
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, partial):
        return _described_partial(value)
    if _has_global_name(value):
        return {"name": name_of(value)}
    if _is_frozen_record(value):
        return {
            "name": name_of(type(value)),
            "options": _options(value),
        }
    has_own_name = callable(value) and hasattr(value, "__qualname__")
    named = value if has_own_name else type(value)
    return {"name": name_of(named), "described": False}


def _described_partial(value: partial[Any]) -> dict[str, Any]:
    """The function, with the arguments that it was given beforehand by their names."""
    description = describe(value.func)
    try:
        signature = inspect.signature(value.func)
        bound = signature.bind_partial(*value.args, **value.keywords)
    except (TypeError, ValueError):
        # A function without a signature, or one that takes no such arguments.
        return {**description, "described": False}
    options = describe(bound.arguments)
    return {**description, "options": options}


def _has_global_name(value: Any) -> bool:
    """Whether a function or class is what its qualified name leads to, so that the name says all of it."""
    if not isinstance(value, _NAMED):
        return False
    target: Any = sys.modules.get(str(value.__module__))
    for name in value.__qualname__.split("."):
        target = getattr(target, name, None)
    return target is value


def _is_frozen_record(value: Any) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    parameters = type(value).__dataclass_params__  # type: ignore[attr-defined]
    return bool(parameters.frozen)


def _options(record: Any) -> dict[str, Any]:
    """Fields that were given, by name."""
    options = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is not field.default:
            options[field.name] = describe(value)
    return options
