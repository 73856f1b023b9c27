"""What people see while they wait: one progress bar for the whole run, and one for each long test."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from tqdm import tqdm

_SHORT = {"val/accuracy": "val", "test/accuracy": "test"}
_BAR = "{percentage:3.0f}% {bar:12} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
_REFRESH = 0.25  # seconds
_NOISE = (
    ".*does not have many workers.*",
    ".*GPU available but not used.*",
    ".*`srun` command is available.*",
    ".*treespec, LeafSpec.*",
    ".*smaller than the logging interval.*",
    ".*It is recommended to use `self.log.*",
)


def quiet() -> None:
    """Leave out what Lightning says about itself, and print warnings as one line."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # as `cli.main` does; workers of a sweep do not pass there
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    warnings.formatwarning = lambda message, *_, **__: f"dpbench: warning: {message}\n"


def watched() -> bool:
    """Whether somebody sees the progress: standard error is a terminal, and this is no job of a batch system."""
    return sys.stderr.isatty() and "SLURM_JOB_ID" not in os.environ


def _noise(strategy: Any) -> str:
    """One line on the noise that a private strategy adds, which may have been solved for a target epsilon."""
    plan, target = strategy.mechanism.plan, strategy.target_epsilon
    sampling, goal = plan.sampling, f" for epsilon {target:g}" if target is not None else ""
    size, population = sampling.expected_batch_size, sampling.population
    batch = f"expected batch size {size:g} of {population:,} records (sampling rate {size / population:.3g})"
    return f"noise multiplier {plan.noise_multiplier:.5g}{goal}, {batch}"


class RunProgress(pl.callbacks.ProgressBar):
    """A bar over all steps, instead of one for each short epoch: steps, time left, epsilon, loss, accuracy.

    Args:
        enabled: False where nobody watches (no terminal).
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled
        self._bar: tqdm[Any] | None = None
        self._test_bar: tqdm[Any] | None = None
        self._shown = 0.0

    def disable(self) -> None:
        """Called by Lightning on ranks other than 0."""
        self._enabled = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Be quiet in spawned processes too."""
        super().setup(trainer, pl_module, stage)
        quiet()

    def _open(self, total: int | None, initial: int = 0, leave: bool = True) -> tqdm[Any]:
        width = max(shutil.get_terminal_size((100, 24)).columns, 80)
        return tqdm(total=total, initial=initial, ncols=width, bar_format=_BAR, leave=leave)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar."""
        if self._enabled:
            steps = trainer.estimated_stepping_batches
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if getattr(callback, "private", False):
                    tqdm.write(_noise(callback), file=sys.stderr)
            self._bar = self._open(None if steps == float("inf") else int(steps), trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        """Advance, a few times a second, with the newest figures."""
        last = trainer.should_stop or trainer.global_step == trainer.max_steps
        if self._bar is None or (time.monotonic() - self._shown < _REFRESH and not last):
            return
        self._shown = time.monotonic()
        figures: dict[str, str] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "epsilon"):
                figures["epsilon"] = f"{callback.epsilon():.3f}"
        if isinstance(outputs, dict) and "loss" in outputs:
            figures["loss"] = f"{float(outputs['loss']):.3f}"
        metrics = trainer.progress_bar_metrics
        figures |= {short: f"{100 * metrics[name]:.1f}%" for name, short in _SHORT.items() if name in metrics}
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)
        self._bar.refresh()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open a bar for the final test."""
        if self._enabled:
            self._test_bar = self._open(int(sum(trainer.num_test_batches)), leave=False)

    def on_test_batch_end(self, *_: Any) -> None:
        """Advance the bar of the test."""
        if self._test_bar is not None:
            self._test_bar.update()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order."""
        self._close()

    def _close(self) -> None:
        for bar in (self._bar, self._test_bar):
            if bar is not None:
                bar.close()
        self._bar = self._test_bar = None


def bars(trainer: Mapping[str, Any], show: bool | None = None) -> list[RunProgress]:
    """The bar of a training, if it may have one.

    Args:
        trainer: Options of Lightning's trainer, which refuses a bar where `enable_progress_bar` is false.
        show: Whether anybody sees it; found out by default.
    """
    return [] if trainer.get("enable_progress_bar") is False else [RunProgress(watched() if show is None else show)]
