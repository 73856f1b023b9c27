"""The picture of the README: our best accuracy against ε beside the field's, and the time of a step beside Opacus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpbench.harness.reports.figures import new_figure, write_figure
from tools.results.overview import FEW, FIELD, METHODS, OURS, RDP

FRONT = "front.png"
BENCHMARK = Path("benchmark") / "cpu-amd-epyc-avx2-2-threads.json"
"""In the folder of the results: the times that the README prints."""

_DATA = ("mnist", "cifar10")
_MOST_EPSILON = 20.0  # above it an accuracy says nothing about private learning
_LEAST = 0.5  # of the best accuracy
_DECIMALS = 3  # of an ε
_LINE = ["whose", "method", "is_chosen"]
"""Results that agree in these are joined."""
_SMALL = 8.5
_SIZE = (8.4, 6.6)  # inches
_SHARES = (0.6, 0.4)  # of its height: accuracy, and time
_PAPER = "#ffffff"
_INK = "#24292f"
_GRID = "#d0d7de"
_FIELD = "#6e7781"
_BARS = ("#3060a8", "#8c959f", "#c8ced4")
_RING = 11
_STYLES = {(OURS, False): "-", (OURS, True): "--", (FIELD, False): ":"}
"""By whose a result is, and whether it was chosen on the data."""
_WORKLOADS = {
    "mnist_cnn b256": "MNIST CNN, batch 256",
    "mlp b256": "MLP 784-1000-10, batch 256",
    "small_alexnet b128": "small AlexNet, batch 128",
    "densenet40 b64": "DenseNet-40, batch 64",
}
_DEFAULT_MALLOC = " default malloc"
"""At the end of a method's name in the benchmark: without the settings of malloc that dpbench makes."""


def write_front(frame: pd.DataFrame, folder: Path) -> None:
    """Write front.png.

    Args:
        frame: See `tools.results.overview.points`.
        folder: Of the results; without a benchmark in it the picture shows accuracy alone.
    """
    frame = best(frame)
    if frame.empty:
        return
    path = folder / BENCHMARK
    times = step_times(path) if path.is_file() else pd.DataFrame()
    write_figure(folder / FRONT, _draw(frame, times))


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """Our results for images by example and the field's: of each method those that none with a smaller ε surpasses.

    A result whose settings were chosen on the same data set, which no ε covers, surpasses none without such a choice. A
    published figure is a method of its source. What reproduced papers print is left out: several of their ε are not
    those of the runs that they describe. So is what has less than half the accuracy of the best.
    """
    shown = frame[
        (frame["unit"] == "example") & frame["whose"].isin((OURS, FIELD)) & (frame["epsilon"] <= _MOST_EPSILON)
    ]
    method = shown["method"].where(shown["whose"] == OURS, shown["source"])
    shown = shown.assign(
        method=method,
        # Solved noise ends a little below its target: unrounded, the worst of a budget may come before the best.
        epsilon=shown["epsilon"].round(_DECIMALS),
        is_chosen=shown["is_chosen"] == True,  # noqa: E712  # absent of the field's
    )
    shown = shown.sort_values(["epsilon", "value"], ascending=[True, False], kind="stable")
    highest = shown.groupby(["data", *_LINE])["value"].cummax()
    highest_of_all = shown.groupby(["data", "whose", "method"])["value"].cummax()
    shown = shown[shown["value"] == highest.where(~shown["is_chosen"], highest_of_all)]
    shown = shown[shown["value"] > _LEAST * shown.groupby("data")["value"].transform("max")]
    return shown.drop_duplicates(["data", *_LINE, "value"])


