"""Convolutions, normalization, attention, recurrent layers."""

from __future__ import annotations

from dpbench.privacy.record_axis.operators import Call, Mixes, Outcome, rule
from dpbench.privacy.record_axis.tags import Axis, Over


@rule("convolution")
def convolution(call: Call) -> Axis:
    """Records are images."""
    call.require_public(call["weight"], call["bias"])
    axis = call.common_axis(call["input"])
    if axis.dim:
        raise Mixes("a convolution over records")
    return axis


@rule("native_layer_norm _fused_rms_norm")
def layer_norm(call: Call) -> Axis:
    """Normalizes the last dimensions."""
    x = call["input"]
    call.require_public(call["weight"], call["bias"])
    axis = call.common_axis(x)
    if axis.dim >= x.dim() - len(call["normalized_shape"]):
        raise Mixes("normalizes over records")
    return axis


@rule("native_group_norm")
def group_norm(call: Call) -> Axis:
    """Normalizes groups of channels of each image."""
    call.require_public(call["weight"], call["bias"])
    axis = call.common_axis(call["input"])
    if axis.dim:
        raise Mixes("normalizes over records")
    return axis


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm",
    "_batch_norm_with_update",
)
def batch_norm(call: Call) -> list[Outcome]:
    """Normalizes each channel over images: mixes in training, unless the channels are the records (instance norm)."""
    x = call["input"]
    axis = call.common_axis(x)
    along_channels = axis._replace(dim=0)
    is_training = call["training"] if call.has("training") else "no_training" not in call.operator.name
    names = [name for name in ("weight", "bias", "running_mean", "running_var") if call.has(name)]
    if axis.dim == 1:
        if is_training and call["running_mean"] is not None:
            raise Mixes("the layer keeps numbers of all records")
        for name in names:
            call.require_along(call[name], along_channels)
        return [axis, along_channels, along_channels]
    call.require_public(*(call[name] for name in names))
    if is_training:
        raise Mixes("normalizes over the batch")
    return [axis, None, None]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math",
)
def attention(call: Call) -> list[Outcome]:
    """Attention of queries (B, H, T, D) over keys and values; records in dimension 0, or in 1 where heads are alike."""
    query, key, value = call["query"], call["key"], call["value"]
    axis = call.common_axis(query, key, value)
    if axis.dim >= query.dim() - 2 or (len({query.shape[:2], key.shape[:2], value.shape[:2]}) > 1 and axis.dim):
        raise Mixes("attention over records")
    for name in ("attn_mask", "attn_bias"):
        if call.has(name):
            call.require_along(call[name], axis, query.dim())
    return [axis, axis] + [None] * 7  # the state of the random numbers and sizes


@rule("mkldnn_rnn_layer")
def recurrent_layer(call: Call) -> list[Outcome]:
    """A recurrent layer, time first."""
    x = call["input"]
    axis = call.common_axis(x)
    call.require_public(*(call[f"weight{i}"] for i in range(4)))
    if axis.dim != 1:
        raise Mixes("a recurrence along the records")
    for name in ("hx_", "cx_tmp"):
        call.require_along(call[name], axis)
    return [axis, axis, axis, axis]


@rule("affine_grid_generator")
def affine_grid(call: Call) -> Axis:
    """A grid of each matrix."""
    axis = call.common_axis(call["theta"])
    if axis.dim:
        raise Mixes("matrices that are made of several records")
    return axis


@rule("grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward")
def grid_sampler(call: Call) -> Axis:
    """Images at places, one grid for each, and their gradients."""
    axis = call.common_axis(call["input"], call["grid"], call["grad_output"])
    if axis.dim:
        raise Mixes("a grid over records")
    return axis


@rule("convolution_backward")
def convolution_backward(call: Call) -> list[Outcome]:
    """The gradients of images, filters and bias."""
    gradient, x = call["grad_output"], call["input"]
    call.require_public(call["weight"])
    axis = call.common_axis(gradient, x)
    if axis.dim:
        raise Mixes("a convolution over records")
    return [axis, Over.SUM, Over.SUM]


@rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> list[Outcome]:
    """The gradients of rows, scale and shift."""
    x = call["input"]
    call.require_public(call["weight"], call["bias"])
    axis = call.common_axis(call["grad_out"], x, call["mean"], call["rstd"])
    if axis.dim >= x.dim() - len(call["normalized_shape"]):
        raise Mixes("normalizes over records")
    return [axis, Over.SUM, Over.SUM]


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> list[Outcome]:
    """The gradients of images, scale and shift."""
    call.require_public(call["weight"])
    axis = call.common_axis(call["grad_out"], call["input"], call["mean"], call["rstd"])
    if axis.dim:
        raise Mixes("normalizes over records")
    return [axis, Over.SUM, Over.SUM]


@rule("embedding_dense_backward")
def embedding_backward(call: Call) -> Over:
    """The gradient of a table: a sum over rows."""
    gradient, indices = call["grad_output"], call["indices"]
    axis = call.common_axis(gradient, indices)
    if axis.dim == gradient.dim() - 1 or call["scale_grad_by_freq"]:
        raise Mixes("a sum over other rows than records")
    return Over.SUM


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(call: Call) -> Axis:
    """The gradients of queries, keys and values."""
    axis = call.common_axis(*(call[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")))
    if axis.dim:
        raise Mixes("attention over records")
    call.require_along(call["attn_mask"], axis, call["query"].dim())
    return axis
