"""Private training by a plain loop: the same records, releases and ledger as in a Lightning Trainer, without one.

The loop draws each lot itself and hands nothing of it out, but to a function that is called `nonprivate`. What a record
is, and all that is checked of lots, is that of the session, which a Trainer drives likewise.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from dpbench.callback import run_key
from dpbench.callback.lines import log_line
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.guards import LOOP, earlier_fits
from dpbench.guards.divergence import EVERY, refuse_diverged
from dpbench.guards.loss_function import held_by
from dpbench.guards.lots import OTHERS_TOOK_LOTS, require_lot_loader
from dpbench.guards.precision import refuse_precision
from dpbench.options import PositiveInt, checked_value
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.processes import ALONE
from dpbench.records.examples import Examples
from dpbench.records.source import SECOND_RELEASE
from dpbench.records.training import Training, TrainingStep

Loss = Callable[[Any, Any], Tensor]
"""Called with (model, batch): the mean (or, with loss_reduction="sum", the sum) of the losses of a lot's records."""
_OVER = object()  # the epoch


class PrivateLoop:
    """Trains a module privately, lot by lot, in a `for` loop of yours.

    Guarantee: that of the strategy, for all updates together; the loop makes nothing else of the records. Between two
    lots the model is yours: evaluate it, save it, move a schedule on.

    Args:
        model: Trained; on the device where it is to be trained, in the mode (train or eval, of each part) in which it
            is to be trained.
        optimizer: Over all of its trainable parameters.
        loader: Draws lots.
        strategy: What is done with them, new, with its `ledger=`.
        loss: Function of the model and a batch. A record's gradient must be a function of that record alone; some
            lots are run again in parts to find out, so that the function may be called more often than once a lot.
        steps: Number of lots; fewer where the budget is spent before.
        nonprivate: For debugging: called after each update with its number, the batch, and its loss (of the last piece,
            where `max_physical_batch_size` cuts it). No epsilon covers what it sees.

    Raises:
        ConfigurationError: Something does not go with private training, or needs a Lightning Trainer.

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
        loader: LotLoader,
        strategy: PrivateStrategy,
        loss: Loss,
        steps: int,
        nonprivate: Callable[[int, Any, Tensor], object] | None = None,
    ) -> None:
        _refuse_other_kinds(model, optimizer, strategy)
        _refuse_what_needs_a_trainer(strategy)
        self._strategy = strategy
        self._steps = checked_value(PositiveInt, steps, "steps")
        self._loader = require_lot_loader(loader)
        self._training = LoopTraining(model, loss, optimizer)
        self._session = strategy.session(LOOP)
        if nonprivate is not None and not callable(nonprivate):
            raise ConfigurationError(f"nonprivate must be a function of (step, batch, loss), not {nonprivate!r}.")
        self._nonprivate = nonprivate

    def epsilon(self, accountant: str | None = None) -> float:
        """Epsilon of everything released so far, at the strategy's δ and by its accountant unless another is named.

        Raises:
            ConfigurationError: Nothing was trained yet.
        """
        return self._strategy.epsilon(accountant)

    def __iter__(self) -> Iterator[int]:
        """Train: after each release and its update, its number from 1 on."""
        releases = self._session.releases
        if self._strategy.has_trained:
            raise ConfigurationError(
                "this strategy has trained already: make a new one, with another ledger, and a new loop. What both "
                "have released counts together (dpbench account LEDGER LEDGER)."
            )
        try:
            self._begin()
            batches: Iterator[Any] = iter(())
            while releases.num_releases < self._steps and not releases.budget.exhausted:
                self._refuse_other_lots()
                batch = next(batches, _OVER)
                if batch is _OVER:
                    batches = iter(self._loader)
                    batch = next(batches)
                self._one_lot(batch)
                del batch
                self._look_at_divergence()
                yield releases.num_releases
            steps = releases.num_releases
            if steps < self._steps:
                warnings.warn(
                    f"stopped after {steps} of {self._steps} steps: one more would cost more than the budget.",
                    stacklevel=2,
                )
        except GeneratorExit:  # the loop was left
            self._session.conclude()
            raise
        finally:
            self._session.end()

    def _begin(self) -> None:
        strategy = self._strategy
        session = self._session
        training = self._training
        assert strategy.ledger_path is not None
        session.check(training)
        training.module.look_at_loss()
        key_of = self._key_of() if session.releases.may_draw_again else int
        key = None if strategy.seed is None else key_of(strategy.seed)
        session.attach()
        session.acquire(self._loader)
        session.releases.reset()
        after = session.releases.budget.after
        before = earlier_fits.other_record(training.module, strategy.ledger_path, after)
        if before is not None:
            warnings.warn(
                f"the model holds what {before} recorded, too: its epsilon is that of both ledgers together (dpbench "
                f"account {before} {strategy.ledger_path}).",
                stacklevel=3,
            )
        session.begin(ALONE, key, strategy.ledger_path, TrainingLength(self._steps), {}, key_of)
        strategy.take_solution()
        if self._nonprivate is not None:
            warnings.warn(
                "nonprivate=... sees batches and losses that no epsilon covers: for debugging, never for a model that "
                "is published or chosen by them.",
                stacklevel=3,
            )

    def _key_of(self) -> Callable[[int], int]:
        """Seed or kept key → key of the run."""
        settings = run_key.settings_of(self._training, self._strategy)
        weights = run_key.weights_digest(self._training.module)
        return lambda seed: run_key.run_key(seed, settings, weights, self._loader)[0]

    def _refuse_other_lots(self) -> None:
        """Refuse that the body of the loop draws lots."""
        if self._loader.lots.position != self._session.releases.num_releases:
            raise ConfigurationError(OTHERS_TOOK_LOTS)

    def _one_lot(self, batch: Any) -> None:
        """One lot, one release, one update."""
        session = self._session
        training = self._training
        training.restore_modes()
        batch = training.to_device(batch)
        session.open(batch, rank=0)
        loss = training.gradients(batch, session.releases.num_releases)
        session.release()
        training.update()
        session.close()
        if self._nonprivate is not None:  # last, when the lot can no longer be changed or left out by what it shows
            before = run_key.weights_digest(training.module)
            self._nonprivate(session.releases.num_releases, batch, loss)
            if run_key.weights_digest(training.module) != before:
                raise ConfigurationError(
                    "nonprivate=... has changed the model, which may hold records now that no epsilon covers: it may "
                    "look, not write."
                )

    def _look_at_divergence(self) -> None:
        releases = self._session.releases
        self._strategy.note_unused_lot()
        is_last = releases.num_releases == self._steps or releases.budget.exhausted
        if is_last or releases.num_releases % EVERY == 0:
            refuse_diverged(self._training.module, self._training.optimizers, releases)


class ModelWithLoss(nn.Module):
    """A model and its loss function; as one module, so that guards see all that the function can reach.

    Args:
        model: Trained.
        loss: Function of the model and a batch.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._held: list[Any] = []
        # Settings of every LightningModule, which this once was: keys of seeded loops cover them, and its name below.
        self.allow_zero_length_dataloader_with_multiple_devices = False
        self.prepare_data_per_node = True

    @property
    def loss(self) -> Loss:
        """The loss function."""
        loss: Any = self._loss
        return loss  # type: ignore[no-any-return]

    def look_at_loss(self) -> None:
        """Make a part of this module what the function holds, for those who look what one lot leaves for the next."""
        self._held = held_by(self.loss)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss of a batch."""
        return self.loss(self.model, batch)


ModelWithLoss.__qualname__ = "_Module"


class LoopTraining(Training):
    """The training of a model by a loop.

    Args:
        model: Trained.
        loss: Function of the model and a batch.
        optimizer: Over all of its trainable parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: Optimizer) -> None:
        module = ModelWithLoss(model, loss)
        super().__init__(module)
        self.optimizer = optimizer
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._step: TrainingStep = module.training_step
        self._backward: Callable[..., None] = torch.autograd.backward
        self._modes: dict[nn.Module, bool] = {}

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The one optimizer."""
        return [self.optimizer]

    @property
    def device(self) -> torch.device:
        """Where the model was when the loop was made."""
        return self._device

    @property
    def own_step(self) -> TrainingStep:
        """The loss of a batch."""
        return self.module.training_step  # type: ignore[no-any-return]

    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        """Have the loop call these; note the mode in which each part of the model is trained."""
        self._step = step
        self._backward = backward
        self._modes = {part: part.training for part in self.module.modules()}

    def to_device(self, batch: Any) -> Any:
        """A batch, where the model is."""
        return move_data_to_device(batch, self._device)

    def gradients(self, batch: Any, number: int) -> Tensor:
        """The step and its backward pass on a lot that is open.

        Returns:
            The loss, of which no epsilon is known.

        Raises:
            ConfigurationError: The loss function gives no loss that can be differentiated.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        _refuse_scaled_losses(self._device.type)
        with torch.enable_grad():
            loss = self._step(batch, number)
            for function in self.after_zero_grad:
                function()
            if not isinstance(loss, Tensor):
                raise ConfigurationError(
                    f"the loss function gave a {type(loss).__name__}: return the loss, one tensor, for every batch."
                )
            if torch.is_inference_mode_enabled() or any(parameter.grad is not None for parameter in parameters):
                raise ConfigurationError(
                    "the loss has no gradient, or was differentiated already: leave backward() to the loop, and do not "
                    "run the loop in torch.inference_mode()."
                )
            self._backward(loss)
        return loss.detach()

    def inform(self, text: str) -> None:
        """Log a line, as a Trainer does."""
        log_line(text)

    def update(self) -> None:
        """One step of the optimizer, after which the lot is out of sight."""
        self.optimizer.step()
        for function in self.after_lot:
            function()

    def restore_modes(self) -> None:
        """Train in the modes of the beginning, whatever an evaluation has left."""
        for part, mode in self._modes.items():
            part.training = mode


