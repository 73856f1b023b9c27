"""Kernels in C++ (`native.cpp`), compiled on first use; everything works without them."""

from dpbench.privacy.native.loader import (
    Mode,
    cache_folder,
    library,
    mode,
    select,
    signature,
    warn_if_missing,
)

__all__ = ["Mode", "cache_folder", "library", "mode", "select", "signature", "warn_if_missing"]
