"""The page of results/audit, from the lines of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.reports.markdown import markdown_rows

FOLDER = Path(__file__).parents[2] / "results" / "audit"
ELSEWHERE = {
    "another divisor": "tests/strategies/test_dpsgd.py (updates equal the reference)",
    "users weighted by examples": "tests/records/test_user_mutants.py (weighs_by_examples)",
}
"""Tests of the repository that find what canaries do not show."""
_HEAD = """# Claimed, sound and audited

Written by `make audits` (code {code}): every strategy and every kind of record is trained with canaries for an epsilon
of 1, 2, 4, 8 and 10 by RDP at δ = 1e-5, and each run is audited by what its own releases showed, at 95 % confidence. A
passed audit is not a proof.

* claimed: the ledger's epsilon by RDP; sound: the tightest by an accountant that covers the lots.
* one run, DP only (Steinke et al. 2023): assumes nothing. One run, f-DP (Mahloujifar et al. 2025): the family of
  curves.
* family: a lower limit of the area under the ROC curve against the ledger's own trade-off curve; canaries are
  independent. game: the auditor knows in which lots a canary was; noise is independent, and lots are as declared.
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


def _number(value: object, digits: int = 2) -> str:
    return "–" if pd.isna(value) else f"{float(value):.{digits}f}"  # type: ignore[call-overload, arg-type]


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
    good = runs[runs["table"] != "mutants"]
    verdicts = good["verdict"].value_counts()
    return _HEAD.format(
        code=", ".join(dict.fromkeys(runs["code"])),
        strategies=_bounds(runs[runs["table"] == "strategies"]),
        sizes=_shares(runs[runs["table"] == "sizes"]),
        mutants=_mutants(runs[runs["table"] == "mutants"]),
        correct=len(good),
        violated=int(verdicts.get("VIOLATED", 0)),
        undeclared=int(verdicts.get("NOT AS DECLARED", 0)),
        above=_above(good),
    )


def _above(good: pd.DataFrame) -> str:
    """How many limits of correct runs are too high, by each bound."""
    names = {"one_run": "one run, DP only", "f_dp": "one run, f-DP", "family": "family", "game": "release game"}
    counts = []
    for column, name in names.items():
        limits = pd.to_numeric(good[column])
        counts.append(f"{(limits > good['sound']).sum()} of {limits.notna().sum()} ({name})")
    return ", ".join(counts)


def _noise(row: dict[Any, Any]) -> float:
    """Measured noise over declared."""
    return float(row["declared_mu"] / row["measured_mu"]) if row["measured_mu"] else float("nan")


def _bounds(runs: pd.DataFrame) -> str:
    head = ["strategy", "claimed", "sound", "one run, DP only", "one run, f-DP", "family", "game", "noise", "verdict"]
    lines = [head]
    for row in runs.to_dict("records"):
        values = [row[name] for name in ("claimed", "sound", "one_run", "f_dp", "family", "game")]
        lines.append([str(row["name"]), *map(_number, values), _number(_noise(row), 3), str(row["verdict"])])
    return markdown_rows(lines, text=1)


def _shares(runs: pd.DataFrame) -> str:
    lines = [["canaries", "claimed", "sound", "DP only", "family", "game", "share of DP only", "of family", "of game"]]
    for row in runs.to_dict("records"):
        values = [row[name] for name in ("claimed", "sound", "one_run", "family", "game")]
        shares = []
        for name in ("one_run", "family", "game"):
            shares.append("–" if pd.isna(row[name]) else f"{100 * row[name] / row['sound']:.0f} %")
        lines.append([str(row["name"]), *map(_number, values), *shares])
    return markdown_rows(lines, text=1)


def _mutants(runs: pd.DataFrame) -> str:
    lines = [["mechanism", "sound", "family", "game", "noise", "verdict", "found by", "seconds"]]
    for row in runs.to_dict("records"):
        finders = [str(row[name]) for name in ("violated", "failed") if isinstance(row[name], str) and row[name]]
        lines.append(
            [
                str(row["name"]),
                *(_number(row[name]) for name in ("sound", "family", "game")),
                _number(_noise(row)),
                str(row["verdict"]),
                "; ".join(finders) or ELSEWHERE.get(str(row["name"]), "nothing"),
                _number(row["train_seconds"] + row["audit_seconds"], 1),
            ]
        )
    return markdown_rows(lines, text=1)
