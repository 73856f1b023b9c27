"""`dpbench audit`: what a run's canaries tell of its epsilon, as a table, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.auditing import AuditResult, Bound, Check, Family, LabelAudit, Verdict
from dpbench.auditing.audit import KEYS, NO_PROOF, audit
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.privacy.canaries.file import READABLE, SCHEMA
from dpbench.privacy.canaries.scores import Scores
from dpbench.reports.audited import MOST, audited_epsilon, limit, verdict_of
from dpbench.runs.folder import RunFolder
from dpbench.runs.ledgers import read_run_ledger
from dpbench.runs.readers import read_json
from dpbench.runs.record import read_result

_OUTLINE = ("family", "release_game", "one_run_dp")
_NAMED = 6  # groups
_HOW = "dpbench train ... audit=gradient_canaries"
VERDICTS = {
    Verdict.VIOLATED: "a lower bound is above the sound epsilon: mechanism or ledger is wrong",
    Verdict.NOT_AS_DECLARED: "no bound is above the sound epsilon, but what was done is not what was declared",
    Verdict.CONSISTENT: f"nothing contradicts the claim; {NO_PROOF}",
}
"""What a verdict means."""


@dataclass(frozen=True)
class AuditReport:
    """An audited run.

    Attributes:
        run: Its folder.
        result: What was found.
        scores: What the canaries saw.
        family: What its ledger claims.
        left_out: Groups of parameters that show nothing of the canaries → their coordinates.
        stored: What its result holds of an audit, and tables show; None where it holds none.
    """

    run: RunFolder
    result: AuditResult
    scores: Scores
    family: Family
    left_out: Mapping[str, int]
    stored: Mapping[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON; None in place of infinite numbers."""
        return {"run": str(self.run), **self.result.to_json(), "left_out": self.left_out, "stored": self.stored}

    @property
    def text(self) -> str:
        """The facts as a table for people."""
        result = self.result
        confidence = f"{100 * result.confidence:g} % confidence"
        head = f"audit of {self.run}: {result.canaries:,} canaries, {result.releases:,} releases, {confidence}"
        unseen = [*_left_out(self.left_out), *_not_seen(self.scores)]
        rows = [*_rows(result), *unseen, *_stored_otherwise(self.stored, result)]
        return "\n".join([head, *(f"  {name:<12} {words}" for name, words in rows)])


def refuse_unended(folder: Path) -> None:
    """Refuse a run that can go on: whoever reads an audit and goes on chooses what the next one shows.

    Raises:
        ConfigurationError: It has not ended.
    """
    run = RunFolder(folder)
    if run.begun and not run.finished:
        raise ConfigurationError(_no_scores(run))


def audit_run(folder: Path, confidence: float = 0.95) -> AuditReport:
    """Audit a run that was trained with canaries.

    Args:
        folder: Of the run.
        confidence: See `auditing.audit`.

    Raises:
        DPBenchError: There is no run, it had no canaries, a file is damaged, of another run or not the one that was
            audited when the run ended, or the confidence is out of range.
    """
    run = RunFolder(folder)
    scores, seal, left_out = read_scores(run)
    ledger = _ledger_of(run, seal)
    stored = read_result(run)["privacy"].get("audit") if run.finished else None
    if stored is not None and "damage" in stored:
        raise ConfigurationError(f"{run}: {stored['damage']}; restore a copy, or train again, `{_HOW}`.")
    family = Family(ledger.events, ledger.header.delta)
    return AuditReport(run, audit(ledger, scores, confidence, family), scores, family, left_out, stored)


def read_scores(run: RunFolder) -> tuple[Scores, Seal, dict[str, int]]:
    """What the canaries of a run saw, the seal of the ledger that it belongs to, and what is left out.

    Raises:
        ConfigurationError: There is none, or it is damaged.
    """
    if not run.path.is_dir():
        raise ConfigurationError(f"{run}: {'it is a file' if run.path.exists() else 'No such directory'}; name a run.")
    if not run.audit.exists():
        raise ConfigurationError(_no_scores(run))
    again = f"train again, `{_HOW}`, or restore a copy of {{path}}"
    data = read_json(run.audit, dict[str, Any], again)
    if data.get("schema") not in READABLE:
        raise ConfigurationError(
            f"{run.audit} has schema {data.get('schema')!r}, and this version of dpbench reads schemas up to {SCHEMA}: "
            "use the version that wrote it."
        )
    seal = Seal.read(data.get("ledger"))
    try:
        scores = Scores.from_json(data.get("scores"))
        if seal is None:
            raise ValueError("ledger is no seal of a ledger")
        left_out = data.get("left_out", {})
        if not isinstance(left_out, dict) or {type(size) for size in left_out.values()} - {int}:
            raise ValueError("left_out is no number of coordinates for each group")
    except ValueError as error:
        raise ConfigurationError(f"{run.audit} is damaged: {again.format(path=run.audit)} ({error}).") from None
    return scores, seal, left_out


def _no_scores(run: RunFolder) -> str:
    if any(run.path.rglob(f"*/{RunFolder.audit}")):
        return f"{run} holds several runs: name one that has an {RunFolder.audit}."
    if not (run.begun or run.trained or run.finished):
        return f"{run} holds no run: train one, `{_HOW}`, and name its folder."
    if not (run.begun and "GradientCanaries" in run.config.read_text(encoding="utf-8", errors="replace")):
        return f"{run} was trained without canaries, so there is nothing to audit: train again, `{_HOW}`."
    if not run.finished:
        return f"{run} has not ended: what its canaries saw is written last; `{run.command('resume')}` goes on."
    return f"{run} was trained with canaries, but {run.audit} is missing: restore a copy, or train again, `{_HOW}`."


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


