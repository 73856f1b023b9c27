"""Output of a sweep that has ended: its runs in groups, the missing ones, and the cost of a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpbench.errors import DPBenchError
from dpbench.files import typed, write_atomically
from dpbench.harness.reports.account import AccountingRequest, account
from dpbench.harness.reports.groups import group_by
from dpbench.harness.reports.run_rows import row_of
from dpbench.harness.reports.run_table import RunTable, unfinished_notes
from dpbench.harness.runs.folder import RunFolder, places_of
from dpbench.harness.runs.ledgers import runs_without_privacy
from dpbench.harness.runs.numbers import epsilon_text
from dpbench.harness.runs.sweep import Sweep


def end_of_sweep(sweep: Sweep) -> str | None:
    """Write the table of a sweep into its folder, as Markdown and CSV.

    Args:
        sweep: The sweep that has ended.

    Returns:
        The table with notes, for the terminal; None where no run was finished.

    Raises:
        OSError: The table cannot be written.
    """
    finished = sweep.finished()
    if not finished:
        return None
    table = RunTable(tuple(map(row_of, finished)))
    # Overrides may also set options of the launcher, say, which are not settings of a run.
    groups = group_by(table, [key for key in sweep.differing() if table.knows(key)])
    notes = [*groups.notes, *unfinished_notes([sweep.folder], len(finished))]
    cost = cost_of_sweep([sweep.folder])
    if cost is not None:
        notes += cost.lines(held_out=any(name.startswith("val/") for row in table.rows for name in row.metrics))
    if sweep.study is not None:
        notes.append(f"Trials of the study {sweep.study} in other folders count too: give dpbench account all of them.")
    if groups.keys:
        again = f"dpbench table {typed(sweep.folder)} --group-by {','.join(groups.keys)}"
        notes.append(f"Print this table again: {again}")
    text = replace(groups, notes=tuple(notes)).to_markdown()
    page = sweep.folder / "table.md"
    write_atomically(page, text + "\n")
    write_atomically(page.with_suffix(".csv"), groups.to_csv())
    return f"{text}\n\n  written to      {page}\n  written to      {page.with_suffix('.csv')}"


@dataclass(frozen=True)
class SweepCost:
    """Joint cost of a sweep's runs: publishing the best of them costs as much as all.

    Attributes:
        count: Number of runs, those without privacy included.
        command: Command that computes it.
        epsilon: ε by RDP; None if it is infinite or unknown.
        delta: δ.
        unit: Unit of privacy.
        unprotected: True if one of them trained without privacy.
        refusal: Reason why ε is unknown; empty if it is known.
    """

    count: int
    command: str
    epsilon: float | None = None
    delta: float = 0.0
    unit: str = ""
    unprotected: bool = False
    refusal: str = ""

    def lines(self, held_out: bool) -> list[str]:
        """Cost of choosing one of the runs, a paragraph each.

        Args:
            held_out: True if runs were measured on records held out of the training data.
        """
        if self.refusal:
            return [
                f"The cost of choosing among these {self.count} runs cannot be computed: {self.refusal} "
                f"({self.command})"
            ]
        if self.unprotected:
            return ["One of these runs has no privacy: no epsilon covers a choice based on comparison with it."]
        lines = [
            f"Choosing one of these {self.count} runs, by any metric (even on public records), costs as much as "
            f"publishing all of them: epsilon {epsilon_text(self.epsilon)} (RDP) at delta={self.delta:g}, unit: "
            f"{self.unit} ({self.command})."
        ]
        if held_out:
            lines.append(
                "No epsilon covers the held-out records (val/...): choices based on them reveal information about them."
            )
        return lines


def cost_of_sweep(folders: Sequence[Path]) -> SweepCost | None:
    """Joint cost of all runs below some folders; None if at most one run is private.

    Args:
        folders: Folders of sweeps, or of runs.
    """
    ledgers = 0
    for folder in folders:
        ledgers += len(places_of(RunFolder.ledger, folder))
    count = ledgers + len(runs_without_privacy(folders))
    if not ledgers or count < 2:
        return None
    command = f"dpbench account {' '.join(map(typed, folders))}"
    try:
        facts = account(folders, AccountingRequest()).facts
    except DPBenchError as error:
        return SweepCost(count, command, refusal=str(error))
    return SweepCost(
        count,
        command,
        epsilon=facts["epsilon"],
        delta=facts["delta"],
        unit=facts["unit"],
        unprotected=bool(facts.get("without_privacy")),
    )
