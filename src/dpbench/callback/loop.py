"""Private training by a plain loop: the same records, releases and ledger as in a Lightning Trainer, without one.

The loop draws each lot itself and hands nothing of it out. What a record is, and all that is checked of lots, is the
source's (`records.examples`), which sees a module with a `training_step` here as it does there.
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
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.guards import LOOP, earlier_fits
from dpbench.guards.divergence import EVERY, refuse_diverged
from dpbench.guards.loss_function import held_by
from dpbench.guards.lots import OTHERS_TOOK_LOTS, require_lot_loader
from dpbench.guards.precision import refuse_precision
from dpbench.privacy.budget import Horizon
from dpbench.privacy.processes import ALONE
from dpbench.records.examples import Examples
from dpbench.records.source import SECOND_RELEASE
from dpbench.records.training import Training, TrainingStep
from dpbench.session.executors import executor_of
from dpbench.session.session import PrivateSession

_OVER = object()  # the epoch
Loss = Callable[[Any, Any], Tensor]
"""Called with (model, batch): the mean (or, with loss_reduction="sum", the sum) of the losses of a lot's records."""


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
    ) -> None:
        _refuse_other_kinds(model, optimizer, strategy)
        _refuse_what_needs_a_trainer(strategy)
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigurationError(f"steps must be a whole number from 1 on, not {steps!r}.")
        self._strategy = strategy
        self._optimizer = optimizer
        self._steps = steps
        self._loader = require_lot_loader(loader)
        self._training = _LoopTraining(_Module(model, loss), optimizer)
        self._session = PrivateSession(
            strategy._releases,
            strategy._source,
            LOOP,
            strategy.audit,
            strategy.delta,
            executor_of(strategy.executor),
        )
        self._modes: dict[nn.Module, bool] = {}
        self._trains: list[int] = []

    def epsilon(self, accountant: str = "rdp") -> float:
        """Epsilon of everything released so far, at the strategy's δ.

        Raises:
            ConfigurationError: Nothing was trained yet.
        """
        return self._strategy.epsilon(accountant)

    def __iter__(self) -> Iterator[int]:
        """Train: after each release and its update, its number from 1 on."""
        strategy = self._strategy
        releases = strategy._releases
        if releases.made or strategy._session.is_attached or releases.budget.path is not None:
            raise ConfigurationError(
                "this strategy has trained already: make a new one, with another ledger, and a new loop. What both "
                "have released counts together (dpbench account LEDGER LEDGER)."
            )
        try:
            self._begin()
            batches: Iterator[Any] = iter(())
            while releases.made < self._steps and not releases.budget.exhausted:
                self._refuse_changes()
                batch = next(batches, _OVER)
                if batch is _OVER:
                    self._session.refuse_skipped_lot()
                    batches = iter(self._loader)
                    batch = next(batches)
                self._one_lot(batch)
                del batch
                strategy._unused_lots.note(releases.mechanism, strategy._source)
                if releases.made == self._steps or releases.budget.exhausted or releases.made % EVERY == 0:
                    refuse_diverged(self._training.module, [self._optimizer], releases)
                yield releases.made
            if releases.made < self._steps:
                warnings.warn(
                    f"stopped after {releases.made} of {self._steps} steps: one more would cost more than the budget.",
                    stacklevel=2,
                )
        finally:
            self._session.end()

    def _begin(self) -> None:
        strategy = self._strategy
        session = self._session
        module = self._training.module
        assert strategy.ledger_path is not None
        session.check(self._training)
        module.look_at_loss()
        self._modes = {part: part.training for part in module.modules()}
        key = self._run_key()
        session.attach()
        session.acquire(self._loader)
        strategy._releases.forget()
        if (before := earlier_fits.other_record(module, strategy.ledger_path)) is not None:
            warnings.warn(
                f"the model holds what {before} recorded, too: its epsilon is that of both ledgers together (dpbench "
                f"account {before} {strategy.ledger_path}).",
                stacklevel=3,
            )
        session.begin(ALONE, key, strategy.ledger_path, Horizon(self._steps), {})
        strategy._set_solved("noise_multiplier", strategy._releases.noise_multiplier)
        self._trains = self._trainable()

    def _run_key(self) -> int | None:
        """Key of a seeded run; None without a seed."""
        strategy = self._strategy
        if strategy.seed is None:
            return None
        settings = run_key.settings_of(self._training, strategy)
        weights = run_key.weights_digest(self._training.module)
        return run_key.run_key(strategy.seed, settings, weights, self._loader)[0]

    def _trainable(self) -> list[int]:
        """What is trained, and what the optimizer moves."""
        moved = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [*(id(p) for p in self._training.module.parameters() if p.requires_grad), *map(id, moved)]

    def _refuse_changes(self) -> None:
        """Refuse what the body of the loop may not do between two lots."""
        if self._loader.lots.position != self._strategy._releases.made:
            raise ConfigurationError(OTHERS_TOOK_LOTS)
        if self._trainable() != self._trains:
            raise ConfigurationError(
                "the trainable parameters, or those of the optimizer, are others than when the loop began: freeze, add "
                "and replace them before it, or train on with a new strategy, ledger and loop (dpbench account LEDGER "
                "LEDGER tells what both cost)."
            )

    def _one_lot(self, batch: Any) -> None:
        """One lot, one release, one update."""
        session = self._session
        training = self._training
        parameters = session.trained.parameters
        _refuse_scaled_losses(parameters[0].device.type)
        for part, mode in self._modes.items():
            part.training = mode  # whatever an evaluation has left
        batch = training.to_device(batch)
        session.open(batch, rank=0)
        with torch.enable_grad():
            loss = training.step(batch, self._strategy.releases)
            training.clear_gradients()
            if not isinstance(loss, Tensor):
                raise ConfigurationError(
                    f"the loss function gave a {type(loss).__name__}: return the loss, one tensor, for every lot."
                )
            if not loss.requires_grad or any(parameter.grad is not None for parameter in parameters):
                raise ConfigurationError(
                    "the loss has no gradient, or was differentiated already: return it undetached, leave backward() "
                    "to the loop, and do not run the loop in torch.inference_mode()."
                )
            training.backward(loss)
        session.release()
        self._optimizer.step()
        training.end_lot()
        session.close()


