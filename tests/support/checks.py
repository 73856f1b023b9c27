"""Checks that a mechanism passes and a broken mutant fails; used by both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch.utils.data import TensorDataset

from dpbench.data.sampler import PrivateBatchSampler
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Known, loader_of, trainer_for


def accepts_scale(noise: NDArray[np.floating], std: float, level: float = 1e-4) -> bool:
    """Kolmogorov-Smirnov: could `noise` be centered Gaussian with this standard deviation?"""
    return bool(stats.kstest(np.asarray(noise, np.float64) / std, "norm").pvalue > level)


def audit(folder: Path, strategy: DPSGD, width: int = 2000, steps: int = 30, expected: float = 2.0) -> list[str]:
    """Train where every gradient is known, and compare each update with what DP-SGD should have released.

    Args:
        folder: For the ledger.
        strategy: Flat clipping at 1, noise multiplier 0.1, seed 0.
        width: Number of weights.
        steps: Releases; with a mean lot size of 2 some lots are empty.
        expected: Expected lot size.

    Returns:
        What is wrong; empty for a correct mechanism.
    """
    population = 40
    data = torch.randn(population, width, generator=torch.Generator().manual_seed(1)) * 0.2 + 0.3  # norms far above 1
    loader = loader_of(TensorDataset(data), expected)
    module = Known(width)
    trainer_for(folder, strategy, steps).fit(module, loader)
    history = [torch.zeros(width), *module.history]
    lots = PrivateBatchSampler(loader.lots.sampling, seed=0)
    sizes = [len(lots.lot(step)) for step in range(steps)]
    assert 0 in sizes, "this world needs an empty lot"
    problems, residuals = [], []
    for step in range(steps):
        released = (history[step] - history[step + 1]) * expected
        clipped = data[lots.lot(step)]
        clipped = (clipped / clipped.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
        residual = released - clipped
        residuals.append(residual.numpy())
        if not accepts_scale(residual.numpy(), 0.1):
            problems.append(f"step {step}: noise of another scale")
        direction = torch.ones(width) / width**0.5  # all records lie this way
        if abs(float(residual @ direction)) > 6 * 0.1:
            problems.append(f"step {step}: the sum is off")
    for i, a in enumerate(residuals):
        for b in residuals[:i]:
            if a.std() and b.std() and abs(stats.pearsonr(a, b).statistic) > 6 / np.sqrt(width):
                problems.append("noise is reused")
    lines = read_ledger(folder / "ledger.jsonl").releases
    if len(lines) != steps:
        problems.append(f"{len(lines)} ledger lines for {steps} steps")
    return problems
