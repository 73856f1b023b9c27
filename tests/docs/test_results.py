"""Pages of results: a cell leads to its own runs, found by the table's definition."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from docutils import nodes
from docutils.core import publish_doctree
from sphinx.errors import ExtensionError

from dpbench.reproduce._results import RUNS
from dpbench.reproduce._summary import cells
from dpbench.reproduce.tables import Table
from tools.site import results
from tools.site.results import anchor, positions

ROOT = Path(__file__).parents[2]
PAGE = "results/gradient_compression_table1/README"


def _of(page: str) -> tuple[Table, pd.DataFrame]:
    table = results.definitions()[page]
    return table, pd.read_csv(ROOT / "results" / table.folder / RUNS)


def _document(shown: list[list[str]]) -> nodes.document:
    lines = [f"   * - {line[0] or ' '}\n" + "\n".join(f"     - {cell}" for cell in line[1:]) for line in shown]
    return publish_doctree(".. list-table::\n\n" + "\n".join(lines) + "\n", settings_overrides={"report_level": 5})


def test_every_table_with_runs_has_a_page() -> None:
    assert len(results.definitions()) > 20 and PAGE in results.definitions()
    assert all((ROOT / f"{page}.md").is_file() for page in results.definitions())


def test_a_cell_links_to_the_runs_of_its_row_and_column() -> None:
    table, runs = _of(PAGE)
    shown = cells(table, runs)
    document = _document(shown)
    results.link_cells(document, table, shown, PAGE)
    found = {str(link["refuri"]): link.astext() for link in document.findall(nodes.reference)}
    places = positions(table, shown[0])
    assert len(found) == len(table.rows) * len(table.columns)
    for number, row in enumerate(table.rows):
        for column in table.columns:
            assert found[f"#{anchor(row.name, column.name)}"] == shown[number + 1][places[column.name]]


def test_a_page_that_is_not_that_of_its_runs_fails_the_build() -> None:
    table, runs = _of(PAGE)
    shown = cells(table, runs)
    stale = [list(line) for line in shown]
    stale[1][1] = "99.99 ± 0.01"
    with pytest.raises(ExtensionError, match="make results"):
        results.link_cells(_document(stale), table, shown, PAGE)


@pytest.mark.parametrize("page", sorted(results.definitions()))
def test_runs_of_a_table_stand_behind_its_cells(page: str) -> None:
    table, runs = _of(page)
    html = results.runs_html(table, runs, True)
    anchors = re.findall(r'<div class="inside" id="([^"]+)"', html)
    assert len(anchors) == len(set(anchors)) == runs.groupby(["row", "column"]).ngroups
    assert html.count("<tr><td>") == len(runs)
    commands = [shlex.split(unescape(text)) for text in re.findall(r"<pre>(dpbench train [^<]*)\n</pre>", html)]
    words = {" ".join(command[2:]) for command in commands}
    for text in runs["words"]:
        plain = " ".join(word for word in text.split() if not re.match(r"(run\.name|run\.group|logger)=", word))
        assert re.sub(r"\bseed=\d+", "seed=", plain) in {re.sub(r"\bseed=\d+", "seed=", one) for one in words}


def test_a_run_shows_each_epsilon_with_delta_and_unit() -> None:
    table, runs = _of("results/gradient_compression_table2_small/README")
    html = results.runs_html(table, runs, False)
    for text in (
        "ε (RDP)",
        "ε (PLD)",
        "ε of a fixed microbatch (RDP)",
        "δ",
        "unit",
        "4.125",
        "0.675",
        "1e-05",
        "example",
    ):
        assert f">{text}<" in html
    assert "not private" not in html and "curve" not in html
    table, runs = _of("results/pyvacy_mnist/README")
    assert "<td>not private</td>" in results.runs_html(table, runs, False)


def test_curves_are_those_of_the_file_in_the_units_of_the_table() -> None:
    table, _ = _of(PAGE)
    curves = pd.read_csv(ROOT / "results" / table.folder / "curves.csv")
    found = results.curves_of(table, curves)
    lines = [line for cell in found["cells"].values() for line in cell]
    assert sum(len(line["x"]) for line in lines) == len(curves) and found["axis"] == "test accuracy (%)"
    first = found["cells"][anchor(curves["row"][0], curves["column"][0])][0]
    assert first["y"][0] == pytest.approx(100 * curves["value"][0], abs=0.01)
    json.dumps(found, allow_nan=False)


def test_overview_leads_to_cells_that_there_are() -> None:
    panels = results.overview_of(pd.read_csv(ROOT / "results" / "overview.csv"))
    json.dumps(panels, allow_nan=False)
    links = {link for panel in panels for trace in panel["traces"] for link in trace["links"] if link}
    shown = [text for panel in panels for trace in panel["traces"] for text in trace["text"]]
    assert any("De et al. 2022" in text for text in shown) and any("DP-RandP" in text for text in shown)
    for link in links:
        page, _, cell = link.partition("#")
        _, runs = _of(f"results/{page.removesuffix('.html')}")
        known = {anchor(row, column) for row, column in zip(runs["row"], runs["column"], strict=True)}
        # Without a cell: a figure of a paper whose cell was not run here.
        assert not cell or cell in known, link
