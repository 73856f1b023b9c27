"""ROC curves on logarithmic axes: measured ones, what an audit proves, and what a ledger allows at most."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dpbench.reports.figures import COLORS, GRAY, RED, add_legend, new_panels

Floats = NDArray[np.float64]
RATES: Floats = np.geomspace(1e-4, 1, 61)
"""False positive rates at which curves are drawn: fifteen a decade."""
_MEASURED = [color for color in COLORS if color != RED]
_COLUMNS = 3
_LINE = 40  # letters of a title


@dataclass(frozen=True, eq=False)
class RocCurve:
    """A measured ROC curve.

    Attributes:
        label: Its name in the legend.
        fpr: (points,) false positive rates, increasing.
        tpr: (points,) true positive rates.
        kind: Number of its color: what the attacker sees, say.
        faint: Whether it is one of several, beside one that matters more.
    """

    label: str
    fpr: Floats
    tpr: Floats
    kind: int = 0
    faint: bool = False


@dataclass(frozen=True, eq=False)
class RocPanel:
    """Attacks or audits of one claim: what was measured between what is proven and what is allowed.

    Attributes:
        title: Title of the panel.
        measured: Measured curves; the later ones lie above the earlier ones.
        proven: (61,) true positive rates at `RATES` that an audit proves to be reached; None: it proves nothing.
        allowed: (61,) the largest ones that the ledger allows; None: it allows all, or no accountant covers it.
    """

    title: str
    measured: tuple[RocCurve, ...]
    proven: Floats | None
    allowed: Floats | None


def roc_figure(panels: Sequence[RocPanel]) -> Figure:
    """Draw panels side by side, with one legend beside them.

    Args:
        panels: At least one.
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
    rates = np.concatenate([curve.fpr for curve in panel.measured] or [RATES])
    least = float(10.0 ** np.floor(np.log10(rates[rates > 0].min())))

    for curve in panel.measured:
        color = _MEASURED[curve.kind % len(_MEASURED)]
        width, alpha = (0.7, 0.5) if curve.faint else (1.6, 1.0)
        axes.plot(curve.fpr, curve.tpr, color=color, linewidth=width, alpha=alpha, label=curve.label)
    if panel.proven is not None:
        axes.plot(RATES, panel.proven, color=RED, linestyle="--", linewidth=1.2, label="audit's bound: at least")
    if panel.allowed is not None:
        axes.plot(RATES, panel.allowed, color=RED, label="allowed by the ledger: at most")
    axes.plot(RATES, RATES, color=GRAY, linestyle=":", linewidth=0.9, label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    axes.set_xlabel("others called members (FPR)")
    axes.set_ylabel("members called members (TPR)")
    axes.set_title(textwrap.fill(panel.title, _LINE), fontsize=8)
