"""From one call of a layer, as the engine's hooks have kept it, to per-record gradients of the layer's parameters.

There are four ways: by a rule or `vmap` of a layer (`layers`), from the parts of a layer that is intercepted
(`_interception`), by running a module's own lines again (`_own_code`), and by folding the rows of a record into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._interception import Arguments, LayerGradients, Part
from dpbench.privacy.gradients._own_code import ModuleCall, own_gradients
from dpbench.privacy.gradients._parametrized import is_parametrized
from dpbench.privacy.gradients.folds import by_row, row_of_each
from dpbench.privacy.gradients.layers import OVER_POSITIONS, Rule, fallback, refuse_disagreement
from dpbench.privacy.record_axis.tags import Axis


@dataclass(frozen=True)
class Use:
    """One call of a layer in the forward pass, or one part of it.

    Attributes:
        name: Of the layer in the model.
        layer: The layer.
        inputs: Arguments by position, detached.
        versions: Of the tensors among them, when they were seen.
        edges: Gradient edges of the outputs.
        rule: Of the layer; None: `fallback`.
        output: Detached; of layers without a rule of ours only.
        part: Of a layer that is computed from its parts.
        call: Of a module that owns parameters beside layers.
        places: Where tags say that the layer's output and its inputs have their records; empty without tags.
        tagged: Number of records of these tags.
    """

    name: str
    layer: nn.Module
    inputs: Arguments
    versions: tuple[int, ...]
    edges: tuple[GradientEdge, ...]
    rule: Rule | None = None
    output: Tensor | None = None
    part: Part | None = None
    call: ModuleCall | None = None
    places: tuple[Axis | int, ...] = ()
    tagged: int = 0

    def __str__(self) -> str:
        """The layer, as messages name it."""
        name = self.name or "the model"
        return f"{name} ({type(self.layer).__name__})"

    def with_rows(self) -> list[Tensor]:
        """What must hold the records in dimension 0, beside the gradient of the output."""
        if self.call is not None:
            return [seen.value for seen in self.call.with_records]
        if type(self.layer) is nn.EmbeddingBag:  # whose tokens are in one row
            return []
        return [x for x in self.inputs if isinstance(x, Tensor)]

    def parameter(self, name: str) -> nn.Parameter:
        """The layer's parameter of a name.

        Raises:
            UnsupportedModuleError: It is none any more.
        """
        try:
            return self.layer.get_parameter(name)
        except AttributeError as error:
            raise UnsupportedModuleError(
                f"{name} of {self} is no longer a parameter: it was replaced during the training (by pruning, say), "
                "and nothing is released to what took its place. Change the network before or after the training."
            ) from error

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the call answers for."""
        if self.call is not None:
            names = self.call.names
        else:
            is_whole_layer = self.part is not None or is_parametrized(self.layer)
            names = [name for name, _ in self.layer.named_parameters(recurse=is_whole_layer)]
        return [self.parameter(name) for name in names]

    def refuse_changed(self) -> None:
        """Raise UnsupportedModuleError where a kept input is not what the layer saw."""
        versions = tuple(x._version for x in self.inputs if isinstance(x, Tensor))
        if versions != self.versions:
            raise UnsupportedModuleError(f"the input of {self} was changed in place after its forward pass.")


