"""Pages of results/: tables that sort, cells that lead to their runs, curves and an overview that one can point at."""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

from dpbench.reproduce._overview import OVERVIEW, WHOSE
from dpbench.reproduce._results import CURVES, RUNS, best_trials, of_best_trials, with_choices
from dpbench.reproduce._summary import cells, summary
from dpbench.reproduce.tables import Table, read_table, select_cell, table_names
from tools.site.cells import anchor, cell_html, positions, shared_settings
from tools.site.written import ROOT

_CONF = ROOT / "conf"
_RESULTS = ROOT / "results"
_FRONT = "results/README"
_SCRIPTS = "results"  # folder of _static: what the pages draw
_PLOTLY = "plotly.min.js"


def register(app: Sphinx) -> None:
    """Change the pages as they are read, and bring what their scripts draw."""
    app.add_transform(_Runs)
    app.connect("html-page-context", _bring)
    app.connect("build-finished", _write_scripts)


@cache
def definitions() -> dict[str, Table]:
    """Tables that have runs in results/, by the page that shows them."""
    tables = (read_table(name) for name in table_names())
    found = {f"results/{t.folder}/README": t for t in tables if (_RESULTS / t.folder / RUNS).is_file()}
    return {page: with_choices(table, _RESULTS) for page, table in found.items()}


class _Runs(SphinxTransform):
    """Cells of the main table link to their runs, which stand in a section of their own."""

    default_priority = 200

    def apply(self, **options: Any) -> None:
        page = self.env.docname
        if page == _FRONT:
            self._place_of_the_overview()
        if page not in definitions():
            return
        table = definitions()[page]
        for name in (RUNS, f"{CURVES}.csv"):
            self.env.note_dependency(str(_RESULTS / table.folder / name))
        self.env.note_dependency(str(_CONF / "table" / f"{table.name}.yaml"))
        runs = pd.read_csv(_RESULTS / table.folder / RUNS)
        link_cells(self.document, table, cells(table, runs), page)
        title = next(iter(self.document.findall(nodes.section)))
        title += self._section(table, runs)

    def _section(self, table: Table, runs: pd.DataFrame) -> nodes.section:
        section = nodes.section("", nodes.title("", "Runs"), ids=["runs"], names=["runs"])
        html = runs_html(table, runs, (_RESULTS / table.folder / f"{CURVES}.csv").is_file())
        section += nodes.raw("", html, format="html")
        return section

    def _place_of_the_overview(self) -> None:
        for image in self.document.findall(nodes.image):
            if image["uri"].endswith(f"{OVERVIEW}.png"):
                self.env.note_dependency(str(_RESULTS / f"{OVERVIEW}.csv"))
                image["classes"].append("still")
                image.parent.parent.insert(
                    image.parent.parent.index(image.parent) + 1,
                    nodes.raw("", '<div class="overview"></div>', format="html"),
                )
                return


def link_cells(document: nodes.document, table: Table, shown: list[list[str]], page: str) -> None:
    """Let each cell of ours lead to its runs.

    Args:
        document: The page; its first table is the main one.
        table: The definition.
        shown: What the table holds by runs.csv, headings first.
        page: Its name.

    Raises:
        ExtensionError: The page shows another table than runs.csv has.
    """
    lines = [list(row.children) for row in next(iter(document.findall(nodes.table))).findall(nodes.row)]
    text = [[cell.astext() for cell in line] for line in lines]
    if text != shown:
        raise ExtensionError(f"{page}.md does not show the table of its {RUNS}: make results writes it again.")
    places = positions(table, shown[0])
    for row, line in zip(table.rows, lines[1:], strict=True):
        for column in table.columns:
            cell = line[places[column.name]]
            if shown[lines.index(line)][places[column.name]] != "–":
                _link(cell, anchor(row.name, column.name))


def _link(cell: nodes.Node, target: str) -> None:
    paragraph = next(iter(cell.findall(nodes.paragraph)))
    inside = list(paragraph.children)
    paragraph.clear()
    paragraph += nodes.reference("", "", *inside, refuri=f"#{target}", internal=True)


def runs_html(table: Table, runs: pd.DataFrame, curves: bool) -> str:
    """Every cell of a table with its runs.

    Args:
        table: The definition.
        runs: As in runs.csv.
        curves: Whether they left curves.
    """
    what = "its runs, settings and curves" if curves else "its runs and settings"
    parts = [f"<p>Behind each figure of the table: {what}.</p>", shared_settings(table)]
    records: list[dict[Any, Any]] = summary(table, of_best_trials(table, runs)).to_dict("records")
    lines = {(line["row"], line["column"]): line for line in records}
    best = {cell: trial.name for cell, (trial, _) in best_trials(table, runs).items()}
    for row in table.rows:
        for column in table.columns:
            line = lines[row.name, column.name]
            if not line["n"]:
                continue
            text = f"{table.measure.text(line['mean'], line['sd'])} (n = {line['n']})"
            if pd.notna(line["paper"]):
                text += f", paper: {table.measure.text(line['paper'], line['paper_spread'], 1)}"
            shown = best.get((row.name, column.name), "")
            parts.append(cell_html(table, select_cell(runs, row, column), row, column, text, shown, curves))
    return "\n".join(parts)


