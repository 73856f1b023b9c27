"""Kernels in Triton for CUDA devices; everything works without them."""

from dpbench.privacy.triton import kernels
from dpbench.privacy.triton.loader import Mode, mode, select, signature, suits, usable

__all__ = ["Mode", "kernels", "mode", "select", "signature", "suits", "usable"]
