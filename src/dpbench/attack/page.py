"""What an attack says: a table for the terminal, a page, pictures, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpbench import __version__
from dpbench.attack.attack import AttackedSetting
from dpbench.data.images import ImageDataModule
from dpbench.files import write_atomically, write_json
from dpbench.reports.attacked import (
    FILE,
    HIGH,
    LOW,
    AttackSummary,
    attack_rows,
    overview_rows,
    roc_panels,
    share,
    size_of_game,
    text_of,
)
from dpbench.reports.figures import new_figure, page_picture, write_figure
from dpbench.reports.roc import page_legend, page_pictures, roc_figure
from dpbench.templates import render

_BLUE = "#3060a8"
_RED = "#c04030"
_GRAY = "#808080"
_MARK = 8  # points: no higher than the names that stand above
_IN_A_LINE = 8  # images


@dataclass(frozen=True)
class Pages:
    """Where an attack was written.

    Attributes:
        page: HTML, which needs nothing beside itself.
        picture: What is attacked and allowed; of one setting its curves.
        exposed: The most exposed images; not there for other data.
        table: Markdown.
        facts: JSON.
    """

    page: Path
    picture: Path
    exposed: Path
    table: Path
    facts: Path


def write_pages(folder: Path, settings: Sequence[AttackedSetting]) -> Pages:
    """Write page, picture and facts of an attack into the folder of its sweep.

    Args:
        folder: Of the sweep.
        settings: That were attacked.
    """
    pages = Pages(
        page=folder / "attack.html",
        picture=folder / "attack.png",
        exposed=folder / "exposed.png",
        table=folder / "attack.md",
        facts=folder / FILE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    summaries = [setting.summary for setting in settings]
    panels = roc_panels(summaries)
    write_json(pages.facts, [summary.to_dict() for summary in summaries])
    write_atomically(pages.table, f"{text_of(summaries)}\n")
    pictures = []
    if len(settings) == 1:
        write_figure(pages.picture, roc_figure(panels))
    else:
        # A page has room for curves and rates, a single picture for one of them: of several settings the rates.
        comparison = comparison_figure(summaries)
        write_figure(pages.picture, comparison)
        pictures.append(page_picture("Attacked and allowed", comparison, "rates"))
    exposed = exposed_figure(max(settings, key=lambda setting: setting.summary.strongest.auc.value))
    exposed_pictures = []
    if exposed is not None:
        write_figure(pages.exposed, exposed)
        exposed_pictures.append(page_picture("Most exposed", exposed, "exposed"))
    text = render(
        "attack.html",
        version=__version__,
        title=f"Membership inference: {folder.name}",
        subtitle=size_of_game(summaries),
        summaries=summaries,
        overview=overview_rows(summaries),
        rows=attack_rows(summaries),
        curves=page_pictures(panels, "curves"),
        curves_legend=page_legend(panels),
        pictures=pictures,
        exposed_pictures=exposed_pictures,
        unit=summaries[0].unit,
    )
    write_atomically(pages.page, text)
    return pages


def comparison_figure(summaries: Sequence[AttackSummary]) -> Figure:
    """For each setting what the strongest attack reaches at a false positive rate of 1 %, and what ε allows."""
    figure = new_figure(5.5, 1.2 + 0.42 * len(summaries))
    axes = figure.subplots()
    for place, summary in enumerate(summaries):
        estimate = summary.strongest.tpr[HIGH]
        axes.plot([estimate.low, estimate.high], [place, place], color=_BLUE, linewidth=1)
        axes.plot(estimate.value, place, "o", color=_BLUE)
        if summary.allowed is not None:
            axes.plot(summary.allowed.tpr[HIGH], place, "|", color=_RED, markersize=_MARK, markeredgewidth=2)
        # Above its line, not beside it: names of settings are long, and columns of a page as narrow as a phone.
        axes.annotate(summary.title, (LOW, place), xytext=(3, _MARK), textcoords="offset points", fontsize=8)
    axes.plot([], [], "o", color=_BLUE, label="strongest attack, 95 %")
    axes.plot([], [], "|", color=_RED, markersize=_MARK, markeredgewidth=2, label="allowed by the ledger")
    axes.axvline(HIGH, color=_GRAY, linestyle=":", linewidth=0.9, label="guessing")
    axes.set_yticks([])
    axes.set_xscale("log")
    axes.set_xlim(LOW, 1.1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
    axes.set_ylim(len(summaries) - 0.6, -0.9)  # the first setting at the top
    axes.set_xlabel(f"members recognized at a false positive rate of {share(HIGH)}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def exposed_figure(setting: AttackedSetting) -> Figure | None:
    """The images that are most exposed, with their labels; None where records are no images.

    Args:
        setting: Whose attack exposes them.
    """
    data = setting.candidates.data
    if not isinstance(data, ImageDataModule) or data.features is not None:
        return None
    images = data.train_set
    records = setting.summary.worst_records
    lines = -(-len(records) // _IN_A_LINE)
    figure = new_figure(1.1 * _IN_A_LINE, 1.3 * lines)
    panels = np.ravel(figure.subplots(lines, _IN_A_LINE, squeeze=False))
    for axes in panels:
        axes.set_axis_off()
    for axes, exposed in zip(panels, records, strict=False):
        pixels = images.pixels[exposed.record].numpy()
        pixels = (pixels - pixels.min()) / max(pixels.max() - pixels.min(), 1e-9)
        axes.imshow(pixels.squeeze(), cmap="gray")
        axes.set_title(f"{int(images.labels[exposed.record])} ({exposed.score:.1f})", fontsize=8)
    return figure
