"""The table of guards in docs/guards.md, from the lists in `dpbench.guards`.

`python -m tools.guards_table` writes it into the page (`make guards`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpbench.guards import EVERY_TRAINING, LIGHTNING, LOOP, Guard
from dpbench.reports.markdown import markdown_rows
from tools.package_map import with_table

PAGE = Path(__file__).parents[1] / "docs" / "guards.md"
BEGIN = "<!-- guards: written by `make guards` -->"
END = "<!-- end of guards -->"
_MOMENTS = {
    "check": "before the training",
    "begin": "before the first batch",
    "open": "each batch",
    "step": "some batches",
    "stepped": "each batch",
    "release": "each release",
    "released": "each update",
    "public_loss": "each other network's step",
    "close": "the end of each batch",
}
_OF_SOURCE = "some batches"  # where the source of records asks it


def table() -> str:
    """A row for each guard, in the order in which they look."""
    rows = [["guard", "what it prevents", "looks at", "trainings"]]
    for guard in every_guard():
        named = [_MOMENTS[moment] for moment in guard.moments() if moment in _MOMENTS]
        moments = dict.fromkeys(named or [_OF_SOURCE])
        rows.append([guard.name, guard.prevents, ", ".join(moments), _trainings(guard)])
    return markdown_rows(rows, text=4)


def every_guard() -> list[type[Guard]]:
    """Each guard of a list once."""
    return [*dict.fromkeys([*LIGHTNING, *LOOP])]


def _trainings(guard: type[Guard]) -> str:
    if guard in EVERY_TRAINING:
        return "all"
    return "Lightning" if guard in LIGHTNING else "`PrivateLoop`"


def page(text: str) -> str:
    """The page with this table instead of the one that it holds."""
    return with_table(text, BEGIN, END, table())


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
