"""The page of results/audit, from the lines of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.harness.reports.markdown import markdown_rows

FOLDER = Path(__file__).parents[2] / "results" / "audit"
_BOUNDS = {
    "one_run": "one run, DP only",
    "f_dp": "one run, f-DP",
    "game": "release game",
    "share of one_run": "share of DP only",
}
"""Columns that have another name on the page."""
_HEAD = """# Claimed, sound and audited

Written by `make audits` (code {code}): every strategy and every kind of record is trained with canaries for an epsilon
of 1, 2, 4, 8 and 10 by RDP at δ = 1e-5, and each run is audited by what its own releases showed, at 95 % confidence. A
passed audit is not a proof.

* claimed: the ledger's epsilon by RDP; sound: the tightest by an accountant that covers the lots.
* one run, DP only (Steinke et al. 2023): assumes nothing. One run, f-DP (Mahloujifar et al. 2025): the family of
  curves.
* family: a lower limit of the area under the ROC curve against the ledger's own trade-off curve; canaries are
  independent. Release game: the auditor knows in which lots a canary was; noise is independent, and lots are as
  declared.
* noise: measured over declared (1 is right).

## Strategies and kinds of records

Digits, a network with one layer of 64, lots of 64, 150 steps, 1,000 canaries (600 where layers or parameters are
clipped apart, which must have room for them; biases have none); "every record in every lot": 512 digits, 20 steps, 500
canaries; users: the 539 writers of mnist_writers, cohorts of 20, 60 rounds, 500 canaries. Correlated noise:
four bands and cyclic Poisson lots.

{strategies}

## As many canaries

10,000 images of MNIST, lots of 1,000, 200 steps; the share of the sound epsilon that the audit certifies.

{sizes}

## Broken mechanisms

Claimed 4, flat clipping on digits, but for those of statistics (adaptive quantile), of users, and of banded noise and
its groups (the last eight: four bands, cyclic Poisson lots). Seconds are of CPU time: training and audit.

{mutants}

Of {correct} correct runs above {violated} were called VIOLATED and {undeclared} NOT AS DECLARED. A limit at 95 %
confidence lies above the truth in up to one run of twenty, by chance; above the sound epsilon lie {above}.
"""


def page() -> str:
    """The page of the lines that are committed."""
    return page_of(read_runs(FOLDER / "runs.csv"))


def read_runs(path: Path) -> pd.DataFrame:
    """Lines of audited runs; an empty text stays one, since "" says that no bound was violated."""
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def page_of(runs: pd.DataFrame) -> str:
    """The page, in Markdown.

    Args:
        runs: A line for each audited run.
    """
    runs = runs.copy()
    runs["noise"] = [f"{noise:.3f}" for noise in runs["declared_mu"] / runs["measured_mu"]]
    for name in ("one_run", "family", "game"):
        shares = 100 * pd.to_numeric(runs[name]) / runs["sound"]
        runs[f"share of {name}"] = [_text(share, " %", 0) for share in shares]
    runs["seconds"] = runs["train_seconds"] + runs["audit_seconds"]
    runs["found by"] = runs[["violated", "failed"]].fillna("").agg("; ".join, axis=1).str.strip("; ")
    good = runs[runs["table"] != "mutants"]
    verdicts = good["verdict"].value_counts()
    return _HEAD.format(
        code=", ".join(dict.fromkeys(runs["code"])),
        strategies=_table(
            runs, "strategies", "claimed", "sound", "one_run", "f_dp", "family", "game", "noise", "verdict"
        ),
        sizes=_table(
            runs,
            "sizes",
            *("claimed", "sound", "one_run", "family", "game"),
            *("share of one_run", "share of family", "share of game"),
        ),
        mutants=_table(runs, "mutants", "sound", "family", "game", "noise", "verdict", "found by", "seconds"),
        correct=len(good),
        violated=int(verdicts.get("VIOLATED", 0)),
        undeclared=int(verdicts.get("NOT AS DECLARED", 0)),
        above=_above(good),
    )


def _above(good: pd.DataFrame) -> str:
    """How many limits of correct runs are too high, by each bound."""
    counts = []
    for column in ("one_run", "f_dp", "family", "game"):
        limits = pd.to_numeric(good[column])
        counts.append(f"{(limits > good['sound']).sum()} of {limits.notna().sum()} ({_BOUNDS.get(column, column)})")
    return ", ".join(counts)


def _table(runs: pd.DataFrame, table: str, *columns: str) -> str:
    """The lines of a table, in Markdown."""
    lines = [["name", *(_BOUNDS.get(column, column) for column in columns)]]
    for row in runs[runs["table"] == table].to_dict("records"):
        lines.append([str(row["name"]), *(_text(row[column]) for column in columns)])
    return markdown_rows(lines)


def _text(value: Any, unit: str = "", digits: int = 2) -> str:
    if isinstance(value, str):
        return value
    return "–" if pd.isna(value) else f"{value:.{digits}f}{unit}"
