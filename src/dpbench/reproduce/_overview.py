"""Accuracy against epsilon for each data set, ours beside the papers': `results/overview.csv` and pictures of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpbench.files import write_atomically
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce._summary import summary
from dpbench.reproduce.tables import MEASURES, Table, Variant
from dpbench.run.search_path import conf_dir

OVERVIEW = "overview"
FRONT = "overview_images.png"
OURS = "ours"
PAPER = "paper"
FIELD = "field"
WHOSE = {OURS: "ours", PAPER: "published", FIELD: "others"}  # as legends say
OWN = "recipes/"
"""Of tables that reproduce no paper: what stands beside our figures there is the field's."""
ACCOUNTANT = "epsilon_rdp"

_NOISE = ("random_noise", "user_noise")  # of whose test data nothing can be learned
_FEW = 2  # runs, which say nothing about their spread
_LEGEND = 50  # letters of a line
_LONG = 2.5  # decades: too many for ticks at 2 and 5
_SHOWN = 0.9  # of the figures of a panel of the front page; the lowest are counted, and not drawn
_BLACK = "#333333"
_GRAY = "#888888"
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
_MARKERS = {
    (OURS, "example"): "o",
    (OURS, "user"): "o",
    (PAPER, "example"): "x",
    (PAPER, "microbatch"): "D",
    (FIELD, "example"): "*",
}
_FRONT_DATA = ("mnist", "cifar10")
_PAPERS = {
    "three_tools": ("van der Veen et al. 2018", "C0"),
    "pyvacy": ("Waites 2019", "C2"),
    "gradient_compression": ("Nasr et al. 2020", "C1"),
    "adaptive_quantile": ("Andrew et al. 2021", "C3"),
    "recipes": ("our own recipes", "C4"),
}
_MARKS = {
    (OURS, "example"): "ours; 95 % intervals of three runs or more",
    (PAPER, "example"): "papers'",
    (PAPER, "microbatch"): "papers', ε for a microbatch",
    (FIELD, "example"): "others', no extra data",
}


def points(results: Mapping[str, tuple[Table, pd.DataFrame]], tables: Sequence[Table]) -> pd.DataFrame:
    """List each private cell of ours on test data, and each figure with an epsilon that others publish.

    Panels (data set and metric, by example or by user) with one private result of ours, or one epsilon, are left out.

    Args:
        results: Tables with runs (as in runs.csv), by name.
        tables: Every table, also those without runs: what papers print stands there, too.
    """
    lines = []
    for table, runs in results.values():
        lines += _ours(table, runs)
    for table in tables:
        lines += _papers(table)
    frame = pd.DataFrame(lines + _field(), columns=list(_COLUMNS))
    # A figure of a paper stands in each table that is compared with it.
    frame = frame.drop_duplicates(["data", "source", "whose", "label", "epsilon", "value"])
    frame = frame.groupby(["data", "metric"]).filter(_has_several_epsilons)
    order = [*_TITLES, *sorted(set(frame["data"]) - set(_TITLES))]
    frame = frame.assign(place=frame["data"].map(order.index))
    return frame.sort_values(["place", "metric"], kind="stable", ignore_index=True).drop(columns="place")


def _has_several_epsilons(panel: pd.DataFrame) -> bool:
    return panel.loc[panel["whose"] == OURS, "epsilon"].round(2).nunique() > 1


def _ours(table: Table, runs: pd.DataFrame) -> list[dict[str, Any]]:
    if not table.metric.startswith("test/"):
        return []
    lines = {line.name: line for line in (*table.rows, *table.columns)}
    deltas = runs.groupby(["row", "column"])["delta"].max()
    cells = summary(table, runs).dropna(subset=["unit", ACCOUNTANT, "mean"])
    entries = []
    for cell in cells.to_dict("records"):
        row = lines[cell["row"]]
        column = lines[cell["column"]]
        entry = _entry(table, row, column)
        if entry["data"] in _NOISE:
            continue
        entry |= {
            "unit": cell["unit"],
            "whose": OURS,
            "epsilon": cell[ACCOUNTANT],
            "delta": deltas[row.name, column.name],
            "accountant": "RDP",
            "value": cell["mean"],
            "half": cell["half"] if cell["n"] > _FEW else None,
            "n": cell["n"],
        }
        entries.append(entry)
    return entries


