"""Opacus: its three ways to per-record gradients, each with its own optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.plain import SGD, Step, laid_out
from benchmarks.workloads import Workload
from dpbench.models.wide_resnet import standardized


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose own forward standardizes its weight: Opacus knows no parametrizations.

    Args:
        layer: A convolution with `WeightStandardization`, whose tensors it takes over.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
        )
        self.weight = layer.parametrizations.weight.original
        self.bias = layer.bias
        self.gain = layer.parametrizations.weight[0].gain

    def forward(self, input: Tensor) -> Tensor:
        """(N, channels, H, W) → (N, channels, H, W)."""
        weight = standardized(self.weight, self.gain)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


def without_parametrizations(network: nn.Module) -> nn.Module:
    """The network, with the same weights, with `StandardizedConv2d` for convolutions with weight standardization."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if parametrize.is_parametrized(layer):
                setattr(module, name, StandardizedConv2d(layer))
    return network


def opacus(workload: Workload, mode: str, device: str, layout: torch.memory_format) -> Step:
    """Flat clipping at 1, noise multiplier 1, SGD.

    Args:
        workload: Model and lot.
        mode: "hooks", "functorch" or "ghost" (fast gradient clipping).
        device: Where.
        layout: Of model and records.
    """
    from opacus.validators import ModuleValidator

    # Its own DPLSTM and DPMultiheadAttention for torch's, with the same weights; other networks are as they were.
    network = without_parametrizations(workload.model())
    plain = ModuleValidator.fix(network).to(device, memory_format=layout)
    x, y = (data.to(device) for data in workload.data())
    x = laid_out(x, layout)
    return private_step(plain, mode, lambda model: F.cross_entropy(model(x), y, reduction="none"), len(x))


def private_step(network: nn.Module, mode: str, losses: Callable[[nn.Module], Tensor], records: int) -> Step:
    """Make the step of a network with the losses of a lot's records.

    Args:
        network: The network.
        mode: As above.
        losses: Function of the wrapped network.
        records: In the lot.
    """
    # Of its hooks on every forward pass, which would be a part of the time.
    warnings.filterwarnings("ignore")
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    common: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": records}
    sgd = SGD(parameter for parameter in network.parameters() if parameter.requires_grad)
    if mode == "ghost":
        ghost = GradSampleModuleFastGradientClipping(network, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd, **common)

        def loss_of() -> Any:
            return DPTensorFastGradientClipping(ghost, optimizer, losses(ghost))

    else:
        model = GradSampleModule(network, force_functorch=mode == "functorch")
        optimizer = DPOptimizer(sgd, **common)

        def loss_of() -> Any:
            return losses(model).mean()

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return step
