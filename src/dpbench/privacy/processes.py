"""The processes of one training, as a release sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def _itself(value: Any) -> Any:
    return value


def _alone(total: Tensor) -> None:
    """All-reduce of a single process: its sum is the sum of all."""


@dataclass(frozen=True)
class Processes:
    """The processes that take part in a release.

    Attributes:
        rank: Rank of this process; rank 0 adds the noise and writes the ledger.
        world: Number of processes.
        broadcast: Gives every process the value that rank 0 has; tensors in place.
        add_up: Replaces a tensor by the sum of all processes' tensors, in place.
        alike: True if the sum is that of one process, except for rounding; else another number of them gets other
            noise.
    """

    rank: int = 0
    world: int = 1
    broadcast: Callable[[Any], Any] = _itself
    add_up: Callable[[Tensor], object] = _alone
    alike: bool = True

    @property
    def apart(self) -> int:
        """Number of processes where the sum depends on it, otherwise 1: part of the key of the noise."""
        return 1 if self.alike else self.world

    def share(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0, in place, to the last bit."""
        if self.world > 1:
            tensor.copy_(self.broadcast(tensor))


ALONE = Processes()
