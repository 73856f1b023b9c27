"""Opacus: its three ways to per-record gradients, each with its own optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.plain import Step, laid_out
from benchmarks.workloads import Workload


def opacus(workload: Workload, mode: str, device: str, layout: torch.memory_format) -> Step:
    """Flat clipping at 1, noise multiplier 1, SGD.

    Args:
        workload: Model and lot.
        mode: "hooks", "functorch" or "ghost" (fast gradient clipping).
        device: Where.
        layout: Of model and records.
    """
    # Of its hooks on every forward pass, which would be a part of the time.
    warnings.filterwarnings("ignore")
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    # Its own DPLSTM and DPMultiheadAttention for torch's, with the same weights; other networks are as they were.
    plain = ModuleValidator.fix(workload.model()).to(device, memory_format=layout)
    x, y = (data.to(device) for data in workload.data())
    x = laid_out(x, layout)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01)
    common: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    criterion: Any = nn.CrossEntropyLoss()
    optimizer: Any
    if mode == "ghost":
        model = GradSampleModuleFastGradientClipping(plain, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd, **common)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)
    else:
        model = GradSampleModule(plain, force_functorch=mode == "functorch")
        optimizer = DPOptimizer(sgd, **common)

    def step() -> Any:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step
