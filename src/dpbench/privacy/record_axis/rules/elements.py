"""Operators that treat each element alone, or each row along other dimensions."""

from __future__ import annotations

from torch import Tensor

from dpbench.privacy.record_axis.operators import Call, Mixes, rule
from dpbench.privacy.record_axis.tags import Axis


@rule(
    "pointwise",
    "clone _to_copy native_dropout masked_fill where bernoulli poisson _standard_gamma binomial normal fill random",
    "rrelu_with_noise _prelu_kernel nan_to_num lerp addcmul addcdiv gelu silu mish complex polar hardswish hardtanh",
    "log_sigmoid_forward softplus threshold elu leaky_relu hardsigmoid hardshrink softshrink _conj_physical",
    "gelu_backward silu_backward mish_backward threshold_backward native_dropout_backward hardswish_backward",
    "log_sigmoid_backward softplus_backward hardtanh_backward hardsigmoid_backward elu_backward leaky_relu_backward",
    "fake_quantize_per_tensor_affine_cachemask exponential log_normal uniform geometric cauchy zero resolve_conj",
    "sigmoid_backward tanh_backward logit_backward _prelu_kernel_backward hardshrink_backward softshrink_backward",
)
def pointwise(call: Call) -> Axis:
    """Each element of the output is a function of the elements at its place, broadcast."""
    return call.broadcast_axis(*call.read_tensors)


@rule("copy")
def copy(call: Call) -> Axis:
    """Elements of the source, broadcast, in the place of all that was there or of a part that each record has."""
    target, source = call["self"], call["src"]
    if call.has_records(target):
        return call.broadcast_axis(target, source)
    axis = call.common_axis(source)
    return axis._replace(dim=axis.dim + target.dim() - source.dim())


@rule("isin bucketize")
def elements_against_public(call: Call) -> Axis:
    """Each element of the first argument against a public table."""
    first, *others = call.tensors
    call.require_public(*others)
    return call.common_axis(first)


@rule(
    "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp sort argsort topk flip",
    "roll cummax cummin glu gather diff",
    "_softmax_backward_data _log_softmax_backward_data glu_backward _fft_r2c _fft_c2c _fft_c2r",
)
def along(call: Call) -> Axis:
    """Something happens along some dimensions; the others stay."""
    tensors = [t for t in call.tensors if t.dim()]
    axis = call.common_axis(*tensors)
    dims = call.dims(tensors[0])
    if dims is None or axis.dim in dims:
        raise Mixes("works along the records")
    return axis


@rule("scatter scatter_add scatter_reduce")
def scatter(call: Call) -> Axis:
    """Writes to places that an index names along one dimension."""
    target, index, source = call["self"], call["index"], call["src"]
    tensors = [target, index, *([source] if isinstance(source, Tensor) and source.dim() else [])]
    axis = call.common_axis(*tensors)
    if axis.dim == call["dim"] % max(target.dim(), 1):
        raise Mixes("records write to places that they choose")
    for t in tensors[1:]:
        if t.shape[axis.dim] != target.shape[axis.dim]:
            raise Mixes("a part of the batch")
    return axis
