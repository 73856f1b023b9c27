"""What `dpbench attack` measured, as attack.json holds it, with its tables, sentences and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from dpbench.auditing import Verdict
from dpbench.auditing.membership import FALSE_POSITIVE_RATES, AttackResult, Estimate
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.roc import ALLOWED, AUDITED, RocCurve, RocPanel, measured
from dpbench.runs.numbers import ABSENT, epsilon_text, limit_text
from dpbench.runs.readers import read_json

FILE = "attack.json"
LOW, HIGH = FALSE_POSITIVE_RATES
"""False positive rates at which attacks are stated; sentences and pictures take the higher one."""
_MOST_PANELS = 8


@dataclass(frozen=True)
class MeasuredAttack(AttackResult):
    """What one attack reaches.

    Attributes:
        signal: What it sees of a record.
        curve: True positive rates at the false positive rates of its summary.
    """

    signal: str
    curve: tuple[float, ...]

    @property
    def title(self) -> str:
        """Name and signal, for people."""
        return f"{self.name} on {self.signal_title}"

    @property
    def signal_title(self) -> str:
        """The signal, for people."""
        return self.signal.replace("_", " ")


@dataclass(frozen=True)
class AllowedRates:
    """Most that a ledger allows any attack.

    Attributes:
        tpr: True positive rate by false positive rate.
        advantage: Largest TPR − FPR.
        auc: Area under the ROC curve.
        curve: True positive rates at the false positive rates of the summary.
    """

    tpr: Mapping[float, float]
    advantage: float
    auc: float
    curve: tuple[float, ...]


@dataclass(frozen=True)
class ExposedRecord:
    """A record whose members score higher than its others.

    Attributes:
        record: Position among the candidates.
        score: By how much on average.
    """

    record: int
    score: float


@dataclass(frozen=True)
class AttackSummary:
    """An attack on the runs of one setting, which differ by their seeds and by who was a member.

    Attributes:
        setting: What it differs in from other settings; "" where there is one only.
        runs: Folders, as they were named.
        seeds: Of the runs, in the same order.
        candidates: Number of records that may be members.
        unit: Whose membership it is.
        epsilon: The largest of the runs, by accountant; None where a run has none.
        delta: δ of the ledgers; None of runs without privacy.
        accuracy: Mean test accuracy of the runs; None of another task.
        fpr: False positive rates of all curves, increasing.
        attacks: By signal and attack.
        allowed: By the ledger; None of runs without privacy.
        audited_curve: True positive rates that the runs prove to be reached: of the ledger's releases with as much
            noise as the attack's guesses refute. None where they refute nothing, or there are no such curves.
        verdict: Of the test of the claim; None of runs without privacy.
        audited: Lower limit of ε by the same guesses.
        level: Probability that a claim which is true is called VIOLATED.
        worst_records: Those that are most exposed, the worst first.

    Raises:
        ValueError: A curve has another number of points than there are false positive rates.
    """

    setting: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    candidates: int
    unit: str
    epsilon: Mapping[str, float | None]
    delta: float | None
    accuracy: float | None
    fpr: tuple[float, ...]
    attacks: tuple[MeasuredAttack, ...]
    allowed: AllowedRates | None
    audited_curve: tuple[float, ...] | None
    verdict: str | None
    audited: float | None
    level: float | None
    worst_records: tuple[ExposedRecord, ...]

    def __post_init__(self) -> None:
        curves = [attack.curve for attack in self.attacks]
        if self.allowed is not None:
            curves.append(self.allowed.curve)
        if self.audited_curve is not None:
            curves.append(self.audited_curve)
        if {len(curve) for curve in curves} != {len(self.fpr)}:
            raise ValueError("a curve has another number of points than fpr")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which `read_attack` reads."""
        return asdict(self)

    @property
    def strongest(self) -> MeasuredAttack:
        """The attack with the largest area under its curve: it is chosen by its result."""
        return max(self.attacks, key=lambda attack: attack.auc.value)

    @property
    def refuted(self) -> bool:
        """Whether the attack is significantly above what the ledger allows."""
        return self.verdict == Verdict.VIOLATED

    @property
    def claim(self) -> str:
        """ε by PLD, else by RDP, and by which; ∞ of runs without privacy."""
        if self.allowed is None:
            return "∞"
        accountant = "pld" if self.epsilon.get("pld") is not None else "rdp"
        return f"{epsilon_text(self.epsilon[accountant])} ({accountant.upper()})"

    @property
    def title(self) -> str:
        """Setting and claim, above a picture."""
        if self.allowed is None:
            return self.setting or "without privacy"
        claim = f"ε = {self.claim}"
        return f"{self.setting}: {claim}" if self.setting else claim

    @property
    def sentences(self) -> str:
        """One sentence on the strongest attack, and one on the claim."""
        opening = f"{self.setting}: the" if self.setting else "The"
        strongest = self.strongest
        text = (
            f"{opening} attack of the largest AUC ({strongest.title}) recognizes {share(strongest.tpr[HIGH].value)} of "
            f"the members at a false positive rate of {share(HIGH)}"
        )
        if self.allowed is None or self.audited is None:
            return f"{text}; without privacy nothing limits it."
        audited = f"audited ε {limit_text(self.audited)}" if self.audited > 0 else "no audited ε above 0"
        verdict = self.verdict
        if self.refuted:
            verdict = f"{verdict}: the attack is above what the ledger allows"
        limit = f"ε = {self.claim} allows {share(self.allowed.tpr[HIGH])}"
        return f"{text}; {limit}. {verdict} ({audited}, at level {self.level:g})."


