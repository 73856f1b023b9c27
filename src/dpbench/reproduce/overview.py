"""Accuracy against epsilon for each data set, ours beside the papers': `results/overview.csv` and the picture of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpbench.files import write_atomically
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.measures import MEASURES
from dpbench.reproduce.outputs import summary
from dpbench.reproduce.tables import Table, Variant

OVERVIEW = "overview"
OURS, PAPER, FIELD = "ours", "paper", "field"
WHOSE = {OURS: "ours", PAPER: "published", FIELD: "others"}  # as legends say
OWN = "recipes/"
"""Of tables that reproduce no paper: what stands beside our figures there is the field's."""
ACCOUNTANT = "epsilon_rdp"
_TEST = "test/"
_NOISE = ("random_noise", "user_noise")  # of whose test data nothing can be learned
_FEW = 2  # runs: two say nothing about their spread
_LEGEND = 50  # letters of a line
_LONG = 2.5  # decades: too many for ticks at 2 and 5
_TITLES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "digits": "digits",
    "mnist_writers": "MNIST by writer",
    "stackexchange_tags": "tags of beer.stackexchange, by user",
}
_COLUMNS = (
    "data", "title", "unit", "metric", "axis", "table", "name", "source", "whose", "row", "column", "label", "epsilon",
    "delta", "accountant", "value", "half", "n",
)  # fmt: skip
MARKERS = {
    **{(OURS, "example"): "o", (OURS, "user"): "o"},
    **{(PAPER, "example"): "x", (PAPER, "microbatch"): "D", (FIELD, "example"): "*"},
}


def points(held: Mapping[str, tuple[Table, pd.DataFrame]], tables: Sequence[Table], conf: Path) -> pd.DataFrame:
    """One line for each private cell of ours on test data, and for each figure with an epsilon that others publish.

    Panels (data set and metric, by example or by user) with one private result of ours, or one epsilon, are left out.

    Args:
        held: Tables with runs (as in runs.csv), by name.
        tables: Every table, also those without runs: what papers print stands there, too.
        conf: The configuration's folder.
    """
    found = [point for table, runs in held.values() for point in _ours(table, runs, conf)]
    found += [point for table in tables for point in _papers(table, conf)] + list(_field(conf))
    frame = pd.DataFrame(found, columns=list(_COLUMNS))
    frame = frame.drop_duplicates(["data", "source", "whose", "label", "epsilon", "value"])
    ours = frame[frame["whose"] == OURS]
    several = {panel for panel, own in ours.groupby(["data", "metric"]) if own["epsilon"].round(2).nunique() > 1}
    shown = frame[[panel in several for panel in zip(frame["data"], frame["metric"], strict=True)]]
    known = {name: number for number, name in enumerate(_TITLES)}
    place = shown["data"].map(lambda name: known.get(name, len(known)))
    order = place.to_frame("place").assign(data=shown["data"], metric=shown["metric"])
    return shown.loc[order.sort_values(["place", "data", "metric"], kind="stable").index].reset_index(drop=True)


def _ours(table: Table, runs: pd.DataFrame, conf: Path) -> Iterator[dict[str, Any]]:
    if not table.metric.startswith(_TEST):
        return
    names = {line.name: line for line in (*table.rows, *table.columns)}
    for cell in summary(table, runs).to_dict("records"):
        row, column = names[str(cell["row"])], names[str(cell["column"])]
        data = _data(table, row, column, conf)
        if cell["private"] and pd.notna(cell[ACCOUNTANT]) and pd.notna(cell["mean"]) and data not in _NOISE:
            own = runs[(runs["row"] == row.name) & (runs["column"] == column.name)]
            half = cell["half"] if cell["n"] > _FEW else None
            yield {
                **_of(table, row, column, data), "unit": cell["unit"], "whose": OURS, "epsilon": cell[ACCOUNTANT],
                "delta": own["delta"].max(), "accountant": "RDP", "value": cell["mean"], "half": half, "n": cell["n"],
            }  # fmt: skip


def _papers(table: Table, conf: Path) -> Iterator[dict[str, Any]]:
    """What is printed with an epsilon, in the unit that the paper accounts for."""
    if not table.metric.startswith(_TEST) or table.name.startswith(OWN):
        return
    for row in table.rows:
        for column in table.columns:
            epsilon = row.epsilon if row.epsilon is not None else column.epsilon
            printed = table.paper.get((row.name, column.name))
            if epsilon is None or printed is None:
                continue
            words = table.words_of(row, column)
            microbatches = any(word.startswith("strategy.microbatch_size=") for word in words)
            yield {
                **_of(table, row, column, _data(table, row, column, conf)), "whose": PAPER, "epsilon": epsilon,
                "unit": "microbatch" if microbatches else "example", "accountant": "as claimed", "value": printed[0],
            }  # fmt: skip


