"""`dpbench audit`: what a run's canaries tell of its epsilon, as a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.privacy.auditing import AuditResult, Bound, Check, Family, Scores, Verdict
from dpbench.privacy.auditing.audit import NO_PROOF, audit
from dpbench.privacy.auditing.file import SCHEMA
from dpbench.runs.folder import RunFolder
from dpbench.runs.ledgers import read_run_ledger
from dpbench.runs.readers import read_json

_HOW = "dpbench train ... audit=gradient_canaries"
_WORDS = {
    Verdict.VIOLATED: "a lower bound is above the sound epsilon: mechanism or ledger is wrong",
    Verdict.NOT_AS_DECLARED: "no bound is above the sound epsilon, but what was done is not what was declared",
    Verdict.CONSISTENT: f"nothing contradicts the claim; {NO_PROOF}",
}
_MOST = 1000.0  # above which figures of epsilon say nothing


@dataclass(frozen=True)
class AuditReport:
    """An audited run.

    Attributes:
        run: Its folder.
        result: What was found.
        scores: What the canaries saw.
        family: What its ledger claims.
    """

    run: RunFolder
    result: AuditResult
    scores: Scores
    family: Family

    def to_json(self) -> str:
        """The facts as JSON; infinite numbers are null."""
        return json.dumps({"run": str(self.run), **self.result.to_json()}, indent=2, allow_nan=False)

    @property
    def text(self) -> str:
        """The facts as a table for people."""
        result = self.result
        confidence = f"{100 * result.confidence:g} % confidence"
        head = f"audit of {self.run}: {result.canaries:,} canaries, {result.releases:,} releases, {confidence}"
        return "\n".join([head, *(f"  {name:<12} {words}" for name, words in _rows(result))])


def audit_run(folder: Path, confidence: float = 0.95) -> AuditReport:
    """Audit a run that was trained with canaries.

    Args:
        folder: Of the run.
        confidence: See `privacy.auditing.audit`.

    Raises:
        DPBenchError: There is no run, it had no canaries, a file is damaged or of another run, or the confidence is out
            of range.
    """
    run = RunFolder(folder)
    scores, seal = read_scores(run)
    ledger = _ledger_of(run, seal)
    family = Family(ledger.events, ledger.header.delta)
    return AuditReport(run, audit(ledger, scores, confidence, family), scores, family)


def read_scores(run: RunFolder) -> tuple[Scores, Seal]:
    """What the canaries of a run saw, and the seal of the ledger that it belongs to.

    Raises:
        ConfigurationError: There is none, or it is damaged.
    """
    if not run.path.is_dir():
        raise ConfigurationError(f"{run}: {'it is a file' if run.path.exists() else 'No such directory'}; name a run.")
    if not run.audit.exists():
        raise ConfigurationError(_no_scores(run))
    again = f"train again, `{_HOW}`, or restore a copy of {{path}}"
    data = read_json(run.audit, dict[str, Any], again)
    if data.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"{run.audit} has schema {data.get('schema')!r}, and this version of dpbench reads schema {SCHEMA}: use "
            "the version that wrote it."
        )
    seal = Seal.read(data.get("ledger"))
    try:
        scores = Scores.from_json(data.get("scores"))
        if seal is None:
            raise ValueError("ledger is no seal of a ledger")
    except ValueError as error:
        raise ConfigurationError(f"{run.audit} is damaged: {again.format(path=run.audit)} ({error}).") from None
    return scores, seal


def _no_scores(run: RunFolder) -> str:
    if any(run.path.rglob(f"*/{RunFolder.audit}")):
        return f"{run} holds several runs: name one that has an {RunFolder.audit}."
    if not (run.begun or run.trained or run.finished):
        return f"{run} holds no run: train one, `{_HOW}`, and name its folder."
    if run.begun and not run.finished and "GradientCanaries" in run.config.read_text(encoding="utf-8"):
        return f"{run} has not ended: what its canaries saw is written last; `dpbench resume {run}` goes on."
    return f"{run} was trained without canaries, so there is nothing to audit: train again, `{_HOW}`."


def _ledger_of(run: RunFolder, seal: Seal) -> Ledger:
    """The ledger that the scores belong to.

    Raises:
        LedgerError: It is missing, damaged, or another one.
    """
    ledger = read_run_ledger(run.ledger)
    wrong = difference(run.ledger, seal, run.audit.name, ended=True) or ledger.wrong
    if wrong is not None:
        raise LedgerError(
            f"{run.ledger} does not belong to {run.audit.name} ({wrong}): restore both files of one run, or train "
            "again."
        )
    return ledger


def _rows(result: AuditResult) -> Iterator[tuple[str, str]]:
    sound = f"{result.sound:.2f} ({result.sound_by.upper()})" if result.sound and result.sound_by else "none"
    yield "claimed", f"epsilon {result.claimed:.2f} (RDP) at delta={result.delta:g}"
    yield "sound", sound if result.sound else "none: no accountant covers these lots"
    width = max(len(bound.name) for bound in result.bounds)
    for label, bound in zip(["audited", *[""] * len(result.bounds)], result.bounds, strict=False):
        yield label, f"{bound.name:<{width}} {_shown(bound, result.sound)}   assumes {bound.assumes}"
    for label, check in zip(["declared", *[""] * len(result.checks)], result.checks, strict=False):
        yield label, _checked(check)
    if result.measured_mu is not None:
        mu = result.measured_mu
        yield "per release", f"S/σ {result.declared_mu:.3f} declared, {mu.low:.3f} … {mu.high:.3f} measured"
    if result.not_finite:
        yield "", f"{result.not_finite} observations were no finite numbers"
    by = [bound.name for bound in result.violations]
    failed = [check.name for check in result.checks if check.passed is False]
    found = f" ({', '.join([*by, *failed])})" if by or failed else ""
    yield "verdict", f"{result.verdict}{found}: {_WORDS[result.verdict]}"


def _shown(bound: Bound, sound: float | None) -> str:
    if bound.epsilon is None:
        return f"     – ({bound.why_not})"
    figure = f"> {_MOST:.0f}" if bound.epsilon > _MOST else f">= {bound.epsilon:.2f}"
    share = "" if not sound or bound.epsilon > _MOST else f"{100 * bound.epsilon / sound:.0f} %"
    return f"{figure:>8} {share:>6}{' !' if bound.violated else '  '}"


def _checked(check: Check) -> str:
    if check.value is None:
        return f"{check.name:<26} not tested"
    mark = "ok" if check.passed else "NOT AS DECLARED"
    if check.low is not None and check.high is not None:
        return f"{check.name:<26} {check.value:<9.3f} {check.low:.3f} … {check.high:.3f}   {mark}"
    return f"{check.name:<26} {check.value:<9.3g} {check.expected:.3g} expected, p = {check.p_value:.2g}   {mark}"