class UseGradients:
    """Per-record gradients of the calls of one lot.

    Args:
        records: R.
        sequence_first: Layers that carry records in dimension 1.
        shared: Names of embeddings that were called with the same tokens for all records; for messages.
        verify: Compare gradients of a sampler with those of `fallback`.
    """

    def __init__(
        self,
        records: int,
        sequence_first: set[nn.Module],
        shared: Mapping[nn.Module, str],
        verify: bool,
    ) -> None:
        self._records = records
        self._sequence_first = sequence_first
        self._shared = shared
        self._verify = verify

    def of(self, use: Use, grads: Sequence[Tensor | None]) -> LayerGradients:
        """Gradients of a call's parameters.

        Args:
            use: The call.
            grads: Of its edges, in order; None where the loss does not depend on one.

        Raises:
            UnsupportedModuleError: The layer saw other rows than records, changed its input, or has no gradients.
        """
        use.refuse_changed()
        if use.part is not None:
            return self._of_part(use, use.part, grads)
        if use.call is not None:
            return self._of_own_code(use, use.call, grads)
        grad = grads[0]
        assert grad is not None
        if use.places:
            return self._of_placed_layer(use, grad)
        if use.layer in self._sequence_first:
            return self._of_layer(use, grad, self._records, dimension=1)
        return self._of_layer(use, grad, self._records)

    def _of_part(self, use: Use, part: Part, grads: Sequence[Tensor | None]) -> LayerGradients:
        if part.records != self._records:
            where = "dimension 0"
            if not isinstance(use.layer, nn.RNNCellBase):
                where = "dimension 0 with batch_first=True, else in dimension 1"
            raise UnsupportedModuleError(
                f"{use} saw {part.records} records in a batch of {self._records}: its input must carry the records in "
                f"{where}."
            )
        remaining = iter(grads)
        output_grads: list[Tensor | None] = []
        for edge in part.edges:
            grad = None if edge is None else next(remaining)
            output_grads.append(summable(grad))
        gradients = part.gradients(output_grads)
        # The layer may lack biases, or have a weight under two names.
        names = {name for name, _ in use.layer.named_parameters(remove_duplicate=False)}
        return {name: gradients[name] for name in gradients if name in names}

    def _of_own_code(self, use: Use, call: ModuleCall, grads: Sequence[Tensor | None]) -> LayerGradients:
        """Gradients of the parameters that a module owns beside layers."""
        for seen in call.tensors:
            if seen.edge is not None:
                self._refuse_other_rows(use, seen.value, self._records)
        try:
            return own_gradients(call, [summable(grad) for grad in grads], self._records)
        except UnsupportedModuleError as error:
            raise UnsupportedModuleError(f"no per-record gradients for {use}: {error}.") from error

    def _of_layer(self, use: Use, grad: Tensor, rows: int, dimension: int = 0) -> LayerGradients:
        """Gradients by the layer's rule or by `fallback`.

        Args:
            use: A call of the layer.
            grad: Gradient of its output.
            rows: That the layer must have seen.
            dimension: Where it has them.
        """
        for x in (*use.with_rows(), grad):
            self._refuse_other_rows(use, x, rows, dimension)
        grad = cast(Tensor, summable(grad))
        output = use.output
        inputs = tuple(_rule_input(x, grad.dtype, dimension) for x in use.inputs)
        if dimension:
            grad = grad.transpose(0, 1)
            output = None if output is None else output.transpose(0, 1)
        try:
            if use.rule is None:
                assert output is not None
                return fallback(
                    use.layer,
                    inputs,
                    grad,
                    output,
                    dimension,
                )
            gradients = use.rule(use.layer, inputs, grad)
            if self._verify and output is not None:
                refuse_disagreement(
                    use.layer,
                    inputs,
                    grad,
                    output,
                    dimension,
                    gradients,
                )
            return gradients
        except UnsupportedModuleError as error:
            raise UnsupportedModuleError(f"no per-record gradients for {use}: {error}.") from error

    def _of_placed_layer(self, use: Use, grad: Tensor) -> LayerGradients:
        """Gradients of a layer that has its records where tags say.

        Args:
            use: A call of the layer.
            grad: Gradient of its output.
        """
        rows = self._records
        axis, *of_inputs = [place if isinstance(place, Axis) else None for place in use.places]
        if len(grad) == rows if axis is None else axis == Axis(0, 1, rows // use.tagged):
            return self._of_layer(use, grad, rows)
        if use.rule in OVER_POSITIONS:
            # Further rows of a record are further positions: nothing has to be built for each row.
            inputs = tuple(by_row(x, place, use.tagged, rows) for x, place in zip(use.inputs, of_inputs, strict=True))
            return self._of_layer(replace(use, inputs=inputs), by_row(grad, axis, use.tagged, rows), rows)
        if axis == Axis(1, 1, 1):
            return self._of_layer(use, grad, rows, dimension=1)
        if axis is not None and axis.dim:
            return self._of_layer(use, grad, rows)  # which says what the layer saw
        by_number = self._of_layer(use, grad, len(grad))
        row_of = row_of_each(grad, axis, use.tagged, rows)
        return {name: gradients.merge(row_of, rows, 1.0) for name, gradients in by_number.items()}

    def _refuse_other_rows(self, use: Use, x: Tensor, rows: int, dimension: int = 0) -> None:
        """Raise UnsupportedModuleError where a layer saw a tensor that does not have one row a record."""
        if x.dim() <= dimension or x.shape[dimension] != rows:
            raise UnsupportedModuleError(
                f"{use} saw a tensor of shape {tuple(x.shape)} for a batch of {rows} records: every layer must carry "
                f"the records in dimension 0, one row each{self._hint(use, x, rows)}."
            )

    def _hint(self, use: Use, x: Tensor, records: int) -> str:
        """What may have brought about a wrong shape, and the way out; empty where nothing is likely."""
        if type(use.layer) is nn.Embedding:
            return (
                f": pass its tokens (position ids are some) with shape ({records}, ...), for example by tokens.expand"
            )
        if self._shared and x.dim() > 2 and x.shape[:2] == (1, records):
            names = ", ".join(self._shared.values())
            return f" ({names} already gives one row for each record: leave out unsqueeze(0))"
        if x.dim() > 1 and x.shape[1] == records:
            return " (recurrent layers and transformers: batch_first=True)"
        if records and x.dim() and x.shape[0] > records and x.shape[0] % records == 0:
            return (
                " (several rows of a record: run them one after another and take the mean of the losses, or make them "
                "in the collate_fn: LotLoader(..., record_of_row=...))"
            )
        return ""


def is_coarse(x: Tensor) -> bool:
    """Whether numbers are in half precision or below."""
    return x.dtype.itemsize < 4


def summable(grad: Tensor | None) -> Tensor | None:
    """An output gradient in float32 at least: half precision is too coarse for norms and sums."""
    if grad is None or not grad.is_floating_point():
        return grad
    return grad.float() if is_coarse(grad) else grad


def _rule_input(x: Any, dtype: torch.dtype, dimension: int) -> Any:
    """An argument of a layer as rules take it: of the output gradient's type, with the records in dimension 0."""
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():
        x = x.to(dtype)
    return x.transpose(0, 1) if dimension else x
