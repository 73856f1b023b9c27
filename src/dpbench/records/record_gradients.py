"""Per-record gradients of a batch outside of the training: nothing is logged, drawn or changed by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.records.count import count_records
from dpbench.records.training import Training, loss_of, nothing, replaced_methods


def record_gradients(
    training: Training,
    engine: GradientMethod,
    batch: Any,
    seed: int,
) -> tuple[Sequence[ParameterGradients], int]:
    """Per-record gradients of a batch and its number of records, in automatic optimization.

    Args:
        training: Knows the module, the device and the precision.
        engine: Attached to the module.
        batch: For the training step.
        seed: Of the module's own randomness (dropout).
    """
    batch = training.to_device(batch)
    records = engine.records = count_records(batch)
    silent = replaced_methods(training.module, log=nothing, log_dict=nothing)
    with torch.random.fork_rng(), silent, training.autocast(), torch.enable_grad():
        torch.manual_seed(seed)
        output = training.own_step(batch, 0)
    return engine.backward(loss_of(output), records), records
