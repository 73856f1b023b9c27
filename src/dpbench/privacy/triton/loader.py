"""The optional tier of the engine on CUDA devices: kernels in Triton, compiled by it on their first launch.

Off unless they are asked for: their answers are tested by Triton's interpreter on a CPU, and their time was never
measured. Without Triton, on another device or in another precision, the rules of `layers` are computed in pure PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.native.loader import is_first_process
from dpbench.privacy.triton._known_answers import wrong_answers

Mode = Literal["off", "auto", "on"]
_VARIABLE = "DPBENCH_TRITON"
DEVICE = "cuda"
"""Type of the devices that kernels run on."""
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def select(wanted: Mode) -> None:
    """Choose for this process and those that it starts; without a call, the environment's DPBENCH_TRITON, else "off".

    Args:
        wanted: "off" takes no kernel, "auto" takes them where they can be had, and "on" refuses a CUDA device where
            they cannot.

    Raises:
        ConfigurationError: The mode is unknown.
    """
    _check(wanted)
    os.environ[_VARIABLE] = wanted


def _check(wanted: str) -> None:
    if wanted not in get_args(Mode):
        raise ConfigurationError(f"engine.triton (or {_VARIABLE}) must be off, auto or on, not {wanted!r}.")


def mode() -> Mode:
    """What `select` chose, or the environment: "off", "auto" or "on"."""
    chosen = os.environ.get(_VARIABLE, "off")
    _check(chosen)
    return cast(Mode, chosen)


def suits(*tensors: Tensor) -> bool:
    """Whether there are kernels, and they know this device and precision."""
    first = tensors[0]
    for x in tensors:
        if x.dtype != first.dtype or x.device != first.device:
            return False
    return first.dtype in _PRECISIONS and usable(first.device)


def usable(device: torch.device) -> bool:
    """Whether the kernels are wanted, and right on a device, which is tried once for each.

    Raises:
        ConfigurationError: engine.triton is "on", and they cannot be used on this CUDA device.
    """
    if device.type != DEVICE:
        return False
    choice = mode()
    if choice == "off":
        return False
    fault = _fault(device)
    if fault is None:
        return True
    if choice == "on":
        raise ConfigurationError(
            f"engine.triton=on, but the kernels cannot be used: {fault}. Install triton, or set engine.triton=auto for "
            "pure PyTorch where they are missing."
        )
    _warn(fault)
    return False


@cache
def _fault(device: torch.device) -> str | None:
    """Why the kernels are of no use on a device, in one line; None where they are right."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        wrong = wrong_answers(device)
    except Exception as error:  # of a compiler, a driver or a launch: whatever it is, PyTorch can do without
        return brief(error)
    if wrong is not None:
        return f"they compute wrongly on {device} ({wrong})"
    return None


@cache
def _warn(fault: str) -> None:
    if not is_first_process():
        return
    warnings.warn(
        f"there are no Triton kernels ({fault}): pure PyTorch computes, as privately. engine.triton=off says that this "
        "is meant.",
        stacklevel=3,
    )


def signature(device: torch.device) -> str:
    """Names the kernels that a device computes with, "" for none: they round differently, and draw other noise."""
    return _name() if usable(device) else ""


@cache
def _name() -> str:
    """Name made of the sources and of Triton's version, whose compiler decides how they round."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    import triton

    digest.update(triton.__version__.encode())
    return f"triton-{digest.hexdigest()[:12]}"
