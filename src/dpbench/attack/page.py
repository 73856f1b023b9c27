"""What an attack says: a table for the terminal, a page, pictures, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpbench import __version__
from dpbench.attack.attack import LEVEL, AttackedSetting, ScoredAttack, plain_facts
from dpbench.auditing import Verdict
from dpbench.auditing.membership import FALSE_POSITIVE_RATES, Estimate
from dpbench.data.images import ImageDataModule
from dpbench.files import write_atomically, write_json
from dpbench.reports.figures import PAGE_COLORS, new_figure, svg, write_figure
from dpbench.reports.markdown import markdown_rows
from dpbench.runs.numbers import ABSENT, epsilon_text, limit_text
from dpbench.templates import render

_BLUE = "#3060a8"
_RED = "#c04030"
_GRAY = "#808080"
_COLORS = (_BLUE, "#508850", "#a070b0", "#c09020")
_MOST_PANELS = 8
_LEAST_RATE = 1e-4  # on the axes of curves
_POINTS = 300
_IN_A_LINE = 8  # images
_HIGH, _LOW = FALSE_POSITIVE_RATES[1], FALSE_POSITIVE_RATES[0]


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


def write_pages(folder: Path, settings: Sequence[AttackedSetting], runs: int) -> Pages:
    """Write page, picture and facts of an attack into the folder of its sweep.

    Args:
        folder: Of the sweep.
        settings: That were attacked.
        runs: Their number of runs, all together.
    """
    pages = Pages(
        page=folder / "attack.html",
        picture=folder / "attack.png",
        exposed=folder / "exposed.png",
        table=folder / "attack.md",
        facts=folder / "attack.json",
    )
    folder.mkdir(parents=True, exist_ok=True)
    exposed = exposed_figure(max(settings, key=lambda setting: setting.strongest.result.auc.value))
    write_figure(pages.picture, comparison_figure(settings) if len(settings) > 1 else curves_figure(settings))
    write_json(pages.facts, plain_facts(settings))
    write_atomically(pages.table, f"{text_of(settings, runs)}\n")
    curves = svg(curves_figure(settings), "curves", PAGE_COLORS)
    drawings = [("Members recognized, against others called members", curves)]
    if len(settings) > 1:
        drawings.append(("Attacked and allowed", svg(comparison_figure(settings), "rates", PAGE_COLORS)))
    if exposed is not None:
        write_figure(pages.exposed, exposed)
        drawings.append(("Most exposed", svg(exposed, "exposed", PAGE_COLORS)))
    text = render(
        "attack.html",
        version=__version__,
        title=f"Membership inference: {folder.name}",
        subtitle=subtitle_of(settings, runs),
        settings=settings,
        summaries=[summary_of(setting) for setting in settings],
        overview=overview_rows(settings),
        rows=table_rows(settings),
        drawings=drawings,
        worst=[(setting.label, setting.worst_records()) for setting in settings],
        unit=settings[0].unit,
        violated=Verdict.VIOLATED,
    )
    write_atomically(pages.page, text)
    return pages


def subtitle_of(settings: Sequence[AttackedSetting], runs: int) -> str:
    """Size of the game in one line."""
    setting = settings[0]
    return (
        f"{runs} runs, {setting.members.shape[1]:,} candidate {setting.unit}s, each a member of each run with "
        "probability 1/2"
    )


def text_of(settings: Sequence[AttackedSetting], runs: int) -> str:
    """Table and verdicts for the terminal, and for attack.md."""
    if len(settings) == 1:
        table = markdown_rows(table_rows(settings), 3)
        return f"{subtitle_of(settings, runs)}\n\n{table}\n\n{summary_of(settings[0])}"
    return f"{subtitle_of(settings, runs)}\n\n{markdown_rows(overview_rows(settings))}"


def overview_rows(settings: Sequence[AttackedSetting]) -> list[list[str]]:
    """A row for each setting: its strongest attack, what the ledger allows, and the verdict; the headings first."""
    rate = f"TPR at FPR {_share(_HIGH)}"
    rows = [
        ["setting", "runs", "ε", "test accuracy", "strongest attack", "AUC", rate, "allowed", "audited ε", "verdict"]
    ]
    for setting in settings:
        strongest = setting.strongest
        result = strongest.result
        test = setting.test
        rows.append(
            [
                setting.label or "all runs",
                str(len(setting.rows)),
                "∞" if test is None else _claim(setting),
                _share(setting.accuracy),
                f"{strongest.name} on {_word(strongest)}",
                _estimate_text(result.auc),
                _estimate_text(result.tpr[_HIGH], percent=True),
                ABSENT if test is None else f"≤ {_share(setting.allowed_tpr(_HIGH))}",
                ABSENT if test is None else f"{test.audited:.2f}",
                ABSENT if setting.verdict is None else str(setting.verdict),
            ]
        )
    return rows


def table_rows(settings: Sequence[AttackedSetting]) -> list[list[str]]:
    """A row for each attack, and one for what the ledger allows; the headings first."""
    headings = ["setting", "signal", "attack", "AUC"]
    headings += [f"TPR at FPR {_share(fpr)}" for fpr in FALSE_POSITIVE_RATES]
    rows = [[*headings, "advantage"]]
    for setting in settings:
        name = setting.label or "all runs"
        for attack in setting.attacks:
            result = attack.result
            rates = [_estimate_text(result.tpr[fpr], percent=True) for fpr in FALSE_POSITIVE_RATES]
            rows.append(
                [
                    name,
                    attack.signal,
                    attack.name,
                    _estimate_text(result.auc),
                    *rates,
                    _estimate_text(result.advantage),
                ]
            )
        if setting.allowed is not None:
            allowed = [_share(setting.allowed_tpr(fpr)) for fpr in FALSE_POSITIVE_RATES]
            area = f"≤ {1 - setting.allowed.area:.3f}"
            advantage = f"≤ {setting.allowed_advantage:.3f}"
            claim = f"ε = {_claim(setting)}"
            rows.append([name, claim, "allowed at most", area, *(f"≤ {rate}" for rate in allowed), advantage])
    return rows


def summary_of(setting: AttackedSetting) -> str:
    """One sentence on the strongest attack, and one on the claim."""
    opening = f"{setting.label}: the" if setting.label else "The"
    strongest = setting.strongest
    rate = strongest.result.tpr[_HIGH].value
    text = (
        f"{opening} attack of the largest AUC ({strongest.name} on {_word(strongest)}) recognizes {_share(rate)} of "
        f"the members at a false positive rate of {_share(_HIGH)}"
    )
    test = setting.test
    if test is None:
        return f"{text}; without privacy nothing limits it."
    limit = f"; ε = {_claim(setting)} allows {_share(setting.allowed_tpr(_HIGH))}"
    audited = f"audited ε {limit_text(test.audited)}" if test.audited > 0 else "no audited ε above 0"
    verdict = str(setting.verdict)
    if setting.verdict == Verdict.VIOLATED:
        verdict = f"{verdict}: the attack is above what the ledger allows"
    return f"{text}{limit}. {verdict} ({audited}, at level {LEVEL:g})."


def curves_figure(settings: Sequence[AttackedSetting]) -> Figure:
    """ROC curves of each setting on logarithmic axes, under what its ledger allows.

    Args:
        settings: The first eight are drawn.
    """
    shown = settings[:_MOST_PANELS]
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = new_figure(max(3.6 * columns, 6), 3.5 * lines + 0.5)
    panels = np.ravel(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True))
    for axes, setting in zip(panels, shown, strict=False):
        _draw_curves(axes, setting)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in panels[: len(shown)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    style: dict[str, Any] = {"loc": "outside lower center", "ncols": 2 * columns, "frameon": False, "fontsize": 8}
    figure.legend(list(handles.values()), list(handles), **style)
    return figure


def _draw_curves(axes: Axes, setting: AttackedSetting) -> None:
    rates = np.geomspace(_LEAST_RATE, 1, _POINTS)
    for color, signal in zip(_COLORS, dict.fromkeys(attack.signal for attack in setting.attacks), strict=False):
        attacks = [attack for attack in setting.attacks if attack.signal == signal]
        best = max(attacks, key=lambda attack: attack.result.auc.value)
        for attack in attacks:
            heights = [attack.curve.true_positive_rate_at(rate) for rate in rates]
            is_best = attack is best
            axes.plot(
                rates,
                np.maximum(heights, _LEAST_RATE),
                color=color,
                linewidth=1.6 if is_best else 0.7,
                alpha=1 if is_best else 0.5,
                label=f"strongest by {_word(attack)}" if is_best else f"others by {_word(attack)}",
            )
    if setting.allowed is not None:
        axes.plot(rates, setting.allowed.max_true_positive_rate(rates), color=_RED, label="allowed by the ledger")
    axes.plot(rates, rates, color=_GRAY, linestyle=":", linewidth=0.9, label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(_LEAST_RATE, 1), ylim=(_LEAST_RATE, 1.05))
    axes.set_xlabel("others called members (FPR)")
    axes.set_ylabel("members called members (TPR)")
    axes.set_title(_title(setting), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def comparison_figure(settings: Sequence[AttackedSetting]) -> Figure:
    """For each setting what the strongest attack reaches at a false positive rate of 1 %, and what ε allows."""
    figure = new_figure(7, 1.3 + 0.32 * len(settings))
    axes = figure.subplots()
    places = np.arange(len(settings))[::-1]
    for place, setting in zip(places, settings, strict=True):
        estimate = setting.strongest.result.tpr[_HIGH]
        axes.plot([estimate.low, estimate.high], [place, place], color=_BLUE, linewidth=1)
        axes.plot(
            estimate.value, place, "o", color=_BLUE, label="strongest attack, 95 %" if place == places[0] else None
        )
        allowed = setting.allowed_tpr(_HIGH)
        if allowed is not None:
            axes.plot(allowed, place, "|", color=_RED, markersize=14, markeredgewidth=2)
    axes.plot([], [], "|", color=_RED, markersize=12, markeredgewidth=2, label="allowed by the ledger")
    axes.axvline(_HIGH, color=_GRAY, linestyle=":", linewidth=0.9, label="guessing")
    axes.set_yticks(places, [_title(setting) for setting in settings], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(_LOW, 1.1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.set_ylim(-0.6, len(settings) - 0.4)
    axes.set_xlabel(f"members recognized at a false positive rate of {_share(_HIGH)}")
    axes.spines[["top", "right"]].set_visible(False)
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
    records = setting.worst_records()
    lines = -(-len(records) // _IN_A_LINE)
    figure = new_figure(1.1 * _IN_A_LINE, 1.3 * lines)
    panels = np.ravel(figure.subplots(lines, _IN_A_LINE, squeeze=False))
    for axes in panels:
        axes.set_axis_off()
    for axes, (record, score) in zip(panels, records, strict=False):
        pixels = images.pixels[record].numpy()
        pixels = (pixels - pixels.min()) / max(pixels.max() - pixels.min(), 1e-9)
        axes.imshow(pixels.squeeze(), cmap="gray")
        axes.set_title(f"{int(images.labels[record])} ({score:.1f})", fontsize=8)
    return figure


def _title(setting: AttackedSetting) -> str:
    if setting.test is None:
        return setting.label or "without privacy"
    claim = f"ε = {_claim(setting)}"
    return f"{setting.label}: {claim}" if setting.label else claim


def _claim(setting: AttackedSetting) -> str:
    """ε by PLD, else by RDP, and by which."""
    accountant = "pld" if setting.epsilon("pld") is not None else "rdp"
    return f"{epsilon_text(setting.epsilon(accountant))} ({accountant.upper()})"


def _word(attack: ScoredAttack) -> str:
    return attack.signal.replace("_", " ")


def _share(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.3g} %"


def _estimate_text(estimate: Estimate, percent: bool = False) -> str:
    if percent:
        return f"{100 * estimate.value:.2f} % ({100 * estimate.low:.2f} to {100 * estimate.high:.2f})"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
