"""Attacks on membership over the runs of a sweep, one setting after the other, beside the curve that each ε allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dpbench.attack.signals import SIGNALS, Candidates, candidates_of, members_of, signals_of
from dpbench.auditing import Verdict
from dpbench.auditing.membership import (
    ATTACKS,
    AttackResult,
    ClaimTest,
    MembershipGame,
    Roc,
    claim_groups,
    claim_test,
    lira_online,
    measure_attack,
    roc,
)
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.tradeoff import TradeOff, membership_bound
from dpbench.reports.run_rows import UNIT, RunRow, without_seeds
from dpbench.reports.run_table import RunTable
from dpbench.runs.folder import RunFolder
from dpbench.runs.ledgers import read_run_ledger

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
LEVEL = 0.05
"""Probability that a claim which is true is called VIOLATED."""
FEWEST_RUNS = 4
_WORST = 16  # records that are named
_LIRA = "LiRA"
_ON_PROBABILITIES = ("RMIA", "RMIA, offline")  # need the probability of a record


@dataclass(frozen=True, eq=False)
class ScoredAttack:
    """One attack on the runs of one setting.

    Attributes:
        signal: What it sees of a record.
        name: Of the attack.
        result: How well it tells members from others.
        curve: The same at every threshold.
        scores: (M, N) by run and record.
    """

    signal: str
    name: str
    result: AttackResult
    curve: Roc
    scores: Floats


@dataclass(frozen=True, eq=False)
class AttackedSetting:
    """Runs that differ by their seeds, and by who was a member.

    Attributes:
        label: What the setting differs in from others; "" where there is one only.
        rows: The runs.
        members: (M, N) who was trained on.
        attacks: By signal and attack.
        test: Whether the claim is refuted; None of runs without privacy.
        allowed: Trade-off curve of the ledger; None where there is none.
        candidates: The records.
    """

    label: str
    rows: tuple[RunRow, ...]
    members: Flags
    attacks: tuple[ScoredAttack, ...]
    test: ClaimTest | None
    allowed: TradeOff | None
    candidates: Candidates

    @property
    def verdict(self) -> Verdict | None:
        """Whether the attack speaks against the ledger; None of runs without privacy."""
        if self.test is None:
            return None
        return Verdict.VIOLATED if self.test.violated else Verdict.CONSISTENT

    def epsilon(self, accountant: str) -> float | None:
        """The largest ε of its runs; None where there is none."""
        values = [row.metrics.get(f"privacy/epsilon_{accountant}") for row in self.rows]
        stated = [value for value in values if value is not None]
        return max(stated) if len(stated) == len(values) else None

    @property
    def delta(self) -> float | None:
        """δ of its ledgers."""
        delta: float | None = self.rows[0].record["privacy"].get("delta")
        return delta

    @property
    def accuracy(self) -> float | None:
        """Mean test accuracy of the runs; None of another task."""
        values = [row.metrics.get("test/accuracy") for row in self.rows]
        stated = [value for value in values if value is not None]
        return float(np.mean(stated)) if len(stated) == len(values) else None

    @property
    def unit(self) -> str:
        """Whose membership it is."""
        return str(self.rows[0].settings.get(UNIT, "example"))

    @property
    def attack_of_claim(self) -> ScoredAttack:
        """The attack by which the claim is tested, LiRA by the first signal, with all other runs as shadow models."""
        return next(attack for attack in self.attacks if attack.name == _LIRA)

    @property
    def strongest(self) -> ScoredAttack:
        """The attack with the largest area under its curve: it is chosen by its result."""
        return max(self.attacks, key=lambda attack: attack.result.auc.value)

    def allowed_tpr(self, fpr: float) -> float | None:
        """Most members that the ledger lets an attacker recognize at a false positive rate; None without a curve."""
        return None if self.allowed is None else float(self.allowed.max_true_positive_rate(fpr))

    @property
    def allowed_advantage(self) -> float | None:
        """Largest TPR − FPR that the ledger allows; None without a curve."""
        return None if self.allowed is None else self.allowed.advantage

    def worst_records(self) -> list[tuple[int, float]]:
        """Positions of the candidates whose members score highest above their others, and by how much on average.

        Those that were members of all runs, or of none, have no difference and are left out.
        """
        scores = self.attack_of_claim.scores
        members = self.members
        inside = _mean_where(scores, members)
        outside = _mean_where(scores, ~members)
        differences = inside - outside
        order = np.argsort(-differences, kind="stable")[:_WORST]  # NaN comes last
        order = order[~np.isnan(differences[order])]
        return [(int(record), float(differences[record])) for record in order]


def attack_runs(
    sources: Sequence[Path],
    signals: Sequence[str] = ("loss",),
    most_records: int | None = None,
    trust: bool = False,
) -> list[AttackedSetting]:
    """Attack the finished runs below some folders, those of each setting by themselves.

    Args:
        sources: Folders of sweeps whose runs have `data.membership=half`.
        signals: Words of `SIGNALS`; the first one is that by which claims are tested.
        most_records: Largest number of candidates that are attacked, the first ones; None: all.
        trust: Whether checkpoints may hold objects, see `read_checkpoint`.

    Raises:
        ConfigurationError: A run was trained on all records, a setting has too few runs or two of one seed, runs of a
            setting were made by different code, or a signal is none.
        LedgerError: A ledger is damaged.
    """
    # Before any run is read: scoring takes minutes.
    unknown = [signal for signal in signals if signal not in SIGNALS]
    if unknown or not signals:
        raise ConfigurationError(f"--signal must be of {', '.join(SIGNALS)}, not {', '.join(unknown) or 'nothing'}.")
    table = RunTable.read(sources)
    for row in table.rows:
        if (row.record["config"].get("data") or {}).get("membership") is None:
            raise ConfigurationError(
                f"{row.folder} was trained on all records, so that nobody is to be told from others: attack runs with "
                "data.membership=half (dpbench attack --train 16 makes them)."
            )
    groups = table.groups_of_seeds()
    for rows in groups:
        _refuse_group(rows, groups)
    labels = _labels(groups)
    settings = []
    candidates: dict[str, Candidates] = {}
    for label, rows in zip(labels, groups, strict=True):
        # Settings that differ elsewhere share the data, which take the longest to load.
        key = repr(sorted((name, value) for name, value in without_seeds(rows)[0].items() if name.startswith("data.")))
        if key not in candidates:
            candidates[key] = candidates_of(rows[0].record["config"], most_records)
        settings.append(_attack_setting(label, rows, candidates[key], signals, trust))
    return settings


def _refuse_group(rows: Sequence[RunRow], groups: Sequence[Sequence[RunRow]]) -> None:
    seeds = [row.record["seed"] for row in rows]
    repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        raise ConfigurationError(
            f"two runs of a setting have seed {repeated[0]}, and so the same members and noise: name one of their "
            "sweeps."
        )
    if len(rows) >= FEWEST_RUNS:
        return
    # Too few, perhaps because another code made the others: they are a group of their own.
    other = next((group for group in groups if group is not rows and _differ_by_code(rows[0], group[0])), None)
    if other is not None:
        raise ConfigurationError(
            f"{rows[0].folder} and {other[0].folder} have one setting and were made by different code: train all runs "
            "of an attack by the same."
        )
    raise ConfigurationError(
        f"{rows[0].folder}: there are {len(rows)} runs of its setting with different seeds, and an attack compares "
        f"{FEWEST_RUNS} or more: train more, seed=0,1,2,..."
    )


def _differ_by_code(one: RunRow, other: RunRow) -> bool:
    settings = without_seeds([one, other])
    return settings[0] == settings[1] and one.code != other.code


def _labels(groups: Sequence[Sequence[RunRow]]) -> list[str]:
    """What tells the settings apart, in the words of the command line."""
    firsts = RunTable(tuple(rows[0] for rows in groups))
    keys = [key for key in firsts.distinguishing() if key != "seed"] if len(groups) > 1 else []
    labels = []
    for row in firsts.rows:
        words = []
        for key in keys:
            if row.settings.get(key) is None:  # an option of others
                continue
            value = str(row.settings[key])
            words.append(value.rpartition(".")[2] if key.endswith("_target_") else f"{key.rpartition('.')[2]}={value}")
        labels.append(", ".join(words))
    return labels


def _attack_setting(
    label: str,
    rows: Sequence[RunRow],
    candidates: Candidates,
    signals: Sequence[str],
    trust: bool,
) -> AttackedSetting:
    members = np.stack([members_of(_folder_of(row), row.record, candidates) for row in rows])
    of_candidates: dict[str, list[Floats]] = {signal: [] for signal in signals}
    of_others: dict[str, list[Floats]] = {signal: [] for signal in signals}
    # Shown where somebody is there to see it: hundreds of runs take minutes.
    for row in tqdm(rows, desc=f"scoring {label}".rstrip(), unit="run", leave=False, disable=None):
        for signal in signals:
            scored = signals_of(_folder_of(row), candidates, signal, trust)
            of_candidates[signal].append(scored[0])
            of_others[signal].append(scored[1])
    attacks = []
    games = {}
    for signal in signals:
        game = games[signal] = MembershipGame(np.stack(of_candidates[signal]), members, np.stack(of_others[signal]))
        has_probabilities = signal == "loss" and candidates.has_probabilities(rows[0].record["config"])
        for name, attack in ATTACKS.items():
            if name in _ON_PROBABILITIES and not has_probabilities:
                continue
            scores = attack(game)
            attacks.append(
                ScoredAttack(signal, name, measure_attack(name, scores, members), roc(scores, members), scores)
            )
    # By LiRA and the first signal, chosen before anything is looked at.
    test, allowed = _test_claim(rows, replace(games[signals[0]], groups=claim_groups(len(rows))))
    return AttackedSetting(label, tuple(rows), members, tuple(attacks), test, allowed, candidates)


def _folder_of(row: RunRow) -> RunFolder:
    assert row.folder is not None  # of runs of this machine
    return row.folder


def _test_claim(
    rows: Sequence[RunRow],
    game: MembershipGame,
) -> tuple[ClaimTest | None, TradeOff | None]:
    """The test of a setting's claim, and its trade-off curve; None of runs without privacy."""
    delta = rows[0].record["privacy"].get("delta")
    if delta is None:
        return None, None
    # The largest ε allows the most: no run is accused by the claim of another one.
    costliest = max(rows, key=lambda row: row.metrics.get("privacy/epsilon_rdp") or math.inf)
    path = _folder_of(costliest).ledger
    ledger = read_run_ledger(path)
    if ledger.wrong is not None:
        raise LedgerError(f"{path}: {ledger.wrong}; restore it, or train again.")
    allowed = membership_bound([ledger]).curve
    test = claim_test(lira_online(game), game.members, allowed, delta, LEVEL, groups=game.groups)
    return test, allowed


