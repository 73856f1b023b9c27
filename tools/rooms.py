"""The table of rooms in CONTRIBUTING.md, from the contracts on imports in pyproject.toml and the rooms' docstrings.

`python -m tools.rooms` writes it into the page (`make rooms`).
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpbench.reports.markdown import markdown_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by `make rooms` -->", "<!-- end of rooms -->"
_PACKAGE = "dpbench."


def contracts() -> list[dict[str, Any]]:
    """The contracts on imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return listed


def floors(container: str = "dpbench") -> list[list[str]]:
    """Full names of the rooms of each floor of a package, from the top."""
    (layers,) = (c["layers"] for c in contracts() if c.get("containers") == [container])
    return [[f"{container}.{name.strip(' ()')}" for name in layer.split("|")] for layer in layers]


def table() -> str:
    """A row for each room, from the top."""
    rows = [["floor", "room", "holds", "never imports, not even through others"]]
    every_floor = floors()
    for number, layer in zip(range(len(every_floor), 0, -1), every_floor, strict=True):
        for room in layer:
            rows.append([str(number), f"`{_path(room)}`", _holds(room), _never(room)])
            if room == "dpbench.privacy":
                rows += list(_sub_rooms(number))
    return markdown_rows(rows, text=4)


def _sub_rooms(number: int) -> Iterator[list[str]]:
    inside = floors("dpbench.privacy")
    for below, layer in zip(range(len(inside), 0, -1), inside, strict=True):
        for room in filter(_exists, layer):
            yield [f"{number}.{below}", f"`{_path(room)}`", _holds(room), _never(room)]


def _exists(room: str) -> bool:
    return (ROOT / "src" / "dpbench" / _path(room)).exists()


def _path(room: str) -> str:
    """Such as `privacy/gradients/`, or `errors.py`."""
    path = room.removeprefix(_PACKAGE).replace(".", "/")
    return f"{path}/" if (ROOT / "src" / "dpbench" / path).is_dir() else f"{path}.py"


def _holds(room: str) -> str:
    """The first paragraph of its docstring."""
    path = ROOT / "src" / "dpbench" / _path(room)
    source = path / "__init__.py" if path.is_dir() else path
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def _never(room: str) -> str:
    """What the contracts forbid, without the rooms that stand above it."""
    forbidden: dict[str, None] = {}
    for contract in contracts():
        if room in contract.get("source_modules", ()) and not contract.get("allow_indirect_imports"):
            forbidden |= dict.fromkeys(contract["forbidden_modules"])
        if contract["type"] == "independence" and room in contract["modules"]:
            forbidden |= dict.fromkeys(contract["modules"])
    every_floor = [*floors(), *floors("dpbench.privacy")]
    (level,) = (number for number, layer in enumerate(every_floor) if room in layer)
    for layer in every_floor[: level + 1]:
        for above in layer:
            forbidden.pop(above, None)
    return ", ".join(f"`{name.removeprefix(_PACKAGE)}`{_exceptions(room, name)}" for name in forbidden)


def _exceptions(room: str, name: str) -> str:
    """Files of a room that a contract lets import a name all the same."""
    pairs = (pair.split(" -> ") for contract in contracts() for pair in contract.get("ignore_imports", ()))
    files = sorted({importer for importer, imported in pairs if imported == name and importer.startswith(f"{room}.")})
    return f" (but {', '.join(f'`{_path(file)}`' for file in files)})" if files else ""


def page(text: str) -> str:
    """CONTRIBUTING.md with this table instead of the one that it holds."""
    return with_table(text, BEGIN, END, table())


def with_table(text: str, begin: str, end: str, written: str) -> str:
    """A page with another table between two marks."""
    before, _, remainder = text.partition(begin)
    _, _, after = remainder.partition(end)
    return f"{before}{begin}\n\n{written}\n\n{end}{after}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
