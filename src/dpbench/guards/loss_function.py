"""What a loss function of a plain loop holds: it may carry one lot into the next, so it is looked at, or refused."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard

_REBINDING = {"STORE_DEREF", "DELETE_DEREF"}
_GLOBAL = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_EMPTY = object()


class LossState(Guard):
    """The loss function of a plain loop carries nothing from one lot to the next where nobody sees it."""

    name = "loss"
    prevents = "the loss function of a plain loop stores a batch in variables, or trains parameters without privacy"

    def on_check(self) -> None:
        """Look at the function."""
        module = self.session.training.module
        refuse_hidden_state(module.loss, module.model)


def held_by(loss: Callable[..., Any]) -> list[Any]:
    """Objects that the function can reach without the model and the batch: of its closure, defaults, arguments, object.

    Args:
        loss: A function, method, partial or object with `__call__`.
    """
    values: list[Any] = []
    for function in _functions_of(loss):
        for cell in function.__closure__ or ():
            content = _content(cell)
            if content is not _EMPTY and not isinstance(content, FunctionType):
                values.append(content)
        values += function.__defaults__ or ()
        values += (function.__kwdefaults__ or {}).values()
    return values + _bound_to(loss)


def refuse_hidden_state(loss: Callable[..., Any], model: nn.Module) -> None:
    """Refuse what nobody could see a lot being carried by, and parts that would be trained without privacy, or not.

    Raises:
        ConfigurationError: The function assigns to a variable outside itself, has attributes, or holds trainable
            parameters that are not the model's.
    """
    for function in _functions_of(loss):
        name = next(_assigned_outside(function.__code__), None)
        if name is not None:
            raise ConfigurationError(
                f"the loss function assigns to {name}, outside itself, so that a batch could be carried into the next "
                "one: keep nothing of a batch; what is to be counted belongs into the body of the loop."
            )
        attributes = [name for name in vars(function) if name != "__wrapped__"]
        if attributes:
            raise ConfigurationError(
                f"the loss function has an attribute ({attributes[0]}), in which a batch could be carried into the "
                "next one: make it an argument with a default, or a variable."
            )
    parameters_of_model = {id(parameter) for parameter in model.parameters()}
    for parameter in _parameters([*held_by(loss), *_globals_of(loss)]):
        if parameter.requires_grad and id(parameter) not in parameters_of_model:
            raise ConfigurationError(
                f"the loss function uses a trainable tensor of shape {tuple(parameter.shape)} that is not of the "
                "model: make it a part of the model, which is trained privately, or call requires_grad_(False) on it."
            )


def _functions_of(loss: Any) -> Iterator[FunctionType]:
    """The function and those that it holds itself, each once."""
    seen: set[int] = set()
    pending = [loss]
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):
            yield x
            pending += map(_content, x.__closure__ or ())
            pending.append(getattr(x, "__wrapped__", None))
        elif isinstance(x, MethodType):
            pending.append(x.__func__)
        elif isinstance(x, partial):
            pending += [x.func, *x.args, *x.keywords.values()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return _EMPTY


def _bound_to(loss: Any) -> list[Any]:
    """Arguments of a partial, the object of a method, or an object that is called itself."""
    if isinstance(loss, partial):
        return [*loss.args, *loss.keywords.values(), *_bound_to(loss.func)]
    if isinstance(loss, MethodType):
        return [loss.__self__]
    if isinstance(loss, FunctionType):
        return []
    return [loss]


def _assigned_outside(code: CodeType, outer: frozenset[str] | None = None) -> Iterator[str]:
    """Names of variables that belong to somebody else and that the code assigns to, also in functions inside it."""
    if outer is None:
        outer = frozenset(code.co_freevars)
    for instruction in dis.get_instructions(code):
        rebinds = instruction.opname in _REBINDING and instruction.argval in outer
        if rebinds or instruction.opname in _GLOBAL:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned_outside(constant, outer & frozenset(constant.co_freevars))


def _globals_of(loss: Any) -> list[Any]:
    """Networks and tensors that the functions name and find in their module."""
    values = []
    for function in _functions_of(loss):
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, nn.Module | Tensor):
                values.append(value)
    return values


def _parameters(values: Iterable[Any], depth: int = 2) -> Iterator[Tensor]:
    """Tensors of networks among objects, their attributes and what containers hold."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, nn.Module):
            yield from x.parameters()
        elif depth:
            yield from _parameters(_parts(x), depth - 1)


def _parts(x: Any) -> Iterable[Any]:
    if isinstance(x, Mapping):
        return x.values()
    if isinstance(x, list | tuple | set):
        return x
    if hasattr(x, "__dict__") and not isinstance(x, type | FunctionType):
        attributes: dict[str, Any] = vars(x)
        return attributes.values()
    return ()
