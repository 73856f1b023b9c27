"""Per-record gradients of a batch outside of the training: nothing is logged, drawn or changed by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.gradients.parameter import InstantiatedGradients, ParameterGradients
from dpbench.records.count import count_records
from dpbench.records.physical_batches import cut
from dpbench.records.tagging import under_tags
from dpbench.records.training import Training, loss_of, nothing, replaced_methods


def record_gradients(
    training: Training,
    engine: GradientMethod,
    batch: Any,
    seed: int,
    verify: bool = False,
) -> tuple[Sequence[ParameterGradients], int]:
    """Per-record gradients of a batch and its number of records, in automatic optimization.

    Args:
        training: Knows the module, the device and the precision.
        engine: Attached to the module.
        batch: Batch for the training step.
        seed: Seed of the module's own randomness (dropout).
        verify: Compare the sum of the gradients with an ordinary backward pass.
    """
    batch = training.to_device(batch)
    records = engine.records = count_records(batch)
    pieces = cut(batch, records, engine.at_once, None, training)
    silent = replaced_methods(training.module, log=nothing, log_dict=nothing)
    gradients = []
    with torch.random.fork_rng(), silent:
        torch.manual_seed(seed)
        for piece in pieces:
            rows = count_records(piece)
            with training.autocast(), torch.enable_grad():
                output = under_tags(engine, lambda x: training.own_step(x, *training.index_of_step()), piece, rows)
            gradients.append(engine.backward(loss_of(output), rows, verify=verify))
    if len(pieces) == 1:
        return gradients[0], records
    return [_one_after_the_other(of_parameter) for of_parameter in zip(*gradients, strict=True)], records


def _one_after_the_other(pieces: Sequence[ParameterGradients]) -> ParameterGradients:
    rows = torch.cat([piece.per_record() for piece in pieces])
    return InstantiatedGradients(lambda: rows)
