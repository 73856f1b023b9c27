"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_rows(lines: Sequence[Sequence[str]]) -> str:
    """Rows of text, headings first, numbers to the right."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
