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
    prevents = "the loss function of a plain loop keeps a lot in variables, or trains parameters without privacy"

    def on_check(self) -> None:
        """Look at the function."""
        module = self.session.training.module
        refuse_hidden_state(module.loss, module.model)


def held_by(loss: Callable[..., Any]) -> list[Any]:
    """Objects that the function can reach without the model and the batch: of its closure, defaults, arguments, object.

    Args:
        loss: A function, method, partial or object with `__call__`.
    """
    found: list[Any] = []
    for function in _functions_of(loss):
        cells = [_content(cell) for cell in function.__closure__ or ()]
        found += [x for x in cells if x is not _EMPTY and not isinstance(x, FunctionType)]
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*found, *_bound_to(loss)]


def refuse_hidden_state(loss: Callable[..., Any], model: nn.Module) -> None:
    """Refuse what nobody could see a lot being carried by, and parts that would be trained without privacy, or not.

    Raises:
        ConfigurationError: The function assigns to a variable outside itself, has attributes, or holds trainable
            parameters that are not the model's.
    """
    for function in _functions_of(loss):
        if name := next(_assigned_outside(function.__code__), None):
            raise ConfigurationError(
                f"the loss function assigns to {name}, outside itself, so that a lot could be carried into the next "
                "one: keep nothing of a lot; what is to be counted belongs into the body of the loop."
            )
        if kept := [name for name in vars(function) if name != "__wrapped__"]:
            raise ConfigurationError(
                f"the loss function has an attribute ({kept[0]}), in which a lot could be carried into the next one: "
                "make it an argument with a default, or a variable."
            )
    own = {id(parameter) for parameter in model.parameters()}
    for parameter in _parameters([*held_by(loss), *_globals_of(loss)]):
        if parameter.requires_grad and id(parameter) not in own:
            raise ConfigurationError(
                f"the loss function uses a trainable tensor of shape {tuple(parameter.shape)} that is not of the "
                "model: make it a part of the model, which is trained privately, or call requires_grad_(False) on it."
            )


def _functions_of(loss: Any) -> Iterator[FunctionType]:
    """The function and those that it holds itself, each once."""
    seen: set[int] = set()
    waiting = [loss]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            yield one
            waiting += [_content(cell) for cell in one.__closure__ or ()]
            waiting += [getattr(one, "__wrapped__", None)]
        elif isinstance(one, MethodType):
            waiting.append(one.__func__)
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return _EMPTY


def _bound_to(loss: Any) -> list[Any]:
    if isinstance(loss, partial):
        return [*loss.args, *loss.keywords.values(), *_bound_to(loss.func)]
    if isinstance(loss, MethodType):
        return [loss.__self__]
    return [] if isinstance(loss, FunctionType) else [loss]


def _assigned_outside(code: CodeType, outer: frozenset[str] | None = None) -> Iterator[str]:
    """Names of variables that belong to somebody else and that the code assigns to, also in functions inside it."""
    outer = frozenset(code.co_freevars) if outer is None else outer
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL or (instruction.opname in _REBINDING and instruction.argval in outer):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned_outside(constant, outer & frozenset(constant.co_freevars))


def _globals_of(loss: Any) -> list[Any]:
    """Networks and tensors that the functions name and find in their module."""
    return [
        function.__globals__[name]
        for function in _functions_of(loss)
        for name in function.__code__.co_names
        if isinstance(function.__globals__.get(name), nn.Module | Tensor)
    ]


def _parameters(found: Iterable[Any], depth: int = 2) -> Iterator[Tensor]:
    """Tensors of networks among objects, their attributes and what containers hold."""
    for x in found:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, nn.Module):
            yield from x.parameters()
        elif depth and isinstance(x, Mapping):
            yield from _parameters(x.values(), depth - 1)
        elif depth and isinstance(x, list | tuple | set):
            yield from _parameters(x, depth - 1)
        elif depth and hasattr(x, "__dict__") and not isinstance(x, type | FunctionType):
            yield from _parameters(vars(x).values(), depth - 1)
