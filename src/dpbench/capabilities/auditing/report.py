"""`dpbench audit`: bounds on a run's epsilon by its canaries, or by the labels of its noise, as a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from dpbench.capabilities.auditing.audit import NO_PROOF, Audit, Verdict, audit
from dpbench.capabilities.auditing.family import Family
from dpbench.capabilities.auditing.labels import LabelScores, audit_labels
from dpbench.capabilities.canaries.file import READABLE, SCHEMA, keep_scores
from dpbench.capabilities.canaries.scores import Scores
from dpbench.errors import ConfigurationError, DPBenchError, LedgerError
from dpbench.harness.reports.figures import FolderPicture
from dpbench.harness.reports.roc import RATES, RocPanel, roc
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import read_run_ledger
from dpbench.harness.runs.numbers import MOST_AUDITED, audit_text, limit_or_none, limit_text
from dpbench.harness.runs.readers import read_json
from dpbench.harness.runs.record import CONFIDENCE, read_result
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.privacy.accounting.tradeoff import trade_off
from dpbench.templates import render

_MOST_GROUPS = 6  # of parameters, named
_HOW = "dpbench train ... audit=gradient_canaries"
PICTURE = FolderPicture(
    section="audit",
    title="Audit",
    file="audit.png",
    words="scores of canaries and their ROC curve, as dpbench audit draws them, which prints all bounds and checks",
)
"""An entry point of `dpbench.pictures`."""
VERDICTS = {
    Verdict.VIOLATED: "a lower bound is above the sound epsilon: mechanism or ledger is wrong",
    Verdict.NOT_AS_DECLARED: "no bound is above the sound epsilon, but the mechanism is not as declared",
    Verdict.CONSISTENT: f"nothing contradicts the claim; {NO_PROOF}",
}
"""Meaning of each verdict."""


class AuditFile(BaseModel):
    """The content of audit.json.

    Attributes:
        ledger: By which the ledger beside it is known as the one that the scores belong to.
        scores: Scores of all releases in the ledger.
        left_out: Groups of parameters that show nothing of the canaries → their coordinates.
    """

    model_config = ConfigDict(strict=True)

    ledger: Seal
    scores: Scores
    left_out: dict[str, int] = {}


@dataclass(frozen=True)
class AuditReport:
    """An audited run.

    Attributes:
        run: The run's folder.
        result: Bounds, checks and verdict.
        scores: Scores of canaries, or of labels by the final weights.
        family: Claim of the ledger.
        left_out: Groups of parameters that show nothing of the canaries → their coordinates.
        stored: The audit in result.json, which tables show; None if there is none.
    """

    run: RunFolder
    result: Audit
    scores: Scores | LabelScores
    family: Family
    left_out: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON; None in place of infinite numbers."""
        return {"run": str(self.run), **self.result.to_json(), "left_out": self.left_out, "stored": self.stored}

    @property
    def text(self) -> str:
        """The facts as a table for people."""
        result = self.result
        grounds = f" ({'; '.join(result.accused_by)})" if result.accused_by else ""
        text = render(
            Path(__file__).with_name("audit.txt.jinja"),
            run=self.run,
            by_labels=isinstance(self.scores, LabelScores),
            result=result,
            sound=_sound_text(result.sound, result.sound_by),
            # First the bound that stands for all.
            bounds=sorted(result.bounds, key=lambda bound: bound is not result.shown),
            bound_width=max(len(bound.name) for bound in result.bounds),
            limit_of=limit_text,
            epsilon_of=audit_text,
            most_audited=MOST_AUDITED,
            verdict=f"{result.verdict}{grounds}: {VERDICTS[result.verdict]}",
            left_out=[f"{name} ({size:,} coordinates)" for name, size in self.left_out.items()],
            most_groups=_MOST_GROUPS,
            records_measured=isinstance(self.scores, Scores) and self.scores.probes.records,
        )
        return text.rstrip("\n")

    @property
    def roc_panel(self) -> RocPanel:
        """Error rates of the scores, between the audit's bound and the ledger's bound."""
        if isinstance(self.scores, Scores):
            scores, member, label = self.scores.llr, self.scores.member, "these canaries"
        else:
            scores = np.concatenate([self.scores.members, self.scores.others])
            member = np.arange(len(scores)) < len(self.scores.members)
            label = "these records"
        curves = {}
        if member.any() and not member.all():
            curves[label] = roc(scores, member)
        result = self.result
        bound = result.shown
        proven = allowed = None
        if bound is not None and bound.noise_scale is not None and math.isfinite(bound.noise_scale):
            proven = self.family.curve(bound.noise_scale).max_true_positive_rate(RATES)
        if self.family.accountant is not None:
            allowed = trade_off(self.family.events).max_true_positive_rate(RATES)
        title = f"{result.verdict}: sound ε {audit_text(result.sound)}, audited {limit_or_none(result.audited)}"
        return RocPanel(title, curves, proven, allowed)


