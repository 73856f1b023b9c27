"""The verdict on a step as a training comes to it: by the tags of its loss, then by the engine's look at its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.mode import Event
from dpbench.privacy.record_axis.tags import UNKNOWN
from dpbench.privacy.record_axis.verdict import Verdict, judge, new_axis
from dpbench.records.tagging import tagged


def verdict_of_step(
    step: Callable[[Any], Any],
    batch: Any,
    records: int,
    module: nn.Module,
    rows_of_record: int = 1,
) -> tuple[Any, Verdict]:
    """Run a step under the axis and the engine.

    Args:
        step: Batch → loss.
        batch: Records in dimension 0.
        records: R.
        module: The network, of layers that the engine takes.
        rows_of_record: Neighboring rows that belong to one record.

    Returns:
        The output of the step, None where the engine refuses a layer; and the verdict. Gradients of the loss are added
        to those of the parameters.
    """
    rows = records * rows_of_record
    axis = new_axis(records)
    try:
        engine = PerRecordEngine(module)
    except UnsupportedModuleError as error:
        return step(batch), _refused(error)
    engine.follow_tags()
    with closing(engine):
        engine.expect(rows)
        try:
            with watched(axis), axis:
                output = engine.within(step)(tagged(axis, batch, rows_of_record))
        except UnsupportedModuleError as error:
            return None, _refused(error)
        verdict = judge(axis, output)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return output, verdict
        loss.backward(retain_graph=verdict.is_separable)  # type: ignore[no-untyped-call]
        if not verdict.is_separable:
            return output, verdict
        engine.axis = axis, rows_of_record
        try:
            engine.backward(loss, rows, verify=True)
        except UnsupportedModuleError as error:
            verdict = _refused(error)
    return output, verdict


def _refused(error: UnsupportedModuleError) -> Verdict:
    return Verdict("mixed", (Event(UNKNOWN, "engine", str(error)),))
