"""Figures of gradients inside a private step: for research, outside of the guarantee.

Everything here reads private gradients without noise. It is named `nonprivate/…`, is off unless asked for, and must not
be published with a model that is meant to be private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from torch import Tensor

from dpbench.callback.lightning_training import LightningTraining
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import read_csv
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.clipping import clip_factors
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.records.count import count_records
from dpbench.records.record_gradients import record_gradients
from dpbench.strategies import PrivateStrategy

EDGES = np.concatenate([[-np.inf], np.linspace(-9.0, 2.0, 89), [np.inf]])
"""Of the histogram: log10 |g|; the first bin holds the zeros."""
_HISTOGRAM_RECORDS = 16  # of a piece of a batch: their gradients are written out in full


class GradientDiagnostics(pl.Callback):
    """Gradient norms by parameter, clipped share, bounds, noise-to-signal ratio and a histogram of gradient values.

    Goes with any strategy. Under a private one it looks at the very gradients that are clipped; without privacy it
    makes a backward pass of its own now and then. The results are private data: see the module's docstring.

    Args:
        every_n_steps: Steps between two looks.
        folder: The run's folder, for the histogram; None writes none.
    """

    def __init__(self, every_n_steps: int = 50, folder: RunFolder | None = None) -> None:
        super().__init__()
        self._every = every_n_steps
        self._folder = folder
        self._counts = np.zeros(len(EDGES) - 1)
        self._pieces: list[dict[str, float]] = []
        self._strategy: PrivateStrategy | None = None
        self._is_due = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Listen to the private strategy, if there is one."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise ConfigurationError("diagnostics see the records of one process only: train with one process.")
        if self._folder is not None and self._folder.gradient_histogram.exists():  # a resumed run goes on counting
            self._counts = np.array(read_csv(self._folder.gradient_histogram, ["count"])["count"], dtype=float)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._strategy = next((callback for callback in callbacks if isinstance(callback, PrivateStrategy)), None)
        if self._strategy is None:
            if not pl_module.automatic_optimization:
                raise ConfigurationError("diagnostics without a private strategy need automatic optimization.")
        elif self._observe not in self._strategy.observers:
            self._strategy.observers.append(self._observe)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Without a private strategy: a backward pass of our own."""
        self._is_due = trainer.global_step % self._every == 0
        self._pieces = []
        if not self._is_due or self._strategy is not None or not count_records(batch):
            return
        engine = PerRecordEngine(pl_module)
        try:
            training = LightningTraining(trainer, pl_module)
            gradients, _ = record_gradients(training, engine, batch, seed=trainer.global_step)
            with torch.no_grad():
                self._pieces.append(self._measure(engine.names, gradients))
        finally:
            engine.close()

    def _observe(
        self,
        mechanism: Mechanism,
        names: Sequence[str],
        gradients: Sequence[ParameterGradients],
        norms: Tensor,
    ) -> None:
        """Look at a piece of a batch, as the private strategy clips it; norms are squared, (groups, R)."""
        if not self._is_due or not norms.shape[1]:
            return
        plan = mechanism.plan
        values = self._measure(names, gradients)
        if mechanism.recipe.clip_factors is clip_factors:  # of another function no record is above or below the bound
            for group, squared in zip(plan.groups, norms, strict=True):
                is_clipped = squared.sqrt() > group.max_grad_norm
                values[f"nonprivate/clip_fraction/{group.name}"] = float(is_clipped.double().mean())
                values[f"nonprivate/bound/{group.name}"] = group.max_grad_norm
        if mechanism.recipe.noise:
            for name, total, std in zip(names, mechanism.gradients, plan.parameter_stds, strict=True):
                signal = max(float(total.norm()), 1e-12)
                values[f"nonprivate/noise_to_signal/{name}"] = std * total.numel() ** 0.5 / signal
        self._pieces.append(values)

    def _measure(self, names: Sequence[str], gradients: Sequence[ParameterGradients]) -> dict[str, float]:
        """Mean norms by parameter; some records go into the histogram."""
        values = {}
        for name, parameter in zip(names, gradients, strict=True):
            norms = parameter.squared_norms().double().sqrt()
            values[f"nonprivate/grad_norm/{name}"] = float(norms[norms.isfinite()].mean())
            rows = torch.arange(min(_HISTOGRAM_RECORDS, len(norms)), device=norms.device)
            sample = parameter.select(rows).per_record()
            logarithms = sample.abs().double().log10().flatten().cpu().numpy()
            counts, _ = np.histogram(logarithms[~np.isnan(logarithms)], EDGES)
            self._counts += counts
        return values

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Hand the means over the pieces of the batch to the loggers."""
        if not self._pieces:
            return
        values: dict[Any, float] = pd.DataFrame(self._pieces).mean().to_dict()
        for name, value in self._pieces[-1].items():
            if "noise_to_signal" in name:  # the sum grows with each piece: only with the last one it is the whole
                values[name] = value
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the histogram."""
        self._write()

    def _write(self) -> None:
        if self._folder is not None:
            table = pd.DataFrame({"log10_from": EDGES[:-1], "log10_to": EDGES[1:], "count": self._counts})
            write_atomically(self._folder.gradient_histogram, table.to_csv(index=False))

    def on_save_checkpoint(self, *_: Any) -> None:
        """Write the histogram to a file of its own, never into the checkpoint, since checkpoints are published."""
        self._write()
