"""A training step, run and judged under the record axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.tags import Over
from dpbench.privacy.record_axis.verdict import LayerPlaces, Verdict, judge, new_axis
from dpbench.records.tagging import tagged


def watch(
    step: Callable[[Any], Any],
    batch: Any,
    records: int,
    module: nn.Module,
    rows_of_record: int = 1,
    over: Over = Over.MEAN,
) -> tuple[Any, Verdict]:
    """Run a training step on a batch, and judge it.

    Args:
        step: Batch → loss.
        batch: As for `tagged`.
        records: Number of records, R.
        module: The network.
        rows_of_record: Neighboring rows that belong to one record.
        over: The loss is declared to be a mean, or a sum, over the records.

    Returns:
        What the step returned, and the verdict.
    """
    axis = new_axis(records)
    layers = LayerPlaces(axis, module)
    batch = tagged(axis, batch, rows_of_record)
    with layers.recorded(), watched(axis), axis:
        output = step(batch)
    with torch.no_grad():
        return output, judge(axis, output, layers, over)
