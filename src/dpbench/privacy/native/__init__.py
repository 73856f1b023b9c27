"""Kernels in C++ (`native.cpp`), compiled when they are first wanted; everything can be computed without them, too."""

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
