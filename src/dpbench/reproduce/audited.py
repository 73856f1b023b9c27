"""`dpbench reproduce TABLE --audit`: beside each private cell of a table a run with canaries, and what it shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.auditing import Verdict
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.reports.audit import audit_run, read_scores
from dpbench.reports.markdown import markdown_rows
from dpbench.reproduce._jobs import Job, status, sweep, table_jobs, value_at
from dpbench.reproduce._results import RUNS, with_choices
from dpbench.reproduce.reproduction import Part, full_disk_explained, refuse_unknown_choices
from dpbench.reproduce.tables import Audit, Table, Variant, read_table, table_names
from dpbench.runs.command import key_of
from dpbench.runs.numbers import ABSENT, MOST_AUDITED, epsilon_text
from dpbench.runs.readers import read_csv
from dpbench.runs.record import CONFIDENCE
from dpbench.templates import render

FOLDER = "audited_tables"
ALL = "all"
"""In place of a table's name: every table of the project whose definition says how it is audited."""
MOST_ROWS = 200
"""Rows whose verdicts hold together: each has a two-hundredth of the probability of an error (Bonferroni)."""
JOINT_CONFIDENCE = 1 - (1 - CONFIDENCE) / MOST_ROWS

_WITH_CANARIES = "with_canaries"
_WORDS = ("audit=gradient_canaries", "++trainer.limit_val_batches=0", "++trainer.limit_test_batches=0")
_STOP_AFTER = ("+callbacks.stop_after._target_=dpbench.callback.stop_after.StopAfter",)
_TEXTS = ("table", "row", "column", "words")
_TITLES = {"family": "family", "release_game_t": "release game", "one_run_dp": "one run, DP only"}
"""Bound → what the page calls it."""
_BOUNDS = ("family", "release_game", "release_game_t", "one_run_dp")
_Key = tuple[str, str, str, int]
"""Table, row, column and seed of a line."""
_OF_PRIVACY = {
    "unit": "unit",
    "population": "population",
    "neighbouring_relation": "neighbouring_relation",
    "delta": "delta",
    "epsilon_rdp": "epsilon.rdp",
    "epsilon_pld": "epsilon.pld",
    "sound": "audit.sound",
    "sound_by": "audit.sound_by",
}
_PROVENANCE = {
    "seconds": "seconds",
    "config_hash": "config_hash",
    "code_hash": "code_hash",
    "commit": "commit",
    "cpu": "hardware.cpu",
    "threads": "hardware.threads",
    "gpu": "hardware.gpu",
    "python": "versions.python",
    "torch": "versions.torch",
    "dpbench": "versions.dpbench",
}


def audit_tables(
    name: str,
    part: Part,
    out: Path,
    runs: Path,
    only_status: bool = False,
    keep: bool = False,
    config_dir: Path | None = None,
) -> tuple[str, bool]:
    """Train each private cell of a table once with canaries, and write what they tell beside what the ledgers claim.

    Args:
        name: PAPER/TABLE, the path of a definition, or "all".
        part: Which cells, and how; of the seeds the first one, unless it names others.
        out: Where tables are kept; `audited_tables/` in it gets the lines, and keeps those of other tables.
        runs: Where the runs themselves are kept.
        only_status: Run nothing, write nothing.
        keep: Whether lines that are there count as done, whatever code made them.
        config_dir: Further configuration, as `dpbench train --config-dir` takes it.

    Returns:
        What to print, and whether no run has failed.

    Raises:
        ConfigurationError: There is no such table, row or column, it has no private cell or is one of trials, or there
            are more rows than verdicts that hold together.
        Interrupted: A signal stopped it; finished runs stay.
    """
    refuse_unknown_choices((*part.sweep, *part.trainer), config_dir)
    folder = out / FOLDER
    texts = []
    succeeded = True
    for table in _tables(name, out, config_dir):
        jobs = _private_jobs(table, part, runs, config_dir)
        earlier = _earlier_lines(folder, table)
        _refuse_many(folder, {*map(_key, earlier), *(_key_of(table, job) for job in jobs)})
        if keep:
            # A line without steps is of a run that failed.
            done = {_key(line) for line in earlier if pd.notna(line["steps"])}
            jobs = [job for job in jobs if _key_of(table, job) not in done]
        with full_disk_explained(runs, out):
            if not only_status:
                try:
                    sweep(jobs, part.sweep)
                finally:
                    # Also of a sweep that was interrupted: what has ended is on the page.
                    _write(folder, table, earlier, jobs)
        texts.append(f"{table.name}: {status(jobs)}")
        succeeded = succeeded and all(job.state() != "failed" for job in jobs)
    if not only_status:
        texts.append(f"written to {folder}")
    return "\n".join(texts), succeeded


