"""Triton's language where it is installed; without it the files of kernels can still be read, though nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None
    tl = None


def jit(kernel: Callable[..., Any]) -> Any:
    """Make a function a kernel, which is compiled on its first launch; with TRITON_INTERPRET=1 numpy runs it."""
    return kernel if triton is None else triton.jit(kernel)


__all__ = ["jit", "tl"]
