"""How the arithmetic of a step is carried out: for speed alone, never in a plan, in ε or in a run's name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from dpbench.privacy.releases import ReleaseEngine
from dpbench.records.source import RecordSource
from dpbench.records.training import Training, TrainingStep

REFERENCE = "eager"
"""Of the executor whose keys are those of the seed alone."""


class Executor:
    """Carries out what a session asks for, operation by operation, as PyTorch meets them: for every network and device.

    It is the reference; others override what they do otherwise.

    Guarantee: that of the session. The sum that an executor releases is that of the reference, but for rounding; each
    release is in the ledger before its sum is used.

    Attributes:
        name: In keys: another one wherever its sums come to round otherwise.
    """

    name = REFERENCE

    def attach(
        self,
        training: Training,
        releases: ReleaseEngine,
        source: RecordSource,
        optimizer: Optimizer,
    ) -> None:
        """Take note of a training and of the optimizer of its private part; `step` and `backward` are called next."""

    def detach(self) -> None:
        """Let go of it, also after an error."""

    def own_step(self, own: TrainingStep) -> TrainingStep:
        """Carry out the module's step, which a source calls in its own."""
        return own

    def step(self, step: TrainingStep) -> TrainingStep:
        """Carry out a source's step."""
        return step

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Carry out a source's backward pass."""
        return backward

    def release(self, releases: ReleaseEngine) -> list[Tensor]:
        """Make the sums of a lot private; see `ReleaseEngine.release`."""
        return releases.release()
