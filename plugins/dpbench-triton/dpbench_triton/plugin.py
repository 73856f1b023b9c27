"""The kernels as `dpbench.privacy.kernels.PluginKernels`, compiled by Triton on their first launch."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor, nn

from dpbench.errors import ConfigurationError, brief
from dpbench_triton._known_answers import wrong_answers
from dpbench_triton.convolution_gradients import TritonConvolutionGradients
from dpbench_triton.kernels import add_noise, count_outer, group_norm, sum_outer

__all__ = ["add_noise", "convolution_weights", "count_outer", "group_norm", "signature", "suits", "sum_outer"]

DEVICE = "cuda"
"""Type of the devices that kernels run on."""
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def suits(*tensors: Tensor) -> bool:
    """Tell if the kernels know this device and precision."""
    first = tensors[0]
    for x in tensors:
        if x.dtype != first.dtype or x.device != first.device:
            return False
    return first.dtype in _PRECISIONS and signature(first.device) != ""


def convolution_weights(
    layer: nn.Conv2d,
    a: Tensor,
    g: Tensor,
    padding: tuple[int, int],
) -> TritonConvolutionGradients:
    """Per-record gradients of the weight of a zero-padded convolution, a (R, in, H, W) and g (R, out, H', W')."""
    return TritonConvolutionGradients(layer, a, g, padding)


def signature(device: torch.device) -> str:
    """Name of the kernels that a device computes with, "" for none: of their sources and of Triton's version.

    Raises:
        ConfigurationError: They compute wrongly on this CUDA device, which is tried once for each, or not at all.
    """
    if device.type != DEVICE:
        return ""
    fault = _fault(device)
    if fault is not None:
        raise ConfigurationError(f"engine.kernels=triton cannot be used: {fault}. engine.kernels=none does without.")
    return _name()


@cache
def _fault(device: torch.device) -> str | None:
    """Reason why the kernels cannot be used on a device, in one line; None if they can."""
    try:
        wrong = wrong_answers(device)
    except Exception as error:  # of a compiler, a driver or a launch
        return brief(error)
    return None if wrong is None else f"they compute wrongly on {device} ({wrong})"


@cache
def _name() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(triton.__version__.encode())
    return f"triton-{digest.hexdigest()[:12]}"