def step_times(path: Path) -> pd.DataFrame:
    """Times of a private step relative to the fastest plain step.

    Args:
        path: A JSON file of `make bench`.

    Returns:
        A row for each network: dpbench with all that `dpbench train` does, the fastest mode of Opacus as it is
        installed, and the fastest with dpbench's settings of malloc.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    version = entries[0]["versions"]["opacus"]
    opacus_name = f"Opacus {version}"
    rows = {}
    for workload, title in _WORKLOADS.items():
        ratios = {entry["method"]: entry["ratio_to_limit"] for entry in entries if entry["workload"] == workload}
        opacus = {name: ratio for name, ratio in ratios.items() if name.startswith("opacus/")}
        rows[title] = {
            "dpbench, logging and accounting included": ratios["harness/flat"],
            opacus_name: min(ratio for name, ratio in opacus.items() if name.endswith(_DEFAULT_MALLOC)),
            f"{opacus_name} with dpbench's malloc settings": min(
                ratio for name, ratio in opacus.items() if not name.endswith(_DEFAULT_MALLOC)
            ),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _draw(frame: pd.DataFrame, times: pd.DataFrame) -> Figure:
    width, height = _SIZE
    panels = [panel for _, panel in frame.groupby("data", sort=False)]
    panels.sort(key=lambda panel: _DATA.index(panel["data"].iloc[0]))
    shares = _SHARES[:1] if times.empty else _SHARES
    figure = new_figure(width, height * sum(shares))
    figure.set_facecolor(_PAPER)
    accuracy, *speed = figure.subfigures(len(shares), 1, height_ratios=shares, squeeze=False)[:, 0]
    places = accuracy.subplots(1, len(panels), squeeze=False).flat
    for axes, panel in zip(places, panels, strict=True):
        _draw_accuracy(axes, panel)
        _name_sources(axes, panel)
        _color(axes)
    _add_legend(accuracy, _legend(frame))
    if speed:
        axes = speed[0].subplots()
        _draw_times(axes, times)
        _color(axes)
        _add_legend(speed[0], axes.get_legend_handles_labels()[0])
    return figure


def _add_legend(figure: FigureBase, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=_SMALL, frameon=False, labelcolor=_INK)


def _draw_accuracy(axes: Axes, panel: pd.DataFrame) -> None:
    for (whose, method, is_chosen), line in panel.groupby(_LINE, sort=False):
        is_ours = whose == OURS
        color = METHODS[str(method)][1] if is_ours else _FIELD
        axes.plot(
            line["epsilon"],
            line["value"],
            color=color,
            marker="o" if is_ours else "*",
            markersize=6 if is_ours else 10,
            linewidth=1.6 if is_ours else 0.9,
            linestyle=_STYLES[str(whose), bool(is_chosen)],
            zorder=3 if is_ours else 6,
        )
        few = line[line["n"] <= FEW]
        axes.plot(
            few["epsilon"],
            few["value"],
            color=color,
            marker="o",
            markersize=6,
            markerfacecolor=_PAPER,
            linestyle="none",
            zorder=4,
        )
        axes.errorbar(
            line["epsilon"],
            line["value"],
            yerr=line["half"].astype(float),
            fmt="none",
            ecolor=color,
            elinewidth=1.2,
            alpha=0.6,
        )
    chosen = panel[panel["is_chosen"]]
    axes.plot(
        chosen["epsilon"],
        chosen["value"],
        color=_INK,
        marker="o",
        markersize=_RING,
        markerfacecolor="none",
        markeredgewidth=0.9,
        linestyle="none",
        zorder=5,
    )
    _finish_accuracy(axes, panel)


def _name_sources(axes: Axes, panel: pd.DataFrame) -> None:
    """Write who published a star, and by what if not RDP, beside the one of each source that has a place for it."""
    for star in panel.dropna(subset="beside").to_dict("records"):
        by = "" if star["accountant"] == RDP else f" ({star['accountant']})"
        axes.annotate(
            f"{star['source']}{by}",
            (star["epsilon"], star["value"]),
            xytext=star["beside"],
            textcoords="offset points",
            ha="left" if star["beside"][0] > 0 else "right",
            fontsize=_SMALL,
            color=_INK,
            zorder=7,
        )


def _finish_accuracy(axes: Axes, panel: pd.DataFrame) -> None:
    lowest = float(panel["value"].min())
    highest = float(panel["value"].max())
    room = 0.09 * (highest - lowest)
    axes.set_ylim(lowest - room, highest + room)
    axes.set_xscale("log")
    axes.set_xlim(float(panel["epsilon"].min()) / 1.35, float(panel["epsilon"].max()) * 1.35)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"ε for one example, by RDP (δ ≤ {panel['delta'].max():g})")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(str(panel["title"].iloc[0]))
    axes.grid(visible=True)


def _draw_times(axes: Axes, times: pd.DataFrame) -> None:
    height = 0.8 / len(times.columns)
    for number, (name, column) in enumerate(times.items()):
        places = [row + (number - (len(times.columns) - 1) / 2) * height for row in range(len(times))]
        bars = axes.barh(
            places,
            column,
            height=0.9 * height,
            color=_BARS[number],
            label=str(name),
        )
        axes.bar_label(
            bars,
            fmt="%.2f",
            padding=3,
            fontsize=_SMALL,
            color=_INK,
        )
    axes.axvline(1.0, color=_INK, linewidth=1.0)
    axes.set_yticks(range(len(times)), [str(name) for name in times.index])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * float(times.max().max()))
    axes.set_xlabel("time of a private step ÷ plain PyTorch step")
    axes.grid(visible=True, axis="x")


def _legend(frame: pd.DataFrame) -> list[Line2D]:
    handles = []
    for method, (name, color) in METHODS.items():
        if ((frame["whose"] == OURS) & (frame["method"] == method)).any():
            handles.append(Line2D([], [], color=color, marker="o", label=f"dpbench: {name}"))
    marks: dict[str, dict[str, Any]] = {
        "published, no public data": {"color": _FIELD, "marker": "*", "markersize": 10, "linestyle": ":"},
        "one or two runs": {"color": _INK, "marker": "o", "markerfacecolor": _PAPER, "linestyle": "none"},
        "not tuned on this data": {"color": _INK, "linestyle": _STYLES[OURS, False]},
        "tuned or designed on this data: not in ε": {
            "color": _INK,
            "marker": "o",
            "markersize": _RING,
            "markerfacecolor": "none",
            "linestyle": _STYLES[OURS, True],
        },
    }
    for label, style in marks.items():
        handles.append(Line2D([], [], label=label, **style))
    return handles


def _color(axes: Axes) -> None:
    axes.set_facecolor(_PAPER)
    axes.tick_params(colors=_INK, which="both")
    for side, spine in axes.spines.items():
        spine.set_color(_GRID)
        spine.set_visible(side in ("left", "bottom"))
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(_INK)
