"""`dpbench audit` of a run on noise: what its final weights tell of ε, as a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpbench.auditing.family import Family
from dpbench.auditing.labels import LabelAudit, audit_labels
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.canaries.labels import LabelScores
from dpbench.reports.audit import epsilon_rows, verdict_words
from dpbench.reports.audit_plot import drawn_audit
from dpbench.reports.figures import write_figure
from dpbench.runs.folder import RunFolder
from dpbench.runs.ledgers import read_run_ledger

_ASSUMES = (
    "the training data are noise with random labels (data=random_noise): each record is a canary with its label, and",
    "noise that nobody trained on stands for records that were left out; the code and the settings are audited",
)


@dataclass(frozen=True)
class LabelReport:
    """An audited run on noise.

    Attributes:
        run: Its folder.
        result: What was found.
        scores: By its final weights.
        family: What its ledger claims.
    """

    run: RunFolder
    result: LabelAudit
    scores: LabelScores
    family: Family

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON; None in place of infinite numbers."""
        return {"run": str(self.run), **self.result.to_json()}

    @property
    def text(self) -> str:
        """The facts as a table for people."""
        result = self.result
        confidence = f"{100 * result.confidence:g} % confidence"
        head = f"audit of {self.run} by labels: {result.members:,} training records, final weights, {confidence}"
        return "\n".join([head, *(f"  {name:<12} {words}" for name, words in _rows(result))])


def audit_by_labels(run: RunFolder, scores: LabelScores, confidence: float = 0.95) -> LabelReport:
    """Audit a run on noise.

    Args:
        run: Its folder.
        scores: By its final weights.
        confidence: See `auditing.audit_labels`.

    Raises:
        DPBenchError: It was not private, its unit is no example, or its ledger is damaged.
    """
    require_private(run)
    ledger = read_run_ledger(run.ledger)
    if ledger.wrong is not None:
        raise LedgerError(f"{run.ledger}: {ledger.wrong}; restore it, or train again.")
    if ledger.header.unit != "example":
        raise ConfigurationError(f"{run} protects {ledger.header.unit}s, and labels are of examples: records=examples.")
    family = Family(ledger.events, ledger.header.delta)
    return LabelReport(run, audit_labels(ledger, scores, confidence, family), scores, family)


def require_private(run: RunFolder) -> None:
    """Raise ConfigurationError where a run claims no ε."""
    if run.finished and not run.ledger.is_file():
        raise ConfigurationError(f"{run} has no ledger: without privacy it claims no epsilon that could be audited.")


def _rows(result: LabelAudit) -> Iterator[tuple[str, str]]:
    yield from epsilon_rows(result)
    yield from zip(("assumes", ""), _ASSUMES, strict=True)
    shares = f"{100 * result.recalled:.1f} % of the training labels, {100 * result.guessed:.1f} % of fresh ones"
    yield "recalled", f"{shares}; a training record scores higher with probability {result.auc:.3f}"
    yield "verdict", verdict_words(result.verdict, [bound.name for bound in result.violations])


def plot_label_audit(path: Path, report: LabelReport) -> Path:
    """Draw scores of training records and fresh ones, and which pairs of error rates they give.

    Args:
        path: The PNG.
        report: Of one run.
    """
    values = np.concatenate([report.scores.members, report.scores.others])
    member = np.arange(len(values)) < len(report.scores.members)
    labels = ("score: log-odds of the label by the final weights", "images of noise", "these records")
    return write_figure(path, drawn_audit(report.result, values, member, report.family, labels))
