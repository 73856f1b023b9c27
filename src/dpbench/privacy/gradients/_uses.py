"""From one call of a layer, as the engine's hooks have kept it, to per-record gradients of the layer's parameters.

There are three ways: by a rule or `vmap` of a layer (`layers`), from the parts of a layer that is intercepted
(`_interception`), and by folding the rows of a record into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._interception import Arguments, LayerGradients, Part
from dpbench.privacy.gradients.folds import by_row, row_of_each
from dpbench.privacy.gradients.layers import OVER_POSITIONS, Rule, fallback
from dpbench.privacy.record_axis.tags import Axis


@dataclass(frozen=True)
class Use:
    """One call of a layer in the forward pass, or one part of it.

    Attributes:
        name: Name of the layer in the model.
        layer: The layer.
        inputs: Arguments by position, with their graph: to detach them takes an operator, under the mode of a step.
        versions: Versions of the tensors among them, when they were seen.
        edges: Gradient edges of the outputs.
        rule: Rule of the layer; None: `fallback`.
        output: The output, detached; kept for layers without a rule of ours only.
        part: Part of a layer that is computed from parts.
        places: Axes of the records in the layer's output and inputs, by their tags; empty without tags.
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
    places: tuple[Axis | int, ...] = ()
    tagged: int = 0

    def __str__(self) -> str:
        """The layer, as messages name it."""
        name = self.name or "the model"
        return f"{name} ({type(self.layer).__name__})"

    def with_rows(self) -> list[Tensor]:
        """Inputs that must hold the records in dimension 0, as must the gradient of the output."""
        return [x.detach() for x in self.inputs if isinstance(x, Tensor)]

    def parameter(self, name: str) -> nn.Parameter:
        """The layer's parameter of a name.

        Raises:
            UnsupportedModuleError: It is no longer a parameter.
        """
        try:
            return self.layer.get_parameter(name)
        except AttributeError as error:
            raise UnsupportedModuleError(
                f"{name} of {self} is no longer a parameter: it was replaced during training (by pruning, say), and "
                "its replacement gets no released gradient. Change the network before or after training."
            ) from error

    def refuse_changed(self) -> None:
        """Raise UnsupportedModuleError if an input was changed since the layer saw it."""
        versions = tuple(x._version for x in self.inputs if isinstance(x, Tensor))
        if versions != self.versions:
            raise UnsupportedModuleError(f"the input of {self} was changed in place after its forward pass.")


def gradients_of(use: Use, grads: Sequence[Tensor | None], records: int) -> LayerGradients:
    """Per-record gradients of a call's parameters.

    Args:
        use: The call.
        grads: Gradients of its edges, in order; None where the loss does not depend on one.
        records: R.

    Raises:
        UnsupportedModuleError: The layer saw other rows than records, changed its input, or has no gradients.
    """
    use.refuse_changed()
    if use.part is not None:
        return _of_part(use, use.part, grads, records)
    (grad,) = grads
    assert grad is not None
    if use.places:
        return _of_placed_layer(use, grad, records)
    return _of_layer(use, grad, records)


def _of_part(use: Use, part: Part, grads: Sequence[Tensor | None], records: int) -> LayerGradients:
    if part.records != records:
        raise UnsupportedModuleError(
            f"{use} saw {part.records} records in a batch of {records}: its input must carry the records in "
            "dimension 0 with batch_first=True, else in dimension 1."
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


def _of_layer(use: Use, grad: Tensor, rows: int, dimension: int = 0) -> LayerGradients:
    """Gradients by the layer's rule or by `fallback`.

    Args:
        use: A call of the layer.
        grad: Gradient of its output.
        rows: Number of rows that the layer must have seen.
        dimension: Dimension of the rows.
    """
    for x in (*use.with_rows(), grad):
        _refuse_other_rows(use, x, rows, dimension)
    grad = cast(Tensor, summable(grad))
    output = use.output
    inputs = tuple(_rule_input(x, grad.dtype, dimension) for x in use.inputs)
    if dimension:
        grad = grad.transpose(0, 1)
        output = None if output is None else output.transpose(0, 1)
    try:
        if use.rule is not None:
            return use.rule(use.layer, inputs, grad)
        assert output is not None
        return fallback(use.layer, inputs, grad, output, dimension)
    except UnsupportedModuleError as error:
        raise UnsupportedModuleError(f"no per-record gradients for {use}: {error}.") from error


def _of_placed_layer(use: Use, grad: Tensor, rows: int) -> LayerGradients:
    """Gradients of a layer that has its records where tags say.

    Args:
        use: A call of the layer.
        grad: Gradient of its output.
        rows: Rows of the batch.
    """
    axis, *of_inputs = [place if isinstance(place, Axis) else None for place in use.places]
    if len(grad) == rows if axis is None else axis == Axis(0, 1, rows // use.tagged):
        return _of_layer(use, grad, rows)
    if use.rule in OVER_POSITIONS:
        # Further rows of a record are further positions: nothing has to be built for each row.
        inputs = tuple(by_row(x, place, use.tagged, rows) for x, place in zip(use.inputs, of_inputs, strict=True))
        return _of_layer(replace(use, inputs=inputs), by_row(grad, axis, use.tagged, rows), rows)
    if axis == Axis(1, 1, 1):
        return _of_layer(use, grad, rows, dimension=1)
    if axis is not None and axis.dim:
        return _of_layer(use, grad, rows)  # which says what the layer saw
    by_number = _of_layer(use, grad, len(grad))
    row_of = row_of_each(grad, axis, use.tagged, rows)
    return {name: gradients.merge(row_of, rows, 1.0) for name, gradients in by_number.items()}


def _refuse_other_rows(use: Use, x: Tensor, rows: int, dimension: int) -> None:
    """Raise UnsupportedModuleError where a layer saw a tensor that does not have one row a record."""
    if x.dim() <= dimension or x.shape[dimension] != rows:
        raise UnsupportedModuleError(
            f"{use} saw a tensor of shape {tuple(x.shape)} for a batch of {rows} records: every layer must carry the "
            "records in dimension 0, one row each (recurrent layers and transformers: batch_first=True; several rows "
            "of a record: PrivateDataLoader(..., record_of_row=...))."
        )


def is_coarse(x: Tensor) -> bool:
    """Return whether numbers are in half precision or below."""
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
    x = x.detach()
    if x.is_floating_point():
        x = x.to(dtype)
    return x.transpose(0, 1) if dimension else x
