"""The loss function of a plain loop: it may carry one lot into the next, so all that it holds is seen, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard

_DEEP = 2  # attributes of attributes are looked at


class LossState(Guard):
    """The loss function of a plain loop carries nothing from one lot to the next unseen."""

    name = "loss"
    prevents = "the loss function of a plain loop stores a batch in attributes, or trains parameters without privacy"

    def on_check(self) -> None:
        """Refuse attributes of the function, and networks to train; make the rest a part of the module."""
        module = self.session.training.module
        held = []
        named = []
        pending = [module.loss]
        for x in pending:  # and of what is added meanwhile
            if isinstance(x, partial):
                pending += [x.func, *x.args, *x.keywords.values()]
            elif isinstance(x, MethodType):
                pending += [x.__func__, x.__self__]
            elif isinstance(x, FunctionType):
                _refuse_attributes(x)
                parts = [*_contents(x), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
                pending += [part for part in parts if not any(part is other for other in pending)]
                named += [x.__globals__.get(name) for name in x.__code__.co_names]
            else:
                held.append(x)
        module.hold(held)
        named = [x for x in named if isinstance(x, nn.Module | Tensor)]
        leaves = tree_leaves([held, named])
        for _ in range(_DEEP):
            leaves += tree_leaves([vars(x) for x in leaves if hasattr(x, "__dict__")])
        of_model = set(map(id, module.model.parameters()))
        for x in leaves:
            for parameter in x.parameters() if isinstance(x, nn.Module) else [x]:
                if isinstance(parameter, Tensor) and parameter.requires_grad and id(parameter) not in of_model:
                    raise ConfigurationError(
                        f"the loss function uses a trainable tensor of shape {tuple(parameter.shape)} that is not of "
                        "the model: make it a part of the model, which is trained privately, or call "
                        "requires_grad_(False) on it."
                    )


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # assigned later
            yield cell.cell_contents


def _refuse_attributes(function: FunctionType) -> None:
    """Refuse a function that has attributes, of which only numbers are looked at.

    Raises:
        ConfigurationError: Names the attribute.
    """
    for name in vars(function).keys() - {"__wrapped__"}:
        raise ConfigurationError(
            f"the loss function has an attribute ({name}), in which a batch could be carried into the next one: make "
            "it an argument with a default, or a variable."
        )
