"""Tests that kernels must pass on a device before they are used there, as `native.known_answers`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from dpbench.privacy.native.known_answers import DIGEST, KEY, SPACING, START, digest_of_numbers
from dpbench_triton import kernels
from dpbench_triton.kernels import Geometry


def wrong_answers(device: torch.device) -> str | None:
    """Name what the kernels compute wrongly on a device; None where they are right."""
    wrong = [name for name, is_right in CHECKS.items() if not is_right(device)]
    return " and ".join(wrong) or None


def _noise(device: torch.device) -> bool:
    """The numbers that the native kernels must draw, among them two from the tail, and the same divided."""
    total = torch.zeros(256, device=device)
    divided = torch.zeros(256, device=device)
    kernels.add_noise(total, START, 1.0, SPACING, KEY)
    kernels.add_noise(divided, START, 1.0, SPACING, KEY, divisor=3.0)
    is_stream = digest_of_numbers(total.cpu().numpy()) == DIGEST
    return is_stream and torch.equal(divided.cpu(), total.cpu() / 3)


def _whole_numbers(shape: tuple[int, ...], modulus: int, device: torch.device) -> Tensor:
    """Small whole numbers around zero in a shape: their sums and products are exact in every order."""
    numbers = torch.arange(torch.Size(shape).numel(), device=device) % modulus - modulus // 2
    return numbers.view(shape).float()


def _convolution(device: torch.device) -> bool:
    geometry = Geometry((3, 2), (2, 1), (1, 1), (1, 2), groups=2)
    a = _whole_numbers((3, 4, 6, 5), 7, device)
    g = _whole_numbers((3, 6, 3, 5), 5, device)
    expected = torch.stack([_by_autograd(geometry, *rows) for rows in zip(a.cpu(), g.cpu(), strict=True)])
    members = kernels.each_alone(3, device)
    rows = kernels.convolution(geometry, a, g, members)
    norms = kernels.convolution(geometry, a, g, members, stored=False).squared_norms
    signs = kernels.convolution(geometry, a, g, members, threshold=2.0)
    weights = torch.tensor([2.0, -3.0, 5.0], device=device)
    assert rows.weights is not None
    assert signs.weights is not None
    is_beyond = expected.abs() > 2
    expected_signs = expected.sign() * is_beyond
    answers = [
        (rows.weights, expected),
        (rows.squared_norms, expected.square().flatten(1).sum(1)),
        (norms, expected.square().flatten(1).sum(1)),
        (signs.weights.float(), expected_signs),
        (signs.squared_norms, is_beyond.flatten(1).sum(1).float()),
        (kernels.weighted_signs(signs.weights, weights), torch.tensordot(weights.cpu(), expected_signs, 1)),
    ]
    return all(torch.equal(answer.cpu(), right) for answer, right in answers)


def _by_autograd(geometry: Geometry, a: Tensor, g: Tensor) -> Tensor:
    """Gradient of one record by PyTorch on the CPU, from a (in, height, width) and g (out, height', width')."""
    shape = (len(g), len(a) // geometry.groups, *geometry.kernel)
    settings = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    gradient: Tensor = conv2d_weight(a[None], shape, g[None], *settings)  # type: ignore[no-untyped-call]
    return gradient


def _outer(device: torch.device) -> bool:
    g = _whole_numbers((3, 20), 7, device)
    a = _whole_numbers((3, 150), 5, device)
    weights = torch.tensor([2.0, -3.0, 5.0], device=device)
    products = g.cpu()[:, :, None] * a.cpu()[:, None, :]
    is_beyond = products.abs() > 2
    expected = torch.tensordot(weights.cpu(), products.sign() * is_beyond, 1)
    counts = kernels.count_outer(g, a, 2.0).cpu()
    is_counted = torch.equal(counts, is_beyond.flatten(1).sum(1).float())
    return is_counted and torch.equal(kernels.sum_outer(g, a, weights, 2.0).cpu(), expected)


def _group_norm(device: torch.device) -> bool:
    x = _whole_numbers((2, 6, 9, 10), 11, device) + 100
    g = _whole_numbers((2, 6, 9, 10), 7, device)
    scale, shift = kernels.group_norm(nn.GroupNorm(2, 6), x, g)
    groups = x.cpu().double().view(2, 2, -1)
    variance, mean = torch.var_mean(groups, 2, correction=0, keepdim=True)
    normalized = (groups - mean) / (variance + 1e-5).sqrt()
    expected = (normalized.view(x.shape) * g.cpu()).sum((2, 3))
    is_right = torch.allclose(scale.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    return is_right and torch.equal(shift.cpu(), g.cpu().sum((2, 3)))


CHECKS: dict[str, Callable[[torch.device], bool]] = {
    "noise": _noise,
    "gradients of a convolution": _convolution,
    "signs of a linear layer": _outer,
    "gradients of GroupNorm": _group_norm,
}
"""What is computed → whether a device computes it rightly."""
