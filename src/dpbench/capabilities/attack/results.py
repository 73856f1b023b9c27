"""Results of `dpbench attack`, as in attack.json, with their tables and curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpbench.capabilities.auditing.audit import Verdict
from dpbench.harness.reports.figures import FolderPicture
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reports.roc import Roc, RocPanel
from dpbench.harness.runs.numbers import ABSENT, epsilon_text

FILE = "attack.json"
PICTURE = FolderPicture(
    section="attack",
    title="Attack on membership",
    file="attack.png",
    words="members that dpbench attack recognized, compared with what the ledgers allow",
)
"""An entry point of `dpbench.pictures`."""
FALSE_POSITIVE_RATES = (1e-3, 1e-2)
"""False positive rates at which the true positive rate of an attack is stated."""
HIGH = max(FALSE_POSITIVE_RATES)
"""False positive rate at which tables state the bound."""
_MOST_PANELS = 8
_TEXTS = 4  # columns of a table of attacks that hold no numbers


@dataclass(frozen=True)
class Estimate:
    """A quantity of an attack.

    Attributes:
        value: Value for the given runs and records.
        low, high: Confidence limits.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MeasuredAttack:
    """Results of one attack.

    Attributes:
        name: Name of the attack.
        runs: Number of runs, M.
        records: Number of records, N.
        confidence: Confidence of each interval by itself.
        auc: Area under the ROC curve.
        advantage: max(TPR − FPR).
        tpr: True positive rate by false positive rate.
        signal: The attacker's view of a record, such as its loss.
        curve: True positive rates at the false positive rates of its summary.
    """

    name: str
    runs: int
    records: int
    confidence: float
    auc: Estimate
    advantage: Estimate
    tpr: Mapping[float, Estimate]
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
        curve: True positive rates at the false positive rates of the summary.
    """

    tpr: Mapping[float, float]
    curve: tuple[float, ...]


@dataclass(frozen=True)
class ExposedRecord:
    """A record that scores higher as a member than as another.

    Attributes:
        record: Position among the candidates.
        score: Mean score as a member minus mean score as another.
    """

    record: int
    score: float


@dataclass(frozen=True)
class AttackSummary:
    """An attack on the runs of one setting, which differ by their seeds and their members.

    Attributes:
        setting: Differences from other settings; "" if there is one only.
        runs: Folders, as they were named.
        seeds: Seeds of the runs, in the same order.
        candidates: Number of records that may be members.
        unit: Unit of membership, such as "example".
        epsilon: The largest of the runs, by accountant; None where a run has none.
        delta: δ of the ledgers; None of runs without privacy.
        accuracy: Mean test accuracy of the runs; None of another task.
        fpr: False positive rates of all curves, increasing.
        attacks: Results by signal and attack.
        allowed: Largest rates that the ledger allows; None without privacy.
        audited_curve: True positive rates that the runs prove to be reached: of the ledger's releases with as much
            noise as the attack's guesses refute. None where they refute nothing, or there are no such curves.
        verdict: Verdict of the test of the claim; None without privacy.
        audited: Lower limit of ε by the same guesses.
        level: Probability that a claim which is true is called VIOLATED.
        worst_records: Those that are most exposed, the worst first.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @property
    def strongest(self) -> MeasuredAttack:
        """The attack with the largest area under its curve: it is chosen by its result."""
        return max(self.attacks, key=lambda attack: attack.auc.value)

    @property
    def refuted(self) -> bool:
        """True if the attack is significantly above the ledger's bound."""
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


# What is said of it


def text_of(summaries: Sequence[AttackSummary]) -> str:
    """Table for the terminal, below the size of the game; of several settings the strongest attack on each."""
    first = summaries[0]
    runs = sum(len(summary.runs) for summary in summaries)
    game = f"{runs} runs, {first.candidates:,} candidate {first.unit}s, each a member of each run with probability 1/2"
    only_strongest = len(summaries) > 1
    return f"{game}\n\n{markdown_rows(_rows(summaries, only_strongest), range(_TEXTS))}"


def _rows(summaries: Sequence[AttackSummary], only_strongest: bool) -> list[list[str]]:
    """A row for each attack: its rates, the one that the ledger allows, and the verdict; the headings first."""
    rates = [f"TPR at FPR {share(fpr)}" for fpr in FALSE_POSITIVE_RATES]
    # The verdict comes early: on a phone the last columns are out of sight.
    headings = ["setting", "ε", "verdict", "attack", "AUC", "advantage", *rates, "allowed"]
    rows = [[*headings, "audited ε", "test accuracy", "runs"]]
    for summary in summaries:
        for attack in [summary.strongest] if only_strongest else summary.attacks:
            row = [summary.setting or "all runs", summary.claim, summary.verdict or ABSENT, attack.title]
            for estimate in (attack.auc, attack.advantage):
                row.append(f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})")
            for fpr in FALSE_POSITIVE_RATES:
                rate = attack.tpr[fpr]
                row.append(f"{100 * rate.value:.2f} % ({100 * rate.low:.2f} to {100 * rate.high:.2f})")
            row.append(ABSENT if summary.allowed is None else f"≤ {share(summary.allowed.tpr[HIGH])}")
            row.append(ABSENT if summary.audited is None else f"{summary.audited:.2f}")
            rows.append([*row, share(summary.accuracy), str(len(summary.runs))])
    return rows


def roc_panels(summaries: Sequence[AttackSummary]) -> list[RocPanel]:
    """Draw ROC curves of the first eight settings: attacks, the audit's bound, and the ledger's bound."""
    panels = []
    for summary in summaries[:_MOST_PANELS]:
        proven = None if summary.audited_curve is None else np.array(summary.audited_curve)
        allowed = None if summary.allowed is None else np.array(summary.allowed.curve)
        panels.append(RocPanel(summary.title, _curves_of(summary), proven, allowed))
    return panels


def _curves_of(summary: AttackSummary) -> dict[str, Roc]:
    """The curve of the strongest attack by each signal."""
    curves = {}
    for signal in dict.fromkeys(attack.signal for attack in summary.attacks):
        attacks = [attack for attack in summary.attacks if attack.signal == signal]
        strongest = max(attacks, key=lambda attack: attack.auc.value)
        label = f"strongest attack by {strongest.signal_title}"
        curves[label] = Roc(np.array(summary.fpr), np.array(strongest.curve))
    return curves


def rounded(rates: Iterable[float]) -> tuple[float, ...]:
    """Rates of a drawing, to six digits: files are read by people too."""
    return tuple(float(f"{rate:.6g}") for rate in rates)


def share(value: float | None) -> str:
    """A share in percent."""
    return ABSENT if value is None else f"{100 * value:.3g} %"