def _papers(table: Table) -> list[dict[str, Any]]:
    """What is printed with an epsilon, in the unit that the paper accounts for."""
    if not table.metric.startswith("test/") or table.name.startswith(OWN):
        return []
    entries = []
    for row in table.rows:
        for column in table.columns:
            epsilon = row.epsilon if row.epsilon is not None else column.epsilon
            mean, _ = table.printed(row.name, column.name)
            if epsilon is None or mean is None:
                continue
            by_microbatch = "strategy.microbatch_size=" in " ".join(table.words_of(row, column))
            entry = _entry(table, row, column)
            entry |= {
                "unit": "microbatch" if by_microbatch else "example",
                "whose": PAPER,
                "epsilon": epsilon,
                "accountant": "as claimed",
                "value": mean,
            }
            entries.append(entry)
    return entries


def _field() -> list[dict[str, Any]]:
    """What others publish, who are no paper that is reproduced here."""
    entries = []
    for published in yaml.safe_load((conf_dir() / "field.yaml").read_text(encoding="utf-8")):
        entry = {
            "title": _TITLES[published["data"]],
            "unit": "example",
            "metric": "test/accuracy",
            "axis": MEASURES["test/accuracy"].label,
            "table": "",
            "name": "see conf/field.yaml",
            "whose": FIELD,
            "row": "",
            "column": "",
            "accountant": "as claimed",
            "value": float(published["accuracy"]),
        }
        numbers = {"epsilon": float(published["epsilon"]), "delta": float(published["delta"])}
        entries.append({**published, **entry, **numbers})
    return entries


def _entry(table: Table, row: Variant, column: Variant) -> dict[str, Any]:
    """What is common to our figure and the paper's figure of a cell."""
    words = dict(word.partition("=")[::2] for word in table.words_of(row, column))
    data = words.get("data") or _data_of_experiment(words.get("experiment", ""))
    return {
        "data": data,
        "title": _TITLES.get(data, data),
        "metric": table.metric,
        "axis": table.measure.label,
        "table": table.folder,
        "name": table.title,
        "source": table.source,
        "row": row.name,
        "column": column.name,
        "label": row.label if len(table.columns) == 1 else f"{row.label}; {column.label}",
    }


@cache
def _data_of_experiment(name: str) -> str:
    path = conf_dir() / "experiment" / f"{name}.yaml"
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"] if path.is_file() else []
    for choice in defaults:
        if "override /data" in choice:
            return str(choice["override /data"])
    return "digits"


