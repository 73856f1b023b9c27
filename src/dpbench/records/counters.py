"""Counts that a training step keeps (`self.n += 1`): once for a lot, however many records are run one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

_KINDS = (int, float)  # a flag says what was done once, and stays


class Counters:
    """Plain numbers in the attributes of a module and its parts.

    One that each record leaves alike counts, or follows a schedule: each record finds what the first one did. One that
    a record leaves otherwise than the first tells something of records. It stays, and guards see what comes of it.

    Args:
        module: Whose step runs on one record after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in module.modules():
            attributes = part.__dict__
            numbers = {name: value for name, value in attributes.items() if type(value) in _KINDS}
            self._places.append((attributes, numbers))
        self._records = 0
        self._after_first: dict[tuple[int, str], Any] = {}

    def before_record(self) -> None:
        """Put back what counts; called before each record."""
        self._records += 1
        if self._records == 1:
            return
        for place, (attributes, numbers) in enumerate(self._places):
            for name, value in list(numbers.items()):
                current = attributes.get(name)
                if current is value or current == value:
                    continue
                if self._records == 2:
                    self._after_first[place, name] = current
                if self._after_first.get((place, name)) == current:
                    attributes[name] = value
                else:
                    del numbers[name]
