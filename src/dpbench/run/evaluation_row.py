"""What stands beside the figures of an evaluation in every log: epsilon by each accountant, and the learning rate."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger

from dpbench.callback.strategy import epsilon_here
from dpbench.errors import ConfigurationError
from dpbench.runs.record import REPORTED
from dpbench.strategies import PrivateStrategy

_QUICK = "rdp"
_SHARE = 0.1  # of the training time that the other accountants may take
_COVERED = ("nonprivate/", "privacy/", "private/", "val/", "test/", "gan/", "optimizer/", "evaluation/")


class EvaluationRow(pl.Callback):
    """Hands epsilon and learning rates to loggers at the step at which an evaluation is logged.

    RDP takes a millisecond; the other accountants take a second, and are asked at the first evaluation and whenever
    they have taken less than a tenth of the training's time. At the end of the run all are there.

    Warns of metrics of a private training that look private and are not.

    Args:
        loggers: All but the run's own metrics.csv.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        super().__init__()
        self._loggers = list(loggers)
        self._started = time.monotonic()
        self._spent = 0.0
        self._known: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The time of the training begins."""
        self._started, self._spent = time.monotonic(), 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Say once of each metric from private records that its name does not say so."""
        new = trainer.logged_metrics.keys() - self._known
        self._known |= new
        if _private(trainer) is None:
            return
        for name in sorted(new):
            if name != "epoch" and not name.startswith(_COVERED):
                warnings.warn(
                    f"the metric {name} is logged from private training data and no epsilon covers it: call it "
                    f"nonprivate/{name}, so that nobody publishes it with the model.",
                    stacklevel=1,
                )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log beside what was measured."""
        self._known |= trainer.callback_metrics.keys()
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        strategy = _private(trainer)
        values = {} if strategy is None else self._epsilons(strategy)
        values |= learning_rates(optimizer.param_groups for optimizer in trainer.optimizers)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # by which Lightning logs the evaluation
        _log(self._loggers, values, step)

    def _epsilons(self, strategy: PrivateStrategy) -> dict[str, float]:
        found = {_QUICK: epsilon_here(strategy, _QUICK)}
        if self._spent <= _SHARE * (time.monotonic() - self._started):
            before = time.monotonic()
            for name in REPORTED:
                try:
                    found[name] = epsilon_here(strategy, name)
                except ConfigurationError:  # it does not cover the sampling
                    continue
            self._spent += time.monotonic() - before
        return {f"privacy/epsilon_{name}": value for name, value in found.items() if math.isfinite(value)}


def _private(trainer: pl.Trainer) -> PrivateStrategy | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((one for one in callbacks if isinstance(one, PrivateStrategy) and one.private), None)


def learning_rates(optimizers: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Learning rate of each optimizer, by the name of its setting; of further ones with a number.

    Args:
        optimizers: Parameter groups of each; the first group counts.

    >>> learning_rates([[{"lr": 0.1}], [{"lr": 0.2}]])
    {'optimizer/lr': 0.1, 'optimizer/lr_2': 0.2}
    """
    rates = [float(groups[0]["lr"]) for groups in optimizers if "lr" in groups[0]]
    return {f"optimizer/lr{'' if number == 1 else f'_{number}'}": rate for number, rate in enumerate(rates, 1)}


def log_end(loggers: Iterable[Logger], record: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Log the last epsilons and learning rates beside the last evaluation and the test.

    Args:
        loggers: All but the run's own metrics.csv.
        record: The content of result.json.
        checkpoint: The last one: optimizers may have been in another process.
    """
    epsilons = record["privacy"]["epsilon"].items()
    values = {f"privacy/epsilon_{name}": value for name, value in epsilons if value is not None}
    rates = learning_rates(state["param_groups"] for state in checkpoint["optimizer_states"])
    _log(loggers, values | rates, record["steps"])


def _log(loggers: Iterable[Logger], values: Mapping[str, float], step: int) -> None:
    for logger in loggers if values else ():
        logger.log_metrics(dict(values), step=step)
        logger.save()
