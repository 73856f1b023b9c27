"""Accuracy against epsilon for each data set, ours beside the papers': `results/overview.csv` and pictures of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpbench.files import write_atomically
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce._summary import summary
from dpbench.reproduce.tables import MEASURES, Table, Variant, group_choice, read_table

OVERVIEW = "overview"
OURS = "ours"
PAPER = "paper"
FIELD = "field"
WHOSE = {OURS: "ours", PAPER: "published", FIELD: "others"}  # as legends say
OWN = "recipes/"
"""Of tables that reproduce no paper: what stands beside our figures there is the field's."""
ACCOUNTANT = "epsilon_rdp"

_NOISE = ("random_noise", "user_noise")  # of whose test data nothing can be learned
FEW = 2  # runs, which say nothing about their spread
_LONG = 2.5  # decades: too many for ticks at 2 and 5
_LONG_NARROW = 1.6  # the same of a panel that shares its row
_MANY = 20  # points, which need the whole width
_ACROSS = 3  # panels with fewer, side by side
_MEANINGLESS = 100.0  # an ε above which there is no protection to speak of
_LONG_GAP = 1.2  # ratio of two ε of one experiment that is worth a line
_GRAY = "#888888"
_BLACK = "#333333"
_TITLES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "digits": "digits",
    "mnist_writers": "MNIST by writer",
    "stackexchange_tags": "tags of beer.stackexchange, by user",
}
_COLUMNS = [
    "data",
    "title",
    "unit",
    "metric",
    "axis",
    "table",
    "name",
    "source",
    "whose",
    "row",
    "column",
    "label",
    "epsilon",
    "delta",
    "accountant",
    "value",
    "half",
    "n",
]
_ONLY_DRAWN = ["method", "is_chosen"]
"""Columns that pictures show and overview.csv does not have."""
_MARKERS = {
    (OURS, "example"): "o",
    (OURS, "user"): "o",
    (PAPER, "example"): "x",
    (PAPER, "microbatch"): "D",
    (FIELD, "example"): "*",
}
METHODS = {
    "dpsgd": ("DP-SGD", "#3060a8"),
    "discretized": ("discretized gradients", "#e08020"),
    "adaptive_mean": ("adaptive mean clipping", "#508850"),
    "adaptive_quantile": ("adaptive quantile clipping", "#c04030"),
}
"""Strategy → its name and color, the same for ours and for what papers print of it."""
_OTHER_METHOD = ("other methods", "#8060a0")
_PLAIN_MARK: dict[str, Any] = {"color": _BLACK, "linestyle": "none", "markersize": 5}
_MARKS: dict[str, dict[str, Any]] = {
    "ours; 95 % intervals of three runs or more": {"marker": "o"},
    "ours, one or two runs": {"marker": "o", "markerfacecolor": "white"},
    "settings or design chosen on this data set: no ε covers that": {
        "marker": "o",
        "markersize": 10,
        "markerfacecolor": "none",
    },
    "printed in papers": {"marker": "x"},
    "printed, ε for a microbatch": {"marker": "D", "markerfacecolor": "none"},
    "printed and ours: one experiment": {"color": _GRAY, "linestyle": ":"},
    "others', no extra data": {"marker": "*", "markersize": 9, "color": _GRAY},
}
"""What legends say → how it is drawn."""


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
    frame = pd.DataFrame(lines + _field(), columns=[*_COLUMNS, *_ONLY_DRAWN])
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
            "half": cell["half"] if cell["n"] > FEW else None,
            "n": cell["n"],
        }
        entries.append(entry)
    return entries


def _papers(table: Table) -> list[dict[str, Any]]:
    """What is printed with an epsilon, in the unit that the paper accounts for."""
    if not table.metric.startswith("test/") or table.name.startswith(OWN):
        return []
    entries = []
    for row, column in table.cells:
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
    for published in yaml.safe_load((Path(__file__).parents[2] / "results" / "field.yaml").read_text(encoding="utf-8")):
        entry = {
            "title": _TITLES[published["data"]],
            "unit": "example",
            "metric": "test/accuracy",
            "axis": MEASURES["test/accuracy"].label,
            "table": "",
            "name": "see results/field.yaml",
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
    data = group_choice("data", table, row, column) or "digits"
    method = group_choice("strategy", table, row, column) or "dpsgd"
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
        "label": table.label_of(row, column),
        "method": method,
        "is_chosen": _is_chosen_here(table, row, column, data),
    }


