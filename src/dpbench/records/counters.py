"""Counts that a training step keeps (`self.n += 1`): once for a lot, however many records are run one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpbench.records.step_state import is_opaque

_ABSENT = object()
_KINDS = (int, float)  # a flag says what was done once, and stays


class Counters:
    """Plain numbers in the attributes of a module and its parts, and in dictionaries and objects that they hold.

    One that each record leaves alike counts, or follows a schedule: each record finds what the first one did. One that
    a record leaves otherwise than the first tells something of records. It stays, and guards see what comes of it.

    Args:
        module: Whose step runs on one record after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for attributes in _attributes(module):
            numbers = {name: value for name, value in attributes.items() if type(value) in _KINDS}
            self._places.append((attributes, numbers))
        self._names = [set(attributes) for attributes, _ in self._places]
        self._records = 0
        self._after_first: dict[tuple[int, str], Any] = {}

    def before_record(self) -> None:
        """Put back what counts; called before each record."""
        self._records += 1
        if self._records == 1:
            return
        for place, (attributes, numbers) in enumerate(self._places):
            if self._records == 2:  # the class has the first value
                new = attributes.keys() - self._names[place]
                numbers.update({name: _ABSENT for name in new if type(attributes[name]) in _KINDS})
            for name, value in list(numbers.items()):
                current = attributes.get(name)
                if current is value or current == value:
                    continue
                if self._records == 2:
                    self._after_first[place, name] = current
                if self._after_first.get((place, name)) == current:
                    attributes[name] = value
                    if value is _ABSENT:
                        del attributes[name]
                else:
                    del numbers[name]


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