def curves_of(table: Table, curves: pd.DataFrame) -> dict[str, Any]:
    """What the script of a page draws: a line for each seed of each cell."""
    found: dict[str, Any] = {}
    for (row, column, seed), own in curves.groupby(["row", "column", "seed"], sort=False):
        values = [float(f"{table.measure.scale * value:.5g}") for value in own["value"]]
        line = {"name": f"seed {seed}", "x": own["step"].tolist(), "y": values}
        found.setdefault(anchor(str(row), str(column)), []).append(line)
    return {"axis": table.measure.label, "cells": found}


def overview_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Panels of the overview, each with its traces: those of one table share a color."""
    panels = []
    ours = frame[frame["whose"] == "ours"]
    cells = set(zip(ours["table"], ours["row"], ours["column"], strict=True))
    for _, panel in frame.groupby(["data", "metric"], sort=False):
        tables = list(panel["table"].unique())
        traces = []
        for (table, whose, unit), own in panel.groupby(["table", "whose", "unit"], sort=False):
            name = f"{WHOSE[str(whose)]}: {own['name'].iloc[0]}"
            traces.append(
                {
                    "name": name + (" (microbatch)" if unit == "microbatch" else ""),
                    "color": tables.index(table), "whose": whose, "unit": unit,
                    "x": own["epsilon"].tolist(), "y": own["value"].tolist(), "half": _numbers(own["half"]),
                    "text": [_hover(point) for point in own.to_dict("records")],
                    "links": [_place(point, cells) for point in own.to_dict("records")],
                }
            )  # fmt: skip
        first = panel.iloc[0]
        units = " or ".join(sorted(set(panel.loc[panel["whose"] == "ours", "unit"])))
        panels.append({"title": first["title"], "axis": first["axis"], "unit": units, "traces": traces})
    return panels


def _numbers(values: pd.Series[Any]) -> list[float]:
    return [0.0 if pd.isna(value) else float(value) for value in values]


def _hover(point: dict[Any, Any]) -> str:
    value = f"{point['value']:.4g}" + (f" ± {point['half']:.2g} (95 %)" if pd.notna(point["half"]) else "")
    value += f", n = {point['n']:.0f}" if pd.notna(point["n"]) else ""
    cost = f"ε = {point['epsilon']:.4g} ({point['accountant']}), unit: {point['unit']}"
    source = point["source"] if point["whose"] == "paper" else point["table"]
    return f"{source}<br>{point['label']}<br>{value}<br>{cost}"


def _place(point: dict[Any, Any], cells: set[tuple[str, str, str]]) -> str:
    """Of our cell, where it has runs: the paper's figure stands beside it."""
    page = f"results/{point['table']}/README"
    if page not in definitions():
        return ""
    has_runs = (point["table"], point["row"], point["column"]) in cells
    return f"{point['table']}/README.html" + (f"#{anchor(point['row'], point['column'])}" if has_runs else "")


def _bring(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Scripts and styles of the pages that need them."""
    if not page.startswith("results/") or doctree is None:
        return
    app.add_css_file("results.css")
    app.add_js_file("tables.js", loading_method="defer")
    table = definitions().get(page)
    data = OVERVIEW if page == _FRONT else table.folder if table is not None else ""
    if data and (page == _FRONT or (_RESULTS / data / f"{CURVES}.csv").is_file()):
        app.add_js_file(f"{_SCRIPTS}/{data}.js", loading_method="defer")
        app.add_js_file("pictures.js", loading_method="defer")


def _write_scripts(app: Sphinx, exception: Exception | None) -> None:
    """The data as scripts, which a page may load where it may not fetch a file; and the library that draws them."""
    if exception is not None or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    (static / _SCRIPTS).mkdir(parents=True, exist_ok=True)
    for table in definitions().values():
        path = _RESULTS / table.folder / f"{CURVES}.csv"
        if path.is_file():
            _write(static / _SCRIPTS / f"{table.folder}.js", curves_of(table, pd.read_csv(path)))
    _write(static / _SCRIPTS / f"{OVERVIEW}.js", {"panels": overview_of(pd.read_csv(_RESULTS / f"{OVERVIEW}.csv"))})
    if not (static / _PLOTLY).exists():
        spec = find_spec("plotly")
        assert spec is not None and spec.origin is not None, "the extra docs has plotly"
        shutil.copyfile(Path(spec.origin).parent / "package_data" / _PLOTLY, static / _PLOTLY)


def _write(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    path.write_text(f"window.dpbenchResults = {text};\n", encoding="utf-8")