def _is_chosen_here(table: Table, row: Variant, column: Variant, data: str) -> bool:
    """Whether a cell's settings were chosen on the data set that it is trained on."""
    if not table.chosen_from:
        return table.name.startswith(OWN)
    tuning = read_table(table.chosen_from)
    chosen_on = group_choice("data", tuning, *tuning.cells[0]) or "digits"
    return table.chooses(row, column) and chosen_on == data


def write_overview(frame: pd.DataFrame, folder: Path) -> None:
    """Write overview.csv, .png and .pdf (a panel for each data set and metric, a color for each method).

    Args:
        frame: See `points`.
        folder: Of the results.
    """
    if frame.empty:
        return
    text = frame.to_csv(columns=_COLUMNS, index=False, float_format="%.6g")
    write_atomically(folder / f"{OVERVIEW}.csv", text)
    figure = _draw_all(frame)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"{OVERVIEW}.{suffix}", figure)


def _draw_all(frame: pd.DataFrame) -> Figure:
    """Every panel: those of many points one below the other, then those of few side by side."""
    panels = [panel for _, panel in frame.groupby(["data", "metric"], sort=False)]
    wide = [panel for panel in panels if len(panel) > _MANY]
    narrow = [panel for panel in panels if len(panel) <= _MANY]
    rows = len(wide) + math.ceil(len(narrow) / _ACROSS)
    figure = new_figure(11.0, 0.8 + 4.0 * rows)
    grid = figure.add_gridspec(rows, _ACROSS)
    for place, panel in enumerate(wide):
        _draw_panel(figure.add_subplot(grid[place, :]), panel)
    for place, panel in enumerate(narrow):
        row, column = divmod(place, _ACROSS)
        _draw_panel(figure.add_subplot(grid[len(wide) + row, column]), panel, is_narrow=True)
    _add_legend(figure, frame)
    return figure


def _draw_panel(axes: Axes, panel: pd.DataFrame, is_narrow: bool = False) -> None:
    """Draw the figures of a data set and metric.

    Args:
        axes: Where.
        panel: See `points`.
        is_narrow: Whether it has a third of the width.
    """
    lowest = float(panel["value"].min())
    highest = float(panel["value"].max())
    spread = highest - lowest
    room = 0.06 * spread
    _join_cells(axes, panel)
    for (origin, unit, method), part in panel.groupby(["whose", "unit", "method"], dropna=False, sort=False):
        style = _style(str(origin), str(unit), str(method))
        is_few = part["n"] <= FEW
        axes.plot(part["epsilon"][~is_few], part["value"][~is_few], **style)
        # Hollow: one or two runs say nothing about their spread.
        axes.plot(part["epsilon"][is_few], part["value"][is_few], **style | {"markerfacecolor": "white"})
        half = part["half"].astype(float)
        # An interval as high as the picture is of three runs of which one failed.
        half = half.where(half < spread)
        axes.errorbar(
            part["epsilon"],
            part["value"],
            yerr=half,
            fmt="none",
            ecolor=style["color"],
            elinewidth=1,
            alpha=0.5,
        )
    chosen = panel[(panel["whose"] == OURS) & panel["is_chosen"].astype(bool)]
    axes.scatter(
        chosen["epsilon"],
        chosen["value"],
        s=90,
        facecolors="none",
        edgecolors=_BLACK,
        linewidths=0.9,
        zorder=4,
    )
    _name_sources(axes, panel, panel[panel["whose"] == FIELD])
    axes.set_ylim(lowest - room, highest + room)
    _finish(axes, panel, is_narrow)


