"""Counts that a training step keeps (`self.n += 1`): once for a batch, however many records are run one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpbench.records.step_state import is_opaque

_KINDS = (int, float)  # a flag says what was done once, and stays


class Counters:
    """Plain numbers in the attributes of a module and its parts, and in dictionaries and objects that they hold.

    Each record finds the numbers that the first one found, so that a batch counts once.

    Args:
        module: The module; its step runs on one record after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(attributes, dict(attributes)) for attributes in _attributes(module)]
        self._is_first = True

    def before_record(self) -> None:
        """Put numbers back before each record but the first."""
        is_first, self._is_first = self._is_first, False
        if is_first:
            return
        for attributes, before in self._places:
            for name, value in list(attributes.items()):
                if type(value) not in _KINDS or value is before.get(name):
                    continue
                if name not in before:
                    del attributes[name]
                elif type(before[name]) in _KINDS:
                    attributes[name] = before[name]


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    dictionaries = []
    for part in module.modules():
        dictionaries.append(part.__dict__)
        for name, value in part.__dict__.items():
            if type(value) is dict and name not in ("_parameters", "_buffers", "_modules"):
                dictionaries.append(value)
            elif hasattr(value, "__dict__") and not is_opaque(value):
                dictionaries.append(vars(value))
    return dictionaries
