"""Check of the engine's layout: the rows of each layer's input must belong to the records that the engine assumes.

`record_axis` tags the memory of all tensors of a step. Here the tags of each call of a layer are compared with the
layout that the engine assumes; where the two differ, the batch goes record by record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._shared import SharedCall
from dpbench.privacy.gradients._uses import Use
from dpbench.privacy.record_axis.mode import RecordAxis
from dpbench.privacy.record_axis.tags import Axis, Mixed, Total


class Places:
    """Compares places of records with the arrangement that the engine takes for granted.

    Args:
        axis: The mode under which the step ran.
        rows_of_record: Neighboring rows that make up a record.
    """

    def __init__(self, axis: RecordAxis, rows_of_record: int) -> None:
        self._axis = axis
        self._inner = rows_of_record

    def are_public(self, uses: Sequence[Use]) -> bool:
        """Return whether some layer's input is public: only its output's gradient then tells the records apart."""
        return any(t.dim() > 0 and self._axis.place_of(t) is None for use in uses for t in _inputs(use))

    def refuse_others(self, uses: Iterable[tuple[Use, Sequence[Tensor | None]]]) -> None:
        """Refuse layers that have records elsewhere than the engine takes them to be.

        Args:
            uses: Calls of layers with the gradients of their outputs; calls without any are not in the loss.

        Raises:
            UnsupportedModuleError: The engine would take rows for another record's.
        """
        for use, grads in uses:
            of_loss = [grad for grad in grads if grad is not None]
            if not of_loss:
                continue
            for t in (*_inputs(use), *of_loss):
                self._refuse(use, self._axis.place_of(t))

    def refuse_other_outputs(self, calls: Iterable[tuple[SharedCall, Sequence[Tensor | None]]]) -> None:
        """Refuse calls with shared tensors if the gradients have their records elsewhere than the outputs.

        Args:
            calls: Calls with the gradients of their outputs.
        """
        for call, grads in calls:
            for expected, grad in zip(call.places, grads, strict=True):
                place = None if grad is None else self._axis.place_of(grad)
                if not isinstance(expected, Total) and place not in (None, 0 if expected is None else expected):
                    raise UnsupportedModuleError(_message(call, place))

    def _refuse(self, use: Use, place: object) -> None:
        if place is None or place in self._allowed(use):
            return
        if use.part is not None and isinstance(place, Axis) and place[1:] == (1, self._inner):
            return  # a recurrence or attention along the records mixes: they can be nowhere else
        raise UnsupportedModuleError(_message(use, place))

    def _allowed(self, use: Use) -> tuple[object, ...]:
        if self._axis.records == 1:
            return (0,)
        if use.places:
            return use.places[:1]
        return (Axis(0, 1, self._inner),)


def _inputs(use: Use) -> list[Tensor]:
    if use.part is not None:
        return list(use.part.inputs)
    return [x for x in use.inputs if isinstance(x, Tensor)]


def _message(use: Use | SharedCall, place: object) -> str:
    if isinstance(place, Mixed):
        return f"the input of {use} has rows that belong to no single record ({place.place}: {place.reason})"
    if isinstance(place, Total):
        return f"the input of {use} is a {place.over.value} over all records"
    return f"the input of {use} has its records in an order that the engine does not support ({place})"
