"""How every table and figure of the papers compares with ours: `results/verdicts.md`, from results/verdicts.yaml."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict

from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reproduce._results import of_best_trials
from dpbench.harness.reproduce._summary import summary
from dpbench.harness.reproduce.tables import Table, select_lines
from dpbench.harness.runs.numbers import ABSENT
from dpbench.templates import render

VERDICTS = "verdicts.md"
Verdict = Literal["reproduced", "nearly", "in kind", "not seen", "contradicted", "open"]

_CELL = re.compile(r"\{(?P<table>\S+) (?P<row>\S+) (?P<column>\S+)\}")
_HEADINGS = ("item", "paper", "ours", "n", "scale", "verdict", "why, and what is missing")


class Item(BaseModel):
    """A table, figure or statement of a paper.

    Attributes:
        paper: Its key in docs/papers.md.
        item: Which one, and what it says.
        printed: What the paper prints.
        ours: What was measured here; `{TABLE ROW COLUMN}` stands for a cell.
        scale: How much of the paper's experiment was run.
        verdict: See the head of the page.
        because: What the verdict rests on, where it does not go without saying.
        open: What it takes to settle or to finish it.
        page: Where the figures stand, below results/; null: the page of the first cell's table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    paper: str
    item: str
    printed: str
    ours: str
    scale: str
    verdict: Verdict
    because: str = ""
    open: str = ""
    page: str | None = None


class Verdicts(BaseModel):
    """All of results/verdicts.yaml.

    Attributes:
        papers: Key in docs/papers.md → authors and year, in the order of the page.
        items: Of all papers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    papers: dict[str, str]
    items: tuple[Item, ...]


def read_verdicts() -> Verdicts:
    """Read results/verdicts.yaml."""
    text = (Path(__file__).parents[2] / "results" / "verdicts.yaml").read_text(encoding="utf-8")
    return Verdicts.model_validate(yaml.safe_load(text))


def write_verdicts(
    verdicts: Verdicts,
    tables: Sequence[Table],
    results: Mapping[str, tuple[Table, pd.DataFrame]],
    folder: Path,
) -> None:
    """Write the page.

    Args:
        verdicts: As in results/verdicts.yaml.
        tables: Every table.
        results: Those with runs, and their runs, by name.
        folder: results/ of a checkout.

    Raises:
        ConfigurationError: An item names a cell that no table has.
    """
    cells = _Cells(tables, results)
    sections = []
    for key, authors in verdicts.papers.items():
        rows = [list(_HEADINGS)]
        rows += [_row(item, cells) for item in verdicts.items if item.paper == key]
        sections.append({"key": key, "authors": authors, "table": markdown_rows(rows, text=range(len(_HEADINGS)))})
    numbers = Counter(item.verdict for item in verdicts.items)
    counts = [f"{numbers[verdict]} {verdict}" for verdict in get_args(Verdict)]
    page = render(
        Path(__file__).with_name("verdicts.md.jinja"),
        total=len(verdicts.items),
        counts=", ".join(counts),
        sections=sections,
    )
    write_atomically(folder / VERDICTS, page)


class _Cells:
    """What the tables' cells say.

    Args:
        tables: Every table.
        results: Those with runs, and their runs, by name.
    """

    def __init__(self, tables: Sequence[Table], results: Mapping[str, tuple[Table, pd.DataFrame]]) -> None:
        self.tables = {table.name: table for table in tables}
        self.results = results
        self.summaries: dict[str, pd.DataFrame] = {}

    def page(self, name: str) -> str:
        """Address of a table's page, below results/."""
        if name not in self.tables:
            raise ConfigurationError(f"results/verdicts.yaml: there is no table {name}.")
        return f"{self.tables[name].folder}/README.md"

    def read(self, name: str, row: str, column: str) -> tuple[str, int]:
        """A cell's mean and standard deviation as text, and its number of runs."""
        self.page(name)
        select_lines(self.tables[name].rows, [row], f"results/verdicts.yaml: {name} has no row")
        select_lines(self.tables[name].columns, [column], f"results/verdicts.yaml: {name} has no column")
        if name not in self.results:
            return ABSENT, 0
        table, runs = self.results[name]
        if name not in self.summaries:
            self.summaries[name] = summary(table, of_best_trials(table, runs))
        lines = self.summaries[name]
        line = lines[(lines["row"] == row) & (lines["column"] == column)].to_dict("records")[0]
        return table.measure.text(line["mean"], line["sd"]), line["n"]


def _row(item: Item, cells: _Cells) -> list[str]:
    pages = [] if item.page is None else [item.page]
    numbers = []

    def figure(place: re.Match[str]) -> str:
        text, number = cells.read(place["table"], place["row"], place["column"])
        pages.append(cells.page(place["table"]))
        numbers.append(number)
        return text

    ours = _CELL.sub(figure, item.ours)
    if not pages:
        raise ConfigurationError(f"results/verdicts.yaml: {item.item!r} names neither a cell nor a page.")
    missing = f"missing: {item.open}" if item.open else ""
    return [
        item.item,
        item.printed,
        ours,
        _range(numbers),
        item.scale,
        f"[{item.verdict}]({pages[0]})",
        "; ".join(filter(None, [item.because, missing])),
    ]


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return ABSENT
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"
