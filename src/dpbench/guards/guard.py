"""The base of guards: a name, the mistake that it prevents, and the moments of a training at which it looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor
from torch.optim import Optimizer

from dpbench.data.loader import PrivateDataLoader
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters
from dpbench.records.source import RecordSource
from dpbench.records.training import Training

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from torch import nn


class Session(Protocol):
    """A private training as guards know it.

    Attributes:
        training: The module and its driver.
        releases: Makes the sums of a batch private.
        source: Turns batches into per-record gradients.
        part: The module, or the part of it that sees private records; from `on_attach` on.
        trained: Its parameters, to which gradients are released; from `on_attach` on.
        optimizer: Updates them; from `on_attach` on.
        loader: Draws the batches; from `on_begin` on.
        is_open: True while a batch is open that is not released yet.
        released: True once the present batch was released.
    """

    training: Training
    releases: ReleaseEngine
    source: RecordSource
    part: nn.Module
    trained: TrainableParameters
    optimizer: Optimizer
    loader: PrivateDataLoader
    is_open: bool
    released: bool

    def refuse_skipped_lot(self) -> None:
        """Raise ConfigurationError where the last batch was not released."""


class Guard:
    """Looks for one thing that would break the guarantee silently, and refuses it by an error.

    A session makes its guards anew for each training and calls them in the order of its list.

    Attributes:
        name: Name in docs/guards.md.
        prevents: The mistake, as a line of docs/guards.md.
        session: The training that is looked at.
    """

    name: ClassVar[str]
    prevents: ClassVar[str]

    def __init__(self, session: Any) -> None:
        self.session: Session = session

    @property
    def has_public_networks(self) -> bool:
        """Return whether networks that see no record follow the private one in a step; from `on_attach` on."""
        return self.session.part is not self.session.training.module

    def on_check(self) -> None:
        """Before anything of the training exists but its module and its driver."""

    def on_attach(self) -> None:
        """Parameters and optimizers are known."""

    def on_begin(self) -> None:
        """Batches are known; the ledger is not open yet."""

    def on_change(self) -> None:
        """Other parameters are trained from the batch on that is about to be opened."""

    def on_open(self, batch: Any) -> None:
        """A batch was drawn, and the module is about to see it."""

    def on_step(
        self,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        """The training step is about to be called on the batch."""

    def on_stepped(self) -> None:
        """The training step has returned."""

    def on_release(self) -> None:
        """The sums of the batch are complete; nothing of them is released yet."""

    def on_released(self) -> None:
        """The released gradients are in `p.grad`; the optimizer has not seen them."""

    def on_public_loss(self, loss: Tensor) -> None:
        """After the release, a network that is not private is about to learn from a loss."""

    def on_close(self) -> None:
        """The update is made, and the metrics of the batch are logged."""

    def on_end(self) -> None:
        """The training is over, perhaps by an error, perhaps before it was attached."""


class LightningGuard(Guard):
    """A guard of trainings that a Lightning Trainer drives."""

    @property
    def trainer(self) -> pl.Trainer:
        """Drives the training."""
        trainer: pl.Trainer = self.session.training.trainer  # type: ignore[attr-defined]
        return trainer
