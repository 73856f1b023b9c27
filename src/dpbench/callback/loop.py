"""Private training by a plain loop: the same records, releases and ledger as in a Lightning Trainer, without one.

The loop draws each lot itself and hands nothing of it out. What a record is, and all that is checked of lots, is that
of the session, which a Trainer drives likewise.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpbench.callback import run_key
from dpbench.callback.loop_training import LoopTraining, Loss, refuse_other_kinds, refuse_what_needs_a_trainer
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.guards import LOOP, earlier_fits
from dpbench.guards.divergence import EVERY, refuse_diverged
from dpbench.guards.lots import OTHERS_TOOK_LOTS, require_lot_loader
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.processes import ALONE

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
        refuse_other_kinds(model, optimizer, strategy)
        refuse_what_needs_a_trainer(strategy)
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigurationError(f"steps must be a whole number from 1 on, not {steps!r}.")
        self._strategy = strategy
        self._steps = steps
        self._loader = require_lot_loader(loader)
        self._training = LoopTraining(model, loss, optimizer)
        self._session = strategy.session(LOOP)

    def epsilon(self, accountant: str = "rdp") -> float:
        """Epsilon of everything released so far, at the strategy's δ.

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
        finally:
            self._session.end()

    def _begin(self) -> None:
        strategy = self._strategy
        session = self._session
        training = self._training
        assert strategy.ledger_path is not None
        session.check(training)
        training.module.look_at_loss()
        key = self._run_key()
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
        session.begin(ALONE, key, strategy.ledger_path, TrainingLength(self._steps), metric_sizes={})
        strategy.take_solution()

    def _run_key(self) -> int | None:
        """Key of a seeded run; None without a seed."""
        strategy = self._strategy
        if strategy.seed is None:
            return None
        settings = run_key.settings_of(self._training, strategy)
        weights = run_key.weights_digest(self._training.module)
        key, _ = run_key.run_key(strategy.seed, settings, weights, self._loader)
        return key

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
        training.gradients(batch, session.releases.num_releases)
        session.release()
        training.update()
        session.close()

    def _look_at_divergence(self) -> None:
        releases = self._session.releases
        self._strategy.note_unused_lot()
        is_last = releases.num_releases == self._steps or releases.budget.exhausted
        if is_last or releases.num_releases % EVERY == 0:
            refuse_diverged(self._training.module, self._training.optimizers, releases)
