"""Per-record gradients by plain autograd, one record at a time: slower, and exact for every function of one record.

Nothing is attached to the network, so that it may do anything: derivatives of derivatives, parameters in lists, weights
that functions use, layers on shared tensors. The caller runs the step on each record alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._calls import backward, refuse_reentrant
from dpbench.privacy.gradients.engine import LossReduction
from dpbench.privacy.gradients.parameter import OneRecord, ParameterGradients, zero_gradients
from dpbench.privacy.gradients.validation import refuse_statistics, trainable_of


class OneByOne:
    """Answers the loss of one record with its gradient.

    Guarantee: that of the session. A record's gradient is computed on that record alone, so that nothing of others can
    be in it, except through state that the module keeps from one record to the next; guards look for that.

    Args:
        model: Any network.
        loss_reduction: How the loss combines the rows of a record: their "mean" or their "sum".

    Attributes:
        names: Names of the trainable parameters, tied ones once.
        parameters: The parameters, in the same order.
        verified: True: all gradients are autograd's.
        recording: Not used.
        records: Not used.
        at_once: Number of rows taken at once; a record may have more.
        has_gradients: True once the loss of a record had a gradient.

    Raises:
        UnsupportedModuleError: A layer keeps statistics of records, or makes them of a batch; a parameter is complex.
        ConfigurationError: There is nothing to train, or `loss_reduction` is unknown.
    """

    verified = True
    at_once: int | None = 1

    def __init__(self, model: nn.Module, loss_reduction: LossReduction = "mean") -> None:
        refuse_statistics(model)
        trainable = trainable_of(model, loss_reduction)
        self.names = list(trainable)
        self.parameters = list(trainable.values())
        self.recording = False
        self.records: int | None = None
        self.has_gradients = False
        self._reduction = loss_reduction
        self._is_looked_at = False

    def expect(self, records: int, counted: Tensor | None = None) -> None:
        """Nothing is kept of forward passes."""

    def discard(self) -> None:
        """Nothing is kept of forward passes."""

    def close(self) -> None:
        """Nothing is attached."""

    def backward(self, loss: Tensor, records: int, verify: bool = False) -> Sequence[ParameterGradients]:
        """The gradient of one record.

        Args:
            loss: Scalar, the mean or the sum of the losses of its rows.
            records: Rows of it, R.
            verify: Not needed.

        Returns:
            One `ParameterGradients` over R rows for each of `parameters`, of which the sum over the rows is known.
        """
        if not records:
            return [zero_gradients(parameter, 0) for parameter in self.parameters]
        factor = float(records) if self._reduction == "mean" else 1.0
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        gradients: list[Tensor | None] = [None] * len(trainable)
        if loss.requires_grad:  # not of a record of which nothing is predicted
            self.has_gradients = True
            if not self._is_looked_at:
                refuse_reentrant(loss)  # autograd would not reach its inputs
                self._is_looked_at = True
            gradients = list(backward(loss, trainable, torch.full_like(loss, factor), trainable))
        of_parameter = dict(zip(trainable, gradients, strict=True))
        dense = [_dense(of_parameter.get(parameter), parameter) for parameter in self.parameters]
        of_record, _ = OneRecord.of(dense)
        if records == 1:
            return of_record
        return [SummedRows(gradient) for gradient in of_record]


class SummedRows(ParameterGradients):
    """Gradients of the rows of one record, of which nothing is known but their sum.

    Args:
        total: The sum.
    """

    def __init__(self, total: OneRecord) -> None:
        self._total = total

    def squared_norms(self) -> Tensor:
        """Of the sum, shape (1,)."""
        return self._total.squared_norms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum; all rows have weight 1."""
        if not bool((weights == 1).all()):
            raise UnsupportedModuleError("rows of a record have no gradients of their own: they were run together.")
        return self._total.per_record()[0]

    def per_record(self) -> Tensor:
        """The sum, as one record."""
        return self._total.per_record()

    def select(self, records: Tensor) -> ParameterGradients:
        """Refused: nothing is known of single rows."""
        raise UnsupportedModuleError("rows of a record have no gradients of their own: they were run together.")

    def merge(self, record_of: Tensor, records: int, factor: float) -> ParameterGradients:
        """The record that all rows make up."""
        if records != 1:
            raise UnsupportedModuleError(f"rows of {records} records were run together, record by record.")
        return OneRecord.of([self._total.per_record()[0] * factor])[0][0]


def _dense(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """A gradient in float32 at least, with zeros where the record has none."""
    if gradient is None:
        return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