def epsilon_rows(result: AuditResult | LabelAudit) -> Iterator[tuple[str, str]]:
    """Lines of claimed, sound and audited ε: a label, and what belongs to it; first the limit that stands for all."""
    yield "claimed", f"epsilon {result.claimed:.2f} (RDP) at delta={result.delta:g}"
    yield "sound", sound_epsilon(result.sound, result.sound_by)
    width = max(len(bound.name) for bound in result.bounds)
    bounds = sorted(result.bounds, key=lambda bound: bound is not result.shown)
    for label, bound in zip(["audited", *[""] * len(bounds)], bounds, strict=False):
        yield label, f"{bound.name:<{width}} {_shown_bound(bound, result.sound)}   assumes {bound.assumes}"


def _rows(result: AuditResult) -> Iterator[tuple[str, str]]:
    yield from epsilon_rows(result)
    for label, check in zip(["declared", *[""] * len(result.checks)], result.checks, strict=False):
        yield label, _checked(check)
    if result.measured_mu is not None:
        mu = result.measured_mu
        yield "per release", f"S/σ {result.declared_mu:.3f} declared, {mu.low:.3f} … {mu.high:.3f} measured"
    if result.not_finite:
        yield "", f"{result.not_finite} observations were no finite numbers"
    yield "verdict", verdict_words(result.verdict, result.accused_by)


def verdict_words(verdict: str, accused_by: Sequence[str]) -> str:
    """A verdict with what it rests on and what it means, one line."""
    found = f" ({'; '.join(accused_by)})" if accused_by else ""
    return f"{verdict}{found}: {VERDICTS[Verdict(verdict)]}"


def outline(privacy: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines of the short table at the end of a run with canaries: claimed, sound, audited, verdict."""
    audit = privacy.get("audit") or {"why_not": "nothing was released"}
    if audit.get("verdict") is None:
        yield "verdict", f"{verdict_of({'audit': audit})}"
        return
    claimed = audit["claimed"]
    yield "claimed", "infinite" if claimed is None else f"epsilon {claimed:.2f} (RDP)"
    yield "sound", sound_epsilon(audit["sound"], audit["sound_by"])
    names, limits = {key: name for name, key in KEYS.items()}, audit["audited"]
    shown = [f"{limit(limits[key])} ({names[key]})" for key in _OUTLINE if key in limits]
    yield "audited", f"{', '.join(shown) or 'nothing'} at {100 * audit['confidence']:g} % confidence"
    yield "verdict", verdict_words(audit["verdict"], audit["accused_by"])


def _left_out(groups: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Parameters of which the audit knows nothing."""
    named = [f"{name} ({size:,} coordinates)" for name, size in groups.items()]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    if named:
        yield "left out", f"{', '.join(named[:_NAMED])}{more}: no room for all canaries, not audited"


def _not_seen(scores: Scores) -> Iterator[tuple[str, str]]:
    """What the audit says nothing of."""
    yield "not seen", "what becomes of a record before it is clipped: in the data set, the loss, and by its lot"
    probes = scores.probes
    if probes is None or not probes.records:
        yield "", "how records, not canaries, are clipped and added up: nothing was measured of them"


def _stored_otherwise(stored: Mapping[str, Any] | None, result: AuditResult) -> Iterator[tuple[str, str]]:
    """What tables show, where that is something else: of another confidence, or found by another version."""
    if stored is None or stored.get("verdict") is None:
        return
    figures = audited_epsilon({"audit": stored}), math.nan if result.audited is None else result.audited
    kept, now = ("none" if math.isnan(figure) else limit(figure) for figure in figures)
    if (stored["confidence"], stored["verdict"], kept) != (result.confidence, result.verdict, now):
        level = f"{100 * stored['confidence']:g} % confidence"
        yield "in tables", f"{kept}, {stored['verdict']}, at {level}: kept when the run ended"


def sound_epsilon(sound: float | None, accountant: str | None) -> str:
    """The sound ε, with the accountant that gives it."""
    if not sound or accountant is None:
        return "none: no accountant covers these lots"
    return f"{sound:.2f} ({accountant.upper()})"


def _shown_bound(bound: Bound, sound: float | None) -> str:
    """A lower limit and its share of the sound ε, in columns."""
    if bound.epsilon is None:
        return f"     – ({bound.why_not})"
    share = "" if not sound or bound.epsilon > MOST else f"{100 * bound.epsilon / sound:.0f} %"
    return f"{limit(bound.epsilon):>8} {share:>6}{' !' if bound.violated else '  '}"


def _checked(check: Check) -> str:
    if check.value is None:
        return f"{check.name:<26} not tested"
    mark = "ok" if check.passed else "NOT AS DECLARED"
    if check.low is not None and check.high is not None:
        return f"{check.name:<26} {check.value:<9.3f} {check.low:.3f} … {check.high:.3f}   {mark}"
    if check.p_value is None:
        return f"{check.name:<26} {check.value:<9.3g} {check.expected:.3g} at most   {mark}"
    return f"{check.name:<26} {check.value:<9.3g} {check.expected:.3g} expected, p = {check.p_value:.2g}   {mark}"
