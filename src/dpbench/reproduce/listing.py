"""What tables there are; reads their definitions only, so that it answers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def listing() -> str:
    """Names, titles and hours of all tables."""
    tables = [read_table(name, conf_dir()) for name in table_names(conf_dir())]
    lines = {name: one.title for name, one in COMPUTED_TABLES.items()}
    lines |= {table.name: f"{table.title} (about {table.hours:g} hours on two cores)" for table in tables}
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {title}" for name, title in lines.items())
