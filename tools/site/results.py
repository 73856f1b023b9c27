"""Pages of results/: tables that sort, cells that lead to their runs, curves and an overview that one can point at."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from docutils import nodes
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

from dpbench.reproduce._results import CURVES, RUNS, best_trials, of_best_trials, trials_of, with_choices
from dpbench.reproduce._summary import cells, summary
from dpbench.reproduce.tables import ONLY, Table, Variant, read_table, select_cell, table_names
from tools.results.overview import OVERVIEW, WHOSE

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_RESULTS = _ROOT / "results"
_FRONT = "results/README"
_SCRIPTS = "results"
"""Folder of _static: what the pages draw."""
_PLOTLY = "plotly.min.js"
_TABLE_WORDS = ("run.name=", "run.group=", "logger=")
"""Beginnings of words by which `dpbench reproduce` keeps its runs apart; a run made again needs none of them."""
_EPSILONS = {
    "epsilon_rdp": "ε (RDP)",
    "epsilon_pld": "ε (PLD)",
    "epsilon_microbatch_rdp": "ε of a fixed microbatch (RDP)",
    "epsilon_nominal_rdp": "ε nominal (RDP)",
}
_DASH = "–"


def register(app: Sphinx) -> None:
    """Change the pages as they are read, and bring what their scripts draw."""
    app.add_transform(_Runs)
    app.connect("html-page-context", _add_scripts)
    app.connect("build-finished", _write_scripts)


@cache
def definitions() -> dict[str, Table]:
    """Tables that have runs in results/, by the page that shows them."""
    by_page = {}
    for name in table_names():
        table = read_table(name)
        if (_RESULTS / table.folder / RUNS).is_file():
            by_page[f"results/{table.folder}/README"] = with_choices(table, _RESULTS)
    return by_page


class _Runs(SphinxTransform):
    """Cells of the main table link to their runs, which stand in a section of their own."""

    default_priority = 200

    def apply(self, **options: Any) -> None:
        page = self.env.docname
        if page == _FRONT:
            self._make_place_for_overview()
        table = definitions().get(page)
        if table is None:
            return
        folder = _RESULTS / table.folder
        for path in (folder / RUNS, folder / f"{CURVES}.csv", _ROOT / "conf" / "table" / f"{table.name}.yaml"):
            self.env.note_dependency(str(path))
        runs = pd.read_csv(folder / RUNS)
        link_cells(self.document, table, cells(table, runs), page)
        section = nodes.section("", nodes.title("", "Runs"), ids=["runs"], names=["runs"])
        html = runs_html(table, runs, (folder / f"{CURVES}.csv").is_file())
        section += nodes.raw("", html, format="html")
        first_section = next(iter(self.document.findall(nodes.section)))
        first_section += section

    def _make_place_for_overview(self) -> None:
        for image in self.document.findall(nodes.image):
            if image["uri"].endswith(f"{OVERVIEW}.png"):
                self.env.note_dependency(str(_RESULTS / f"{OVERVIEW}.csv"))
                image["classes"].append("still")
                place = nodes.raw("", '<div class="overview"></div>', format="html")
                paragraph = image.parent
                paragraph.parent.insert(paragraph.parent.index(paragraph) + 1, place)
                return


# ------------------------------------------------------------------------------------- the main table of a page


def anchor(row: str, column: str) -> str:
    """Address of a cell, by the keys of its row and column."""
    return f"cell-{row}--{column}"


def positions(table: Table, head: Sequence[str]) -> dict[str, int]:
    """Key of a column → where the table, as `_summary.cells` lays it out, shows ours.

    Args:
        table: The definition.
        head: Headings, as `outputs.cells` has them.
    """
    places: dict[str, int] = {}
    last = 0
    for column in table.columns:
        last = head.index(f"{column.label}, ours", last + 1)  # two columns may have one label
        places[column.name] = last
    return places


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
    main_table = next(iter(document.findall(nodes.table)))
    lines = [list(line.children) for line in main_table.findall(nodes.row)]
    text = [[cell.astext() for cell in line] for line in lines]
    if text != shown:
        raise ExtensionError(f"{page}.md does not show the table of its {RUNS}: make results writes it again.")
    places = positions(table, shown[0])
    for row, line in zip(table.rows, lines[1:], strict=True):
        for column in table.columns:
            cell = line[places[column.name]]
            if cell.astext() != _DASH:
                paragraph = next(iter(cell.findall(nodes.paragraph)))
                inside = list(paragraph.children)
                paragraph.clear()
                target = f"#{anchor(row.name, column.name)}"
                paragraph += nodes.reference("", "", *inside, refuri=target, internal=True)


# ------------------------------------------------------------------------------------- runs behind the cells


def runs_html(table: Table, runs: pd.DataFrame, curves: bool) -> str:
    """Every cell of a table with its runs: closed until a reader opens it.

    Args:
        table: The definition, with its choices.
        runs: As in runs.csv.
        curves: Whether they left curves.
    """
    records: list[dict[Any, Any]] = summary(table, of_best_trials(table, runs)).to_dict("records")
    lines = {(line["row"], line["column"]): line for line in records}
    best = best_trials(table, runs)
    cell_entries = []
    for row in table.rows:
        for column in table.columns:
            line = lines[row.name, column.name]
            if not line["n"]:
                continue
            text = f"{table.measure.text(line['mean'], line['sd'])} (n = {line['n']})"
            if pd.notna(line["paper"]):
                text += f", paper: {table.measure.text(line['paper'], line['paper_spread'], 1)}"
            best_trial = best[row.name, column.name][0].name if (row.name, column.name) in best else ""
            cell = {"anchor": anchor(row.name, column.name), "name": f"{row.label}; {column.label}", "summary": text}
            cell_runs = select_cell(runs, row, column)
            cell_entries.append({**cell, "trials": _trials(table, cell_runs, row, column, best_trial)})
    return _template().render(shared_words=table.words, curves=curves, cells=cell_entries)


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("runs.html.j2")


def _trials(table: Table, cell_runs: pd.DataFrame, row: Variant, column: Variant, best: str) -> list[dict[str, Any]]:
    """What the template needs of each trial of a cell that has runs."""
    trials = []
    for trial in table.trials:
        runs = cell_runs[trials_of(cell_runs) == trial.name]
        if runs.empty:
            continue
        epsilons = [name for name in _EPSILONS if name in runs and runs[name].notna().any()]
        is_private = bool(runs["unit"].notna().any())
        privacy = [*(_EPSILONS[name] for name in epsilons), "δ", "unit"] if is_private else ["ε"]
        measure = table.measure.axis + (" (%)" if table.measure.percent else "")
        seeds = sorted(int(seed) for seed in runs["seed"])
        words = table.words_of(row, column, trial)
        # A run's own words follow those of its cell: the seed, and what keeps runs of tables apart.
        last_words = str(runs["words"].iloc[0])[len(" ".join(words)) :].split()
        last_words = [word for word in last_words if not word.startswith(_TABLE_WORDS)]
        trials.append(
            {
                "label": "" if trial is ONLY else trial.label,
                "is_best": best == trial.name,
                "head": ["seed", measure, *privacy, "steps", "seconds", "commit", "machine", "date"],
                "runs": [_run(table, run, epsilons, is_private) for run in runs.to_dict("records")],
                "words": words[len(table.words) :],
                "command": shlex.join(["dpbench", "train", *words, *last_words]),
                "other_seeds": ", ".join(str(seed) for seed in seeds[1:]),
            }
        )
    return trials


def _run(table: Table, run: dict[Any, Any], epsilons: Sequence[str], is_private: bool) -> dict[str, Any]:
    """A line of the table of runs; the commit is shortened by the template."""
    if is_private:
        privacy = [_number(run[name], ".3f") for name in epsilons]
        privacy += [_number(run["delta"], "g"), _text(run["unit"])]
    else:
        privacy = ["not private"]
    machine = [str(run[part]) for part in ("cpu", "gpu") if pd.notna(run[part])]
    return {
        "values": [
            _text(run["seed"]),
            table.measure.text(table.measure.scale * float(run["value"])),
            *privacy,
            _number(run["steps"], ",.0f"),
            _number(run["seconds"], ",.0f"),
        ],
        "commit": str(run["commit"]),
        "machine": ", ".join(machine),
        "date": _text(run["date"]),
    }


def _text(value: Any) -> str:
    return _DASH if pd.isna(value) else str(value)


def _number(value: Any, form: str) -> str:
    return _DASH if pd.isna(value) else format(float(value), form)


# ------------------------------------------------------------------------------------- curves and the overview


def curves_of(table: Table, curves: pd.DataFrame) -> dict[str, Any]:
    """What the script of a page draws: a line for each seed of each cell."""
    lines: dict[str, Any] = {}
    for (row, column, seed), points in curves.groupby(["row", "column", "seed"], sort=False):
        values = [float(f"{table.measure.scale * value:.5g}") for value in points["value"]]
        line = {"name": f"seed {seed}", "x": points["step"].tolist(), "y": values}
        lines.setdefault(anchor(str(row), str(column)), []).append(line)
    return {"axis": table.measure.label, "cells": lines}


def overview_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Panels of the overview, each with its traces: those of one table share a color."""
    frame = frame.fillna(
        {"table": ""}
    )  # figures of the field are of no table, and a group without a name would be dropped
    ours = frame[frame["whose"] == "ours"]
    cells_with_runs = set(zip(ours["table"], ours["row"], ours["column"], strict=True))
    panels = []
    for _, panel in frame.groupby(["data", "metric"], sort=False):
        tables = list(panel["table"].unique())
        traces = []
        for (table, whose, unit), points in panel.groupby(["table", "whose", "unit"], sort=False):
            name = f"{WHOSE[str(whose)]}: {points['name'].iloc[0]}"
            records = points.to_dict("records")
            traces.append(
                {
                    "name": name + (" (microbatch)" if unit == "microbatch" else ""),
                    "color": tables.index(table),
                    "whose": whose,
                    "unit": unit,
                    "x": points["epsilon"].tolist(),
                    "y": points["value"].tolist(),
                    "half": points["half"].astype(float).fillna(0.0).tolist(),
                    "text": [_hover_text(point) for point in records],
                    "links": [_link(point, cells_with_runs) for point in records],
                }
            )
        units = sorted(set(panel.loc[panel["whose"] == "ours", "unit"]))
        first = panel.iloc[0]
        panels.append({"title": first["title"], "axis": first["axis"], "unit": " or ".join(units), "traces": traces})
    return panels


