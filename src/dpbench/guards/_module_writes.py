"""Writes to a module and its optimizers: to all that is saved with them, and may be published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.octaves import is_checked
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._saved import Saved
from dpbench.guards.guard import Guard
from dpbench.guards.optimizer_steps import OptimizerSteps
from dpbench.guards.withheld_loss import records_withheld

_BEFORE_RELEASE = (
    "the forward pass (or a hook that sees the batch) changes {names}, which would be saved with the model without "
    "noise: keep statistics of private records out of the model. Update what depends only on released weights, such as "
    "a target network, in on_before_zero_grad or on_train_epoch_end, set learning rates by a schedule "
    "(configure_optimizers), keep counters in attributes, and run a generator with BatchNorm in evaluation mode for "
    "the private step."
)
_BEFORE_UPDATE = (
    "{names} changed between the release of a batch and its update (in on_before_optimizer_step or "
    "configure_gradient_clipping, of the module or of a callback), where values kept from the batch are accessible, "
    "and would be saved without noise: update what depends only on released weights in a hook of the optimizer "
    "(register_step_post_hook), in on_before_zero_grad (except for trained weights, which are in use there) or in "
    "on_train_epoch_end."
)
_AFTER_RELEASE = (
    "{names} changed after the release of a batch, where its records are still accessible (in on_train_batch_end, or "
    "after the optimizer's step in manual optimization), and would be saved without noise: update what depends only on "
    "released weights in a hook of the optimizer (register_step_post_hook), in on_before_zero_grad (except for trained "
    "weights, which are in use there) or in on_train_epoch_end, set learning rates by a schedule "
    "(configure_optimizers), and, in manual optimization, name the network that sees records in private_module."
)
_BETWEEN = (
    "{names} changed in an epoch hook (on_train_epoch_end, on_train_epoch_start) that uses a tensor computed from "
    "records in training_step, such as a loss: it is exact, and would be saved or steer updates without noise. Only "
    "show it there; changes may depend on released weights, the number of steps and constants."
)


class Writes(Guard):
    """Compares all that is saved with a module: no write may carry facts of a batch's records past its release.

    From the moment a batch is drawn to its update, and from there to the last hook that sees it. The contents of
    tensors are compared in the first batch, and in one batch of each octave. Writes of the private optimizer before it
    calls the closure follow from released gradients, and are accepted.
    """

    name = "writes"
    prevents = (
        "values computed from records are kept in buffers, hyperparameters or optimizer states and saved without noise"
    )

    _steps: OptimizerSteps

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._lots = 0
        self._before: Saved | None = None  # as of when the lot was drawn
        self._updated: Saved | None = None  # as of its update
        self._loader: PrivateDataLoader | None = None

    # ------------------------------------------------------------------------------------- moments

    def on_attach(self) -> None:
        """Watch the optimizers, and the module from one batch to the next."""
        training = self.session.training
        self._steps = OptimizerSteps(self.session.optimizer, self.session.trained.parameters)
        self._steps.watch(self, self._after_update)
        training.after_lot.append(self.end_lot)
        training.after_zero_grad.append(self.remember)
        self._steps.goes_on = training.withhold_loss(self.accept_values)
        training.watch_epochs(self._between_batches)

    def on_change(self) -> None:
        """Allow the optimizer to move the new parameters."""
        self._steps.follow(self.session.trained.parameters)
        self.remember()

    def on_begin(self) -> None:
        """Learn from the loader when a batch is drawn: before any hook has seen it."""
        self._loader = self.session.loader
        self._loader.before_lot = self._draw_lot

    def on_open(self, batch: Any) -> None:
        """Begin a batch; its update is still to come."""
        self._steps.open_lot()
        self._updated = None
        if self._before is None:
            self.remember()

    def on_stepped(self) -> None:
        """A step that sees a batch may write nothing; the hooks before its backward pass, which see none, may."""
        if self.session.training.automatic_optimization:
            self.refuse_before_release()
        elif self.session.released and self.has_public_networks:
            self._note_update()
            self._steps.close_lot()

    def on_release(self) -> None:
        """Nothing of the module may have kept anything of the records."""
        self._steps.release_lot()
        self.refuse_before_release()

    def on_end(self) -> None:
        """Nothing is watched any longer."""
        steps = vars(self).pop("_steps", None)
        if steps is not None:  # else the training was refused before
            steps.close()
        if self._loader is not None:
            self._loader.before_lot = None
            self._loader = None
        self._forget()

    # ------------------------------------------------------------------------------------- what is remembered

    def _draw_lot(self) -> None:
        self.session.refuse_skipped_lot()
        self._lots += 1
        self.remember()

    def _after_update(self) -> None:
        if not self.has_public_networks:
            self._note_update()

    def _snapshot(self) -> Saved:
        return Saved(self.session.training, is_checked(self._lots))

    def remember(self) -> None:
        """Accept the writes up to now, by code that saw no record of the batch."""
        self._before = self._snapshot()

    def _note_update(self) -> None:
        """Remember the module after its update, with the batch still in sight."""
        self._updated = self._snapshot()

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Within, a hook may use records that the step has kept, to show them, or write; not both."""
        before = self._snapshot()
        with records_withheld(refuses=False) as records:
            yield
        if records.has_seen:
            _refuse_writes(before, _BETWEEN)

    def accept_values(self) -> None:
        """Accept options that were set since the update, by code that saw no record."""
        self._steps.end_step()
        if self._updated is not None:
            self._updated.accept_options()

    def end_lot(self) -> None:
        """Refuse writes after the update; the last hook that sees the batch has run.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        _refuse_writes(self._updated, _AFTER_RELEASE)
        self._forget()

    def refuse_before_release(self) -> None:
        """Refuse writes since the batch was drawn: statistics of private records may have got into the model.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        _refuse_writes(self._before, _BEFORE_RELEASE)

    def refuse_before_update(self) -> None:
        """Refuse writes between the release and the update.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        _refuse_writes(self._before, _BEFORE_UPDATE)

    def _forget(self) -> None:
        self._before = None
        self._updated = None


def _refuse_writes(before: Saved | None, message: str) -> None:
    """Raise UnsupportedModuleError with names in a message where something was written to since then."""
    written = [] if before is None else before.written()
    if written:
        raise UnsupportedModuleError(message.format(names=", ".join(written)))