def write_overview(frame: pd.DataFrame, folder: Path) -> None:
    """Write overview.csv, .png and .pdf (a panel for each data set and metric, a color for each table), and the front.

    Args:
        frame: See `points`.
        folder: Of the results.
    """
    if frame.empty:
        return
    write_atomically(folder / f"{OVERVIEW}.csv", frame.to_csv(index=False, float_format="%.6g"))
    panels = [panel for _, panel in frame.groupby(["data", "metric"], sort=False)]
    figure = new_figure(11.0, 3.9 * len(panels))
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"{OVERVIEW}.{suffix}", figure)
    _write_front(frame[frame["unit"] != "user"], folder)


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    """Every figure of a data set and metric; intervals may be cut that are much wider than the figures lie apart."""
    colors = {name: f"C{number % 10}" for number, name in enumerate(panel["table"].unique())}
    for (table, origin, unit, name), part in panel.groupby(["table", "whose", "unit", "name"], sort=False):
        note = " (unit: microbatch)" if unit == "microbatch" else ""
        label = "\n".join(wrap(f"{WHOSE[str(origin)]}: {name}{note}", _LEGEND))
        color = colors[table] if table else "black"
        axes.plot(part["epsilon"], part["value"], label=label, **_style(str(origin), str(unit), color, size=5))
        half = part["half"].astype(float)
        axes.errorbar(part["epsilon"], part["value"], yerr=half, fmt="none", ecolor=color, capsize=2, elinewidth=1)
    half = panel["half"].astype(float).fillna(0)
    lowest = panel["value"].min()
    highest = panel["value"].max()
    room = highest - lowest
    axes.set_ylim(
        max((panel["value"] - half).min(), lowest - 0.2 * room) - 0.04 * room,
        min((panel["value"] + half).max(), highest + 0.2 * room) + 0.04 * room,
    )
    decades = math.log10(panel["epsilon"].max() / panel["epsilon"].min())
    units = " or ".join(sorted(set(panel.loc[panel["whose"] == OURS, "unit"])))
    _finish(axes, panel, f"{units}; ours: RDP accountant; papers'", has_many_ticks=decades < _LONG)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _write_front(frame: pd.DataFrame, folder: Path) -> None:
    """The overview at a glance, for the README: images by example, a color for each paper."""
    panels = [panel for data, panel in frame.groupby("data", sort=False) if data in _FRONT_DATA]
    if not panels:
        return
    figure = new_figure(11.0, 4.6)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_front(axes, panel)
    handles = [Line2D([], [], color=color, linewidth=5, label=name) for name, color in _PAPERS.values()]
    for (origin, unit), label in _MARKS.items():
        color = _GRAY if origin == FIELD else _BLACK
        handles.append(Line2D([], [], label=label, **_style(origin, unit, color)))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    write_figure(folder / FRONT, figure)


def _draw_front(axes: Axes, panel: pd.DataFrame) -> None:
    lowest = panel["value"].quantile(1 - _SHOWN)
    highest = panel["value"].max()
    room = 0.06 * (highest - lowest)
    visible = panel[panel["value"] >= lowest - room]
    for (table, origin, unit), part in visible.groupby(["table", "whose", "unit"], sort=False):
        color = _GRAY if origin == FIELD else _BLACK
        for name, (_, paper_color) in _PAPERS.items():
            if table.startswith(name):
                color = paper_color
        order = 2 if origin == FIELD else 3
        axes.plot(part["epsilon"], part["value"], alpha=0.85, zorder=order, **_style(origin, unit, color))
        half = part["half"].astype(float)
        half = half.where(half < highest - lowest)  # three runs of which one failed: an interval as high as the picture
        axes.errorbar(part["epsilon"], part["value"], yerr=half, fmt="none", ecolor=color, elinewidth=1, alpha=0.6)
    axes.set_ylim(lowest - room, highest + room)
    _finish(axes, panel, "example; ours: RDP accountant; others'")
    if len(visible) < len(panel):
        hidden = len(panel) - len(visible)
        axes.set_title(f"{panel['title'].iloc[0]} ({hidden} lower figures are not shown)", fontsize=10)


def _style(origin: str, unit: str, color: str, size: int | None = None) -> dict[str, Any]:
    """How a mark looks: hollow where its ε is for a microbatch, and larger where it is the field's."""
    return {
        "marker": _MARKERS.get((origin, unit), "s"),
        "color": color,
        "linestyle": "none",
        "markersize": size or (9 if origin == FIELD else 5),
        "markerfacecolor": "none" if unit == "microbatch" else color,
    }


def _finish(axes: Axes, panel: pd.DataFrame, unit: str, has_many_ticks: bool = True) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if has_many_ticks else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"ε for one {unit}: as claimed", fontsize=9)
    axes.set_ylabel(panel["axis"].iloc[0])
    axes.set_title(panel["title"].iloc[0], fontsize=10)
    axes.grid(alpha=0.3)