def _hover_text(point: dict[Any, Any]) -> str:
    value = f"{point['value']:.4g}"
    if pd.notna(point["half"]):
        value += f" ± {point['half']:.2g} (95 %)"
    if pd.notna(point["n"]):
        value += f", n = {point['n']:.0f}"
    cost = f"ε = {point['epsilon']:.4g} ({point['accountant']}), unit: {point['unit']}"
    source = point["table"] if point["whose"] == "ours" else point["source"]
    return f"{source}<br>{point['label']}<br>{value}<br>{cost}"


def _link(point: dict[Any, Any], cells_with_runs: set[tuple[str, str, str]]) -> str:
    """To our cell, where it has runs: the paper's figure stands beside it."""
    if f"results/{point['table']}/README" not in definitions():
        return ""
    page = f"{point['table']}/README.html"
    if (point["table"], point["row"], point["column"]) in cells_with_runs:
        return f"{page}#{anchor(point['row'], point['column'])}"
    return page


# ------------------------------------------------------------------------------------- scripts


def _add_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Bring scripts and styles to the pages that need them."""
    if not page.startswith("results/") or doctree is None:
        return
    app.add_css_file("results.css")
    app.add_js_file("tables.js", loading_method="defer")
    table = definitions().get(page)
    if page == _FRONT:
        data = OVERVIEW
    elif table is not None and (_RESULTS / table.folder / f"{CURVES}.csv").is_file():
        data = table.folder
    else:
        return
    app.add_js_file(f"{_SCRIPTS}/{data}.js", loading_method="defer")
    app.add_js_file("pictures.js", loading_method="defer")


def _write_scripts(app: Sphinx, exception: Exception | None) -> None:
    """Write the data as scripts, which a page may load where it may not fetch a file, and copy what draws them."""
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
        plotly = find_spec("plotly")
        assert plotly is not None and plotly.origin is not None, "the extra docs has plotly"
        shutil.copyfile(Path(plotly.origin).parent / "package_data" / _PLOTLY, static / _PLOTLY)


def _write(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    path.write_text(f"window.dpbenchResults = {text};\n", encoding="utf-8")
