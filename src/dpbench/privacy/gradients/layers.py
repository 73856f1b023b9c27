"""Rules: from a layer's input and the gradient of its output to per-record gradients of its parameters.

A rule takes (layer, inputs, output gradient) and returns the gradients by the parameter's name in that layer. Record r
is row r of input and output. A layer type without a rule takes `fallback`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError, brief
from dpbench.privacy import kernels
from dpbench.privacy.gradients._attention import AttentionInterception
from dpbench.privacy.gradients._convolution import (
    ConvolutionGradients,
    weight_gradient,
)
from dpbench.privacy.gradients._interception import Arguments, Interception, LayerGradients
from dpbench.privacy.gradients._parametrized import is_parametrized, of_parametrized, silent_fallbacks, type_of
from dpbench.privacy.gradients._recurrent import RecurrentInterception
from dpbench.privacy.gradients.parameter import (
    EmbeddingGradients,
    InstantiatedGradients,
    OuterProductGradients,
    OutputGradients,
    ParameterGradients,
    zero_gradients,
)
from dpbench.privacy.native import kernels as native_kernels

Rule = Callable[[Any, Arguments, Tensor], LayerGradients]


def linear(
    layer: nn.Linear,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Y = a Wᵀ + b over any number of positions: a (R, ..., in), g (R, ..., out)."""
    g = _by_position(grad_output)
    a = _by_position(inputs[0])
    weight = OuterProductGradients(g, a)
    gradients: LayerGradients = {"weight": weight}
    if layer.bias is not None:
        positions = g.shape[1]
        if positions == 1:
            gradients["bias"] = OutputGradients(weight)
        else:
            gradients["bias"] = InstantiatedGradients(lambda: g.sum(1))
    return gradients


def _by_position(x: Tensor) -> Tensor:
    """(R, ..., width) as (R, positions, width)."""
    records = x.shape[0]
    width = x.shape[-1]
    positions = x.shape[1:-1].numel() if records else 1
    return x.reshape(records, positions, width)


