"""Loss functions."""

from __future__ import annotations

from torch import Tensor

from dpbench.privacy.record_axis.operators import Call, Mixes, Outcome, rule
from dpbench.privacy.record_axis.tags import Axis, Over

_NONE, _MEAN = 0, 1  # of `reduction`; 2 is the sum


def combined(reduction: int, axis: Axis) -> Outcome:
    """The outcome of elementwise terms by a reduction."""
    if reduction == _NONE:
        return axis
    return Over.MEAN if reduction == _MEAN else Over.SUM


@rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits l1_loss"
)
def elementwise_loss(call: Call) -> Outcome:
    """A term of each element."""
    return combined(call["reduction"], call.broadcast_axis(*call.tensors))


@rule("mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward")
def elementwise_loss_backward(call: Call) -> Axis:
    """The gradient of each element's term."""
    if call["reduction"] == _MEAN and not call.is_in_backward:
        raise Mixes("the gradient of a mean over records")
    return call.broadcast_axis(*call.tensors)


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss(call: Call) -> list[Outcome]:
    """The negative log-likelihood of targets.

    A mean counts targets, not records: it is the mean of the records' own means only where as many targets of each
    record count. Which batches are such is decided by values, so that the fallback, record by record, has to compute
    each record's own mean, too.
    """
    x, target, weight = call["self"], call["target"], call["weight"]
    call.require_public(weight)
    if x.dim() == 1:
        raise Mixes("classes are records")
    axis = call.common_axis(x, target)
    if axis.dim == 1 and call.has_records(x):
        raise Mixes("classes are records")
    if axis.dim > 0:
        raise Mixes("records in another dimension than the first")
    reduction = call["reduction"]
    if reduction == _NONE:
        return [axis, None]
    if reduction == _MEAN:
        if weight is not None:
            raise Mixes("a mean over the batch that is weighted by classes")
        if not counts_alike(target, call["ignore_index"], axis, call.records):
            raise Mixes(
                "a mean over all targets of the batch that are not ignored; the mean of each record's own is faster "
                "(dpbench.losses.next_token for causal language models, else per_record)"
            )
        return [Over.MEAN, None]
    return [Over.SUM, Over.SUM]


def counts_alike(target: Tensor, ignored: int, axis: Axis, records: int) -> bool:
    """True if each record has as many targets that count.

    Args:
        target: Targets; records in dimension 0.
        ignored: The target that does not count.
        axis: Axis of the targets' records.
        records: R.
    """
    is_counted = target != ignored
    if is_counted.all():
        return True  # as nearly always, by one look
    counts = is_counted.reshape(axis.outer, records, -1).sum((0, 2))
    return bool((counts == counts[0]).all())


@rule("multi_margin_loss")
def margin_loss(call: Call) -> Outcome:
    """Margins between classes."""
    x, target = call["self"], call["target"]
    call.require_public(call["weight"])
    if x.dim() < 2:
        raise Mixes("classes are records")
    axis = call.common_axis(x, target)
    if axis.dim:
        raise Mixes("classes are records")
    return combined(call["reduction"], axis)


@rule("_ctc_loss")
def ctc_loss(call: Call) -> list[Outcome]:
    """Alignments of (time, record, class) with targets (record, length)."""
    probabilities, targets = call["log_probs"], call["targets"]
    axis = call.axis(probabilities)
    of_targets = call.axis(targets)
    if axis is None or axis.dim != 1 or axis[1:] != (1, 1):
        raise Mixes("alignments over records")
    if targets.dim() != 2 or of_targets not in (None, Axis(0)):
        raise Mixes("targets that are not rows of records")
    call.require_along(targets, Axis(0))
    for length in (call["input_lengths"], call["target_lengths"]):
        if not isinstance(length, Tensor) and len(set(length)) > 1:
            raise Mixes("lengths by position in the batch")
        call.require_along(length, Axis(0))
    return [Axis(0), Axis(0)]


@rule("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Axis:
    """The gradient of log-likelihoods of which no mean was made."""
    if call["reduction"] == _MEAN and not call.is_in_backward:
        raise Mixes("the gradient of a mean over records")
    gradient, x, target = call["grad_output"], call["self"], call["target"]
    call.require_public(call["weight"])
    rows = [x, target] if gradient.dim() == 0 else [gradient, x, target]
    axis = call.common_axis(*rows)
    if axis.dim or x.dim() < 2:
        raise Mixes("classes are records")
    return axis
