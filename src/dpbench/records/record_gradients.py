"""Per-record gradients of a batch outside of the training: nothing is logged, drawn or changed by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch

from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.records.count import count_records


@contextmanager
def _silent(module: pl.LightningModule) -> Iterator[None]:
    names = ["log", "log_dict"]
    before = {name: module.__dict__[name] for name in names if name in module.__dict__}
    for name in names:
        module.__dict__[name] = _nothing
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name)
        module.__dict__.update(before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `log`: a probe logs nothing."""


def record_gradients(
    trainer: pl.Trainer, engine: PerRecordEngine, batch: Any, seed: int
) -> tuple[list[ParameterGradients], int]:
    """Per-record gradients of a batch and its number of records, in automatic optimization.

    Args:
        trainer: Knows the module, the device and the precision.
        engine: Attached to the module.
        batch: For `training_step`.
        seed: Of the module's own randomness (dropout).
    """
    module = trainer.lightning_module
    step: Any = getattr(module.training_step, "__wrapped__", module.training_step)  # not the private strategy's own
    batch = trainer.strategy.batch_to_device(batch)
    records = engine.records = count_records(batch)
    with torch.random.fork_rng(), _silent(module), trainer.precision_plugin.train_step_context(), torch.enable_grad():
        torch.manual_seed(seed)
        output = step(batch, 0)
    loss = output["loss"] if isinstance(output, dict) else output
    return engine.backward(loss, records), records
