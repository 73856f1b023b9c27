"""Batches of kinds that torch's trees do not look into by themselves."""

from __future__ import annotations

from collections import UserDict
from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_leaves


def know_as_tree(batch: Any) -> None:
    """Let torch's trees look into what is a dictionary of another kind (Hugging Face's encodings) or a dataclass.

    Args:
        batch: Such, or something that holds such.
    """
    unknown = [leaf for leaf in tree_leaves(batch) if _opens(leaf)]
    for leaf in unknown:
        _register(type(leaf), leaf)
    if unknown:
        know_as_tree(batch)  # what they hold


def _opens(leaf: Any) -> bool:
    known = type(leaf) in SUPPORTED_NODES
    return not known and (isinstance(leaf, UserDict) or (is_dataclass(leaf) and not isinstance(leaf, type)))


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
