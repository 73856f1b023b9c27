"""The map of the packages in CONTRIBUTING.md, from the contracts on imports in pyproject.toml and from docstrings.

`python -m tools.package_map` writes it into the page (`make map`).
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

from dpbench.reports.markdown import markdown_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- map: written by `make map` -->"
END = "<!-- end of map -->"
_PACKAGE = "dpbench."
_PRIVACY = "dpbench.privacy"
_DRAWN_AS_MAP = ("layers", "acyclic_siblings")  # kinds of contracts that the table itself shows, or the line above it


def contracts() -> list[dict[str, Any]]:
    """The contracts on imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return listed


def layers(container: str = "dpbench") -> list[list[str]]:
    """Full names of the modules of each layer of a package, from the top."""
    (contract,) = (c for c in contracts() if c.get("containers") == [container])
    by_layer = []
    for layer in contract["layers"]:
        names = [name.strip(" ()") for name in layer.split("|")]
        by_layer.append([f"{container}.{name}" for name in names])
    return by_layer


def table() -> str:
    """A row for each package, from the top, and the rules that the order of the rows does not show."""
    rows = [["layer", "package", "holds"]]
    from_top = layers()
    for number, layer in zip(range(len(from_top), 0, -1), from_top, strict=True):
        for package in layer:
            rows.append(_row(str(number), package))
            if package == _PRIVACY:
                rows += _inside_privacy(number)
    rules = [f"- {contract['name']}." for contract in contracts() if contract["type"] not in _DRAWN_AS_MAP]
    return "\n".join([markdown_rows(rows, text=3), "", *rules])


def _inside_privacy(number: int) -> list[list[str]]:
    from_top = layers(_PRIVACY)
    rows = []
    for below, layer in zip(range(len(from_top), 0, -1), from_top, strict=True):
        rows += [_row(f"{number}.{below}", module) for module in layer]
    return rows


def _row(layer: str, package: str) -> list[str]:
    return [layer, f"`{_path(package)}`", _first_line_of(package)]


def _path(package: str) -> str:
    """Such as `privacy/gradients/`, or `errors.py`."""
    path = package.removeprefix(_PACKAGE).replace(".", "/")
    is_folder = (ROOT / "src" / "dpbench" / path).is_dir()
    return f"{path}/" if is_folder else f"{path}.py"


def _first_line_of(package: str) -> str:
    """The first paragraph of a package's docstring."""
    path = ROOT / "src" / "dpbench" / _path(package)
    source = path / "__init__.py" if path.is_dir() else path
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    paragraph = docstring.partition("\n\n")[0]
    return " ".join(paragraph.split())


def page(text: str) -> str:
    """CONTRIBUTING.md with this map instead of the one that it holds."""
    return with_table(text, BEGIN, END, table())


def with_table(text: str, begin: str, end: str, written: str) -> str:
    """A page with another table between two marks."""
    before, _, following = text.partition(begin)
    _, _, after = following.partition(end)
    return f"{before}{begin}\n\n{written}\n\n{end}{after}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
