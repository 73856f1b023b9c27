"""What stands behind a cell of a results table, as HTML: its runs, their settings, and a place for their curves."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from dpbench.reproduce._results import trials_of
from dpbench.reproduce.tables import ONLY, Table, Variant

_OF_THE_TABLE = ("run.name=", "run.group=", "logger=")  # words by which `dpbench reproduce` keeps its runs apart
_EPSILONS = {
    "epsilon_rdp": "ε (RDP)",
    "epsilon_pld": "ε (PLD)",
    "epsilon_microbatch_rdp": "ε of a fixed microbatch (RDP)",
    "epsilon_nominal_rdp": "ε nominal (RDP)",
}
_DASH = "–"


def anchor(row: str, column: str) -> str:
    """Of a cell, by the keys of its row and column."""
    return f"cell-{row}--{column}"


def positions(table: Table, head: Sequence[str]) -> dict[str, int]:
    """Key of a column → where the table, as `_summary.cells` lays it out, shows ours.

    Args:
        table: The definition.
        head: Headings, as `outputs.cells` has them.
    """
    found, at = {}, 0
    for column in table.columns:
        at = head.index(f"{column.label}, ours", at + 1)
        found[column.name] = at
    return found


def shared_settings(table: Table) -> str:
    """What all runs of a table were told."""
    if not table.words:
        return ""
    return f"<p>All runs of this table share: {_code(table.words)}</p>"


def cell_html(
    table: Table, own: pd.DataFrame, row: Variant, column: Variant, summary: str, best: str, curve: bool
) -> str:
    """One cell: closed until it is wanted.

    Args:
        table: The definition, with its choices.
        own: Runs of the cell, as in runs.csv.
        row: Of the cell.
        column: Of the cell.
        summary: What the table shows for it.
        best: Name of the trial that the table shows.
        curve: Whether its runs left curves.
    """
    name = f"{row.label}; {column.label}"
    parts = [f'<details class="cell"><summary>{escape(name)}: <strong>{escape(summary)}</strong></summary>']
    parts.append(f'<div class="inside" id="{escape(anchor(row.name, column.name))}">')
    if curve:
        parts.append(f'<div class="curve" data-cell="{escape(anchor(row.name, column.name))}"></div>')
    for trial in table.trials:
        part = own[trials_of(own) == trial.name]
        if part.empty:
            continue
        if trial is not ONLY:
            shown = " (shown in the table)" if best == trial.name else ""
            parts.append(f"<p><strong>{escape(trial.label)}</strong>{shown}</p>")
        parts += [_runs(table, part), _settings(table, part, row, column, trial)]
    return "\n".join([*parts, "</div></details>"])


def _runs(table: Table, runs: pd.DataFrame) -> str:
    """A line for each run."""
    epsilons = {name: label for name, label in _EPSILONS.items() if name in runs and runs[name].notna().any()}
    private = bool(runs["unit"].notna().any())
    head = ["seed", table.measure.axis + (" (%)" if table.measure.percent else "")]
    head += [*epsilons.values(), "δ", "unit"] if private else ["ε"]
    head += ["steps", "seconds", "commit", "machine", "date"]
    body = []
    for run in runs.to_dict("records"):
        line = [_text(run["seed"]), table.measure.text(table.measure.scale * float(run["value"]))]
        if private:
            line += [_number(run[name], ".3f") for name in epsilons]
            line += [_number(run["delta"], "g"), _text(run["unit"])]
        else:
            line.append("not private")
        line += [_number(run["steps"], ",.0f"), _number(run["seconds"], ",.0f")]
        machine = ", ".join(text for text in (_text(run["cpu"]), _text(run["gpu"])) if text != _DASH)
        commit = str(run["commit"])
        short = f'<code title="{escape(commit)}">{escape(commit[:10])}</code>'
        body.append([*map(escape, line), short, escape(machine), escape(_text(run["date"]))])
    return _table([escape(one) for one in head], body)


def _settings(table: Table, runs: pd.DataFrame, row: Variant, column: Variant, trial: Variant) -> str:
    """What the cell changes, and a command to copy."""
    words = table.words_of(row, column, trial)
    changed = words[len(table.words) :]
    seeds = sorted(int(seed) for seed in runs["seed"])
    tail = str(runs["words"].iloc[0])[len(" ".join(words)) :].split()
    command = [*words, *(word for word in tail if not word.startswith(_OF_THE_TABLE))]
    text = " ".join(["dpbench train", *map(shlex.quote, command)])
    own = f"<p>This cell: {_code(changed)}</p>" if changed else ""
    others = f" (the others: seed={', '.join(map(str, seeds[1:]))})" if len(seeds) > 1 else ""
    return (
        f'{own}<p>One of its runs again{others}:</p><div class="highlight-sh notranslate"><div class="highlight">'
        f"<pre>{escape(text)}\n</pre></div></div>"
    )


def _code(words: Sequence[str]) -> str:
    return " ".join(f'<code class="docutils literal notranslate">{escape(word)}</code>' for word in words)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    rows = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in body)
    return (
        '<div class="table-wrapper docutils container"><table class="docutils align-default runs">'
        f"<thead><tr>{lines[0]}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _text(value: Any) -> str:
    return _DASH if pd.isna(value) else str(value)


def _number(value: Any, form: str) -> str:
    return _DASH if pd.isna(value) else format(float(value), form)
