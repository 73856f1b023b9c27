"""`python -m tools.tuning_cost PATH` draws the cost of publishing the best of several runs: docs/images/tune.png."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from dpbench.capabilities.tune.stated import BestOfTrials, Releases, Setting
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling

DELTA = 1e-5
ONE = Setting((), (Releases(PoissonSampling(60_000, 256 / 60_000), 1.1, 2000),))
MEANS = (1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0)
SHAPES = {"Poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}


def draw(path: Path) -> None:
    """Draw ε of the best of trials of MNIST against their mean number, beside that of publishing all."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    (event,) = ONE.events
    numbers = np.unique(np.round(MEANS).astype(int))
    one = epsilon(ONE.events, DELTA, "pld")
    axes.plot(numbers, [epsilon({event: 2000 * int(k)}, DELTA, "pld") for k in numbers], "k--", label="all published")
    for name, shape in SHAPES.items():
        costs = []
        for mean in MEANS:
            best = BestOfTrials(60_000, mean, None if math.isinf(shape) else shape, (ONE,), "accuracy", None)
            costs.append(epsilon({Event(best, (SumQuery("best", 1.0, 1.0),)): 1}, DELTA, "pld"))
        axes.plot(MEANS, costs, "o-", markersize=3, label=f"the best published, {name} number")
    axes.axhline(one, color="grey", linewidth=0.8)
    axes.annotate("one run", (MEANS[-1], one), ha="right", va="bottom", color="grey")
    axes.set(xscale="log", xlabel="runs (mean number)", ylabel="ε at δ = 1e-5", ylim=(0, 6))
    axes.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