def _join_cells(axes: Axes, visible: pd.DataFrame) -> None:
    """Join what a paper prints with our runs of the same cell, whose true ε may be another one."""
    for _, cell in visible[visible["table"] != ""].groupby(["table", "row", "column"]):
        is_long = cell["epsilon"].max() > _LONG_GAP * cell["epsilon"].min()
        if is_long and set(cell["whose"]) == {OURS, PAPER}:
            axes.plot(
                cell["epsilon"],
                cell["value"],
                color=_GRAY,
                linestyle=":",
                linewidth=0.9,
                zorder=1,
            )


def _name_sources(axes: Axes, panel: pd.DataFrame, field: pd.DataFrame) -> None:
    """Write who published a star beside the best star of each: of the highest above it, of others below."""
    best = field.sort_values("value", ascending=False).drop_duplicates("source")
    best = best.assign(place=best["epsilon"].round())
    middle = math.sqrt(panel["epsilon"].min() * panel["epsilon"].max())
    stars: Any = best.assign(rank=best.groupby("place").cumcount())
    for star in stars.itertuples():
        is_right = star.epsilon > middle
        axes.annotate(
            star.source,
            (star.epsilon, star.value),
            xytext=(-6 if is_right else 6, 4 if star.rank == 0 else -9),
            textcoords="offset points",
            ha="right" if is_right else "left",
            fontsize=6.5,
            color=_BLACK,
        )


def _style(origin: str, unit: str, method: str) -> dict[str, Any]:
    """How a mark looks: its color is the method, its shape says whose figure it is."""
    _, color = METHODS.get(method, _OTHER_METHOD)
    if origin == FIELD:
        color = _GRAY
    return {
        "marker": _MARKERS.get((origin, unit), "s"),
        "color": color,
        "linestyle": "none",
        "markersize": 9 if origin == FIELD else 5,
        # Hollow, because its ε is for another unit than that of the marks beside it.
        "markerfacecolor": "none" if unit == "microbatch" else color,
        "zorder": 2 if origin == FIELD else 3,
    }


def _add_legend(figure: Figure, frame: pd.DataFrame) -> None:
    """What colors and marks mean, below the panels and over none of them."""
    handles = []
    for method, (name, color) in METHODS.items():
        if (frame["method"] == method).any():
            handles.append(
                Line2D(
                    [],
                    [],
                    color=color,
                    linewidth=5,
                    label=name,
                )
            )
    if not frame["method"].dropna().isin(METHODS).all():
        name, color = _OTHER_METHOD
        handles.append(
            Line2D(
                [],
                [],
                color=color,
                linewidth=5,
                label=name,
            )
        )
    for label, style in _MARKS.items():
        handles.append(
            Line2D(
                [],
                [],
                label=label,
                **_PLAIN_MARK | style,
            )
        )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )


def _finish(axes: Axes, panel: pd.DataFrame, is_narrow: bool) -> None:
    least = float(panel["epsilon"].min())
    most = float(panel["epsilon"].max())
    has_many_ticks = math.log10(most / least) < (_LONG_NARROW if is_narrow else _LONG)
    axes.set_xscale("log")
    if most > _MEANINGLESS:
        axes.set_xlim(least / 1.3, most * 1.3)
        axes.axvspan(
            max(_MEANINGLESS, least / 1.3),
            most * 1.3,
            color=_GRAY,
            alpha=0.12,
            linewidth=0,
            zorder=0,
        )
        axes.text(
            0.99,
            0.02,
            f"ε > {_MEANINGLESS:g} protects nobody",
            transform=axes.transAxes,
            ha="right",
            fontsize=7,
            color=_BLACK,
        )
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if has_many_ticks else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    units = " or ".join(sorted(set(panel.loc[panel["whose"] == OURS, "unit"])))
    axes.set_xlabel(f"ε for one {units}; ours by RDP, printed as claimed", fontsize=9)
    axes.set_ylabel(panel["axis"].iloc[0])
    axes.set_title(str(panel["title"].iloc[0]).replace("_", " "), fontsize=10)
    axes.grid(alpha=0.3)
