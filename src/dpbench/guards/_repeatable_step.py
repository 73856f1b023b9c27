"""Training steps that are run again outside of training: what would make two runs differ is switched off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_DROPOUT_OF_ATTENTION = 4  # position of dropout_p


class _NoDropoutOfAttention(TorchFunctionMode):
    """Calls attention without dropout."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > _DROPOUT_OF_ATTENTION:
                args = list(args)
                args[_DROPOUT_OF_ATTENTION] = 0.0
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _IndicesInRange(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a GPU's kernels answer by ending the process, and a CPU's by an error."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        check = _CHECKS.get(func.overloadpacket.__name__)
        if check is not None and not check(*args):
            raise IndexError(f"an argument of {func} is out of range")
        return func(*args, **(kwargs or {}))


def _is_below(index: Tensor, size: int) -> bool:
    """Whether all entries count positions of a dimension, from its beginning or from its end."""
    if not index.numel():
        return True
    in_range = (index >= -size) & (index < size)
    return bool(in_range.all())


def _is_row(table: Tensor, index: Tensor, *_: Any) -> bool:
    return _is_below(index, len(table))


def _are_indices(x: Tensor, indices: Sequence[Tensor | None], *_: Any) -> bool:
    for index, size in zip(indices, x.shape, strict=False):
        if index is None or index.dtype in (torch.bool, torch.uint8):  # all, or a mask
            continue
        if not _is_below(index, size):
            return False
    return True


def _are_labels(x: Tensor, target: Tensor, weight: Any, reduction: Any, ignored: int, *_: Any) -> bool:
    dimension = min(1, x.dim() - 1)
    classes = x.shape[dimension]
    return _is_below(target[target != ignored], classes)


def _is_index_along(x: Tensor, dimension: int, index: Tensor, *_: Any) -> bool:
    size = x.shape[dimension] if x.dim() else 1
    return _is_below(index, size)


def _are_probabilities(p: Tensor, *_: Any) -> bool:
    if not p.is_floating_point():
        return True
    in_range = (p >= 0) & (p <= 1)
    return bool(in_range.all())


def _are_weights(p: Tensor, *_: Any) -> bool:
    in_range = (p >= 0) & p.isfinite()
    if not in_range.all():
        return False
    is_positive = p.sum(-1) > 0
    return bool(is_positive.all())


_CHECKS: dict[str, Callable[..., bool]] = {
    "embedding": _is_row,
    "_embedding_bag": _is_row,
    "index": _are_indices,
    "index_put": _are_indices,
    "index_put_": _are_indices,
    "_index_put_impl_": _are_indices,
    "gather": _is_index_along,
    "scatter": _is_index_along,
    "scatter_": _is_index_along,
    "scatter_add": _is_index_along,
    "scatter_add_": _is_index_along,
    "scatter_reduce": _is_index_along,
    "index_select": _is_index_along,
    "index_add": _is_index_along,
    "index_add_": _is_index_along,
    "index_copy": _is_index_along,
    "index_fill": _is_index_along,
    "nll_loss_forward": _are_labels,
    "nll_loss2d_forward": _are_labels,
    "binary_cross_entropy": _are_probabilities,
    "bernoulli": _are_probabilities,
    "multinomial": _are_weights,
}


@contextmanager
def without_assertions(device: str) -> Iterator[None]:
    """Let records that are out of range end in an error on a GPU too."""
    if device == "cpu":
        yield
        return
    with _IndicesInRange():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def without_fused_dropout(module: nn.Module, device: str) -> Iterator[None]:
    """Switch off dropout inside of kernels of a GPU (recurrent layers, attention), whose masks follow no row."""
    if device == "cpu":
        yield
        return
    layers = []
    rates = []
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase) and layer.dropout:
            layers.append(layer)
            rates.append(layer.dropout)
            layer.dropout = 0.0
    try:
        with _NoDropoutOfAttention():
            yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.dropout = rate


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions as they were written: nothing is compiled for lots of other sizes."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