def _mean_where(values: Floats, chosen: Flags) -> Floats:
    """Mean of each column over the rows that are chosen in it; NaN where none is."""
    counts = chosen.sum(0)
    with np.errstate(invalid="ignore"):
        means: Floats = np.where(chosen, values, 0.0).sum(0) / counts
    return means


def plain_facts(settings: Sequence[AttackedSetting]) -> list[dict[str, Any]]:
    """What `--json` and attack.json say of each setting."""
    facts = []
    for setting in settings:
        test = setting.test
        entry: dict[str, Any] = {
            "setting": setting.label,
            "runs": [str(row.folder) for row in setting.rows],
            "seeds": [row.record["seed"] for row in setting.rows],
            "candidates": setting.members.shape[1],
            "unit": setting.unit,
            "epsilon": {name: setting.epsilon(name) for name in ("rdp", "pld")},
            "delta": setting.delta,
            "allowed": {
                "tpr": {f"{fpr:g}": setting.allowed_tpr(fpr) for fpr in setting.attacks[0].result.tpr},
                "advantage": setting.allowed_advantage,
            },
            "attacks": [{"signal": attack.signal, **attack.result.to_dict()} for attack in setting.attacks],
            "verdict": None if setting.verdict is None else str(setting.verdict),
            "audited": None if test is None else test.audited,
            "level": None if test is None else test.level,
            "worst_records": [{"record": record, "score": score} for record, score in setting.worst_records()],
        }
        facts.append(entry)
    return facts
