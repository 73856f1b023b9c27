"""The map of the packages in CONTRIBUTING.md, from the contracts on imports in pyproject.toml and from docstrings."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

from dpbench.harness.reports.markdown import markdown_rows

ROOT = Path(__file__).parents[1]
_PRIVACY = "dpbench.privacy"
_SHOWN_BY_MAP = ("layers", "acyclic_siblings")
"""Kinds of contracts that the table itself shows, or the line above it."""


def page() -> str:
    """A row for each package, from the top, and the rules that the order of the rows does not show."""
    rows = [["layer", "package", "holds"]]
    packages = _numbered_layers("dpbench")
    for number, package in packages:
        rows.append(_row(str(number), package))
        if package == _PRIVACY:
            rows += [_row(f"{number}.{inner}", module) for inner, module in _numbered_layers(_PRIVACY)]
    rules = [f"- {contract['name']}." for contract in _contracts() if contract["type"] not in _SHOWN_BY_MAP]
    return "\n".join([markdown_rows(rows, text=range(3)), "", *rules])


def _contracts() -> list[dict[str, Any]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return contracts


def _numbered_layers(container: str) -> list[tuple[int, str]]:
    """(number of its layer, full name) of each module of a package, from the top; the lowest layer is 1."""
    (contract,) = (contract for contract in _contracts() if contract.get("containers") == [container])
    layers = contract["layers"]
    numbered = []
    for place, layer in enumerate(layers):
        for name in layer.split("|"):
            numbered.append((len(layers) - place, f"{container}.{name.strip(' ()')}"))
    return numbered


def _row(number: str, package: str) -> list[str]:
    """Such as | 3.4 | `privacy/gradients/` | the first paragraph of its docstring |."""
    place = package.removeprefix("dpbench.").replace(".", "/")
    folder = ROOT / "src" / "dpbench" / place
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    paragraph = docstring.partition("\n\n")[0]
    shown = f"{place}/" if folder.is_dir() else f"{place}.py"
    return [number, f"`{shown}`", " ".join(paragraph.split())]
