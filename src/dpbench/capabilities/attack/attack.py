"""Attacks on membership over the runs of a sweep, setting by setting, against the curve that each ε allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dpbench.capabilities.attack.membership import (
    ATTACKS,
    LEVEL,
    MembershipGame,
    claim_groups,
    claim_test,
    lira_online,
    measure_attack,
)
from dpbench.capabilities.attack.results import (
    FALSE_POSITIVE_RATES,
    FILE,
    PICTURE,
    AllowedRates,
    AttackSummary,
    ExposedRecord,
    MeasuredAttack,
    roc_panels,
    rounded,
    text_of,
)
from dpbench.capabilities.attack.signals import SIGNALS, candidates_of, has_probabilities, members_of, signals_of
from dpbench.capabilities.auditing.audit import Verdict
from dpbench.capabilities.auditing.family import Family
from dpbench.data.module import PrivateDataModule
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.files import write_atomically, write_json
from dpbench.harness.reports.figures import write_figure
from dpbench.harness.reports.roc import RATES, roc_figure
from dpbench.harness.reports.run_rows import UNIT, RunRow
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import read_run_ledger
from dpbench.privacy.accounting.tradeoff import membership_bound

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
FEWEST_RUNS = 4
_WORST = 16  # records that are named
_ON_PROBABILITIES = ("RMIA", "RMIA, offline")  # need the probability of a record
_ACCOUNTANTS = ("rdp", "pld")


@dataclass(frozen=True, eq=False)
class AttackedSetting:
    """Runs that differ by their seeds and their members.

    Attributes:
        summary: The measurements.
        candidates: The data; its training records are the candidates.
        rows: The runs.
        members: (M, N) True for the records that each run was trained on.
    """

    summary: AttackSummary
    candidates: PrivateDataModule[Any]
    rows: tuple[RunRow, ...]
    members: Flags


def attack_runs(
    sources: Sequence[Path],
    signals: Sequence[str] = ("loss",),
    trust: bool = False,
) -> list[AttackedSetting]:
    """Attack the finished runs below some folders, those of each setting by themselves.

    Args:
        sources: Folders of sweeps with runs of `data.membership=half`.
        signals: Words of `SIGNALS`; the first one is that by which claims are tested.
        trust: True if checkpoints may hold objects; see `read_checkpoint`.

    Raises:
        ConfigurationError: A run was trained on all records, a setting has too few runs of one code or two of one seed,
            or a signal is none.
        LedgerError: A ledger is damaged.
    """
    # Before any run is read: scoring takes minutes.
    unknown = set(signals) - set(SIGNALS)
    if unknown or not signals:
        raise ConfigurationError(
            f"--signal must be one or both of {', '.join(SIGNALS)}, not {', '.join(sorted(unknown)) or 'nothing'}."
        )
    table = RunTable.read(sources)
    for row in table.rows:
        if (row.record["config"].get("data") or {}).get("membership") is None:
            raise ConfigurationError(
                f"{row.folder} was trained on all records, so there are no non-members: attack runs with "
                "data.membership=half (dpbench attack --train 16 trains them)."
            )
    groups = table.groups_of_seeds()
    for rows in groups:
        _refuse_group(rows)
    labels = RunTable(tuple(rows[0] for rows in groups)).labels() if len(groups) > 1 else [""]
    settings = []
    candidates: dict[str, PrivateDataModule[Any]] = {}
    for label, rows in zip(labels, groups, strict=True):
        # Settings that differ elsewhere share the data, which take the longest to load.
        config = rows[0].record["config"]
        key = str(config["data"])
        if key not in candidates:
            candidates[key] = candidates_of(config)
        settings.append(_attack_setting(label, rows, candidates[key], signals, trust))
    return settings


def _refuse_group(rows: Sequence[RunRow]) -> None:
    """Refuse runs of one setting that are no game of independent coins, or too few."""
    seeds = [row.record["seed"] for row in rows]
    for seed in seeds:
        # Coins and noise follow from the seed: the second run would tell the attacker what the first one hides.
        if seeds.count(seed) > 1:
            raise ConfigurationError(
                f"two runs of a setting have seed {seed}, so the same members and noise: name only one of their sweeps."
            )
    if len(rows) < FEWEST_RUNS:
        raise ConfigurationError(
            f"{rows[0].folder}: an attack needs at least {FEWEST_RUNS} runs of a setting, with the same code and "
            f"different seeds, not {len(rows)}: train more, seed=0,1,2,..."
        )


def _attack_setting(
    label: str,
    rows: Sequence[RunRow],
    candidates: PrivateDataModule[Any],
    signals: Sequence[str],
    trust: bool,
) -> AttackedSetting:
    members = np.stack([members_of(_folder_of(row), row.record, candidates) for row in rows])
    games = _games(label, rows, members, candidates, signals, trust)
    on_probabilities = has_probabilities(rows[0].record["config"])
    attacks = []
    for signal, game in games.items():
        for name, attack in ATTACKS.items():
            if name not in _ON_PROBABILITIES or (signal == "loss" and on_probabilities):
                attacks.append(measure_attack(signal, name, attack(game), members))
    # By LiRA and the first signal, chosen before anything was looked at: the strongest attack is chosen by its result,
    # and would refute true claims more often than the level says.
    first = games[signals[0]]
    claim = _claim_of(rows, replace(first, groups=claim_groups(len(rows))))
    worst = tuple(_worst_records(lira_online(first), members))
    summary = _summary(label, rows, tuple(attacks), claim, worst)
    return AttackedSetting(summary, candidates, tuple(rows), members)


def _games(
    label: str,
    rows: Sequence[RunRow],
    members: Flags,
    candidates: PrivateDataModule[Any],
    signals: Sequence[str],
    trust: bool,
) -> dict[str, MembershipGame]:
    """Make the attacker's view by each signal."""
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


