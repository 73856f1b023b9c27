"""A strategy's options: what the signatures declare, checked as they say, and shown where they differ."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, dataclass_transform, get_args, get_origin, get_type_hints

from dpbench.callback.option_names import suggestion
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
        options = [f"{name}={value!r}" for name, value in vars(self).get("_given_options", {}).items()]
        return f"{type(self).__name__}({', '.join(options)})"


def ledger_place(ledger: str | None) -> Path | None:
    """The path that the option `ledger` names; None: there is a default."""
    if ledger is not None and not ledger.strip():
        raise ConfigurationError("ledger is empty: name a file, or leave it out for ledger.jsonl in the log folder.")
    return None if ledger is None else Path(ledger)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that checks what it is given first."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **options: Any) -> None:
        if type(self).__init__ is not checked:  # reached through `super().__init__` of a subclass, which has checked
            init(self, *values, **options)
            return
        known = declared(type(self))
        if len(values) > len(names) and not takes_more:
            raise ConfigurationError(
                f"{type(self).__name__} takes at most {len(names)} values without a name "
                f"({', '.join(names) or 'none'}), not {len(values)}: write name=value."
            )
        by_place = dict(zip(names, values, strict=False))
        for name in by_place:
            if name in options:
                raise ConfigurationError(f"{name} is given twice, by its place and by its name.")
        fitting = {}
        for name, value in (by_place | options).items():
            fitting[name] = _fitting(type(self), known, name, value)
        self._given_options = {}
        for name, value in fitting.items():
            _, default = known[name]
            if not _same(value, default):
                self._given_options[name] = value
        init(self, *values[len(names) :], **fitting)

    return checked


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _fitting(cls: type, known: Mapping[str, tuple[Any, Any]], name: str, value: Any) -> Any:
    """A value as the option of that name takes it.

    Raises:
        ConfigurationError: There is no such option, or the value is of no kind that it takes.
    """
    if name not in known:
        hint = suggestion(name, known) or f"It has {', '.join(known)}."
        raise ConfigurationError(f"{cls.__name__} has no option {name!r}. {hint}")
    annotation, _ = known[name]
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    for kind in kinds:
        fits, fitting = _as(kind, value)
        if fits:
            return fitting
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
    if words and isinstance(value, str):
        raise ConfigurationError(f"unknown {name} {value!r}; known are {', '.join(words)}.")
    raise ConfigurationError(f"{name} must be {' or '.join(map(_name_of, kinds))}, not {_shown(value)}.")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return "a number without end"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _as(kind: Any, value: Any) -> tuple[bool, Any]:
    """Whether a value is of a declared kind, and the value as Python's own type."""
    if kind is Any:
        return True, value
    if kind is float or kind is int:
        return _as_number(kind, value)
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind), value
    if origin is list:
        return _as_list(kind, value)
    if origin is dict:
        return _as_dictionary(kind, value)
    if isinstance(kind, type) or isinstance(origin, type):
        is_class = isinstance(value, type) and kind is RecordSource  # which has the protocol's methods, too
        return isinstance(value, origin or kind) and not is_class, value
    return True, value  # what a user's own strategy may declare


def _as_number(kind: type, value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _is_a_float(value):
        return False, None
    number: Any = value
    if kind is float:
        return True, number if isinstance(number, int) else float(number)
    is_whole = math.isfinite(number) and number == int(number)
    return is_whole, int(number) if is_whole else None


def _as_list(kind: Any, value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, None
    (inner,) = get_args(kind)
    entries = [_as(inner, entry) for entry in value]
    return all(fits for fits, _ in entries), [entry for _, entry in entries]


def _as_dictionary(kind: Any, value: Any) -> tuple[bool, Any]:
    if not isinstance(value, Mapping):
        return False, None
    _, inner = get_args(kind)
    entries = {key: _as(inner, entry) for key, entry in value.items()}
    all_fit = all(isinstance(key, str) and fits for key, (fits, _) in entries.items())
    return all_fit, {key: entry for key, (_, entry) in entries.items()}


def _is_a_float(value: Any) -> bool:
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond all of them
        return False


_NAMES = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    NoneType: "None",
    RecordSource: "a source of records, such as Users(LocalTraining(lr=0.1)),",
}


def _name_of(kind: Any) -> str:
    """What a kind of value is called in errors."""
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is list:
        return f"a list, each of it {_name_of(get_args(kind)[0])}"
    if origin is dict:
        _, inner = get_args(kind)
        return "a dictionary" if inner is Any else f"a dictionary, each value {_name_of(inner)},"
    if origin is Sequence:
        return "a list of numbers"
    if origin is Callable:
        return "a function"
    return _NAMES.get(kind, str(getattr(kind, "__name__", kind)))