def _tables(name: str, out: Path, config_dir: Path | None) -> list[Table]:
    """The tables that are asked for, each cell with the words of a run with canaries as its one trial."""
    names = table_names() if name == ALL else [name]
    tables = [read_table(each, config_dir) for each in names]
    if name == ALL:
        tables = [table for table in tables if table.audit is not None]
    with_canaries = []
    for table in tables:
        if table.has_trials:
            raise ConfigurationError(
                f"{table.name} chooses among trials by validation data: audit the table that chooses from it."
            )
        audit = table.audit or Audit()
        words = [*_WORDS, *audit.words]
        if audit.steps is not None:
            words += [*_STOP_AFTER, f"+callbacks.stop_after.steps={audit.steps}"]
        # Neither tested nor evaluated: the model learns from canaries.
        update = {
            "trials": (Variant(name=_WITH_CANARIES, label="with canaries", words=tuple(words)),),
            "metric": "test/accuracy",
            "more": {},
        }
        with_canaries.append(with_choices(table, out, config_dir).model_copy(update=update))
    return with_canaries


def _private_jobs(table: Table, part: Part, runs: Path, config_dir: Path | None) -> list[Job]:
    """The runs with canaries that are asked for.

    Raises:
        ConfigurationError: There is no such row or column, or no cell is private.
    """
    selected = table.selected(part.rows, part.columns, 1 if part.seeds is None else part.seeds)
    jobs = [job for job in table_jobs(selected, runs, part.trainer, config_dir) if _is_private(job.words)]
    if not jobs:
        raise ConfigurationError(f"no run of {table.name} that is asked for is private: there is no epsilon to audit.")
    return jobs


def _key(line: dict[str, Any]) -> _Key:
    return line["table"], line["row"], line["column"], line["seed"]


def _key_of(table: Table, job: Job) -> _Key:
    return table.name, job.row, job.column, job.seed


def _refuse_many(folder: Path, keys: Collection[_Key]) -> None:
    if len(keys) > MOST_ROWS:
        raise ConfigurationError(
            f"{folder} would have {len(keys)} rows, and the verdicts of at most {MOST_ROWS} hold together: audit "
            "fewer tables or seeds, or give another --out."
        )


def _is_private(words: Sequence[str]) -> bool:
    strategies = [word for word in words if key_of(word) == "strategy"]
    return not strategies or not strategies[-1].endswith("=none")


def read_lines(path: Path) -> pd.DataFrame:
    """Lines of audited runs.

    Args:
        path: Of their runs.csv.

    Raises:
        ConfigurationError: It is damaged.
    """
    return read_csv(path, [*_TEXTS, "seed", *_BOUNDS], "restore {path}, or move it away", (*_TEXTS, "*"))


def _earlier_lines(folder: Path, table: Table) -> list[dict[str, Any]]:
    """Lines that are there, but for those of this table whose definition is another one now."""
    path = folder / RUNS
    if not path.is_file():
        return []
    words = {}
    for row, column in table.cells:
        words[row.name, column.name] = " ".join(table.words_of(row, column, table.trials[0]))
    lines = []
    for line in read_lines(path).to_dict("records"):
        prefix = f"{words.get((line['row'], line['column']))} seed="
        if line["table"] != table.name or line["words"].startswith(prefix):
            lines.append({str(name): value for name, value in line.items()})
    return lines


def _write(folder: Path, table: Table, earlier: Sequence[dict[str, Any]], jobs: Sequence[Job]) -> None:
    """Write the lines of runs that are done or have failed, in place of those of the same cells, and the page."""
    labels = {(row.name, column.name): table.label_of(row, column) for row, column in table.cells}
    cells = list(labels)
    lines = {_key(line): line for line in earlier}
    for job in jobs:
        if job.state() in ("done", "failed"):
            lines[_key_of(table, job)] = _line(table.name, labels[job.row, job.column], job)
    if not lines:
        return

    def place(line: dict[str, Any]) -> tuple[str, int, int]:
        if line["table"] != table.name:
            return line["table"], 0, 0  # in their order already
        return table.name, cells.index((line["row"], line["column"])), int(line["seed"])

    ordered: list[Any] = sorted(lines.values(), key=place)
    frame = pd.DataFrame(ordered)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUNS, frame.to_csv(index=False))
    write_page(folder)


def _line(table: str, label: str, job: Job) -> dict[str, Any]:
    """One line of runs.csv, of a run that is done or has failed."""
    record = job.result() or {}
    audit = value_at(record, "privacy.audit") or {}
    line: dict[str, Any] = {
        "table": table,
        "row": job.row,
        "column": job.column,
        "label": label,
        "seed": job.seed,
        "steps": value_at(record, "steps"),
        "steps_of_the_row": job.steps,
    }
    line |= {name: value_at(record, f"privacy.{key}") for name, key in _OF_PRIVACY.items()}
    line |= dict.fromkeys(("canaries", *_BOUNDS, "verdict_alone", "verdict", "accused_by", "why_not"))
    if "verdict" in audit:
        scores, _, _ = read_scores(job.run)
        line["canaries"] = scores.canaries
        for name, limit in audit["audited"].items():
            if name in _BOUNDS:
                line[name] = math.inf if limit is None else limit
        line["verdict_alone"] = audit["verdict"]
        line["verdict"], line["accused_by"] = _joint_verdict(job, audit["verdict"])
    else:
        line["why_not"] = audit.get("why_not") or audit.get("damage") or job.attempt().get("error")
    line |= {name: value_at(record, key) for name, key in _PROVENANCE.items()}
    line["date"] = date.fromtimestamp(job.run.result.stat().st_mtime).isoformat() if record else None
    line["words"] = " ".join(job.words)
    return line