def convolution(
    layer: Any,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Conv1d, Conv2d and Conv3d of any stride, padding, dilation and groups: a (R, in, *), g (R, out, *)."""
    weights = _convolution_weights(layer, inputs[0], grad_output)
    gradients: LayerGradients = {"weight": weights}
    if layer.bias is None:
        return gradients
    if isinstance(weights, ConvolutionGradients):
        # The kernel that computes the weights' gradients adds up the bias's, too.
        gradients["bias"] = InstantiatedGradients(weights.bias)
    else:
        pixels = tuple(range(2, grad_output.dim()))
        gradients["bias"] = InstantiatedGradients(lambda: grad_output.sum(pixels))
    return gradients


def _convolution_weights(layer: Any, a: Tensor, g: Tensor) -> ParameterGradients:
    """Per-record weight gradients (R, out, in / groups, *kernel), by the fastest way."""
    if not len(g):
        return zero_gradients(layer.weight, 0)
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        # Padded here as in the layer, so that the code below handles only zeros on both sides.
        mode = layer.padding_mode
        if mode == "zeros":
            mode = "constant"
        a = F.pad(a, layer._reversed_padding_repeated_twice, mode=mode)
        dimensions = a.dim() - 2
        padding = (0,) * dimensions
    plugin = kernels.plugin()
    if a.dim() == 4 and plugin is not None and plugin.suits(a, g):
        return cast(ParameterGradients, plugin.convolution_weights(layer, a, g, padding))
    if a.dim() != 4 or layer.groups != 1 or not native_kernels.suits(a, g) or _is_pointwise(layer, padding):
        return _pure_convolution_weights(layer, a, g, padding)
    return ConvolutionGradients(layer, a, g, padding)


def _is_pointwise(layer: Any, padding: Any) -> bool:
    """Return whether a convolution is one matrix product for each record, which PyTorch computes fastest."""
    return set(layer.kernel_size) == {1} and set(layer.stride) == {1} and not any(padding) and layer.groups == 1


def _pure_convolution_weights(
    layer: Any,
    a: Tensor,
    g: Tensor,
    padding: Any,
) -> ParameterGradients:
    """The same by PyTorch's operations; the choice depends on shapes only."""
    if _is_pointwise(layer, padding):
        return InstantiatedGradients(lambda: _pointwise_weights(layer, a, g))
    kernel_numbers = layer.weight[0].numel()
    pixels = g[0, 0].numel()
    patch_numbers = kernel_numbers * pixels  # of a record
    if patch_numbers <= _IM2COL_LIMIT and a.dim() == 4 and layer.groups == 1:
        return InstantiatedGradients(
            lambda: _im2col_weights(layer, a, g, padding),
            order=(0, 3, 1, 2),
        )
    # From here on the weight gradient of torch: record by record where one fills the machine, else all in one call
    # with the records moved into the groups.
    if patch_numbers >= _LOOP_LIMIT:
        return InstantiatedGradients(lambda: _looped_weights(layer, a, g, padding))
    return InstantiatedGradients(lambda: _grouped_weights(layer, a, g, padding))


# Measured on two CPU cores over the shapes of our four networks. Fixed, not timed at run time: another choice rounds
# differently, and a resumed run has to repeat the interrupted one to the bit.
_IM2COL_LIMIT = 2**16
_LOOP_LIMIT = 2**19
_GROUPED_LIMIT = 2**25
"""Numbers that one call computes. At twice as many (512 records of 243 → 64 channels, 3×3, 8×8) PyTorch took a hundred
times as long on a CPU with AVX-512; not measured on GPUs."""


def _pointwise_weights(layer: Any, a: Tensor, g: Tensor) -> Tensor:
    """One matrix product per record: (R, out, in, 1, ...)."""
    records = len(g)
    shape = layer.weight.shape
    products = g.flatten(2) @ a.flatten(2).mT
    return products.view(records, *shape)


def _looped_weights(layer: Any, a: Tensor, g: Tensor, padding: Any) -> Tensor:
    """One call per record: (R, out, in / groups, *kernel)."""
    # One number, expanded: the function reads the weight's shape only.
    weight = g.new_empty(()).expand_as(layer.weight)
    rows = []
    for record in range(len(g)):
        row = slice(record, record + 1)
        gradient = weight_gradient(
            layer,
            a[row],
            g[row],
            weight,
            padding,
            records=1,
        )
        rows.append(gradient)
    return torch.stack(rows)


def _grouped_weights(layer: Any, a: Tensor, g: Tensor, padding: Any) -> Tensor:
    """One call for as many records as `_GROUPED_LIMIT` allows: (R, out, in / groups, *kernel)."""
    shape = layer.weight.shape
    records = len(g)
    largest = max(1, _GROUPED_LIMIT // shape.numel())
    if records > largest:
        weights = g.new_empty(records, *shape)
        for start in range(0, records, largest):
            rows = slice(start, start + largest)
            weights[rows] = _grouped_weights(layer, a[rows], g[rows], padding)
        return weights
    outputs = records * shape[0]
    weight = g.new_empty(()).expand(outputs, *shape[1:])
    wide_a = a.reshape(1, -1, *a.shape[2:])
    wide_g = g.reshape(1, -1, *g.shape[2:])
    weights = weight_gradient(
        layer,
        wide_a,
        wide_g,
        weight,
        padding,
        records,
    )
    return weights.view(-1, *shape)


def _im2col_weights(
    layer: nn.Conv2d,
    a: Tensor,
    g: Tensor,
    padding: Any,
) -> Tensor:
    """Patches laid out channels-last, then one matrix product per record: (R, out, *kernel, in)."""
    kernel_height, kernel_width = layer.kernel_size
    stride_height, stride_width = layer.stride
    dilation_height, dilation_width = layer.dilation
    pad_height, pad_width = padding
    a = F.pad(a, (pad_width, pad_width, pad_height, pad_height))
    a = a.permute(0, 2, 3, 1)
    a = a.reshape(-1).view(a.shape)  # contiguous with canonical strides also where a dimension is 1
    records, height, width, channels = a.shape
    row = width * channels  # from a pixel to the one below
    rows, columns = g.shape[2:]
    patches = a.as_strided(
        size=(
            records,
            rows,
            columns,
            kernel_height,
            kernel_width,
            channels,
        ),
        stride=(
            height * row,
            stride_height * row,
            stride_width * channels,
            dilation_height * row,
            dilation_width * channels,
            1,
        ),
    )
    pixels = rows * columns
    patches = patches.reshape(records, pixels, -1)
    outputs = g.permute(0, 2, 3, 1)
    outputs = outputs.reshape(records, pixels, -1)
    weights = outputs.mT @ patches
    return weights.view(records, -1, kernel_height, kernel_width, channels)


def embedding(
    layer: nn.Embedding,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Rows of a table: tokens (R, ...), g (R, ..., width)."""
    records = grad_output.shape[0]
    # Without records, torch cannot infer how many positions there are.
    positions = -1 if records else 1
    tokens = inputs[0].reshape(records, positions)
    g = grad_output.reshape(*tokens.shape, layer.embedding_dim)
    if layer.padding_idx is not None:
        present = tokens != layer.padding_idx
        g = g * present[:, :, None]
    return {"weight": EmbeddingGradients(g, tokens, layer.num_embeddings)}


def group_norm(
    layer: nn.GroupNorm,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Scale and shift of each channel: a, g (R, C, *)."""

    def over_pixels(values: Tensor) -> Tensor:
        if values.dim() == 2:
            return values
        pixels = tuple(range(2, values.dim()))
        return values.sum(pixels)

    def weight() -> Tensor:
        normalized = F.group_norm(inputs[0], layer.num_groups, eps=layer.eps)
        return over_pixels(normalized.mul_(grad_output))

    suited = kernels.suited(inputs[0], grad_output) if inputs[0].dim() == 4 else None
    if suited is not None:
        # One pass of the kernel gives both.
        weight_and_bias = cache(lambda: suited.group_norm(layer, inputs[0], grad_output))
        return {
            "weight": InstantiatedGradients(lambda: weight_and_bias()[0]),
            "bias": InstantiatedGradients(lambda: weight_and_bias()[1]),
        }
    gradients: LayerGradients = {"weight": InstantiatedGradients(weight)}
    if layer.bias is not None:
        gradients["bias"] = InstantiatedGradients(lambda: over_pixels(grad_output))
    return gradients


def layer_norm(
    layer: nn.LayerNorm,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Scale and shift of each coordinate of the trailing dimensions, which `normalized_shape` names."""
    shape = layer.normalized_shape

    def over_positions(values: Tensor) -> Tensor:
        records = values.shape[0]
        first_normalized = values.dim() - len(shape)
        positions = values.shape[1:first_normalized].numel()
        values = values.reshape(records, positions, *shape)
        return values.sum(1)

    def weight() -> Tensor:
        normalized = F.layer_norm(inputs[0], shape, eps=layer.eps)
        return over_positions(normalized * grad_output)

    gradients: LayerGradients = {"weight": InstantiatedGradients(weight)}
    if layer.bias is not None:
        gradients["bias"] = InstantiatedGradients(lambda: over_positions(grad_output))
    return gradients


def batch_norm(
    layer: Any,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Scale and shift of each channel in evaluation mode, after running statistics: a, g (R, C, *)."""
    a = inputs[0]

    def over_pixels(values: Tensor) -> Tensor:
        if values.dim() == 2:
            return values
        return values.flatten(2).sum(2)

    def weight() -> Tensor:
        mean = layer.running_mean.to(a.dtype)
        variance = layer.running_var.to(a.dtype)
        normalized = F.batch_norm(a, mean, variance, eps=layer.eps)
        return over_pixels(normalized * grad_output)

    return {
        "weight": InstantiatedGradients(weight),
        "bias": InstantiatedGradients(lambda: over_pixels(grad_output)),
    }


def transposed_linear(
    layer: Any,
    inputs: Arguments,
    grad_output: Tensor,
) -> LayerGradients:
    """Y = a W + b, as GPT-2 of `transformers` has it ("Conv1D"): a (R, ..., in), W (in, out)."""
    a = _by_position(inputs[0])
    g = _by_position(grad_output)
    return {
        "weight": OuterProductGradients(a, g),
        "bias": InstantiatedGradients(lambda: g.sum(1)),
    }


def fallback(
    layer: nn.Module,
    inputs: Arguments,
    grad_output: Tensor,
    output: Tensor,
    dimension: int = 0,
) -> LayerGradients:
    """Any layer that treats records independently and without randomness: `vmap` of its own backward pass.

    Args:
        layer: A module that owns trainable parameters.
        inputs: Its positional arguments; tensors carry the records in dimension 0.
        grad_output: Gradient of its output.
        output: Its output for the whole batch, to notice layers that mix records.
        dimension: Dimension in which the layer itself expects the records.

    Raises:
        UnsupportedModuleError: The layer cannot be mapped over records, or its outputs then differ from those that it
            gave for the whole batch (it mixes records).
    """
    parameters = {}
    for name, parameter in layer.named_parameters(recurse=False):
        if parameter.requires_grad:
            detached = parameter.detach()
            parameters[name] = detached.to(grad_output.dtype)
    records = grad_output.shape[0]
    if not records:
        return {name: zero_gradients(parameter, 0) for name, parameter in parameters.items()}

    def one_record(cotangent: Tensor, *record: Any) -> tuple[Tensor, dict[str, Tensor]]:
        def forward(values: dict[str, Tensor]) -> Tensor:
            row = _map_tensors(lambda x: x.unsqueeze(dimension), record)
            output = torch.func.functional_call(layer, values, row)
            return cast(Tensor, output).squeeze(dimension)

        value, pullback, *_ = torch.func.vjp(forward, parameters)
        return value, pullback(cotangent)[0]

    input_dims = [0 if isinstance(x, Tensor) else None for x in inputs]
    over_records = torch.func.vmap(one_record, in_dims=(0, *input_dims))
    try:
        with silent_fallbacks():
            values, rows = over_records(grad_output, *inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedModuleError(
            f"it has no rule in dpbench.privacy.gradients.layers, and torch.func.vmap over its records failed "
            f"({brief(error)}); freeze it, replace it or add a rule"
        ) from error
    refuse_other_values(values, output)
    return {name: instantiated(row) for name, row in rows.items()}


def refuse_other_values(values: Tensor, output: Tensor) -> None:
    """Raise UnsupportedModuleError where a layer gave other values for each record than for the whole batch."""
    looseness = 100 if output.dtype.itemsize < 4 else 1
    if values.shape != output.shape or not torch.allclose(
        values,
        output.to(values.dtype),
        rtol=1e-3 * looseness,
        atol=1e-5 * looseness,
        equal_nan=True,
    ):
        raise UnsupportedModuleError("its output for a record depends on the other records of the batch, or is random")


def _map_tensors(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """The arguments, with the function's values in place of tensors."""
    return tuple(function(x) if isinstance(x, Tensor) else x for x in arguments)


def instantiated(rows: Tensor) -> ParameterGradients:
    """Gradients that are computed already, one row a record."""
    return InstantiatedGradients(lambda: rows)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.SyncBatchNorm: batch_norm,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
}
"""Exact types only: a subclass may change `forward`, so it takes the fallback."""

ELSEWHERE: dict[tuple[str, str], Rule] = {
    ("transformers.pytorch_utils", "Conv1D"): transposed_linear,
}
"""Layers of other packages, by module and name, so that nothing is imported."""


OVER_POSITIONS: set[Rule] = {linear, transposed_linear, embedding, layer_norm}
"""Rules that take any number of positions in the dimensions after the first: further rows of a record are some."""


OF_INPUTS: set[Rule | None] = {linear, convolution, group_norm, layer_norm}
"""Rules by which a row depends on that row of the input and of the output gradient alone, and not on parameters."""


def rule_of(layer: nn.Module) -> Rule | None:
    """The rule of a layer; None: `fallback`."""
    if is_parametrized(layer):
        of_type = RULES.get(type_of(layer))
        return None if of_type is None else partial(of_parametrized, of_type)
    kind = type(layer)
    qualified_name = (kind.__module__, kind.__name__)
    return RULES.get(kind) or ELSEWHERE.get(qualified_name)


INTERCEPTED: dict[type[nn.Module], type[Interception]] = {
    nn.LSTM: RecurrentInterception,
    nn.GRU: RecurrentInterception,
    nn.MultiheadAttention: AttentionInterception,
}
"""Layers that are computed from their parts; exact types too."""
