"""Checks that a mechanism passes and a broken mutant fails; used by both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def accepts_scale(noise: NDArray[np.floating], std: float, level: float = 1e-4) -> bool:
    """Kolmogorov-Smirnov: could `noise` be centred Gaussian with this standard deviation?"""
    return bool(stats.kstest(np.asarray(noise, np.float64) / std, "norm").pvalue > level)
