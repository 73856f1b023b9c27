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
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > _DROPOUT_OF_ATTENTION:
                args = (*args[:_DROPOUT_OF_ATTENTION], 0.0, *args[_DROPOUT_OF_ATTENTION + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _IndicesInRange(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a GPU's kernels answer by ending the process, and a CPU's by an error."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check = _CHECKS.get(func.overloadpacket.__name__)
        if check is not None and not check(*args):
            raise IndexError(f"an argument of {func} is out of range")
        return func(*args, **(kwargs or {}))


def _below(index: Tensor, size: int) -> bool:
    return not index.numel() or bool(((index >= -size) & (index < size)).all())


def _indices(x: Tensor, indices: Sequence[Tensor | None], *_: Any) -> bool:
    return all(
        index is None or index.dtype in (torch.bool, torch.uint8) or _below(index, size)
        for index, size in zip(indices, x.shape, strict=False)
    )


def _labels(x: Tensor, target: Tensor, weight: Any, reduction: Any, ignored: int, *_: Any) -> bool:
    return _below(target[target != ignored], x.shape[min(1, x.dim() - 1)])


def _along(x: Tensor, dimension: int, index: Tensor, *_: Any) -> bool:
    return _below(index, x.shape[dimension] if x.dim() else 1)


def _probabilities(p: Tensor, *_: Any) -> bool:
    return not p.is_floating_point() or bool(((p >= 0) & (p <= 1)).all())


def _weights(p: Tensor, *_: Any) -> bool:
    return bool(((p >= 0) & p.isfinite()).all() and (p.sum(-1) > 0).all())


_CHECKS: dict[str, Callable[..., bool]] = {
    "embedding": lambda table, index, *_: _below(index, len(table)),
    "_embedding_bag": lambda table, index, *_: _below(index, len(table)),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _indices),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"), _along),
    **dict.fromkeys(("index_select", "index_add", "index_add_", "index_copy", "index_fill"), _along),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _labels),
    "binary_cross_entropy": _probabilities,
    "bernoulli": _probabilities,
    "multinomial": _weights,
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
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase) and layer.dropout]
    rates = [layer.dropout for layer in layers]
    for layer in layers:
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
