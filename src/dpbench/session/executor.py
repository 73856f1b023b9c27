"""How the arithmetic of a step is carried out: for speed alone, never in a plan, in ε or in a run's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from dpbench.privacy.releases import ReleaseEngine
from dpbench.records.source import RecordSource
from dpbench.records.training import Training, TrainingStep

REFERENCE = "eager"
"""Name of the executor for which keys follow from the seed alone."""


@dataclass(frozen=True)
class SessionParts:
    """Parts of a session that its executor works with.

    Attributes:
        training: The present one.
        releases: Take the sums of a batch, and make them private.
        source: Record source; its step and backward pass make the sums.
        optimizer: Optimizer of the private part.
    """

    training: Training
    releases: ReleaseEngine
    source: RecordSource
    optimizer: Optimizer


class Executor:
    """Runs the steps of a session operation by operation, as PyTorch meets them: for every network and device.

    It is the reference; others override the parts in which they differ.

    Guarantee: that of the session. The sum that an executor releases is that of the reference, but for rounding; each
    release is in the ledger before its sum is used.

    Attributes:
        name: Name in keys: a new one whenever its sums come to round otherwise.
    """

    name = REFERENCE
    _parts: SessionParts | None = None

    def attach(self, parts: SessionParts) -> None:
        """Take note of a session's parts; `step` and `backward` are called next."""
        self._parts = parts

    def detach(self) -> None:
        """Let go of them, also after an error."""
        self._parts = None

    @property
    def parts(self) -> SessionParts:
        """Of the session that it is attached to."""
        assert self._parts is not None
        return self._parts

    @property
    def training(self) -> Training:
        """The present one."""
        return self.parts.training

    @property
    def releases(self) -> ReleaseEngine:
        """Of the session."""
        return self.parts.releases

    @property
    def source(self) -> RecordSource:
        """Of records."""
        return self.parts.source

    def own_step(self, own: TrainingStep) -> TrainingStep:
        """Carry out the module's step, which a source calls in its own."""
        return own

    def step(self, step: TrainingStep) -> TrainingStep:
        """Carry out a source's step."""
        return step

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Carry out a source's backward pass."""
        return backward

    def release(self) -> list[Tensor]:
        """Make the sums of a batch private; see `ReleaseEngine.release`."""
        return self.releases.release()
