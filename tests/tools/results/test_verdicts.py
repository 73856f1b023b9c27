"""The page that says of every table and figure of the papers how ours compares."""

from __future__ import annotations

import re
from pathlib import Path

from dpbench.harness.reproduce.tables import read_table, table_names
from tools.results.verdicts import read_verdicts

ROOT = Path(__file__).parents[3]

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_figures_that_are_no_cells_stand_on_the_page_that_is_named() -> None:
    for item in read_verdicts().items:
        figures = _NUMBER.findall(re.sub(r"\{[^}]*\}", "", item.ours)) if item.page else []
        page = (ROOT / "results" / item.page).read_text(encoding="utf-8") if item.page else ""
        missing = [figure for figure in figures if figure not in page]
        assert not missing, f"{item.item}: {missing} not in {item.page}"


def test_each_table_of_a_paper_has_a_verdict() -> None:
    names = " ".join(item.ours for item in read_verdicts().items)
    pages = {item.page for item in read_verdicts().items}
    for name in table_names():
        # Choices of settings are no item of a paper, nor are variants that are ours; table2 waits for a GPU.
        if name.startswith(("recipes/", "correlated_noise/", "lm/")) or re.search(
            "tuning|grid|median|readings|variants|lost_class|small$|exposure|optimizers|augmented|table2$", name
        ):
            continue
        table = read_table(name)
        assert f"{{{name} " in names or f"{table.folder}/README.md" in pages, f"{name} has no verdict"


def test_each_item_is_of_a_paper_that_is_named() -> None:
    verdicts = read_verdicts()
    assert {item.paper for item in verdicts.items} == set(verdicts.papers)
    papers = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for key, authors in verdicts.papers.items():
        assert f"### {key}\n\n**{authors}**" in papers