def audit_run(folder: Path, confidence: float = 0.95) -> AuditReport:
    """Audit a run that was trained with canaries.

    Args:
        folder: The run's folder.
        confidence: Confidence of each bound, see `auditing.audit`.

    Raises:
        DPBenchError: There is no run, it had no canaries, a file is damaged, of another run or not the one that was
            audited when the run ended, or the confidence is out of range.
    """
    run = RunFolder(folder)
    file = read_scores(run)
    ledger = read_run_ledger(run.ledger)
    wrong = difference(run.ledger, file.ledger, run.audit.name, ended=True) or ledger.wrong
    if wrong is not None:
        raise LedgerError(
            f"{run.ledger} does not belong to {run.audit.name} ({wrong}): restore both files of one run, or train "
            "again."
        )
    stored = read_result(run)["privacy"].get("audit") if run.finished else None
    if stored is not None and "damage" in stored:
        raise ConfigurationError(f"{run}: {stored['damage']}; restore a copy, or train again, `{_HOW}`.")
    family = Family(ledger.events, ledger.header.delta)
    result = audit(ledger, file.scores, confidence, family)
    return AuditReport(run, result, file.scores, family, file.left_out, stored)


def kept_audit(run: RunFolder, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Result of an audit that a run keeps: bounds and verdict, or why there are none; for `dpbench.audits`.

    Args:
        run: The folder of a run with canaries that has made its last step.
        checkpoint: Checkpoint of that step.

    Returns:
        None where nothing was released.
    """
    keep_scores(checkpoint, run.audit)
    if not run.audit.is_file():
        return None
    try:
        return audit_run(run.path, CONFIDENCE).result.summary()
    except DPBenchError as error:  # the model is trained: its result is not lost for that
        return {"why_not": str(error)}


def audit_by_labels(run: RunFolder, scores: LabelScores, confidence: float = 0.95) -> AuditReport:
    """Audit a run on noise, of which each record is a canary with its random label.

    Args:
        run: The run's folder.
        scores: Scores of labels by the final weights.
        confidence: Confidence of each bound, see `auditing.audit_labels`.

    Raises:
        DPBenchError: It was not private, its unit is no example, or its ledger is damaged.
    """
    if not run.ledger.is_file():
        raise ConfigurationError(f"{run} has no ledger: a run without privacy has no epsilon to audit.")
    ledger = read_run_ledger(run.ledger)
    if ledger.wrong is not None:
        raise LedgerError(f"{run.ledger}: {ledger.wrong}; restore it, or train again.")
    if ledger.header.unit != "example":
        raise ConfigurationError(f"{run} protects {ledger.header.unit}s; audit labels of a run with records=examples.")
    family = Family(ledger.events, ledger.header.delta)
    return AuditReport(run, audit_labels(ledger, scores, confidence, family), scores, family)


def read_scores(run: RunFolder) -> AuditFile:
    """Read the observations of a run's canaries.

    Raises:
        ConfigurationError: There is none, or it is damaged.
    """
    if not run.audit.exists():
        if any(run.path.rglob(f"*/{RunFolder.audit}")):
            raise ConfigurationError(f"{run} holds several runs: name one that has an {RunFolder.audit}.")
        raise ConfigurationError(
            f"{run} has no {RunFolder.audit}: it is not a run, has no canaries, or lost the file: train with "
            f"canaries, `{_HOW}`, or restore a copy."
        )
    again = f"train again, `{_HOW}`, or restore a copy of {{path}}"
    schema = read_json(run.audit, dict, again).get("schema")
    if schema not in READABLE:
        raise ConfigurationError(
            f"{run.audit} has schema {schema!r}, and this version of dpbench reads schemas up to {SCHEMA}: "
            "use the version that wrote it."
        )
    return AuditFile.model_validate(read_json(run.audit, AuditFile, again))


def _sound_text(sound: float | None, accountant: str | None) -> str:
    """The sound ε, with the accountant that gives it."""
    if not sound or accountant is None:
        return "none: no accountant covers these batches"
    return f"{audit_text(sound)} ({accountant.upper()})"
