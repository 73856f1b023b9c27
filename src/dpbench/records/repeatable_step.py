"""Training steps that are run again outside of training: what would make two runs differ is switched off."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

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