class _Module(nn.Module):
    """A model and its loss; as one module, so that all that the loss function holds is looked at too."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._held: list[Any] = []
        # Settings of every LightningModule. This one was one: the keys of seeded loops cover them.
        self.allow_zero_length_dataloader_with_multiple_devices = False
        self.prepare_data_per_node = True

    @property
    def loss(self) -> Loss:
        """The loss function."""
        loss: Any = self._loss
        return loss  # type: ignore[no-any-return]

    def look_at_loss(self) -> None:
        """Let those who check what one lot leaves for the next see what the function holds."""
        self._held = held_by(self.loss)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.model, batch)


class _LoopTraining(Training):
    """The training of a module by a loop, in one process."""

    def __init__(self, module: _Module, optimizer: Optimizer) -> None:
        super().__init__(module)
        self._optimizers = [optimizer]
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.step: TrainingStep = module.training_step
        self.backward: Callable[..., None] = torch.autograd.backward

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The one optimizer."""
        return self._optimizers

    @property
    def device(self) -> torch.device:
        """Where the model was when the loop was made."""
        return self._device

    @property
    def own_step(self) -> TrainingStep:
        """The loss of a batch."""
        return self.module.training_step  # type: ignore[no-any-return]

    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        """Have the loop call these."""
        self.step = step
        self.backward = backward

    def to_device(self, batch: Any) -> Any:
        """A batch, where the model is."""
        return move_data_to_device(batch, self._device)

    def clear_gradients(self) -> None:
        """The moment between the step and its backward pass, at which no lot is in sight."""
        for function in self.after_zero_grad:
            function()

    def end_lot(self) -> None:
        """The moment after an update."""
        for function in self.after_lot:
            function()


def _refuse_other_kinds(model: object, optimizer: object, strategy: object) -> None:
    if not isinstance(strategy, PrivateStrategy):
        raise ConfigurationError(f"{type(strategy).__name__} is no private strategy: give a DPSGD(...), say.")
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
        inspect.signature(optimizer.step).bind()
    except TypeError:
        raise ConfigurationError(
            f"PrivateLoop calls step() without a closure, which {type(optimizer).__name__}.step asks for: give it a "
            "default (closure=None). An optimizer that reads the loss of a lot cannot train privately."
        ) from None


def _refuse_what_needs_a_trainer(strategy: PrivateStrategy) -> None:
    """Refuse options that ask for more than one process and a loss function."""
    if strategy.ledger_path is None:
        raise ConfigurationError(
            f"say where the ledger goes: {type(strategy).__name__}(..., ledger='run/ledger.jsonl'); there is no log "
            "folder without a Trainer."
        )
    needs = {
        "records": not isinstance(strategy._source, Examples),
        "metrics": strategy.recipe.metrics is not None,
        "bounds that are found on noise (give initial_max_grad_norm)": strategy.recipe.bounds_from_noise is not None,
        "several processes": dist.is_initialized() and dist.get_world_size() > 1,
    }
    if asked := [name for name, there in needs.items() if there]:
        raise ConfigurationError(f"PrivateLoop does without {asked[0]}: train in a Lightning Trainer.")


def _refuse_scaled_losses(device: str) -> None:
    """Raise ConfigurationError for autocast to float16, whose losses are scaled, so that clipping would be wrong."""
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        refuse_precision("float16")
