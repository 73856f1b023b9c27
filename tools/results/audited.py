"""Audited tables: a run with canaries for each private cell of a table, its audited epsilon beside the claimed one.

`python -m tools.results.audited TABLE [KEY=VALUE ...] [--keep]` trains what `dpbench reproduce TABLE` would train, once
a cell and with canaries. TABLE is a name, the path of a definition, or all: every table of audited.yaml. Exit status: 3
where a cell is accused, else 1 where a run has failed or cannot be audited.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from scipy import special

from dpbench.capabilities.auditing.audit import Verdict
from dpbench.capabilities.auditing.report import audit_run, read_scores
from dpbench.cli.experiments import part_of
from dpbench.errors import ConfigurationError, DPBenchError
from dpbench.files import write_atomically
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reports.run_rows import flat
from dpbench.harness.reproduce._results import RUNS, with_choices
from dpbench.harness.reproduce.jobs import Job, status, sweep, table_jobs
from dpbench.harness.reproduce.reproduction import Part, refuse_changed_code
from dpbench.harness.reproduce.tables import Table, Variant, read_table
from dpbench.harness.runs.numbers import ABSENT, MOST_AUDITED, epsilon_text
from dpbench.harness.runs.provenance import CHANGED
from dpbench.harness.runs.readers import read_csv
from dpbench.harness.runs.record import CONFIDENCE
from dpbench.templates import render
from tools.results.choices import group_choice

FOLDER = "audited_tables"
ALL = "all"
"""In place of a table's name: every table of `HOW`."""
HOW = Path(__file__).with_suffix(".yaml")
"""Table → steps of an audited run, and its further words."""
MOST_ROWS = 200
"""Rows whose verdicts hold together: each has a two-hundredth of the probability of an error (Bonferroni)."""
JOINT_CONFIDENCE = 1 - (1 - CONFIDENCE) / MOST_ROWS

