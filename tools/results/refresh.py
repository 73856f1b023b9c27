"""`make results`: tables, figures and pages again, from the committed runs.csv; changes nothing the second time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd

from dpbench.errors import ConfigurationError, DPBenchError
from dpbench.files import write_atomically
from dpbench.harness.reproduce._outputs import write_outputs
from dpbench.harness.reproduce._results import (
    RUNS,
    read_logged,
    refuse_other_words,
    with_choices,
)
from dpbench.harness.reproduce.tables import read_table, table_names
from tools.results import audited
from tools.results.front import write_front
from tools.results.overview import points
from tools.results.verdicts import VERDICTS, read_verdicts, write_verdicts

_PAGES = ("README.md", "docs/reproduced.md", "docs/discretized_gradients.md", "docs/random_prior.md")
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
    results = root / "results"
    tables = [read_table(name) for name in table_names()]
    with_runs = {}
    for table in tables:
        path = results / table.folder / RUNS
        if path.is_file():
            with_runs[table.name] = (with_choices(table, results), pd.read_csv(path))
    for table, runs in with_runs.values():
        refuse_other_words(table, runs)  # before anything is written
    for table, runs in with_runs.values():
        folder = results / table.folder
        write_outputs(table, runs, read_logged(table, folder), folder)
    write_front(points(with_runs), results)
    if (results / VERDICTS).is_file():
        write_verdicts(read_verdicts(), tables, with_runs, results)
    if (results / audited.FOLDER / RUNS).is_file():
        audited.write_page(results / audited.FOLDER)
    for page in _PAGES:
        _fill(root, page)
    return list(with_runs)


def _fill(root: Path, page: str) -> None:
    def table_at(place: re.Match[str]) -> str:
        path = root / "results" / place["name"] / "table.md"
        if not path.is_file():
            raise ConfigurationError(f"{page} has a place for table {place['name']}, but there is no {path}.")
        return f"{place[1]}{path.read_text(encoding='utf-8')}{place[3]}"

    path = root / page
    if path.is_file():
        write_atomically(path, _PLACE.sub(table_at, path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    try:
        print("\n".join(refresh(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
    except DPBenchError as error:
        sys.exit(f"error: {error}")
