"""Checks of options against annotations: the only code that decides whether a value fits, and how.

Classes and functions declare their options with annotations, ranges included: `Positive`, `Count`, or an
`Annotated[int, Field(ge=2), "a whole number of at least 2"]` of their own, with a note for messages. Values are
checked where they come in: from a configuration, as arguments of a strategy, as options of a data set.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import numbers
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from inspect import Parameter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from dpbench.errors import ConfigurationError, did_you_mean, shown

Positive = Annotated[float, Field(gt=0), "a positive number"]
NonNegative = Annotated[float, Field(ge=0), "a number of at least 0"]
PositiveInt = Annotated[int, Field(ge=1), "a whole number of at least 1"]
Count = Annotated[int, Field(ge=0), "a whole number of at least 0"]
Decay = Annotated[float, Field(ge=0, lt=1), "a number from 0 to below 1"]
Share = Annotated[float, Field(gt=0, lt=1), "a number strictly between 0 and 1"]
Seed = Annotated[int, Field(ge=0, lt=2**32), "a whole number of at least 0 (below 2^32)"]

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
# PyTorch's annotations name what only type checkers import.
_NAMES = {**vars(typing), **vars(collections.abc)}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list",
    dict: "a dictionary",
    Path: "a path",
    NoneType: "null",
}
_LISTS = (list, tuple, collections.abc.Iterable, collections.abc.Sequence)
_DICTIONARIES = (dict, collections.abc.Mapping)


def options_of(target: Callable[..., Any]) -> dict[str, Parameter]:
    """List the options of a class or function: name → parameter, with the type itself as annotation.

    Of a class they are those of its `__init__`, and of its bases' for as long as these hand `**options` on.
    """
    return _signature(target)[0]


def check_options(
    target: Callable[..., Any],
    options: Mapping[str, Any],
    group: str | None = None,
    reserved: Collection[str] = (),
    narrower: Mapping[str, Any] | None = None,
    is_complete: bool = False,
) -> dict[str, Any]:
    """Refuse options that a class or function does not have, or with values that its annotations do not allow.

    An option annotated by a dataclass may be a mapping, which is checked likewise, and must be complete.

    Args:
        target: Class or function that takes the options.
        options: Values by name.
        group: Group of a configuration, shown before the names; "": its top. None: they are arguments of the target.
        reserved: Options that the harness sets itself.
        narrower: Annotations that say more than those of the target.
        is_complete: True if options without a default must be given.

    Returns:
        The options as the target takes them, see `checked_value`.

    Raises:
        ConfigurationError: One line for the first of them.
    """
    parameters, takes_any = _signature(target)
    prefix = f"{group}." if group else ""
    checked = {}
    for name, value in options.items():
        path = f"{prefix}{name}"
        if name in reserved:
            raise ConfigurationError(f"{path} cannot be set: dpbench sets it itself.")
        if name not in parameters and not takes_any:
            known = sorted(set(parameters) - set(reserved))
            subject = f"there is no key {path}"
            if group is None:
                subject = f"{target.__name__} has no option {name!r}"
            hint = did_you_mean(str(name), parameters, prefix)
            raise ConfigurationError(f"{subject}.{hint} Known: {', '.join(known) or 'none, it has no options'}.")
        annotation = parameters[name].annotation if name in parameters else Any
        annotation = (narrower or {}).get(name, annotation)
        if isinstance(annotation, type) and is_dataclass(annotation) and not isinstance(value, annotation):
            checked[name] = check_options(annotation, require_group(value, path), path, is_complete=True)
        else:
            checked[name] = checked_value(annotation, value, path)
    for name, parameter in parameters.items() if is_complete else ():
        if parameter.default is Parameter.empty and name not in {*options, *reserved}:
            raise ConfigurationError(f"{prefix}{name} is missing: it cannot be left out.")
    return checked


def require_group(value: Any, name: str) -> Mapping[str, Any]:
    """Return a value that is a mapping; raise ConfigurationError where it is none."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is a group of settings ({name}.KEY=VALUE), not {shown(value)}.")
    return value


