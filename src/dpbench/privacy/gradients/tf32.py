"""TF32: products that NVIDIA's GPUs make of float32 with eleven bits, in convolutions unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EXACT = "ieee"


def _settings() -> list[Any]:
    """PyTorch's objects that carry a precision of float32 products."""
    backends: Any = torch.backends
    return [backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]


def is_allowed(device: str) -> bool:
    """Whether products of float32 may be made in TF32 on a type of device."""
    return device == "cuda" and any(setting.fp32_precision == "tf32" for setting in _settings())


@contextmanager
def refused(device: str) -> Iterator[None]:
    """Products of float32 are made in float32, where two ways of computing the same are compared."""
    if not is_allowed(device):
        yield
        return
    previous = [setting.fp32_precision for setting in _settings()]
    try:
        for setting in _settings():
            setting.fp32_precision = _EXACT
        yield
    finally:
        for setting, precision in zip(_settings(), previous, strict=True):
            setting.fp32_precision = precision
