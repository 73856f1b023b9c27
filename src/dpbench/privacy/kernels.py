"""Kernels for the tensors at hand: those in C++ on the CPU, or those of a plug-in (entry points `dpbench.kernels`)."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy import native
from dpbench.privacy.native import kernels as native_kernels

_PLUGINS = "dpbench.kernels"
_VARIABLE = "DPBENCH_KERNELS"
_NONE = "none"


class Kernels(Protocol):
    """Functions that a device computes faster than PyTorch does."""

    def suits(self, *tensors: Tensor) -> bool:
        """Tell if there are kernels for this device and precision."""

    def group_norm(self, layer: nn.GroupNorm, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Per-row gradients of scale and shift, (R, C) each; x and g (R, C, H, W)."""

    def count_outer(self, g: Tensor, a: Tensor, threshold: float) -> Tensor:
        """How many coordinates of each g_r a_rᵀ are beyond ±τ, shape (R,), from g (R, out) and a (R, in)."""

    def sum_outer(self, g: Tensor, a: Tensor, weights: Tensor, threshold: float) -> Tensor:
        """Sum over records of `weights` (R,) times the signs of entries beyond ±τ in g_r a_rᵀ, shape (out, in)."""

    def add_noise(self, total: Tensor, start: int, std: float, spacing: float, key: bytes) -> None:
        """Add `std` times the numbers from `start` on of a stream of standard normal numbers; round to a grid."""


class PluginKernels(Kernels, Protocol):
    """Kernels of a plug-in.

    Each answer is a function of its arguments alone, in one order of sums, so that a resumed run repeats the
    interrupted one to the bit. Norms bound the gradients that are summed.
    """

    def signature(self, device: torch.device) -> str:
        """Name of all that decides how they round on a device and the noise they draw; "" where they do not compute.

        Raises:
            ConfigurationError: They should, and cannot.
        """

    def convolution_weights(self, layer: nn.Conv2d, a: Tensor, g: Tensor, padding: tuple[int, int]) -> Any:
        """Per-record gradients of a zero-padded convolution's weight, as `gradients.parameter.ParameterGradients`.

        Args:
            layer: The convolution.
            a: Inputs, shape (R, in, H, W).
            g: Gradients of outputs, shape (R, out, H', W').
            padding: Zeros on each side, (vertical, horizontal).
        """


def select(name: str) -> None:
    """Choose a plug-in's kernels for this process and those that it starts; without a call, DPBENCH_KERNELS, or none.

    Args:
        name: An entry point of `dpbench.kernels`, or "none".

    Raises:
        ConfigurationError: There is no such entry point.
    """
    _load(name)
    os.environ[_VARIABLE] = name


def plugin() -> PluginKernels | None:
    """The plug-in's kernels that were chosen, or None.

    Raises:
        ConfigurationError: There is no such entry point.
    """
    return _load(os.environ.get(_VARIABLE, _NONE))


@cache
def _load(name: str) -> PluginKernels | None:
    if name == _NONE:
        return None
    plugins = entry_points(group=_PLUGINS)
    for entry in plugins.select(name=name):
        return cast(PluginKernels, entry.load())
    known = ", ".join([_NONE, *sorted(plugins.names)])
    raise ConfigurationError(
        f"engine.kernels (or {_VARIABLE}) must be one of {known}, not {name!r}: install its plug-in."
    )


def suited(*tensors: Tensor) -> Kernels | None:
    """Kernels for tensors of one device and precision; None: pure PyTorch."""
    chosen = plugin()
    if chosen is not None and chosen.suits(*tensors):
        return chosen
    return native_kernels if native_kernels.suits(*tensors) else None


def signature(device: torch.device) -> str:
    """Names of the kernels that a device computes with, "" for none: they round differently from PyTorch."""
    chosen = plugin()
    return native.signature() + (chosen.signature(device) if chosen is not None else "")
