"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_rows(lines: Sequence[Sequence[str]], text: int = 1) -> str:
    """Format rows as a Markdown table.

    Args:
        lines: Cells, the headings first.
        text: How many columns are text; those after them are numbers, to the right.
    """
    rule = ["---" if place < text else "---:" for place in range(len(lines[0]))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
