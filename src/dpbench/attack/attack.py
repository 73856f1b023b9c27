"""Attacks on membership over the runs of a sweep, one setting after the other, beside the curve that each ε allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dpbench.attack.signals import SIGNALS, Candidates, candidates_of, members_of, signals_of
from dpbench.auditing import Family, Verdict
from dpbench.auditing.membership import (
    ATTACKS,
    FALSE_POSITIVE_RATES,
    ClaimTest,
    MembershipGame,
    claim_groups,
    claim_test,
    lira_online,
    measure_attack,
    roc,
)
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.tradeoff import TradeOff, membership_bound
from dpbench.reports.attacked import AllowedRates, AttackSummary, ExposedRecord, MeasuredAttack
from dpbench.reports.roc import RATES
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
_ACCOUNTANTS = ("rdp", "pld")


@dataclass(frozen=True, eq=False)
class AttackedSetting:
    """Runs that differ by their seeds, and by who was a member.

    Attributes:
        summary: What was measured.
        candidates: The records.
        rows: The runs.
        members: (M, N) who was trained on.
        scores: (M, N) of LiRA by the first signal.
    """

    summary: AttackSummary
    candidates: Candidates
    rows: tuple[RunRow, ...]
    members: Flags
    scores: Floats


class _ScoredAttack(NamedTuple):
    """One attack on the runs of a setting, with its (M, N) scores by run and record."""

    measured: MeasuredAttack
    scores: Floats


class _Claim(NamedTuple):
    """What the ledger of a setting claims, and what the attack says to it.

    Attributes:
        allowed: Trade-off curve of the ledger.
        test: Whether it is refuted.
        least: Trade-off curve of the ledger's releases with as much noise as is refuted: the runs tell more. None where
            nothing is refuted, or no privacy loss distribution covers the lots.
    """

    allowed: TradeOff
    test: ClaimTest
    least: TradeOff | None


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
    unknown = set(signals) - set(SIGNALS)
    if unknown or not signals:
        raise ConfigurationError(
            f"--signal must be of {', '.join(SIGNALS)}, not {', '.join(sorted(unknown)) or 'nothing'}."
        )
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
    settings = []
    candidates: dict[str, Candidates] = {}
    for label, rows in zip(_labels(groups), groups, strict=True):
        # Settings that differ elsewhere share the data, which take the longest to load.
        key = _data_settings(rows)
        if key not in candidates:
            candidates[key] = candidates_of(rows[0].record["config"], most_records)
        settings.append(_attack_setting(label, rows, candidates[key], signals, trust))
    return settings


def _data_settings(rows: Sequence[RunRow]) -> str:
    """Settings of the data of runs that differ by their seeds: equal for equal records."""
    settings = without_seeds(rows)[0]
    of_data = {name: value for name, value in settings.items() if name.startswith("data.")}
    return repr(sorted(of_data.items()))


def _refuse_group(rows: Sequence[RunRow], groups: Sequence[Sequence[RunRow]]) -> None:
    """Refuse runs of one setting that are no game of independent coins, or too few.

    Args:
        rows: Of the setting.
        groups: The runs of all settings.
    """
    seeds = set()
    for row in rows:
        seed = row.record["seed"]
        # Coins and noise follow from the seed: the second run would tell the attacker what the first one hides.
        if seed in seeds:
            raise ConfigurationError(
                f"two runs of a setting have seed {seed}, and so the same members and noise: name one of their sweeps."
            )
        seeds.add(seed)
    if len(rows) >= FEWEST_RUNS:
        return
    # Too few, perhaps because another code made the others: they are a group of their own.
    for group in groups:
        if group is not rows and _differ_by_code(rows[0], group[0]):
            raise ConfigurationError(
                f"{rows[0].folder} and {group[0].folder} have one setting and were made by different code: train all "
                "runs of an attack by the same."
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
    games = _games(label, rows, members, candidates, signals, trust)
    config = rows[0].record["config"]
    attacks = []
    for signal, game in games.items():
        has_probabilities = signal == "loss" and candidates.has_probabilities(config)
        for name, attack in ATTACKS.items():
            if name in _ON_PROBABILITIES and not has_probabilities:
                continue
            attacks.append(_scored(signal, name, attack(game), members))
    # By LiRA and the first signal, chosen before anything was looked at: the strongest attack is chosen by its result,
    # and would refute true claims more often than the level says.
    claim = _claim_of(rows, replace(games[signals[0]], groups=claim_groups(len(rows))))
    scores = next(attack.scores for attack in attacks if attack.measured.name == _LIRA)
    measured = tuple(attack.measured for attack in attacks)
    worst = tuple(_worst_records(scores, members))
    summary = _summary(label, rows, members, measured, claim, worst)
    return AttackedSetting(summary, candidates, tuple(rows), members, scores)


def _games(
    label: str,
    rows: Sequence[RunRow],
    members: Flags,
    candidates: Candidates,
    signals: Sequence[str],
    trust: bool,
) -> dict[str, MembershipGame]:
    """What the attacker sees by each signal."""
    of_candidates: dict[str, list[Floats]] = {signal: [] for signal in signals}
    of_others: dict[str, list[Floats]] = {signal: [] for signal in signals}
    # Shown where somebody is there to see it: hundreds of runs take minutes.
    for row in tqdm(rows, desc=f"scoring {label}".rstrip(), unit="run", leave=False, disable=None):
        for signal in signals:
            of_records, of_test = signals_of(_folder_of(row), candidates, signal, trust)
            of_candidates[signal].append(of_records)
            of_others[signal].append(of_test)
    games = {}
    for signal in signals:
        games[signal] = MembershipGame(np.stack(of_candidates[signal]), members, np.stack(of_others[signal]))
    return games


def _scored(signal: str, name: str, scores: Floats, members: Flags) -> _ScoredAttack:
    result = measure_attack(name, scores, members)
    curve = roc(scores, members).true_positive_rates_at(RATES)
    return _ScoredAttack(MeasuredAttack(**vars(result), signal=signal, curve=_rounded(curve)), scores)


def _folder_of(row: RunRow) -> RunFolder:
    assert row.folder is not None  # of runs of this machine
    return row.folder


def _claim_of(rows: Sequence[RunRow], game: MembershipGame) -> _Claim | None:
    """The claim of a setting, tested by groups of its runs; None of runs without privacy."""
    delta = rows[0].record["privacy"].get("delta")
    if delta is None:
        return None
    # The largest ε allows the most: no run is accused by the claim of another one.
    costliest = max(rows, key=lambda row: row.metrics.get("privacy/epsilon_rdp") or math.inf)
    path = _folder_of(costliest).ledger
    ledger = read_run_ledger(path)
    if ledger.wrong is not None:
        raise LedgerError(f"{path}: {ledger.wrong}; restore it, or train again.")
    allowed = membership_bound([ledger]).curve
    test = claim_test(lira_online(game), game.members, allowed, delta, LEVEL, groups=game.groups)
    return _Claim(allowed, test, _least_curve(Family(ledger.events, delta), test))


def _least_curve(family: Family, test: ClaimTest) -> TradeOff | None:
    """Trade-off curve of the least noise that a test refutes, with the confidence of the test; see `_Claim.least`."""
    if family.uncovered is not None:
        return None
    scale = family.smallest_refuted(test.refutes)
    return family.curve(scale) if math.isfinite(scale) else None


def _summary(
    label: str,
    rows: Sequence[RunRow],
    members: Flags,
    attacks: tuple[MeasuredAttack, ...],
    claim: _Claim | None,
    worst: tuple[ExposedRecord, ...],
) -> AttackSummary:
    epsilon = {}
    for accountant in _ACCOUNTANTS:
        values = _values_of_all(rows, f"privacy/epsilon_{accountant}")
        epsilon[accountant] = max(values) if values else None
    accuracies = _values_of_all(rows, "test/accuracy")
    allowed = audited_curve = verdict = None
    if claim is not None:
        allowed = _allowed_rates(claim.allowed)
        verdict = Verdict.VIOLATED if claim.test.violated else Verdict.CONSISTENT
        if claim.least is not None:
            audited_curve = _rounded(claim.least.max_true_positive_rate(RATES))
    return AttackSummary(
        setting=label,
        runs=tuple(str(row.folder) for row in rows),
        seeds=tuple(row.record["seed"] for row in rows),
        candidates=members.shape[1],
        unit=str(rows[0].settings.get(UNIT, "example")),
        epsilon=epsilon,
        delta=rows[0].record["privacy"].get("delta"),
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        fpr=_rounded(RATES),
        attacks=attacks,
        allowed=allowed,
        audited_curve=audited_curve,
        verdict=None if verdict is None else str(verdict),
        audited=None if claim is None else claim.test.audited,
        level=None if claim is None else claim.test.level,
        worst_records=worst,
    )


def _values_of_all(rows: Sequence[RunRow], name: str) -> list[float]:
    """A metric of runs; nothing where a run lacks it: the largest or mean of the others would be that of other runs."""
    values = []
    for row in rows:
        value = row.metrics.get(name)
        if value is None:
            return []
        values.append(value)
    return values


def _allowed_rates(curve: TradeOff) -> AllowedRates:
    rates = curve.max_true_positive_rate(FALSE_POSITIVE_RATES)
    return AllowedRates(
        tpr=dict(zip(FALSE_POSITIVE_RATES, rates.tolist(), strict=True)),
        advantage=curve.advantage,
        auc=1 - curve.area,
        curve=_rounded(curve.max_true_positive_rate(RATES)),
    )


def _rounded(rates: Iterable[float]) -> tuple[float, ...]:
    """Rates of a drawing, to six digits: files are read by people too."""
    return tuple(float(f"{rate:.6g}") for rate in rates)


def _worst_records(scores: Floats, members: Flags) -> list[ExposedRecord]:
    """The candidates whose members score highest above their others, on average.

    Those that were members of all runs, or of none, have no difference and are left out.
    """
    differences = _mean_where(scores, members) - _mean_where(scores, ~members)
    worst = []
    for record in np.argsort(-differences, kind="stable")[:_WORST]:  # NaN comes last
        if not np.isnan(differences[record]):
            worst.append(ExposedRecord(int(record), float(differences[record])))
    return worst


def _mean_where(values: Floats, chosen: Flags) -> Floats:
    """Mean of each column over the rows that are chosen in it; NaN where none is."""
    counts = chosen.sum(0)
    with np.errstate(invalid="ignore"):
        means: Floats = np.where(chosen, values, 0.0).sum(0) / counts
    return means
