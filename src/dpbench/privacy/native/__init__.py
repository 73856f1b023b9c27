"""Kernels in C++ (`native.cpp`), compiled when they are first wanted; everything can be computed without them, too."""

from dpbench.privacy.native.loader import Mode, cache_folder, library, mode, select, signature

__all__ = ["Mode", "cache_folder", "library", "mode", "select", "signature"]
