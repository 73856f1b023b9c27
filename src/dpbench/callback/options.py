"""A strategy's options: what the signatures declare, checked as they say, and shown where they differ."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, dataclass_transform, get_args, get_origin, get_type_hints

from dpbench.errors import ConfigurationError
from dpbench.records.source import RecordSource


def declared(cls: type) -> dict[str, tuple[Any, Any]]:
    """Name → (type, default) of what a class takes: its fields, or the arguments of an `__init__` that it has written.

    Of such an `__init__` along its bases, for as long as they pass `**options` on.
    """
    options: dict[str, tuple[Any, Any]] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        if is_dataclass(base) and not vars(base)["_has_own_init"]:
            hints = get_type_hints(base)
            for field in sorted(fields(base), key=lambda one: bool(one.kw_only)):  # its own options first
                options.setdefault(field.name, (hints[field.name], field.default))
            break
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        hints = get_type_hints(base.__init__)  # type: ignore[misc]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                options.setdefault(parameter.name, (hints.get(parameter.name, Any), parameter.default))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return options


@dataclass_transform(eq_default=False)
class CheckedOptions:
    """Base of dataclasses whose options are checked by their annotations before `__init__` runs.

    A subclass is made a dataclass by itself; one that has written an `__init__` keeps it. Numbers of numpy are made
    Python's, so that they can be written to files.

    Raises:
        ConfigurationError: An option has another type than its annotation says, is no number (NaN), or is unknown.
    """

    _has_own_init: ClassVar[bool] = False

    def __init_subclass__(cls, kw_only: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherits = any(vars(base).get("_has_own_init", False) for base in cls.__mro__[1:])
        cls._has_own_init = "__init__" in vars(cls)
        dataclass(eq=False, repr=False, kw_only=kw_only, init=not inherits)(cls)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _checked(vars(cls)["__init__"]))  # noqa: B010 (an assignment is not typed)

    def __repr__(self) -> str:
        given = vars(self).get("_given_options", {})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def ledger_place(ledger: str | None) -> Path | None:
    """The path that the option `ledger` names; None: there is a default."""
    if ledger is not None and not ledger.strip():
        raise ConfigurationError("ledger is empty: name a file, or leave it out for ledger.jsonl in the log folder.")
    return None if ledger is None else Path(ledger)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    parameters = list(inspect.signature(init).parameters.values())[1:]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    more = any(one.kind is one.VAR_POSITIONAL for one in parameters)

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **options: Any) -> None:
        if type(self).__init__ is checked:  # not through `super().__init__` of a subclass
            known = declared(type(self))
            if len(values) > len(names) and not more:
                raise ConfigurationError(
                    f"{type(self).__name__} takes at most {len(names)} values without a name "
                    f"({', '.join(names) or 'none'}), not {len(values)}: write name=value."
                )
            given = dict(zip(names, values, strict=False))
            if twice := [name for name in given if name in options]:
                raise ConfigurationError(f"{twice[0]} is given twice, by its place and by its name.")
            options, values = given | options, values[len(names) :]
            options = {name: _fitting(type(self), known, name, value) for name, value in options.items()}
            self._given_options = {k: value for k, value in options.items() if not _same(value, known[k][1])}
        init(self, *values, **options)

    return checked


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _fitting(cls: type, known: Mapping[str, tuple[Any, Any]], name: str, value: Any) -> Any:
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]}?" if close else f"It has {', '.join(known)}."
        raise ConfigurationError(f"{cls.__name__} has no option {name!r}. {hint}")
    hint = known[name][0]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        fits, made = _as(kind, value)
        if fits:
            return made
    words = [word for kind in kinds for word in (get_args(kind) if get_origin(kind) is Literal else ())]
    if words and isinstance(value, str):
        raise ConfigurationError(f"unknown {name} {value!r}; known are {', '.join(map(str, words))}.")
    raise ConfigurationError(f"{name} must be {' or '.join(_called(kind) for kind in kinds)}, not {_shown(value)}.")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return "a number without end"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _as(kind: Any, value: Any) -> tuple[bool, Any]:
    """Whether a value is of a declared kind, and the value as Python's own type."""
    origin, inner = get_origin(kind), get_args(kind)
    number = not isinstance(value, bool) and isinstance(value, numbers.Real) and _is_a_float(value)
    if kind is Any:
        return True, value
    if kind is float:
        return number, (value if isinstance(value, int) else float(value)) if number else None
    if kind is int:
        whole = number and math.isfinite(value) and value == int(value)
        return whole, int(value) if whole else None
    if origin is Literal:
        return isinstance(value, str) and value in inner, value
    if origin is list:
        parts = [_as(inner[0], one) for one in value] if isinstance(value, list | tuple) else [(False, None)]
        return all(fits for fits, _ in parts), [made for _, made in parts]
    if origin is dict:
        if not isinstance(value, Mapping):
            return False, None
        pairs = {key: _as(inner[1], one) for key, one in value.items()}
        return all(isinstance(k, str) and fits for k, (fits, _) in pairs.items()), {k: v for k, (_, v) in pairs.items()}
    if isinstance(kind, type) or isinstance(origin, type):
        a_class = isinstance(value, type) and kind is RecordSource  # which has the protocol's methods, too
        return isinstance(value, origin or kind) and not a_class, value
    return True, value  # what a user's own strategy may declare


def _is_a_float(value: Any) -> bool:
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond all of them
        return False


def _called(kind: Any) -> str:
    known = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", NoneType: "None"}
    known[RecordSource] = "a source of records, such as Users(LocalTraining(lr=0.1)),"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list, each of it {_called(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        each = get_args(kind)[1]
        return "a dictionary" if each is Any else f"a dictionary, each value {_called(each)},"
    return known.get(kind, str(getattr(kind, "__name__", kind)))
