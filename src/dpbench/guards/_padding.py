"""Padding that moves a record's tokens to other positions where its batch is wider."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from dpbench.errors import UnsupportedModuleError
from dpbench.guards.guard import Guard

_DEPTH = 3  # a function that calls a collator that holds a tokenizer
_MOST_ENTRIES = 100  # of a dictionary that may hold a tokenizer


class Padding(Guard):
    """A network with learned positions is told the positions of tokens that are padded on the left."""

    name = "padding"
    prevents = "a record's tokens have other positions where a longer record is in its batch"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._hooks: list[RemovableHandle] = []

    def on_begin(self) -> None:
        """Watch the calls of such networks, if the tokenizer of the collate_fn pads on the left."""
        if not pads_left(self.session.loader.collation):
            return
        for network in self.session.training.module.modules():
            if _has_learned_positions(network):
                self._hooks.append(network.register_forward_pre_hook(_require_positions, with_kwargs=True))

    def on_end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def pads_left(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a collate_fn holds, or refers to, a tokenizer that pads on the left to the longest text of a batch."""
    if getattr(value, "padding_side", None) == "left":
        return True
    if depth and isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return any(pads_left(part, depth - 1) for part in value.values())
    if depth == 0 or not callable(value) or getattr(value, "padding", None) == "max_length":
        return False
    return any(pads_left(part, depth - 1) for part in _parts(value))


def _parts(function: Any) -> Iterator[Any]:
    """Attributes, arguments and variables of a function or of an object that is called like one."""
    if isinstance(function, partial):
        yield from (function.func, *function.args, *function.keywords.values())
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(plain, FunctionType):
        variables = inspect.getclosurevars(plain)
        yield from (*variables.nonlocals.values(), *variables.globals.values(), *(plain.__defaults__ or ()))
    owner = getattr(function, "__self__", function)
    yield from getattr(owner, "__dict__", {}).values()


def _has_learned_positions(network: nn.Module) -> bool:
    """Whether a network of Hugging Face has an embedding of positions, which it counts unless it is told them."""
    rows = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    if rows is None or "position_ids" not in inspect.signature(network.forward).parameters:
        return False
    embeddings: Any = getattr(network, "get_input_embeddings", lambda: None)
    of_words = embeddings()
    tables = [layer for layer in network.modules() if isinstance(layer, nn.Embedding) and layer is not of_words]
    return any(table.num_embeddings == rows for table in tables)


def _require_positions(network: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise UnsupportedModuleError for a call that leaves positions to the network."""
    given = inspect.signature(network.forward).bind_partial(*arguments, **options).arguments
    if network.training and given.get("position_ids") is None:
        raise UnsupportedModuleError(
            f"the collate_fn pads on the left, and {type(network).__name__} counts positions from the first token of "
            "the batch: a record's gradient depends on the longest of the others, so clipping does not bound the "
            "influence of one record. Set tokenizer.padding_side = 'right', or pass position_ids (the cumulative sum "
            "of attention_mask, minus one)."
        )
