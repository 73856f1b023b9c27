"""Operators that reduce dimensions."""

from __future__ import annotations

from dpbench.privacy.record_axis.operators import Call, Mixes, Outcome, rule
from dpbench.privacy.record_axis.tags import Axis, Over


def reduced(call: Call) -> Axis | None:
    """The axis that is left of the records, or None if they are reduced."""
    x = call["self"]
    axis = call.common_axis(x)
    dims = call.dims(x)
    if dims is None or axis.dim in dims:
        return None
    if call["keepdim"]:
        return axis
    before = sum(dim < axis.dim for dim in set(dims))
    return axis._replace(dim=axis.dim - before)


@rule("sum nansum")
def sums(call: Call) -> Outcome:
    """A sum over the records is a total."""
    return reduced(call) or Over.SUM


@rule("mean")
def mean(call: Call) -> Outcome:
    """A mean over the records is a total."""
    return reduced(call) or Over.MEAN


@rule(
    "prod amax amin max min argmax argmin any all var std var_mean std_mean logsumexp linalg_vector_norm norm",
    "count_nonzero median nanmedian mode kthvalue aminmax",
)
def reduction(call: Call) -> Outcome:
    """Any other reduction over the records mixes them."""
    if call.operator.name in ("max", "min") and call.has("other"):
        return call.broadcast_axis(call["self"], call["other"])
    axis = reduced(call)
    if axis is None:
        raise Mixes("reduces over the records")
    return axis
