"""Does a module keep something from one user's local training to the next one's?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from dpbench.data.octaves import is_checked
from dpbench.errors import UnsupportedModuleError
from dpbench.guards.guard import Guard
from dpbench.records.source import LocalUpdates
from dpbench.records.step_state import StepState


class UserMemory(Guard):
    """Trains two users of some lots again: the first one after all others, the last one before them.

    Of the first lot and one of each octave, or the next one with updates.
    """

    name = "memory"
    prevents = "a user's update depends on users trained before, through state of the module"

    _lots = 0
    _due = False
    _before: StepState | None = None

    def on_attach(self) -> None:
        """Look at the updates of a source that trains its units one after the other."""
        if isinstance(self.session.source, LocalUpdates):
            self.session.source.memory = self

    def open(self, units: Sequence[int]) -> bool:
        """Begin a lot of some users; whether it is looked at."""
        self._lots += 1
        self._due |= is_checked(self._lots)
        is_watched = self._due and len(units) > 0
        self._before = StepState(self.session.training) if is_watched else None
        self._updates: list[tuple[int, list[Tensor]]] = []
        return is_watched

    def note(self, unit: int, update: list[Tensor]) -> None:
        """Keep the first and the last update."""
        self._updates[1:] = [(unit, update)]

    def close(self, again: Callable[[int], list[Tensor]]) -> None:
        """Compute the two updates once more, each from the other end of the round.

        Raises:
            UnsupportedModuleError: One of them is another.
        """
        before = self._before
        if before is None or not self._updates:  # a lot of users without an update leaves it to the next
            return
        self._due = False
        self._before = None
        first, *last = self._updates
        self._refuse_another(*first, again, prepare=before.rewind)
        for update in last:
            self._refuse_another(*update, again, prepare=before.restore)

    def _refuse_another(
        self,
        user: int,
        update: list[Tensor],
        again: Callable[[int], list[Tensor]],
        prepare: Callable[[], None],
    ) -> None:
        after = StepState(self.session.training)
        prepare()
        repeated = again(user)
        after.restore()  # metrics count the user once
        pairs = zip(update, repeated, strict=True)
        difference = _norm(a - b for a, b in pairs)
        # Elsewhere sums come in any order, and local steps amplify it.
        tolerance = 1e-4 if self.session.training.device.type == "cpu" else 1e-1
        if not difference <= tolerance * _norm(update):  # nor is NaN
            raise UnsupportedModuleError(
                "the same user's local training came out otherwise after that of other users: the module keeps "
                "something from one training_step to the next (a running average, a memory of batches, a counter), so "
                "that clipping does not bound what one user does. Keep nothing, or derive it from the weights alone."
            )

    def on_end(self) -> None:
        """Let go of the source."""
        if isinstance(self.session.source, LocalUpdates):
            self.session.source.memory = None
        self._before = None


def _norm(tensors: Iterable[Tensor]) -> float:
    total = 0.0
    for x in tensors:
        total += float(x.square().sum())
    norm: float = total**0.5
    return norm