def _folder_of(row: RunRow) -> RunFolder:
    assert row.folder is not None  # of runs of this machine
    return row.folder


def _claim_of(rows: Sequence[RunRow], game: MembershipGame) -> dict[str, Any]:
    """Test the claim of a setting's ledger by the attack; nothing for runs without privacy.

    Returns:
        Fields of an `AttackSummary`.
    """
    delta = rows[0].record["privacy"].get("delta")
    if delta is None:
        return dict.fromkeys(("delta", "allowed", "audited_curve", "verdict", "audited", "level"))
    # The largest ε allows the most: no run is accused by the claim of another one.
    costliest = max(rows, key=lambda row: row.metrics.get("privacy/epsilon_rdp") or math.inf)
    path = _folder_of(costliest).ledger
    ledger = read_run_ledger(path)
    if ledger.wrong is not None:
        raise LedgerError(f"{path}: {ledger.wrong}; restore it, or train again.")
    allowed = membership_bound([ledger]).curve
    rates = allowed.max_true_positive_rate(FALSE_POSITIVE_RATES)
    test = claim_test(lira_online(game), game.members, game.group_of_run, delta)
    # The least noise that the test refutes: the runs tell more than the ledger's releases with as much.
    family = Family(ledger.events, delta)
    scale = math.inf if family.uncovered is not None else family.smallest_refuted(test.refutes)
    proven = rounded(family.curve(scale).max_true_positive_rate(RATES)) if math.isfinite(scale) else None
    return {
        "delta": delta,
        "allowed": AllowedRates(
            tpr=dict(zip(FALSE_POSITIVE_RATES, rates.tolist(), strict=True)),
            curve=rounded(allowed.max_true_positive_rate(RATES)),
        ),
        "audited_curve": proven,
        "verdict": str(Verdict.VIOLATED if test.refutes(allowed) else Verdict.CONSISTENT),
        "audited": test.audited,
        "level": LEVEL,
    }


def _summary(
    label: str,
    rows: Sequence[RunRow],
    attacks: tuple[MeasuredAttack, ...],
    claim: Mapping[str, Any],
    worst: tuple[ExposedRecord, ...],
) -> AttackSummary:
    epsilon = {}
    for accountant in _ACCOUNTANTS:
        values = _values_of_all(rows, f"privacy/epsilon_{accountant}")
        epsilon[accountant] = max(values) if values and math.isfinite(max(values)) else None
    accuracies = _values_of_all(rows, "test/accuracy")
    return AttackSummary(
        setting=label,
        runs=tuple(str(row.folder) for row in rows),
        seeds=tuple(row.record["seed"] for row in rows),
        candidates=attacks[0].records,
        unit=str(rows[0].settings.get(UNIT, "example")),
        epsilon=epsilon,
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        fpr=rounded(RATES),
        attacks=attacks,
        worst_records=worst,
        **claim,
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


def _worst_records(scores: Floats, members: Flags) -> list[ExposedRecord]:
    """Find the candidates that score highest as members compared with their scores as others, on average.

    Those that were members of all runs, or of none, have no difference and are left out.
    """
    inside = np.ma.array(scores, mask=~members).mean(0)
    outside = np.ma.array(scores, mask=members).mean(0)
    differences = np.ma.filled(inside - outside, np.nan)
    worst = []
    for record in np.argsort(-differences, kind="stable")[:_WORST]:  # NaN comes last
        if not np.isnan(differences[record]):
            worst.append(ExposedRecord(int(record), float(differences[record])))
    return worst


def write_results(folder: Path, summaries: Sequence[AttackSummary]) -> Path:
    """Write ROC curves (attack.png), the table (attack.md) and the facts (attack.json) into a folder.

    Args:
        folder: Folder of the sweep.
        summaries: The settings that were attacked.

    Returns:
        The picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, [summary.to_dict() for summary in summaries])
    write_atomically(folder / "attack.md", f"{text_of(summaries)}\n")
    return write_figure(folder / PICTURE.file, roc_figure(roc_panels(summaries)))