def checked_value(annotation: Any, value: Any, name: str) -> Any:
    """Check a value against an annotation, and return it as the annotation takes it.

    Nothing is guessed: no word is taken for a number, no number for a word, 1.5 or 1e3 for no whole number. Types that
    YAML and JSON lack are converted: a list for a tuple (and a tuple for a list), a word for a path.
    Numbers of numpy become Python's, so that they can be written to files. An int stays one where a float is allowed.

    A validator in the annotation may raise a ConfigurationError, which comes out as it is; its context is the name.

    Args:
        annotation: Annotation of the option.
        value: The given value.
        name: Name of the option, for the message.

    Raises:
        ConfigurationError: It does not fit the annotation.
    """
    plain = _with_plain_numbers(value)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=_STRICT)
    except (PydanticUserError, TypeError):
        # An annotation that says nothing of data, which a user's own class may have.
        return plain
    try:
        checked = _validated(adapter, plain, name)
    except ValidationError as error:
        for detail in error.errors():
            reason = detail.get("ctx", {}).get("error")
            if isinstance(reason, ConfigurationError):
                raise reason from None
        raise _refusal(annotation, value, name) from None
    if isinstance(checked, float) and not isinstance(plain, int | float):
        # Pydantic takes whatever has a `__float__`, such as a tensor.
        raise _refusal(annotation, value, name)
    # Keys of seeded runs tell 1 from 1.0, so that a number stays as it was written.
    keeps = isinstance(plain, int | float | list | tuple | dict) and plain == checked
    return plain if keeps or isinstance(checked, Iterator) else checked


def _refusal(annotation: Any, value: Any, name: str) -> ConfigurationError:
    remedy = ""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        remedy = f""" That is text; from the environment, write '{name}="${{oc.decode:${{oc.env:NAME}}}}"'."""
    return ConfigurationError(f"{name} must be {described(annotation)}, not {shown(value)}.{remedy}")


def _validated(adapter: TypeAdapter[Any], value: Any, name: str) -> Any:
    try:
        checked = adapter.validate_python(value, context=name)
    except ValidationError:
        if isinstance(value, list | tuple | str):
            with suppress(TypeError):  # of what JSON cannot hold
                return adapter.validate_json(json.dumps(value), context=name)
        raise
    if isinstance(checked, Iterator):
        # Pydantic looks at the items of an Iterable when they are asked for.
        list(checked)
    return checked


def _with_plain_numbers(value: Any) -> Any:
    if type(value) in (bool, int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_numbers, value))
    if isinstance(value, Mapping):
        return {key: _with_plain_numbers(inner) for key, inner in value.items()}
    return value


def described(annotation: Any) -> str:
    """Say an annotation to people: "a whole number or null"."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        notes = [note for note in inner[1:] if isinstance(note, str)]
        return notes[0] if notes else described(inner[0])
    if origin is Literal:
        *others, last = map(str, inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (Union, UnionType):
        parts = [described(part) for part in inner if not _is_object(part)]
        if parts == ["null"]:
            parts = [described(part) for part in inner]
        # Lists last but for null, lest their items seem to have the alternatives.
        parts.sort(key=lambda part: (part == "null", part.startswith("a list")))
        return " or ".join(dict.fromkeys(parts))
    if origin is tuple and ... not in inner:
        return f"a list of {len(inner)}: {', '.join(map(described, inner))}"
    if origin in _LISTS and inner:
        return f"a list in which each is {described(inner[0])}"
    if origin in _DICTIONARIES and inner and inner[1] is not Any:
        return f"a dictionary in which each value is {described(inner[1])}"
    return _WORDS.get(origin or annotation, f"a {getattr(annotation, '__name__', annotation)}")


def _is_object(annotation: Any) -> bool:
    """Return whether an annotation names objects that no configuration can hold."""
    if get_origin(annotation) is collections.abc.Callable:
        return True
    return isinstance(annotation, type) and annotation not in _WORDS and get_origin(annotation) is None


def _signature(target: Callable[..., Any]) -> tuple[dict[str, Parameter], bool]:
    """The options of a class or function, and whether it takes any others."""
    if not isinstance(target, type):
        return _parameters(target, _hints(target))
    options: dict[str, Parameter] = {}
    for base in target.__mro__:
        init = vars(base).get("__init__")
        if init is None or base is object:
            continue
        # The `__init__` of a dataclass does not know the modules that its fields' annotations name.
        hints = {**(_hints(base) if is_dataclass(base) else {}), **_hints(init)}
        parameters, passes_on = _parameters(init, hints)
        del parameters[next(iter(parameters))]  # self
        for name, parameter in parameters.items():
            options.setdefault(name, parameter)
        if not passes_on:
            return options, False
    return options, bool(options)


def _parameters(function: Callable[..., Any], hints: Mapping[str, Any]) -> tuple[dict[str, Parameter], bool]:
    options = {}
    takes_any = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is not Parameter.VAR_POSITIONAL:
            options[name] = parameter.replace(annotation=hints.get(name, Any))
    return options, takes_any


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return get_type_hints(owner, localns=_NAMES, include_extras=True)
    except (NameError, TypeError):
        return {}
