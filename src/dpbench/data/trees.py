"""Batches of kinds that torch's trees do not look into by themselves."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_leaves


def know_as_tree(batch: Any) -> None:
    """Let torch's trees look into other kinds of dictionaries (Hugging Face's encodings) and dataclasses.

    Args:
        batch: Such, or something that holds such.
    """
    unknown = [leaf for leaf in tree_leaves(batch) if _opens(leaf)]
    for leaf in unknown:
        _register(type(leaf), leaf)
    if unknown:
        know_as_tree(batch)  # what they hold


def _opens(leaf: Any) -> bool:
    is_registered = type(leaf) in SUPPORTED_NODES
    return not is_registered and (isinstance(leaf, UserDict) or (is_dataclass(leaf) and not isinstance(leaf, type)))


def unopened(batch: Any) -> str | None:
    """Name of the kind of an object in a batch that holds tensors in its attributes and is not looked into."""
    know_as_tree(batch)
    closed = [x for x in tree_leaves(batch) if not isinstance(x, Tensor | nn.Module | type) and _holds_tensors(x)]
    return type(closed[0]).__name__ if closed else None


def _holds_tensors(x: Any) -> bool:
    contents = list(getattr(x, "__dict__", {}).values())
    for kind in type(x).__mro__:
        for name in getattr(kind, "__slots__", ()):
            contents.append(getattr(x, name, None))
    if isinstance(x, Mapping):
        contents += x.values()
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(contents))


def _register(kind: type, example: Any) -> None:
    if type(example) in SUPPORTED_NODES:
        return
    if isinstance(example, UserDict):
        register_pytree_node(
            kind,
            lambda one: (list(one.values()), list(one.keys())),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
        )
        return
    names = [field.name for field in fields(example)]
    register_pytree_node(
        kind,
        lambda one: ([getattr(one, name) for name in names], None),
        lambda values, _: kind(**dict(zip(names, values, strict=True))),
    )
