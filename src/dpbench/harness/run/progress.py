"""Progress bars of a run, and of the runs of a sweep or a table."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar
from tqdm import tqdm

from dpbench.harness.run.runtime import warn_in_one_line

_REFRESH_RUN = 0.25  # seconds
_REFRESH_RUNS = 2.0
_RUNS_BAR = "{desc} {bar:20} {n_fmt}/{total_fmt} [{elapsed}, left {remaining}]"
_CHATTER = (
    ".*does not have many workers.*",
    ".*GPU available but not used.*",
    ".*`srun` command is available.*",
    ".*treespec, LeafSpec.*",
    ".*smaller than the logging interval.*",
    ".*It is recommended to use `self.log.*",
)
"""Warnings of Lightning about itself."""


def quiet() -> None:
    """Silence Lightning's messages about itself, and print warnings as one line."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # as `cli.main` does; workers of a sweep do not pass there
    for pattern in _CHATTER:
        warnings.filterwarnings("ignore", message=pattern)
    warn_in_one_line()


def bars(trainer: Mapping[str, Any], show: bool | None = None) -> list[RunProgress]:
    """The bar of a training, if it may have one.

    Args:
        trainer: Options of Lightning's trainer, which refuses a bar where `enable_progress_bar` is false.
        show: True to draw it; None: if standard output is a terminal and this is no job of a queue.
    """
    if trainer.get("enable_progress_bar") is False:
        return []
    if show is None:
        show = sys.stdout.isatty() and "SLURM_JOB_ID" not in os.environ
    return [RunProgress(show)]


class RunProgress(TQDMProgressBar):
    """Lightning's bar with epsilon, loss, accuracies and the time left of the whole training.

    Args:
        enabled: True to draw the bar.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled
        self._refreshed = 0.0
        self._start_time = 0.0
        self._start_step = 0
        self._outputs: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Be quiet in spawned processes too."""
        super().setup(trainer, pl_module, stage)
        quiet()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print the noise of a private training, and open the bar."""
        super().on_train_start(trainer)
        self._start_time = time.monotonic()
        self._start_step = trainer.global_step
        if not self._enabled:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "private", False):
                tqdm.write(_noise_line(callback), file=sys.stderr)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance, a few times a second: figures on a GPU are waited for."""
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        if time.monotonic() - self._refreshed < _REFRESH_RUN and not is_last:
            return
        self._refreshed = time.monotonic()
        self._outputs = outputs
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, *_: Any) -> None:
        """Leave the terminal in order."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Metrics logged for the bar, such as epsilon and accuracies, with the loss and the time left."""
        figures: dict[str, Any] = super().get_metrics(trainer, pl_module)
        figures.pop("v_num", None)
        if isinstance(self._outputs, dict) and "loss" in self._outputs:
            figures["loss"] = float(self._outputs["loss"])
        made = trainer.global_step - self._start_step
        planned = trainer.estimated_stepping_batches
        if made and planned != math.inf:
            seconds = (time.monotonic() - self._start_time) * (planned - trainer.global_step) / made
            figures["left"] = str(timedelta(seconds=round(seconds)))
        return figures


def _noise_line(strategy: Any) -> str:
    """One line on the noise that a private strategy adds, which may have been solved for a target epsilon."""
    plan = strategy.mechanism.plan
    size = plan.sampling.expected_batch_size
    population = plan.sampling.population
    goal = f" for epsilon {strategy.target_epsilon:g}" if strategy.target_epsilon is not None else ""
    batch = f"expected batch size {size:g} of {population:,} records (sampling rate {size / population:.3g})"
    return f"noise multiplier {plan.noise_multiplier:.5g}{goal}, {batch}"


@contextmanager
def counting(total: int, count: Callable[[], int]) -> Iterator[None]:
    """Show in a terminal how many runs have finished while other processes make them.

    Args:
        total: Number of runs.
        count: Function that counts the finished runs.
    """
    stop = threading.Event()
    with tqdm(total=total, desc="runs", disable=None, bar_format=_RUNS_BAR) as bar:

        def watch() -> None:
            while not stop.wait(_REFRESH_RUNS):
                bar.n = count()
                bar.refresh()

        thread = threading.Thread(target=watch, daemon=True)
        if not bar.disable:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if not bar.disable:
                thread.join()
                bar.n = count()
