"""TF32 and bfloat16: products that processors make of float32 with fewer bits, where PyTorch's settings allow it.

PyTorch's defaults: TF32 in convolutions on NVIDIA's GPUs, float32 elsewhere. `torch.set_float32_matmul_precision`
allows TF32 in matrix products, with "medium" bfloat16 on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_EXACT = "ieee"
_COARSE = ("tf32", "bf16")


def _settings(device: str) -> list[Any]:
    """PyTorch's objects that carry a precision of float32 products on a type of device."""
    backends: Any = torch.backends
    if device == "cuda":
        return [backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]
    if device == "cpu":
        return [backends.mkldnn.conv, backends.mkldnn.rnn, backends.mkldnn.matmul]
    return []


def _of_matrix_products() -> list[Any]:
    """The same of matrix products, on every device: one function of PyTorch sets them together."""
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.mkldnn.matmul]


def is_allowed(device: str) -> bool:
    """Return whether products of float32 may be made in fewer bits on a type of device."""
    return any(setting.fp32_precision in _COARSE for setting in _settings(device))


@contextmanager
def refused(device: str) -> Iterator[None]:
    """Products of float32 are made in float32, where two ways of computing the same are compared."""
    if not is_allowed(device):
        yield
        return
    with _exact([*_settings("cuda"), *_settings("cpu")]):
        yield


@contextmanager
def refused_in_matrix_products() -> Iterator[None]:
    """Compute matrix products of float32 in float32: norms, and the sums of the gradients that these clip.

    A product in p bits (TF32 11, bfloat16 8) rounds each factor by a share of at most u = 2⁻ᵖ, to the nearest number.
    Σ_t (w g_t) a_tᵀ, a record's part of a sum with its clip factor w, is then wrong by up to
    (2u + u²) w Σ_t ‖g_t‖ ‖a_t‖. With one position that is a share of the bound, 2⁻¹⁰ in TF32 and 2⁻⁷ in bfloat16; with
    several it is not, since their parts may cancel and clipping bounds w ‖Σ_t g_t a_tᵀ‖ only. So nothing is charged to
    the bound, but these products are made in float32. Convolutions keep their precision: they give a record's
    gradient, and its norm is computed from the very numbers that are summed.
    """
    settings = _of_matrix_products()
    if not any(setting.fp32_precision in _COARSE for setting in settings):
        yield
        return
    with _exact(settings):
        yield


@contextmanager
def _exact(settings: Sequence[Any]) -> Iterator[None]:
    """Products are made in float32 by some settings, which are put back afterwards."""
    previous = [setting.fp32_precision for setting in settings]
    for_all = _precision_for_all()
    try:
        if for_all is not None:
            torch.set_float32_matmul_precision("highest")
        for setting in settings:
            setting.fp32_precision = _EXACT
        yield
    finally:
        if for_all is not None:
            torch.set_float32_matmul_precision(for_all)
        for setting, precision in zip(settings, previous, strict=True):
            setting.fp32_precision = precision


def _precision_for_all() -> str | None:
    """Precision of `torch.set_float32_matmul_precision`; None if the settings of devices differ from it.

    PyTorch (torch.compile, for one) fails where the two disagree, so that both have to be changed together.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