def _refuse_scaled_losses(device: str) -> None:
    """Raise ConfigurationError for autocast to float16, whose losses are scaled, so that clipping would be wrong."""
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        refuse_precision("float16")


def _refuse_other_kinds(model: object, optimizer: object, strategy: object) -> None:
    """Raise ConfigurationError where something is not what a loop trains, or trains by."""
    if not isinstance(strategy, PrivateStrategy):
        raise ConfigurationError(f"{type(strategy).__name__} is not a private strategy: pass DPSGD(...), for example.")
    if isinstance(model, pl.LightningModule) or not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"PrivateLoop trains a torch.nn.Module by a loss function, not a {type(model).__name__}: a LightningModule "
            "trains in a Lightning Trainer, with callbacks=[strategy]."
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(SECOND_RELEASE)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"the optimizer must be one of torch.optim's kind, not a {type(optimizer).__name__}.")
    try:
        # Of the class: a learning rate schedule puts a function on the object, whose signature names the object, too.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise ConfigurationError(
            f"PrivateLoop calls step() without a closure, which {type(optimizer).__name__}.step requires: give it a "
            "default (closure=None). An optimizer that reads the loss of a batch cannot train privately."
        ) from None


def _refuse_what_needs_a_trainer(strategy: PrivateStrategy) -> None:
    """Raise ConfigurationError for options that ask for more than one process and a loss function."""
    if strategy.ledger_path is None:
        raise ConfigurationError(
            f"set the path of the ledger: {type(strategy).__name__}(..., ledger='run/ledger.jsonl'); there is no log "
            "folder without a Trainer."
        )
    needs = {
        "records": not isinstance(strategy._source, Examples),
        "metrics": strategy.recipe.metrics is not None,
        "bounds that are found on noise (give initial_max_grad_norm)": strategy.recipe.bounds_from_noise is not None,
        "several processes": dist.is_initialized() and dist.get_world_size() > 1,
    }
    for name, is_needed in needs.items():
        if is_needed:
            raise ConfigurationError(f"PrivateLoop does not support {name}: use a Lightning Trainer.")
