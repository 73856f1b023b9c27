"""Tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BORDER = re.compile(r"(?<!\\)\|")


def markdown_rows(lines: Sequence[Sequence[str]], text: int = 1) -> str:
    """Format rows as a Markdown table; a | or a line break of a cell stays inside of it.

    Args:
        lines: Cells, the headings first.
        text: How many columns are text; those after them are numbers, to the right.
    """
    columns = len(lines[0])
    rule = ["---"] * min(text, columns) + ["---:"] * (columns - text)
    rows = []
    for line in lines:
        cells = [markdown_cell(cell) for cell in line]
        rows.append(f"| {' | '.join(cells)} |")
    rows.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(rows)


def markdown_cell(text: str) -> str:
    """Escape what would end a cell: names of runs, labels and options may hold anything."""
    # What is escaped already stays: pages hold cells that were written as Markdown.
    return " ".join(text.replace("\\|", "|").replace("|", "\\|").splitlines())


def markdown_cells(text: str) -> list[list[str]]:
    """Cells of the first Markdown table of a page, the headings first."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            cells = _BORDER.split(line.strip().removeprefix("|").removesuffix("|"))
            rows.append([cell.strip().replace("\\|", "|") for cell in cells])
        elif rows:
            break
    del rows[1:2]  # the rule below the headings
    return rows
