"""What tables there are; reads their definitions only, so that it answers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.reproduce.tables import read_table, table_names
from dpbench.run.search_path import conf_dir


@dataclass(frozen=True)
class ComputedTable:
    """A table that is computed at once, without training.

    Attributes:
        title: Shown.
        make: Imports and returns the function that writes into a folder and returns a summary.
    """

    title: str
    make: Callable[[], Callable[[Path], str]]


def _claims() -> Callable[[Path], str]:
    from dpbench.reproduce.claims_report import reproduce_claims

    return reproduce_claims


def _tracking() -> Callable[[Path], str]:
    from dpbench.reproduce.tracking import reproduce_tracking

    return reproduce_tracking


COMPUTED_TABLES = {
    "claims": ComputedTable("every epsilon that the papers print (one minute)", _claims),
    "adaptive_quantile/figure2": ComputedTable("Bounds that track quantiles of known data (seconds)", _tracking),
}


def listed_tables() -> list[dict[str, Any]]:
    """Name, title and hours on two cores of each table; None for those that are computed without training."""
    listed: list[dict[str, Any]] = []
    for name, computed in COMPUTED_TABLES.items():
        listed.append({"name": name, "title": computed.title, "hours": None})
    for name in table_names(conf_dir()):
        table = read_table(name, conf_dir())
        listed.append({"name": table.name, "title": table.title, "hours": table.hours})
    return listed


def listing() -> str:
    """Names, titles and hours of all tables."""
    lines = {}
    for table in listed_tables():
        hours = "" if table["hours"] is None else f" (about {table['hours']:g} hours on two cores)"
        lines[table["name"]] = f"{table['title']}{hours}"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {title}" for name, title in lines.items())
