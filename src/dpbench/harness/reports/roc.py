"""ROC curves on logarithmic axes: measured ones, an audit's bound, and a ledger's bound."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.figures import COLORS, GRAY, RED, add_legend, new_panels

Floats = NDArray[np.float64]
RATES: Floats = np.geomspace(1e-4, 1, 61)
"""False positive rates at which curves are drawn: fifteen a decade."""
_MEASURED = [color for color in COLORS if color != RED]
_COLUMNS = 3
_LINE = 40  # letters of a title


@dataclass(frozen=True, eq=False)
class Roc:
    """The ROC curve of scores: rates of all thresholds, from none called a member to all.

    Attributes:
        fpr: (points,) false positive rates, from 0 to 1, not decreasing.
        tpr: (points,) true positive rates, from 0 to 1, not decreasing.
    """

    fpr: Floats
    tpr: Floats

    @property
    def auc(self) -> float:
        """Area: the probability that a member scores higher than another, where equal scores count by half."""
        return float(np.trapezoid(self.tpr, self.fpr))

    @property
    def advantage(self) -> float:
        """max(TPR − FPR) (Yeom et al. 2018). Of few records it is above 0 for a coin too: it is a maximum."""
        return float((self.tpr - self.fpr).max())

    def true_positive_rates_at(self, fpr: Floats) -> Floats:
        """Largest TPR of a threshold with an FPR of at most each of these, without interpolation."""
        rates: Floats = self.tpr[np.searchsorted(self.fpr, fpr, side="right") - 1]
        return rates


def roc(scores: Floats, members: NDArray[np.bool_], weights: NDArray[Any] | None = None) -> Roc:
    """ROC curve of all scores together; records with equal scores are called members together.

    Args:
        scores: Scores of any shape; higher for likelier members.
        members: The truth, of the same shape.
        weights: Number of times that each record counts, of the same shape; None: once.

    Raises:
        ConfigurationError: There is no member or no other.

    >>> curve = roc(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False]))
    >>> curve.auc, curve.advantage
    (0.875, 0.5)
    """
    from sklearn.metrics import roc_curve  # takes half a second

    if members.all() or not members.any():
        raise ConfigurationError(
            "a ROC curve requires members and non-members, and all of these records are of one kind: use more records "
            "(runs with data.membership=half)."
        )
    counts = None if weights is None else weights.ravel()
    fpr, tpr, _ = roc_curve(members.ravel(), scores.ravel(), sample_weight=counts, drop_intermediate=False)
    return Roc(fpr, tpr)


@dataclass(frozen=True, eq=False)
class RocPanel:
    """Attacks or audits of one claim: measurements between a lower and an upper bound.

    Attributes:
        title: Title of the panel.
        measured: Label → measured curve; the later ones lie above the earlier ones.
        proven: (61,) true positive rates at `RATES` that an audit proves to be reached; None: it proves nothing.
        allowed: (61,) the largest ones that the ledger allows; None: it allows all, or no accountant covers it.
    """

    title: str
    measured: Mapping[str, Roc]
    proven: Floats | None
    allowed: Floats | None


def roc_figure(panels: Sequence[RocPanel]) -> Figure:
    """Draw panels side by side, with one legend.

    Args:
        panels: The panels, at least one.
    """
    figure, places = new_panels(len(panels), _COLUMNS, 3.6, 3.5, sharex=True, sharey=True)
    for axes, panel in zip(places, panels, strict=True):
        draw_roc(axes, panel)
    add_legend(figure)
    return figure


def draw_roc(axes: Axes, panel: RocPanel) -> None:
    """Draw the curves of a panel, and that of a guess, on logarithmic axes.

    Args:
        axes: Target axes.
        panel: Curves to draw.
    """
    rates = np.concatenate([curve.fpr for curve in panel.measured.values()] or [RATES])
    least = float(10.0 ** np.floor(np.log10(rates[rates > 0].min())))

    for (label, curve), color in zip(panel.measured.items(), _MEASURED, strict=False):
        axes.plot(curve.fpr, curve.tpr, color=color, linewidth=1.6, label=label)
    if panel.proven is not None:
        axes.plot(RATES, panel.proven, color=RED, linestyle="--", linewidth=1.2, label="audit's bound: at least")
    if panel.allowed is not None:
        axes.plot(RATES, panel.allowed, color=RED, label="allowed by the ledger: at most")
    axes.plot(RATES, RATES, color=GRAY, linestyle=":", linewidth=0.9, label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    axes.set_title(textwrap.fill(panel.title, _LINE), fontsize=8)
