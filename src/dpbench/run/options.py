"""Values of a configuration against the annotations of the class that takes them."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import json
import math
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from dpbench.callback.option_names import suggestion
from dpbench.errors import ConfigurationError

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_NAMES = {**vars(typing), **vars(collections.abc)}  # PyTorch's annotations name what only type checkers import
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "null"}
_WORDS |= {list: "a list", dict: "a dictionary", Path: "a path"}
_LARGEST = 2**53  # beyond, whole numbers are no longer exact as floating-point ones
_HUGE = 1e38  # beyond, what computes in 32 bits overflows
_DEEPEST = 20


def check_values(value: Any, path: str, depth: int = 0) -> None:
    """Refuse what no setting can be: numbers that are not finite or have no end, nests, things to be called.

    Raises:
        ConfigurationError: There is such a value; it is named by its dotted path.
    """
    if depth > _DEEPEST:
        raise ConfigurationError(f"{path.split('.', maxsplit=1)[0]} is nested more than {_DEEPEST} levels deep.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{path} must be finite, not {value}.")
    if isinstance(value, float) and abs(value) > _HUGE:
        raise ConfigurationError(f"{path} must lie between -{_HUGE:g} and {_HUGE:g} (32-bit numbers), not {value}.")
    if type(value) is int and abs(value) > _LARGEST:
        raise ConfigurationError(f"{path} must lie between -2^53 and 2^53, not {shown(value)}.")
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        check_values(inner, f"{path}.{key}" if path else str(key), depth + 1)
    for number, inner in enumerate(value) if isinstance(value, list | tuple) else ():
        check_values(inner, f"{path}[{number}]", depth + 1)


def check_options(
    cls: type,
    options: Mapping[str, Any],
    group: str,
    ours: Collection[str] = (),
    narrower: Mapping[str, Any] | None = None,
) -> None:
    """Refuse options that a class does not have, or whose values are not what its annotations say.

    Args:
        cls: What the options are for.
        options: By name.
        group: Shown before the names.
        ours: Options that the harness sets itself.
        narrower: Annotations that say more than those of the class.

    Raises:
        ConfigurationError: One line for the first of them.
    """
    if wrong := [name for name in options if name in ours]:
        raise ConfigurationError(f"{group}.{wrong[0]} cannot be set: dpbench sets it itself.")
    declared, takes_all = _declared(cls)
    for name, value in options.items():
        if name not in declared and not takes_all:
            hint = suggestion(str(name), declared, f"{group}.")
            known = ", ".join(sorted(set(declared) - set(ours))) or "none, it has no options"
            raise ConfigurationError(f"there is no key {group}.{name}. {hint + ' ' if hint else ''}Known: {known}.")
        hint = (narrower or {}).get(name, declared[name].annotation if name in declared else Any)
        if not fits(hint, value):
            raise ConfigurationError(f"{group}.{name} must be {described(hint)}, not {shown(value)}.")


def options_of(cls: type) -> dict[str, inspect.Parameter]:
    """List what a class takes, and hands on to its bases: name → parameter, whose annotation is the type itself."""
    return _declared(cls)[0]


def fits(hint: Any, value: Any) -> bool:
    """Whether a value of a configuration (numbers, words, lists, dictionaries) is what an annotation says.

    Strict: no word is taken for a number, no number for a word, 1.5 or 1e3 for no whole number.
    """
    if type(value) is bool and hint in (int, float):
        return False
    try:
        checked = TypeAdapter(hint, config=_STRICT).validate_json(json.dumps(value))
        if isinstance(checked, Iterator):  # an Iterable is checked when it is gone through
            list(checked)
    except ValidationError:
        return False
    except (PydanticUserError, TypeError):  # an annotation that says nothing of data
        return True
    return True


def described(hint: Any) -> str:
    """An annotation for people: "a whole number or null"."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((note for note in inner[1:] if isinstance(note, str)), described(inner[0]))
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (Union, UnionType):
        parts = [described(part) for part in inner if not _is_object(part)]
        parts.sort(key=lambda part: (part == "null", part.startswith("a list")))
        comma = "," if " in which each " in " ".join(parts[:-1]) else ""  # else null would be one of these
        return f"{comma} or ".join(dict.fromkeys(parts)) or "an object"
    if origin is tuple and ... not in inner:
        return f"a list of {len(inner)}: {', '.join(map(described, inner))}"
    if origin in (list, tuple, collections.abc.Iterable, collections.abc.Sequence) and inner:
        return f"a list in which each is {described(inner[0])}"
    if origin in (dict, collections.abc.Mapping) and inner and inner[1] is not Any:
        return f"a dictionary in which each value is {described(inner[1])}"
    return _WORDS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _is_object(hint: Any) -> bool:
    """Whether an annotation names what no configuration can hold."""
    return isinstance(hint, type) and hint not in _WORDS and get_origin(hint) is None


def shown(value: Any) -> str:
    """A value in an error message, in one line of bearable length."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number without end"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(word: str, names: Iterable[str], prefix: str = "") -> str:
    """A question that names what is nearest to a word, with a space before it; empty if nothing is near."""
    near = difflib.get_close_matches(word, list(names), 1)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def _declared(cls: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """A class's options, with those of the base that it hands `**options` to, and whether it takes any others."""
    declared: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        hints = _hints(base)
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                typed = parameter.replace(annotation=hints.get(parameter.name, Any))
                declared.setdefault(parameter.name, typed)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return declared, False
    return declared, bool(declared)


def _hints(cls: type) -> dict[str, Any]:
    """Types by name; of a dataclass those of its fields too, since its `__init__` does not know the modules of all."""
    hints: dict[str, Any] = {}
    for source in (cls, cls.__init__) if is_dataclass(cls) else (cls.__init__,):  # type: ignore[misc]
        with suppress(NameError, TypeError):
            hints |= get_type_hints(source, localns=_NAMES, include_extras=True)
    return hints
