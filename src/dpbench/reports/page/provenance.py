"""Where the figures of a page come from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dpbench.reports.ledgers import shown_range
from dpbench.reports.page.blocks import Block, Facts, Fold, Grid, Words
from dpbench.reports.page.subject import OneRun, Subject, Table
from dpbench.reports.page.words import epsilon_words
from dpbench.runs.command import words_of

_OF_TABLES = (
    "commit", "code_hash", "date", "cpu", "gpu", "threads", "kernels", "python", "torch", "dpbench",
)  # fmt: skip
_ABSENT = "–"


def provenance(subject: Subject) -> list[Block]:
    """Of each run, or of all where there are several; and of tables."""
    blocks: list[Block] = []
    if len(subject.runs) == 1:
        blocks.append(Facts(_of_run(subject.runs[0])))
    elif subject.runs:
        blocks.append(Grid(_of_runs(subject.runs), text=8))
        blocks += [Fold(run.folder.path.name, [Facts(_of_run(run))]) for run in subject.runs[:_MOST_RUNS]]
        more = len(subject.runs) - _MOST_RUNS
        blocks += [Words([f"And {more} more, each of which its own report shows."])] if more > 0 else []
    return blocks + [Facts(_of_table(table)) for table in subject.tables]


_MOST_RUNS = 24  # whose facts and settings are shown one by one


def _of_run(run: OneRun) -> list[tuple[str, str]]:
    record, privacy = run.record, run.privacy
    words = words_of(run.folder)
    rows = [("run folder", str(run.folder))]
    rows += [("command", f"dpbench train {shlex.join(words)}")] if words else []
    rows += [(name, str(record[key])) for name, key in _KEYS.items() if record.get(key) is not None]
    for name in ("versions", "foreign_code", "hardware"):
        if record.get(name):
            rows.append((name.replace("_", " "), _listed(record[name])))
    if record.get("seconds") is not None:
        rows.append(("seconds", f"{record['seconds']:.1f}"))
    return rows + _of_ledger(run, privacy)


_KEYS = {"seed": "seed", "commit": "commit", "code": "code_hash", "configuration": "config_hash", "steps": "steps"}


def _of_ledger(run: OneRun, privacy: Mapping[str, Any]) -> list[tuple[str, str]]:
    if run.lost is not None:
        return [("ledger", run.lost)]
    if not run.private:
        return []
    seal = privacy.get("ledger") or {}
    if privacy.get("damage"):
        state = f"NOT intact: {privacy['damage']}"
    elif not run.folder.ledger.is_file():
        state = "not beside the result, which alone tells of it"
    else:
        state = "intact" if run.finished else "intact, as far as it goes"
    rows = [("ledger", f"{run.folder.ledger.name}, {state}")]
    return rows + ([("sha256 of the ledger", f"{seal['sha256']} ({seal['lines']} lines)")] if seal else [])


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)


def _of_runs(runs: Sequence[OneRun]) -> list[list[str]]:
    rows = [["run", "folder", "state", "commit", "code", "noise multiplier", "ε", "ledger", "seed", "steps"]]
    for run in runs:
        privacy, noise = run.privacy, run.privacy.get("noise_multiplier")
        seal = (privacy.get("ledger") or {}).get("sha256", "")[:12]
        ledger = "NOT intact" if privacy.get("damage") or run.lost else seal
        epsilon = epsilon_words(privacy["epsilon"]) if run.private else "∞" if run.finished else _ABSENT
        cells = [str(run.config["run"]["name"]), run.folder.path.name, "finished" if run.finished else "not finished"]
        cells += [str(run.record.get("commit") or "")[:10], str(run.record.get("code_hash") or "")]
        cells += [shown_range(noise) if noise is not None else "", epsilon, ledger]
        rows.append([cell or _ABSENT for cell in cells] + [str(run.record["seed"]), str(run.record["steps"])])
    return rows


def _of_table(table: Table) -> list[tuple[str, str]]:
    rows = [("results", str(table.folder)), ("runs", str(len(table.runs)))]
    for name in _OF_TABLES:
        values = pd.Series(table.runs.get(name), dtype=object).dropna().astype(str).unique()
        if len(values):
            rows.append((name.replace("_", " "), ", ".join(values)))
    return rows


def settings(run: OneRun) -> list[list[str]]:
    """All settings of a run, a line for each."""
    return [["setting", "value"], *([key, value] for key, value in _lines("", run.config))]


def _lines(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _lines(f"{name}.{key}" if name else str(key), inner)]
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str))]