def _field(conf: Path) -> Iterator[dict[str, Any]]:
    """What others publish, who are no paper that is reproduced here."""
    accuracy = MEASURES["test/accuracy"]
    for one in yaml.safe_load((conf / "field.yaml").read_text(encoding="utf-8")):
        yield {
            "data": one["data"], "title": _TITLES[one["data"]], "metric": "test/accuracy", "axis": accuracy.label,
            "table": "", "name": "see conf/field.yaml", "source": one["source"], "row": "", "column": "",
            "label": one["label"],
            "whose": FIELD, "unit": "example", "epsilon": float(one["epsilon"]), "delta": float(one["delta"]),
            "accountant": "as claimed", "value": float(one["accuracy"]),
        }  # fmt: skip


def _of(table: Table, row: Variant, column: Variant, data: str) -> dict[str, Any]:
    label = row.label if len(table.columns) == 1 else f"{row.label}; {column.label}"
    return {
        "data": data, "title": _TITLES.get(data, data), "metric": table.metric, "axis": table.measure.label,
        "table": table.folder, "name": table.title, "source": table.source, "row": row.name, "column": column.name,
        "label": label,
    }  # fmt: skip


def _data(table: Table, row: Variant, column: Variant, conf: Path) -> str:
    """The data set of a cell: its word, or that of the experiment that it starts from."""
    words = dict(word.partition("=")[::2] for word in table.words_of(row, column))
    return words.get("data") or _of_experiment(conf, words.get("experiment", ""))


@cache
def _of_experiment(conf: Path, name: str) -> str:
    path = conf / "experiment" / f"{name}.yaml"
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"] if path.is_file() else []
    return next((str(one["override /data"]) for one in defaults if "override /data" in one), "digits")


def write_overview(frame: pd.DataFrame, folder: Path) -> None:
    """Write overview.csv, .png and .pdf: a panel for each data set and metric, a color for each table.

    Args:
        frame: See `points`.
        folder: Of the results.
    """
    if frame.empty:
        return
    write_atomically(folder / f"{OVERVIEW}.csv", frame.to_csv(index=False, float_format="%.6g"))
    panels = list(frame.groupby(["data", "metric"], sort=False))
    figure = new_figure(11.0, 3.9 * len(panels))
    for axes, (_, own) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, own)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"{OVERVIEW}.{suffix}", figure)


def _draw(axes: Axes, panel: pd.DataFrame) -> None:
    colors = {name: f"C{number % 10}" for number, name in enumerate(panel["table"].unique())}
    for (table, whose, unit, name), own in panel.groupby(["table", "whose", "unit", "name"], sort=False):
        color = colors[table] if table else "black"
        face = "none" if unit == "microbatch" else color
        label = f"{WHOSE[str(whose)]}: {name}" + (f" (unit: {unit})" if unit == "microbatch" else "")
        label = "\n".join(wrap(label, _LEGEND))
        marker: dict[str, Any] = {"marker": MARKERS.get((str(whose), str(unit)), "s"), "markerfacecolor": face}
        axes.plot(own["epsilon"], own["value"], linestyle="none", color=color, label=label, markersize=5, **marker)
        half = own["half"].astype(float)
        axes.errorbar(own["epsilon"], own["value"], yerr=half, fmt="none", ecolor=color, capsize=2, elinewidth=1)
    axes.set_ylim(*_limits(panel))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if _decades(panel) < _LONG else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    units = " or ".join(sorted(set(panel.loc[panel["whose"] == OURS, "unit"])))
    axes.set_xlabel(f"ε for one {units}; ours: RDP accountant; papers': as claimed", fontsize=9)
    axes.set_ylabel(panel["axis"].iloc[0])
    axes.set_title(panel["title"].iloc[0], fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _decades(panel: pd.DataFrame) -> float:
    return math.log10(float(panel["epsilon"].max()) / float(panel["epsilon"].min()))


def _limits(panel: pd.DataFrame) -> tuple[float, float]:
    """Every value, and intervals but for those that are much wider."""
    values, half = panel["value"], panel["half"].astype(float).fillna(0)
    lowest, highest = float(values.min()), float(values.max())
    room = highest - lowest
    return (
        max(float((values - half).min()), lowest - 0.2 * room) - 0.04 * room,
        min(float((values + half).max()), highest + 0.2 * room) + 0.04 * room,
    )