def _joint_verdict(job: Job, verdict: str) -> tuple[str, str]:
    """The verdict that holds together with those of other rows, and what it rests on."""
    # What a run is not accused of at 95 % it is not accused of at a higher confidence.
    if verdict == Verdict.CONSISTENT:
        return verdict, ""
    result = audit_run(job.path, JOINT_CONFIDENCE).result
    return str(result.verdict), ", ".join(result.accused_by)


def write_page(folder: Path) -> None:
    """Write the page of the lines in a folder.

    Args:
        folder: With runs.csv.
    """
    runs = read_lines(folder / RUNS)
    audited = runs[runs["verdict"].notna()]
    sound = audited["sound"].astype(float)
    above = {}
    for name, title in _TITLES.items():
        limits = audited[name].astype(float)
        above[title] = f"{(limits > sound).sum()} of {limits.notna().sum()}"
    page = render(
        "audited_tables.md",
        cells=_cells(runs),
        refused=runs[runs["verdict"].isna()].to_dict("records"),
        tables=runs["table"].nunique(),
        rows=len(audited),
        prefixes=int((audited["steps"] < audited["steps_of_the_row"]).sum()),
        accused_alone=int((audited["verdict_alone"] != Verdict.CONSISTENT).sum()),
        accused=audited[audited["verdict"] != Verdict.CONSISTENT].to_dict("records"),
        above=above,
        most_rows=MOST_ROWS,
        not_run=_not_run(runs),
        commits=", ".join(sorted(runs["commit"].dropna().astype(str).unique())),
        hours=audited["seconds"].astype(float).sum() / 3600,
    )
    write_atomically(folder / "README.md", page)


def _not_run(runs: pd.DataFrame) -> list[str]:
    """Say of which of the project's tables how many private cells have no line; nothing where no line is of one."""
    tables = [read_table(name) for name in table_names()]
    if not set(runs["table"]) & {table.name for table in tables}:
        return []
    texts = []
    for table in tables:
        if table.audit is None:
            continue
        cells = [(row.name, column.name) for row, column in table.cells if _is_private(table.words_of(row, column))]
        lines = runs[runs["table"] == table.name]
        missing = set(cells) - set(zip(lines["row"], lines["column"], strict=True))
        if missing:
            texts.append(f"{table.name} ({len(missing)} of {len(cells)})")
    return texts


def _cells(runs: pd.DataFrame) -> str:
    titles = ["table", "row", "unit", "steps", "canaries", "δ", "ε (RDP)", "ε (PLD)", "sound by"]
    lines = [[*titles, *(f"{title} ≥" for title in _TITLES.values()), "verdict"]]
    before = None
    for run in runs.to_dict("records"):
        name = run["table"]
        steps = f"{_count(run['steps'])} of {_count(run['steps_of_the_row'])}"
        if run["steps"] == run["steps_of_the_row"]:
            steps = f"{_count(run['steps'])}, all"
        label = run["label"]
        if (runs[["table", "row", "column"]] == [name, run["row"], run["column"]]).all(axis=1).sum() > 1:
            label = f"{label}, seed {run['seed']}"
        lines.append(
            [
                "" if name == before else f"[{name}](../{name.replace('/', '_')}/README.md)",
                label,
                _text(run["unit"]),
                steps if pd.notna(run["steps"]) else ABSENT,
                _count(run["canaries"]),
                ABSENT if pd.isna(run["delta"]) else f"{float(run['delta']):.3g}",
                *(epsilon_text(float(run[key]), 4) for key in ("epsilon_rdp", "epsilon_pld")),
                _text(run["sound_by"]).upper(),
                *(_limit(run[key]) for key in _TITLES),
                _text(run["verdict"]),
            ]
        )
        before = name
    return markdown_rows(lines, text=3)


def _text(value: object) -> str:
    return ABSENT if pd.isna(value) else str(value)  # type: ignore[call-overload]


def _count(value: Any) -> str:
    return ABSENT if pd.isna(value) else f"{int(value):,}"


def _limit(value: Any) -> str:
    limit = float(value)
    if math.isnan(limit):
        return ABSENT
    return f"> {MOST_AUDITED:.0f}" if limit > MOST_AUDITED else f"{limit:.2f}"
