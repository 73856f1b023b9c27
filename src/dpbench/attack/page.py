"""What an attack says: a page, a picture, a table, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dpbench import __version__
from dpbench.attack.attack import AttackedSetting
from dpbench.data.images import ImageDataModule
from dpbench.files import write_atomically, write_json
from dpbench.reports.attacked import FILE, attack_rows, roc_panels, size_of_game, text_of
from dpbench.reports.figures import Picture, new_panels, svg, write_figure
from dpbench.reports.roc import roc_figure
from dpbench.templates import render

_IN_A_LINE = 8  # images


@dataclass(frozen=True)
class Pages:
    """Where an attack was written.

    Attributes:
        page: HTML, which needs nothing beside itself.
        picture: ROC curves of the attacks, with what is allowed.
        table: Markdown.
        facts: JSON.
    """

    page: Path
    picture: Path
    table: Path
    facts: Path


def write_pages(folder: Path, settings: Sequence[AttackedSetting]) -> Pages:
    """Write page, picture and facts of an attack into the folder of its sweep.

    Args:
        folder: Folder of the sweep.
        settings: The settings that were attacked.
    """
    pages = Pages(folder / "attack.html", folder / "attack.png", folder / "attack.md", folder / FILE)
    folder.mkdir(parents=True, exist_ok=True)
    summaries = [setting.summary for setting in settings]
    curves = roc_figure(roc_panels(summaries))
    write_json(pages.facts, [summary.to_dict() for summary in summaries])
    write_atomically(pages.table, f"{text_of(summaries)}\n")
    write_figure(pages.picture, curves)
    exposed = exposed_figure(max(settings, key=lambda setting: setting.summary.strongest.auc.value))
    text = render(
        "attack.html",
        version=__version__,
        title=f"Membership inference: {folder.name}",
        subtitle=size_of_game(summaries),
        summaries=summaries,
        rows=attack_rows(summaries),
        curves=Picture("Attacked and allowed", svg(curves, "curves")),
        exposed=None if exposed is None else Picture("Most exposed", svg(exposed, "exposed")),
        unit=summaries[0].unit,
    )
    write_atomically(pages.page, text)
    return pages


def exposed_figure(setting: AttackedSetting) -> Figure | None:
    """Draw the images that are most exposed, with their labels; None where records are no images.

    Args:
        setting: The setting whose attack exposes them.
    """
    data = setting.candidates.data
    records = setting.summary.worst_records
    if not isinstance(data, ImageDataModule) or data.features is not None or not records:
        return None
    figure, panels = new_panels(len(records), _IN_A_LINE, 1.1, 1.3)
    for axes, exposed in zip(panels, records, strict=True):
        axes.set_axis_off()
        image = data.train_set.pixels[exposed.record].numpy().squeeze()
        axes.imshow((image - image.min()) / max(np.ptp(image), 1e-9), cmap="gray")
        axes.set_title(f"{int(data.train_set.labels[exposed.record])} ({exposed.score:.1f})", fontsize=8)
    return figure
