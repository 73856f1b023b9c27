"""How per-record gradients are computed: a part that is chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor, nn

from dpbench.privacy.gradients.engine import LossReduction, PerRecordEngine
from dpbench.privacy.gradients.one_by_one import OneByOne
from dpbench.privacy.gradients.parameter import ParameterGradients

GradientsName = Literal["auto", "engine", "one_by_one"]
"""Name of a method; "auto" takes the engine if it knows the network."""


class GradientMethod(Protocol):
    """Per-record gradients of the forward passes of a network, to which it is attached.

    Attributes:
        names: Names of the trainable parameters, tied ones once.
        parameters: The parameters, in the same order.
        verified: True once a call of `backward` with `verify` could compare, and agreed.
        recording: True while forward passes are those of the next call of `backward`.
        records: Number of records in the forward passes that follow, where that is known.
        at_once: Most rows in one forward pass, but for a record of more rows; None: any number.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    verified: bool
    recording: bool
    records: int | None
    at_once: int | None

    def expect(self, records: int, counted: Tensor | None = None) -> None:
        """Forget forward passes that no backward pass followed, and take those that follow, of so many records.

        Args:
            records: Rows of the forward passes.
            counted: Number of records that the loss is a mean of, shape (), if the others are padding; None: all.
        """

    def discard(self) -> None:
        """Forget forward passes that no backward pass followed."""

    def backward(self, loss: Tensor, records: int, verify: bool = False) -> Sequence[ParameterGradients]:
        """Gradients of each record's own loss, one `ParameterGradients` over R records for each parameter.

        Args:
            loss: Scalar, the mean or the sum of the losses of the records.
            records: R.
            verify: Compare their sum with an ordinary backward pass.
        """

    def close(self) -> None:
        """Let go of the network."""


GRADIENTS: dict[str, Callable[[nn.Module, LossReduction], GradientMethod]] = {
    "engine": PerRecordEngine,
    "one_by_one": OneByOne,
}
"""Name → method: "engine" computes the gradients of all records of a batch in one backward pass, "one_by_one" each by
an ordinary one."""