_WITH_CANARIES = "with_canaries"
_WORDS = ("audit=gradient_canaries", "++trainer.limit_val_batches=0", "++trainer.limit_test_batches=0")
_STOP_AFTER = ("+callbacks.stop_after._target_=dpbench.callback.stop_after.StopAfter",)
_TEXTS = ("table", "row", "column", "words", "verdict")
_TITLES = {"family": "family", "release_game": "release game", "one_run_dp": "one run, DP only"}
"""Bound → what the page calls it."""
_Key = tuple[str, str, str, int]
"""Table, row, column and seed of a line."""
_RECORDED = {
    "steps": "steps",
    "unit": "privacy.unit",
    "population": "privacy.population",
    "neighbouring_relation": "privacy.neighbouring_relation",
    "delta": "privacy.delta",
    "epsilon_rdp": "privacy.epsilon.rdp",
    "epsilon_pld": "privacy.epsilon.pld",
    "sound": "privacy.audit.sound",
    "sound_by": "privacy.audit.sound_by",
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
"""Column of a line → where result.json has it."""


def audit_tables(name: str, part: Part, out: Path, runs: Path, keep: bool = False) -> tuple[str, int]:
    """Train each private cell of a table once with canaries, and write what they tell beside what the ledgers claim.

    A cell whose line accuses it is not audited again: a second audit could take the accusation away by chance.

    Args:
        name: PAPER/TABLE, the path of a definition, or "all".
        part: The cells, and how they are run; of the seeds the first one, unless it names others.
        out: The folder of all results; `audited_tables/` in it gets the lines, and keeps those of other tables.
        runs: The folder of the runs themselves.
        keep: Whether lines that are there count as done, whatever code made them.

    Returns:
        The text for the terminal, and the exit status.

    Raises:
        ConfigurationError: There is no such table, row or column, it has no private cell or is one of trials, or there
            are more rows than verdicts that hold together; or results/ would be made by code that no commit holds.
        Interrupted: A signal stopped it; finished runs stay.
    """
    refuse_changed_code(out)
    folder = out / FOLDER
    tables = _tables(name, out)
    # Of all tables before the first of them trains: what is refused costs no hours.
    jobs_by_table = [_private_jobs(table, part, runs) for table in tables]
    keys = {_key_of(table, job) for table, jobs in zip(tables, jobs_by_table, strict=True) for job in jobs}
    earlier = _earlier_lines(folder, tables)
    rows = len({*map(_key, earlier), *keys})
    if rows > MOST_ROWS:
        raise ConfigurationError(
            f"{folder} would have {rows} rows, and the verdicts of at most {MOST_ROWS} hold together: audit "
            "fewer tables or seeds, or give another --out."
        )
    # A line without steps is of a run that failed.
    done = {_key(line) for line in earlier if _is_accused(line) or (keep and pd.notna(line["steps"]))}
    texts = []
    failed = False
    for table, all_jobs in zip(tables, jobs_by_table, strict=True):
        jobs = [job for job in all_jobs if _key_of(table, job) not in done]
        try:
            sweep(jobs, part.sweep)
        finally:
            # Also of a sweep that was interrupted: what has ended is on the page.
            not_audited = _write(folder, table, jobs)
        texts.append(f"{table.name}: {status(jobs)}")
        texts.extend(f"  not audited: {text}" for text in not_audited)
        failed = failed or bool(not_audited) or any(job.state() == "failed" for job in jobs)
    accused = [line for line in _earlier_lines(folder, tables) if _is_accused(line) and _key(line) in keys]
    for line in accused:
        texts.append(
            f"{line['verdict']}: {line['table']}, {line['row']}, {line['column']}, seed {line['seed']} "
            f"({line['accused_by']}); to audit it again, first remove its line from {folder / RUNS}"
        )
    texts.append(f"written to {folder}")
    if accused:
        return "\n".join(texts), 3
    return "\n".join(texts), 1 if failed else 0


def _tables(name: str, out: Path) -> list[Table]:
    """The tables that are asked for, each cell with the words of a run with canaries as its one trial."""
    how: Mapping[str, Mapping[str, Any]] = yaml.safe_load(HOW.read_text(encoding="utf-8"))
    with_canaries = []
    for table in [read_table(each) for each in (how if name == ALL else [name])]:
        if table.has_trials:
            raise ConfigurationError(
                f"{table.name} chooses among trials by validation data: audit the table that chooses from it."
            )
        audit = how.get(table.name, {})
        words = [*_WORDS, *audit.get("words", ())]
        if "steps" in audit:
            words += [*_STOP_AFTER, f"+callbacks.stop_after.steps={audit['steps']}"]
        # Neither tested nor evaluated: the model learns from canaries.
        update = {
            "trials": (Variant(name=_WITH_CANARIES, label="with canaries", words=tuple(words)),),
            "metric": "test/accuracy",
            "more": {},
        }
        with_canaries.append(with_choices(table, out).model_copy(update=update))
    return with_canaries


def _private_jobs(table: Table, part: Part, runs: Path) -> list[Job]:
    """The runs with canaries that are asked for.

    Raises:
        ConfigurationError: There is no such row or column, or no cell is private.
    """
    selected = table.selected(part.rows, part.columns, 1 if part.seeds is None else part.seeds)
    private = _private_cells(selected)
    jobs = [job for job in table_jobs(selected, runs, part.trainer) if (job.row, job.column) in private]
    if not jobs:
        raise ConfigurationError(f"no run of {table.name} that is asked for is private: there is no epsilon to audit.")
    return jobs


def _key(line: dict[str, Any]) -> _Key:
    return line["table"], line["row"], line["column"], line["seed"]


def _key_of(table: Table, job: Job) -> _Key:
    return table.name, job.row, job.column, job.seed


def _private_cells(table: Table) -> set[tuple[str, str]]:
    """Names of row and column of each cell that trains with privacy."""
    cells = set()
    for row, column in table.cells:
        if group_choice("strategy", table, row, column) != "none":
            cells.add((row.name, column.name))
    return cells


def read_lines(path: Path) -> pd.DataFrame:
    """Lines of audited runs.

    Args:
        path: Of their runs.csv.

    Raises:
        ConfigurationError: It is damaged.
    """
    return read_csv(path, [*_TEXTS, "seed", *_TITLES], "restore {path}, or move it away", (*_TEXTS, "*"))


def _is_accused(line: dict[str, Any]) -> bool:
    return bool(pd.notna(line["verdict"])) and line["verdict"] != Verdict.CONSISTENT


def _earlier_lines(folder: Path, tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Lines that are there, but for those of these tables whose definition is another one now, unless they accuse."""
    path = folder / RUNS
    if not path.is_file():
        return []
    words = {table.name: table.words_by_cell() for table in tables}
    lines = []
    for record in read_lines(path).to_dict("records"):
        line = {str(name): value for name, value in record.items()}
        cells = words.get(line["table"], {})
        prefix = f"{cells.get((line['row'], line['column'], _WITH_CANARIES))} seed="
        if not cells or line["words"].startswith(prefix) or _is_accused(line):
            lines.append(line)
    return lines


def _write(folder: Path, table: Table, jobs: Sequence[Job]) -> list[str]:
    """Write the lines of runs that are done or have failed, in place of those of the same cells, and the page.

    Returns:
        Of each run that is done and was not audited, which one it is, and why.
    """
    labels = {(row.name, column.name): table.label_of(row, column) for row, column in table.cells}
    cells = list(labels)
    lines = {_key(line): line for line in _earlier_lines(folder, [table])}
    not_audited = []
    for job in jobs:
        state = job.state()
        if state not in ("done", "failed"):
            continue
        line = _line(table.name, labels[job.row, job.column], job)
        if line["verdict"] is None and state == "done":
            not_audited.append(f"{job.name}: {line['why_not']}")
        key = _key(line)
        # A run that shows nothing takes no verdict away.
        if line["verdict"] is not None or key not in lines or pd.isna(lines[key]["verdict"]):
            lines[key] = line
    if not lines:
        return not_audited

    def place(line: dict[str, Any]) -> tuple[str, int, int]:
        if line["table"] != table.name:
            return line["table"], 0, 0  # in their order already
        cell = line["row"], line["column"]
        # A line that accuses stays also where the definition has lost its cell.
        return table.name, cells.index(cell) if cell in cells else len(cells), int(line["seed"])

    ordered: list[Any] = sorted(lines.values(), key=place)
    frame = pd.DataFrame(ordered)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUNS, frame.to_csv(index=False))
    write_page(folder)
    return not_audited


def _line(table: str, label: str, job: Job) -> dict[str, Any]:
    """One line of runs.csv, of a run that is done or has failed."""
    columns = (*_RECORDED, "canaries", *_TITLES, "verdict_alone", "verdict", "accused_by", "why_not")
    line: dict[str, Any] = {
        "table": table,
        "row": job.row,
        "column": job.column,
        "label": label,
        "seed": job.seed,
        "steps_of_the_row": job.steps,
        **dict.fromkeys(columns),
        "words": " ".join(job.words),
    }
    try:
        record = job.result() or {}
        audit = (record.get("privacy") or {}).get("audit") or {}
        facts = flat(record)
        line |= {name: facts.get(place) for name, place in _RECORDED.items()}
        if "verdict" in audit:
            scores = read_scores(job.run).scores
            line["canaries"] = scores.canaries
            for name in _TITLES:
                if name in audit["audited"]:
                    limit = audit["audited"][name]
                    line[name] = math.inf if limit is None else limit
            line["verdict_alone"] = audit["verdict"]
            line["verdict"], line["accused_by"] = _joint_verdict(job, audit["verdict"])
        else:
            line["why_not"] = audit.get("why_not") or audit.get("damage") or job.attempt().get("error")
    except DPBenchError as error:
        # A damaged file of one run is the matter of its line alone. The page names no folder of this machine.
        line |= dict.fromkeys(columns)
        line["why_not"] = str(error).replace(str(job.path), job.path.name)
    return line


def _joint_verdict(job: Job, verdict: str) -> tuple[str, str]:
    """The verdict that holds together with those of other rows, and what it rests on."""
    # Guesses and thresholds follow from the confidence: what is consistent at 95 % could be accused at a higher one.
    # To ask only of those that are accused at 95 % leaves accusations out and adds none, so the error stays below 5 %.
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
        count = (limits > sound).sum()
        number = limits.notna().sum()
        chance = special.bdtrc(count - 1, number, 1 - CONFIDENCE)
        above[title] = f"{count} of {number}, p = {chance:.2f}"
    page = render(
        Path(__file__).with_name("audited.md.jinja"),
        cells=_cells(runs),
        refused=runs[runs["verdict"].isna()].to_dict("records"),
        tables=runs["table"].nunique(),
        rows=len(audited),
        prefixes=int((audited["steps"] < audited["steps_of_the_row"]).sum()),
        accused_alone=int((audited["verdict_alone"] != Verdict.CONSISTENT).sum()),
        accused=audited[audited["verdict"] != Verdict.CONSISTENT].to_dict("records"),
        above=above,
        most_rows=MOST_ROWS,
        commits=", ".join(sorted(runs["commit"].dropna().astype(str).unique())),
        changed=audited["commit"].astype(str).str.endswith(CHANGED).sum(),
        hours=audited["seconds"].astype(float).sum() / 3600,
    )
    write_atomically(folder / "README.md", page)


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
    return markdown_rows(lines, text=range(3))


def _text(value: object) -> str:
    return ABSENT if pd.isna(value) else str(value)  # type: ignore[call-overload]


def _count(value: Any) -> str:
    return ABSENT if pd.isna(value) else f"{int(value):,}"


def _limit(value: Any) -> str:
    limit = float(value)
    if math.isnan(limit):
        return ABSENT
    return f"> {MOST_AUDITED:.0f}" if limit > MOST_AUDITED else f"{limit:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit tables from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="TABLE")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="as of dpbench reproduce")
    parser.add_argument("--keep", action="store_true", help="count lines that are there as done")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--runs", type=Path, default=Path("runs") / "tables")
    options = parser.parse_intermixed_args(arguments)
    try:
        text, code = audit_tables(options.table, part_of(options.words), options.out, options.runs, options.keep)
    except DPBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
