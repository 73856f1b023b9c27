"""Tables as Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dpbench.templates import render

_LATEX = str.maketrans(
    {
        "%": r"\%",
        "_": r"\_",
        "&": r"\&",
        "#": r"\#",
        "σ": r"$\sigma$",
        "ε": r"$\varepsilon$",
        "α": r"$\alpha$",
        "γ": r"$\gamma$",
        "μ": r"$\mu$",
        "ν": r"$\nu$",
        "τ": r"$\tau$",
        "±": r"$\pm$",
        "≤": r"$\le$",
        "×": r"$\times$",
        "–": "--",
        "−": "$-$",
    }
)


def markdown_rows(lines: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Format rows as a Markdown table; a | or a line break of a cell stays inside of it.

    Args:
        lines: Cells, the headings first.
        text: Positions of the columns that are text; the others are numbers, to the right.
    """
    rows = [f"| {' | '.join(map(markdown_cell, line))} |" for line in lines]
    rule = ["---" if place in text else "---:" for place in range(len(lines[0]))]
    rows.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(rows)


def markdown_cell(text: str) -> str:
    """Escape characters that would end a cell: names of runs, labels and options may hold any."""
    # What is escaped already stays: pages hold cells that were written as Markdown.
    return " ".join(text.replace("\\|", "|").replace("|", "\\|").splitlines())


def latex_rows(lines: Sequence[Sequence[str]]) -> str:
    """Format rows as a LaTeX table (booktabs).

    Args:
        lines: Cells, the headings first.
    """
    rows = [[text.translate(_LATEX) for text in line] for line in lines]
    return render("table.tex", head=rows[0], body=rows[1:])