# The file


def read_attack(folder: Path) -> list[AttackSummary]:
    """What `dpbench attack` left in a folder; nothing where it left nothing.

    Raises:
        ConfigurationError: The file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    again = "attack again, `dpbench attack`, or delete {path}"
    data = read_json(path, list[AttackSummary], again)
    summaries: list[AttackSummary] = TypeAdapter(list[AttackSummary]).validate_python(data)
    return summaries


def attacks_on(runs: Mapping[Path, int], sources: Sequence[Path]) -> list[tuple[Path, AttackSummary]]:
    """Attacks that lie beside runs, or in folders that were named, and that these runs took part in.

    Args:
        runs: Folder of a run → its seed.
        sources: Folders that were named.

    Returns:
        The folder of each attack, and what it measured.

    Raises:
        ConfigurationError: A file of an attack is damaged.
    """
    folders = list(sources)
    for run in runs:
        folders.append(run.parent)
    attacks = []
    for folder in dict.fromkeys(path.resolve() for path in folders):
        for summary in read_attack(folder):
            if any(_took_part(run.resolve(), seed, folder, summary) for run, seed in runs.items()):
                attacks.append((folder, summary))
    return attacks


def _took_part(run: Path, seed: int, folder: Path, summary: AttackSummary) -> bool:
    """Whether a run is one of those that were attacked from a folder.

    Sweeps are moved, and attacked from any folder: of the paths in the file only what lies below the sweep is certain.
    """
    if not run.is_relative_to(folder):
        return False
    below = run.relative_to(folder).parts
    for path, attacked_seed in zip(summary.runs, summary.seeds, strict=True):
        if attacked_seed == seed and Path(path).parts[-len(below) :] == below:
            return True
    return False


# What is said of it


def size_of_game(summaries: Sequence[AttackSummary]) -> str:
    """Number of runs and candidates in one line."""
    first = summaries[0]
    runs = sum(len(summary.runs) for summary in summaries)
    return f"{runs} runs, {first.candidates:,} candidate {first.unit}s, each a member of each run with probability 1/2"


def text_of(summaries: Sequence[AttackSummary]) -> str:
    """Table and verdicts for the terminal, and for attack.md."""
    if len(summaries) == 1:
        table = markdown_rows(attack_rows(summaries), 3)
        return f"{size_of_game(summaries)}\n\n{table}\n\n{summaries[0].sentences}"
    return f"{size_of_game(summaries)}\n\n{markdown_rows(overview_rows(summaries), 4)}"


def overview_rows(summaries: Sequence[AttackSummary]) -> list[list[str]]:
    """A row for each setting: its strongest attack, what the ledger allows, and the verdict; the headings first."""
    rate = f"TPR at FPR {share(HIGH)}"
    # The verdict comes early: on a phone the last columns are out of sight.
    headings = ["setting", "ε", "verdict", "strongest attack", "AUC", rate, "allowed"]
    rows = [[*headings, "audited ε", "test accuracy", "runs"]]
    for summary in summaries:
        strongest = summary.strongest
        rows.append(
            [
                summary.setting or "all runs",
                summary.claim,
                summary.verdict or ABSENT,
                strongest.title,
                _estimate_text(strongest.auc),
                _percent_text(strongest.tpr[HIGH]),
                ABSENT if summary.allowed is None else f"≤ {share(summary.allowed.tpr[HIGH])}",
                ABSENT if summary.audited is None else f"{summary.audited:.2f}",
                share(summary.accuracy),
                str(len(summary.runs)),
            ]
        )
    return rows


def attack_rows(summaries: Sequence[AttackSummary]) -> list[list[str]]:
    """A row for each attack, and one for what the ledger allows; the headings first."""
    rates = [f"TPR at FPR {share(fpr)}" for fpr in FALSE_POSITIVE_RATES]
    rows = [["setting", "signal", "attack", "AUC", *rates, "advantage"]]
    for summary in summaries:
        name = summary.setting or "all runs"
        for attack in summary.attacks:
            row = [name, attack.signal, attack.name, _estimate_text(attack.auc)]
            for fpr in FALSE_POSITIVE_RATES:
                row.append(_percent_text(attack.tpr[fpr]))
            rows.append([*row, _estimate_text(attack.advantage)])
        allowed = summary.allowed
        if allowed is None:
            continue
        row = [name, f"ε = {summary.claim}", "allowed at most", f"≤ {allowed.auc:.3f}"]
        for fpr in FALSE_POSITIVE_RATES:
            row.append(f"≤ {share(allowed.tpr[fpr])}")
        rows.append([*row, f"≤ {allowed.advantage:.3f}"])
    return rows


def roc_panels(summaries: Sequence[AttackSummary]) -> list[RocPanel]:
    """ROC curves of the first eight settings: attacks, the audit's bound, and what the ledger allows."""
    panels = []
    for summary in summaries[:_MOST_PANELS]:
        panels.append(RocPanel(summary.title, tuple(_curves_of(summary))))
    return panels


def _curves_of(summary: AttackSummary) -> list[RocCurve]:
    fpr = np.array(summary.fpr)
    curves = []
    signals = list(dict.fromkeys(attack.signal for attack in summary.attacks))
    for place, signal in enumerate(signals):
        attacks = [attack for attack in summary.attacks if attack.signal == signal]
        best = max(attacks, key=lambda attack: attack.auc.value)
        for attack in attacks:
            label = f"strongest attack by {attack.signal_title}"
            if attack is not best:
                label = f"others by {attack.signal_title}, thin"
            curves.append(RocCurve(label, measured(place, faint=attack is not best), fpr, np.array(attack.curve)))
    if summary.audited_curve is not None:
        curves.append(RocCurve("audit's bound: at least", AUDITED, fpr, np.array(summary.audited_curve)))
    if summary.allowed is not None:
        curves.append(RocCurve("allowed by the ledger: at most", ALLOWED, fpr, np.array(summary.allowed.curve)))
    return curves


def share(value: float | None) -> str:
    """A share in percent."""
    return ABSENT if value is None else f"{100 * value:.3g} %"


def _percent_text(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.2f} % ({100 * estimate.low:.2f} to {100 * estimate.high:.2f})"


def _estimate_text(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
