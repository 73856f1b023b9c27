"""Results as entries of a public leaderboard of private image classification (arXiv 2601.17189): `dpbench table`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.run_rows import RunRow
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs.command import key_of, words_of

_ACCURACY = "test/accuracy"
_BY_AUTHORS = ("name", "url", "authors", "code", "venue", "venue_date")
_OF_A_RUN = {"seed", "run.name", "run.group", "hydra.run.dir", "hydra.sweep.dir"}


def leaderboard(table: RunTable) -> str:
    """An entry in YAML, with a claim for each group of runs that differ by their seeds.

    A claim has the fields of the leaderboard, and those by which it can be checked: unit, seeds, hashes of ledgers, and
    the command of the runs.

    Args:
        table: Single runs.

    Raises:
        ConfigurationError: No run has a test accuracy and an ε.
    """
    groups = [rows for rows in table.groups_of_seeds() if all(row.private and _ACCURACY in row.metrics for row in rows)]
    if not groups:
        raise ConfigurationError(f"no run has an epsilon and {_ACCURACY}: a leaderboard compares these.")
    entry: dict[str, Any] = dict.fromkeys(_BY_AUTHORS, "...")
    entry["claims"] = [_claim(rows) for rows in groups]
    text: str = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, width=1000)
    return text


def _claim(rows: Sequence[RunRow]) -> dict[str, Any]:
    first = rows[0]
    privacy = first.record["privacy"]
    accountant = "rdp" if privacy["epsilon"].get("pld") is None else "pld"
    largest = max(row.record["privacy"]["epsilon"][accountant] for row in rows)
    accuracies = np.array([row.metrics[_ACCURACY] for row in rows], dtype=float)
    claim = {
        "public_data": "...",
        "model": str(first.lookup("model")),
        "epsilon": math.ceil(1000 * largest) / 1000,
        "delta": privacy["delta"],
        "private_accuracy": f"{100 * accuracies.mean():.2f}%",
        "dp_accountant": accountant.upper(),
        "unit": privacy["unit"],
        "seeds": [row.record["config"]["seed"] for row in rows],
        "ledgers_sha256": [row.record["privacy"]["ledger"]["sha256"] for row in rows],
    }
    if len(rows) > 1:
        claim["standard_deviation"] = f"{100 * accuracies.std(ddof=1):.2f}%"
    notes = {row.note for row in rows if row.note is not None}
    if notes:
        claim["doubts"] = sorted(notes)
    if first.folder is not None:
        words = [word for word in words_of(first.folder) if key_of(word) not in _OF_A_RUN]
        claim["command"] = " ".join(["dpbench train", *words])
    return claim
