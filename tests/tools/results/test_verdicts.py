"""The page that says of every table and figure of the papers how ours compares."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce.tables import read_table, table_names
from tools.results.verdicts import VERDICTS, Item, Verdicts, read_verdicts, write_verdicts

ROOT = Path(__file__).parents[3]

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _item(**parts: str) -> Item:
    return Item.model_validate(
        {"paper": "pyvacy_2019", "item": "one", "printed": "95", "ours": "", "scale": "full", "verdict": "nearly"}
        | parts
    )


def _written(item: Item, folder: Path) -> str:
    table = read_table("pyvacy/mnist")
    runs = pd.DataFrame(
        {
            "row": ["epsilon_3", "epsilon_3", "not_private"],
            "column": "accuracy",
            "seed": [0, 1, 0],
            "value": [0.94, 0.95, 0.98],
            "unit": ["example", "example", None],
        }
    )
    tables = [table, read_table("pyvacy/optimizers")]
    verdicts = Verdicts(papers={item.paper: "Waites 2019"}, items=(item,))
    write_verdicts(verdicts, tables, {"pyvacy/mnist": (table, runs)}, folder)
    return (folder / VERDICTS).read_text(encoding="utf-8")


def test_cells_are_means_of_the_runs(tmp_path: Path) -> None:
    page = _written(
        _item(ours="{pyvacy/mnist epsilon_3 accuracy} and {pyvacy/mnist not_private accuracy}"),
        tmp_path,
    )
    assert "| 94.50 ± 0.71 and 98.00 | 1 to 2 | full | [nearly](pyvacy_mnist/README.md) |" in page
    assert "Of 1 items: 0 reproduced, 1 nearly," in page


def test_a_table_without_runs_has_dashes(tmp_path: Path) -> None:
    page = _written(_item(ours="{pyvacy/optimizers sgd private}"), tmp_path)
    assert "| – | 0 | full | [nearly](pyvacy_optimizers/README.md) |" in page


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ("{pyvacy/moon epsilon_3 accuracy}", "there is no table pyvacy/moon"),
        ("{pyvacy/mnist epsilon_4 accuracy}", "has no row 'epsilon_4'; known: epsilon_3, not_private"),
        ("{pyvacy/mnist epsilon_3 moon}", "has no column 'moon'; known: accuracy"),
        ("94", "names neither a cell nor a page"),
    ],
)
def test_what_no_table_has_is_refused(ours: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        _written(_item(ours=ours), tmp_path)
    assert not (tmp_path / VERDICTS).exists()


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
        if name.startswith(("recipes/", "correlated_noise/")) or re.search(
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
