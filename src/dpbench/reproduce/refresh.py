"""`make results`: tables, figures and pages again, from the committed runs.csv; changes nothing the second time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd

from dpbench.errors import ConfigurationError, DPBenchError
from dpbench.files import write_atomically
from dpbench.reproduce.choices import RUNS, of_best_trials, with_choices
from dpbench.reproduce.front import write_front
from dpbench.reproduce.logged import read_logged
from dpbench.reproduce.montage import keep_strips, write_montage
from dpbench.reproduce.outputs import STRIPS, refuse_other_words, write_outputs
from dpbench.reproduce.overview import points, write_overview
from dpbench.reproduce.tables import read_table, table_names
from dpbench.run.search_path import conf_dir

_PAGES = ("README.md", "docs/reproduced.md", "docs/discretized_gradients.md")
_PLACE = re.compile(r"(<!-- table (?P<name>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refresh(root: Path) -> list[str]:
    """Write every table of a checkout again, and put it where pages have `<!-- table NAME -->` ... `<!-- end -->`.

    Args:
        root: The checkout, with results/ and pages.

    Returns:
        Names of the tables.

    Raises:
        ConfigurationError: Runs were made by another definition, or a page has a place for no table.
    """
    every = [read_table(name, conf_dir()) for name in table_names(conf_dir())]
    tables = [table for table in every if (root / "results" / table.folder / RUNS).is_file()]
    tables = [with_choices(table, conf_dir(), root / "results") for table in tables]
    held = [pd.read_csv(root / "results" / table.folder / RUNS) for table in tables]
    for table, runs in zip(tables, held, strict=True):
        refuse_other_words(table, runs)  # before anything is written
    for table, runs in zip(tables, held, strict=True):
        folder = root / "results" / table.folder
        if table.samples and (folder / STRIPS).is_dir():  # older results have the picture alone: it stays
            keep_strips((), of_best_trials(table, runs), folder, folder)
            write_montage(table, folder)
        write_outputs(table, runs, read_logged(table, folder), folder)
    shown_together = {table.name: (table, runs) for table, runs in zip(tables, held, strict=True)}
    found = points(shown_together, every, conf_dir())
    write_overview(found, root / "results")
    write_front(found, root / "results")

    for page in _PAGES:
        _fill(root, page)
    return [table.name for table in tables]


def _fill(root: Path, page: str) -> None:
    def shown(place: re.Match[str]) -> str:
        path = root / "results" / place["name"] / "table.md"
        if not path.is_file():
            raise ConfigurationError(f"{page} has a place for table {place['name']}, but there is no {path}.")
        text = path.read_text(encoding="utf-8")
        return f"{place[1]}{text}{place[3]}"

    if (root / page).is_file():
        write_atomically(root / page, _PLACE.sub(shown, (root / page).read_text(encoding="utf-8")))


if __name__ == "__main__":
    try:
        print("\n".join(refresh(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
    except DPBenchError as error:
        sys.exit(f"error: {error}")
