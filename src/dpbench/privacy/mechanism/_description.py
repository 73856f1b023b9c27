"""Parts of a recipe as plain JSON data: names of classes and functions, and the options they were made with.

For readers of a plan alone: no key and no cost depends on it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Set
from functools import partial
from typing import Any

from dpbench.canonical import name_of


def describe(value: Any) -> Any:
    """Plain JSON data for an option: its name, and its values other than the defaults.

    Args:
        value: Plain data, a container, a function, a `partial`, or an instance of any class.

    Returns:
        Data that `json` writes. A class or a function that its name and options do not describe (a lambda, a method of
        an object, a class with a state of its own) is stated by its qualified name, with `"described": false`.

    >>> from dpbench.privacy.mechanism.adaptive import QuantileBounds
    >>> describe(QuantileBounds(quantile=0.7))
    {'name': 'dpbench.QuantileBounds', 'options': {'quantile': 0.7}}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN and infinities are no JSON
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe(entry) for entry in value]
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, partial):
        named_function = describe(value.func)
        if value.args:
            return {**named_function, "described": False}
        return {**named_function, "options": describe(value.keywords)}
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and named.__dataclass_params__.frozen:
        options = {}
        for field in dataclasses.fields(value):
            option = getattr(value, field.name)
            if option is not field.default:
                options[field.name] = describe(option)
        return {"name": name_of(named), "options": options}
    if _has_global_name(value):
        return {"name": name_of(value)}
    return {"name": name_of(named), "described": False}


def _has_global_name(value: Any) -> bool:
    """Return whether the qualified name of a function or class leads to it, so that the name identifies it."""
    target: Any = sys.modules.get(str(getattr(value, "__module__", "")))
    for name in getattr(value, "__qualname__", "").split("."):
        target = getattr(target, name, None)
    return target is value
