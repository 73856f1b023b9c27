"""The picture of an audit: scores of canaries, and their ROC curve under the claimed trade-off curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dpbench.auditing import AuditResult, Family, LabelAudit
from dpbench.reports.audit import AuditReport
from dpbench.reports.figures import new_figure, write_figure

_BLUE, _RED, _GRAY = "#3060a8", "#c04030", "#808080"


def plot_audit(path: Path, report: AuditReport) -> Path:
    """Write the picture of `audit_figure`."""
    return write_figure(path, audit_figure(report))


def audit_figure(report: AuditReport) -> Figure:
    """Draw scores of members and others, and which pairs of error rates they give.

    Args:
        report: Of one run.
    """
    labels = ("score of a canary: log-likelihood ratio of what was released", "canaries", "these canaries")
    return drawn_audit(report.result, report.scores.llr, report.scores.member, report.family, labels)


def drawn_audit(
    result: AuditResult | LabelAudit,
    scores: NDArray[np.float64],
    member: NDArray[np.bool_],
    family: Family,
    labels: tuple[str, str, str],
) -> Figure:
    """Draw an audit of whatever kind.

    Args:
        result: What was found.
        scores: (m,) higher for likelier members.
        member: (m,) the truth.
        family: Of the ledger's releases.
        labels: What a score is, what is counted, and whose ROC curve it is.
    """
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    _draw_scores(left, scores, member)
    left.set_xlabel(labels[0])
    left.set_ylabel(labels[1])
    _draw_roc(right, scores, member, family, labels[2])
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    audited = f"audited at least {_figure(result.audited)}"
    figure.suptitle(f"{result.verdict}: sound ε {_figure(result.sound)}, {audited}")
    return figure


def _figure(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:.3g}"


def _draw_scores(ax: Axes, scores: NDArray[np.float64], member: NDArray[np.bool_]) -> None:
    """Histograms of the scores of members and others."""
    low, high = np.quantile(scores, [0.002, 0.998])  # what lies beyond would leave the rest one bar
    bins = np.linspace(low, max(high, low + 1e-9), 60)
    shown = np.clip(scores, bins[0], bins[-1])
    for name, which, color in (("members", member, _BLUE), ("others", ~member, _GRAY)):
        ax.hist(shown[which], bins=bins.tolist(), color=color, alpha=0.6, label=f"{which.sum():,} {name}")


def roc(scores: NDArray[np.float64], member: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """False and true positive rates of all thresholds, from the highest down."""
    order = np.argsort(-scores, kind="stable")
    hits, alarms = np.cumsum(member[order]), np.cumsum(~member[order])
    last = np.append(np.diff(scores[order]) != 0, True)  # equal scores are called together
    true, false = hits[last] / max(hits[-1], 1), alarms[last] / max(alarms[-1], 1)
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def _draw_roc(ax: Axes, scores: NDArray[np.float64], member: NDArray[np.bool_], family: Family, label: str) -> None:
    """The ROC curve of scores under the one that a ledger allows at most.

    Args:
        ax: Where to.
        scores: (m,) higher for likelier members.
        member: (m,) the truth.
        family: Of the ledger's releases.
        label: Whose scores they are.
    """
    least = 1 / len(scores)
    false, true = roc(scores, member)
    ax.plot(np.maximum(false, least), true, color=_BLUE, label=label, drawstyle="steps-post")
    at = np.geomspace(least, 1, 300)
    if family.uncovered is None:
        curve = family.curve(1.0)
        most = np.array([1 - curve(alpha) for alpha in at])
        ax.plot(at, most, color=_RED, label="most that the ledger allows")
    ax.plot(at, at, color=_GRAY, linewidth=0.8, linestyle=":", label="guessing")
    ax.set_xscale("log")
    ax.set_xlabel("others called members (share)")
    ax.set_ylabel("members called members (share)")
