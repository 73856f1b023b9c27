"""What a sweep shows when it has come to its end: its runs in groups, what is missing, and what a choice costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.errors import DPBenchError
from dpbench.files import typed, write_atomically
from dpbench.privacy.accounting.composition import Selection
from dpbench.reports.account import AccountingRequest, account
from dpbench.reports.run_rows import unfinished_below
from dpbench.reports.run_table import GroupTable, RunTable, missing_note
from dpbench.runs.command import key_of, words_of
from dpbench.runs.folder import RunFolder, places_of
from dpbench.runs.ledgers import runs_without_privacy
from dpbench.runs.numbers import epsilon_text
from dpbench.runs.sweep import Sweep

_GEOMETRIC = 1.0  # the shape η of that distribution


@dataclass(frozen=True)
class EndOfSweep:
    """The table of a sweep.

    Attributes:
        groups: Its finished runs.
        text: Table, notes, what a choice costs, and how to see the table again.
        pages: Where it was written, in Markdown and as CSV.
        logged: A run of the sweep that was logged to wandb, and the options by which; None where none was.
    """

    groups: GroupTable
    text: str
    pages: tuple[Path, Path]
    logged: tuple[RunFolder, dict[str, Any]] | None


def end_of_sweep(sweep: Sweep) -> EndOfSweep | None:
    """Make the table of a sweep that has ended, and write it into its folder; None where no run was finished.

    Args:
        sweep: Which.

    Raises:
        OSError: The table cannot be written.
    """
    finished = sweep.finished()
    if not finished:
        return None
    table = RunTable.of(finished)
    # A word may set what is no setting of a run, such as its launcher's.
    groups = table.group_by([key for key in sweep.differing() if table.knows(key)])
    held_out = any(name.startswith("val/") for row in table.rows for name in row.metrics)
    notes = [*groups.notes, *_missing(sweep, finished), *cost_of_choosing(sweep.folder, held_out)]
    if sweep.study is not None:
        notes.append(f"Trials of the study {sweep.study} in other folders count too: give dpbench account all of them.")
    if groups.keys:
        again = f"dpbench table {typed(sweep.folder)} --group-by {','.join(groups.keys)}"
        notes.append(f"The same table again: {again}")
    text = replace(groups, notes=notes).to_markdown()
    pages = (_free(sweep.folder, ".md"), _free(sweep.folder, ".csv"))
    write_atomically(pages[0], text + "\n")
    write_atomically(pages[1], groups.to_csv())
    logged = None
    for row in table.rows:
        options = row.record["config"].get("logger") or {}
        if logged is None and options.get("wandb") and row.folder is not None:
            logged = (row.folder, options)
    return EndOfSweep(groups, text, pages, logged)


def _free(folder: Path, kind: str) -> Path:
    """A name for a table: those of earlier sweeps into the same folder stay."""
    number = 1
    path = folder / f"table{kind}"
    while path.exists():
        number += 1
        path = folder / f"table-{number}{kind}"
    return path


def _missing(sweep: Sweep, finished: list[RunFolder]) -> list[str]:
    """Runs of the sweep without a result, by the words in which they differ, or by their folder."""
    unfinished = {words_of(run): run for run in unfinished_below(sweep.folder)}
    if not sweep.jobs:
        names = [f"{typed(run.path)} (go on: dpbench resume {typed(run.path)})" for run in unfinished.values()]
        return missing_note(names, len(finished) + len(names))
    finished_jobs = {words_of(run) for run in finished}
    names = []
    for job in sweep.jobs:
        if job in finished_jobs:
            continue
        words = " ".join(word for word in job if key_of(word) in sweep.swept)
        names.append(f"{words} (go on: dpbench resume {typed(unfinished[job].path)})" if job in unfinished else words)
    return missing_note(names, len(sweep.jobs))


def cost_of_choosing(folder: Path, held_out: bool) -> list[str]:
    """What it costs to choose one of the runs of a sweep; nothing where no run, or only one, is private.

    Args:
        folder: Of the sweep.
        held_out: Whether runs were measured on records held out of the training data.
    """
    ledgers = places_of(RunFolder.ledger, folder)
    count = len(ledgers) + len(runs_without_privacy([folder]))
    if not ledgers or count < 2:
        return []
    ask = f"dpbench account {typed(folder)}"
    try:
        facts = account([folder], AccountingRequest(selection=Selection(_GEOMETRIC, float(count)))).facts
    except DPBenchError as error:
        return [f"What choosing one of these {count} runs costs is not told: {error} ({ask})"]
    if facts["without_privacy"]:
        return ["A run without privacy is among these: what is chosen by comparison with it has no epsilon."]
    everything = facts["epsilon"]
    best = facts["selection"]["epsilons"]["rdp"]
    together = f"epsilon {epsilon_text(everything)} (RDP) at delta={facts['delta']:g}, unit: {facts['unit']}"
    text = (
        f"Choosing one of these {count} runs, by whatever metric (also one of public records), costs what all of them "
        f"cost together: {together} ({ask})."
    )
    if None not in (everything, best) and best < everything:
        text += (
            f" With a number of trials drawn at random beforehand, {count} on average, and random settings for each, "
            f"the best alone costs {epsilon_text(best)} ({ask} --selection geometric --mean-trials {count}; "
            "docs/epsilon.md has the conditions)."
        )
    lines = [text]
    if held_out:
        lines.append(
            "No epsilon covers the held-out records (val/...): choices based on them reveal information about them."
        )
    return lines
