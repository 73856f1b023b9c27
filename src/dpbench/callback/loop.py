"""Private training by a plain loop: the same records, releases and ledger as in a Lightning Trainer, without one.

The loop draws each lot itself and hands nothing of it out. What a record is, and all that is checked of lots, is the
source's (`records.examples`), which sees a module with a `training_step` here as it does there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from dpbench.callback import earlier_fits, guards, run_key
from dpbench.callback.divergence import EVERY, refuse_diverged
from dpbench.callback.loss_function import held_by, refuse_hidden_state
from dpbench.callback.session import PrivateSession
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.budget import Horizon
from dpbench.privacy.processes import ALONE
from dpbench.records.examples import SECOND_RELEASE, Examples

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
        self._strategy, self._optimizer, self._steps = strategy, optimizer, steps
        self._module, self._loss = _Module(model, loss), loss
        self._trainer = _trainer_of(optimizer, loader)
        self._loader = guards.require_lot_loader(self._trainer)
        self._modes: dict[nn.Module, bool] = {}
        self._session = PrivateSession(strategy._releases, strategy._source, strategy.audit, strategy.delta)
        self._trains: list[int] = []

    def epsilon(self, accountant: str = "rdp") -> float:
        """Epsilon of everything released so far, at the strategy's δ.

        Raises:
            ConfigurationError: Nothing was trained yet.
        """
        return self._strategy.epsilon(accountant)

    def __iter__(self) -> Iterator[int]:
        """Train: after each release and its update, its number from 1 on."""
        strategy, releases = self._strategy, self._strategy._releases
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
                    if strategy.releases:
                        strategy._source.finish_epoch()
                    batches = iter(self._loader)
                    batch = next(batches)
                self._one_lot(batch)
                del batch
                strategy._unused_lots.note(releases.mechanism, strategy._source)
                if releases.made == self._steps or releases.budget.exhausted or releases.made % EVERY == 0:
                    refuse_diverged(self._module, [self._optimizer], releases)
                yield releases.made
            if releases.made < self._steps:
                warnings.warn(
                    f"stopped after {releases.made} of {self._steps} steps: one more would cost more than the budget.",
                    stacklevel=2,
                )
        finally:
            self._session.end(self._module)

    def _begin(self) -> None:
        strategy, session, module = self._strategy, self._session, self._module
        session.acquire(self._loader)
        module.look_at_loss()
        self._modes = {part: part.training for part in module.modules()}
        strategy._source.check(self._trainer, module)
        key = self._run_key()
        session.attach(self._trainer, module)
        strategy._releases.forget()
        assert strategy.ledger_path is not None
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
        settings = run_key.settings_of(self._trainer, self._module, strategy, self._loss)
        return run_key.run_key(strategy.seed, settings, run_key.weights_digest(self._module), self._loader)[0]

    def _trainable(self) -> list[int]:
        """What is trained, and what the optimizer moves."""
        moved = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [*(id(p) for p in self._module.parameters() if p.requires_grad), *map(id, moved)]

    def _refuse_changes(self) -> None:
        """Refuse what the body of the loop may not do between two lots."""
        if self._loader.lots.position != self._strategy._releases.made:
            raise ConfigurationError(guards.OTHERS_TOOK_LOTS)
        if self._trainable() != self._trains:
            raise ConfigurationError(
                "the trainable parameters, or those of the optimizer, are others than when the loop began: freeze, add "
                "and replace them before it, or train on with a new strategy, ledger and loop (dpbench account LEDGER "
                "LEDGER tells what both cost)."
            )

    def _one_lot(self, batch: Any) -> None:
        """One lot, one release, one update."""
        session, module, step = self._session, self._module, self._strategy.releases
        parameters = session.attached.trained.parameters
        _refuse_scaled_losses(parameters[0].device.type)
        for part, mode in self._modes.items():
            part.training = mode  # whatever an evaluation has left
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        session.open(batch, module.device, 0)
        with torch.enable_grad():
            loss = module.training_step(batch, step)
            module.on_before_zero_grad(self._optimizer)
            if not isinstance(loss, Tensor):
                raise ConfigurationError(
                    f"the loss function gave a {type(loss).__name__}: return the loss, one tensor, for every lot."
                )
            if not loss.requires_grad or any(parameter.grad is not None for parameter in parameters):
                raise ConfigurationError(
                    "the loss has no gradient, or was differentiated already: return it undetached, leave backward() "
                    "to the loop, and do not run the loop in torch.inference_mode()."
                )
            module.backward(loss)
        session.release()
        self._optimizer.step()
        module.on_train_batch_end(None, batch, self._strategy.releases)


class _Module(pl.LightningModule):
    """A model and its loss, as a source of records knows them."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss
        self._held: list[Any] = []
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def look_at_loss(self) -> None:
        """Let those who check what one lot leaves for the next see what the function holds; refuse what hides it."""
        refuse_hidden_state(self._loss, self.model)
        self._held = held_by(self._loss)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(self.model, batch)


def _trainer_of(optimizer: Optimizer, loader: LotLoader) -> Any:
    """What a source of records, and the guards of its lots, ask of a trainer; of one process."""
    return SimpleNamespace(
        optimizers=[optimizer],
        train_dataloader=loader,
        limit_train_batches=1.0,
        overfit_batches=0.0,
        global_rank=0,
        world_size=1,
        loggers=[],
        lr_scheduler_configs=[],
        should_stop=False,
    )


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
        guards.refuse_precision("float16")
