"""Private training by a plain loop: the same records, releases and ledger as in a Lightning Trainer, without one.

The loop draws each batch itself and shows none of it. The session, which a Trainer drives likewise, defines the records
and the checks of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from dpbench.callback import run_key
from dpbench.callback.lines import log_line
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.guards import EVERY_TRAINING, earlier_fits
from dpbench.guards.divergence import EVERY, refuse_diverged
from dpbench.guards.lots import require_lot_loader
from dpbench.guards.precision import refuse_precision
from dpbench.options import PositiveInt, checked_value
from dpbench.privacy.budget import ENDLESS, TrainingLength
from dpbench.privacy.processes import ALONE
from dpbench.records.training import Training, TrainingStep

Loss = Callable[[Any, Any], Tensor]
"""Called with (model, batch): the mean (or, with loss_reduction="sum", the sum) of the losses of a batch's records."""


class PrivateLoop:
    """Trains a module privately, batch by batch, in a `for` loop of yours.

    Guarantee: that of the strategy, for all updates together; the loop computes nothing else from the records. Between
    two batches the model is yours: evaluate it, save it, step a schedule.

    Args:
        model: The network to train, on its device and in the mode (train or eval, of each part) of the training.
        optimizer: An optimizer over all of its trainable parameters.
        loader: The loader that draws batches.
        strategy: A new strategy, with its `ledger=`.
        loss: Function of the model and a batch. A record's gradient must be a function of that record alone; to check
            this, some batches are run again in parts, so the function may be called more than once a batch.
        steps: Number of batches; fewer are trained if the budget is spent before.

    Raises:
        ConfigurationError: An option is not private, or needs a Lightning Trainer.

    Example:
        >>> loop = PrivateLoop(model, optimizer, loader, strategy, loss, steps=200)  # doctest: +SKIP
        >>> for step in loop:  # doctest: +SKIP
        ...     schedule.step()
        >>> loop.epsilon()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: PrivateDataLoader,
        strategy: PrivateStrategy,
        loss: Loss,
        steps: int,
    ) -> None:
        _refuse_other_kinds(model, strategy)
        self._strategy = strategy
        self._number = checked_value(PositiveInt, steps, "steps")
        self._loader = require_lot_loader(loader)
        self._steps = PrivateSteps(LoopTraining(model, loss, optimizer), strategy)

    def epsilon(self, accountant: str | None = None) -> float:
        """Epsilon of everything released so far, at the strategy's δ and by its accountant unless another is named.

        Raises:
            ConfigurationError: Nothing was trained yet.
        """
        return self._strategy.epsilon(accountant)

    def __iter__(self) -> Iterator[int]:
        """Train: after each release and its update, its number from 1 on."""
        steps = self._steps
        ledger = self._strategy.ledger_path
        assert ledger is not None
        refuse_second_training(self._strategy)
        try:
            steps.check()
            steps.begin(self._loader, ledger, TrainingLength(self._number))
            batches = chain.from_iterable(repeat(self._loader))
            while not steps.is_over:
                steps.release(next(batches))
                steps.training.optimizer.step()
                steps.close()
                yield self._strategy.releases
        finally:
            steps.end()


class PrivateSteps:
    """The private steps of a training, for code that drives them in a loop of its own.

        check → begin → (release → the optimizer's step → close)* → end

    Args:
        training: The model, its loss function and its optimizer.
        strategy: The strategy of its releases.

    Attributes:
        training: The model, its loss function and its optimizer.
        session: The session of the training.
        is_over: True once all steps are made, or the budget is spent.
    """

    def __init__(self, training: LoopTraining, strategy: PrivateStrategy) -> None:
        self.training = training
        self.session = strategy.session(EVERY_TRAINING)
        self.is_over = False
        self._strategy = strategy
        self._settings: run_key.Settings | None = None
        self._length = ENDLESS

    def check(self) -> None:
        """Refuse all that shows before a record is read; read the settings, before a checkpoint moves them on."""
        self.session.check(self.training)
        if self.session.releases.may_draw_again:
            self._settings = run_key.settings_of(self.training, self._strategy)

    def begin(
        self,
        loader: PrivateDataLoader,
        ledger: Path,
        length: TrainingLength,
        resumes: bool = False,
    ) -> None:
        """Fix the plan and open the ledger.

        Args:
            loader: The loader that draws batches.
            ledger: Path of the ledger.
            length: Planned and past steps.
            resumes: True if the strategy has the state of a checkpoint.
        """
        session = self.session
        training = self.training
        releases = session.releases
        self._length = length
        if not resumes:
            releases.reset()
        key = None
        key_of = None
        settings, self._settings = self._settings, None  # which hold on to all that they were made of
        if settings is not None:
            releases.first_weights = releases.first_weights or run_key.weights_digest(training.module)
            key, key_of, _ = run_key.keys_of(training, self._strategy, settings, releases.first_weights, loader)
        session.attach()
        session.acquire(loader)
        before = earlier_fits.other_record(training.module, ledger, releases.budget.after)
        if before is not None:
            training.warn(
                f"this model was already trained in the run recorded in {before}: its epsilon is that of both ledgers "
                f"together (dpbench account {before} {ledger})."
            )
        session.begin(ALONE, key, ledger, length, {}, key_of)
        self._strategy.take_solution()

    def release(self, batch: Any) -> None:
        """Release the gradients of a batch to `p.grad`."""
        session = self.session
        batch = move_data_to_device(batch, self.training.device)
        session.open(batch, rank=0)
        self.training.gradients(batch, session.releases.num_releases)
        session.release()

    def close(self) -> None:
        """End a batch after its update.

        Raises:
            ConfigurationError: The weights have diverged.
        """
        training = self.training
        releases = self.session.releases
        for function in training.after_lot:
            function()
        self.session.close()
        self._strategy.note_unused_lot()
        number = releases.num_releases
        planned = self._length.total_steps
        self.is_over = number == planned or releases.budget.exhausted
        if self.is_over or number % EVERY == 0:
            refuse_diverged(training.module, releases)
        if self.is_over and number < planned:
            training.warn(f"stopped after {number} of {planned} steps: one more would cost more than the budget.")

    def end(self) -> None:
        """Give model and batches back, also after an error."""
        self.session.end()


def refuse_second_training(strategy: PrivateStrategy) -> None:
    """Raise ConfigurationError if a strategy has trained already."""
    if strategy.has_trained:
        raise ConfigurationError(
            "this strategy has already trained: make a new one, with another ledger, for a new training. Their "
            "releases add up (dpbench account LEDGER LEDGER)."
        )


class ModelWithLoss(nn.Module):
    """A model and its loss function; as one module, so that guards see all that the function can reach.

    Args:
        model: The network to train.
        loss: Function of the model and a batch.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss of a batch."""
        return self.loss(self.model, batch)


class LoopTraining(Training):
    """The training of a model by a loop.

    Args:
        model: The network to train.
        loss: Function of the model and a batch.
        optimizer: An optimizer over all of its trainable parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: Optimizer) -> None:
        super().__init__(ModelWithLoss(model, loss))
        self.optimizer = optimizer

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The one optimizer."""
        return [self.optimizer]

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.module.parameters(), torch.zeros(())).device

    @property
    def own_step(self) -> TrainingStep:
        """The loss of a batch."""
        return self.module.training_step  # type: ignore[no-any-return]

    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        """Have the loop call these; note the mode in which each part of the model is trained."""
        self._step = step
        self._backward = backward
        self._modes = {part: part.training for part in self.module.modules()}

    def inform(self, text: str) -> None:
        """Log a line, as a Trainer does."""
        log_line(text)

    def gradients(self, batch: Any, number: int) -> None:
        """Run the step and its backward pass on the open batch, in the modes of the beginning.

        Raises:
            ConfigurationError: The loss function gives no loss that can be differentiated.
        """
        for part, mode in self._modes.items():  # whatever an evaluation has left
            part.training = mode
        if torch.get_autocast_dtype(self.device.type) == torch.float16 and torch.is_autocast_enabled(self.device.type):
            refuse_precision("float16")  # whose losses are scaled, so that clipping would be wrong
        with torch.enable_grad():
            loss = self._step(batch, number)
            if not isinstance(loss, Tensor):
                raise ConfigurationError(
                    f"the loss function returned a {type(loss).__name__}: return the loss, one tensor, for every batch."
                )
            if torch.is_inference_mode_enabled() or any(p.grad is not None for p in self.module.parameters()):
                raise ConfigurationError(
                    "the loss has no gradient, or was already differentiated: leave backward() to the loop, and do not "
                    "run the loop in torch.inference_mode()."
                )
            self._backward(loss)


def require_private(strategy: object) -> PrivateStrategy:
    """The strategy, if it is one of a private training; else a ConfigurationError."""
    if not isinstance(strategy, PrivateStrategy):
        raise ConfigurationError(f"{type(strategy).__name__} is not a private strategy: pass DPSGD(...), for example.")
    return strategy


def _refuse_other_kinds(model: object, strategy: object) -> None:
    """Raise ConfigurationError if the model or the strategy is of a kind that a loop does not take."""
    strategy = require_private(strategy)
    if strategy.ledger_path is None:
        raise ConfigurationError(
            f"set the path of the ledger: {type(strategy).__name__}(..., ledger='run/ledger.jsonl'); there is no log "
            "folder without a Trainer."
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigurationError("PrivateLoop does not support several processes: use a Lightning Trainer.")
    if isinstance(model, pl.LightningModule) or not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"PrivateLoop trains a torch.nn.Module by a loss function, not a {type(model).__name__}: a LightningModule "
            "trains in a Lightning Trainer, with callbacks=[strategy]."
        )
