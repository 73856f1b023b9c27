"""`python -m tools.attack_figure`: attacked, audited, claimed ε in one picture, from attack.json and audits.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.reports.figures import new_figure, write_figure
from tools.attack_runs import AUDITS, EPSILONS, RESULTS

PICTURE = RESULTS / "epsilon.png"
_STRATEGIES = {"dpsgd": "DP-SGD", "automatic": "automatic clipping", "discretized": "discretized gradients"}
_CLAIMED = "#c04030"
_AUDITED = "#3060a8"
_ATTACKED = "#508850"


def write_picture() -> Path:
    """Draw what the committed files of results/attack say."""
    settings: list[dict[str, Any]] = json.loads((RESULTS / "attack.json").read_text(encoding="utf-8"))
    audits: dict[str, Any] = json.loads(AUDITS.read_text(encoding="utf-8"))
    # Settings are named by the folders of their runs, attacks/dpsgd-1/0-mnist-...
    attacked = {Path(setting["runs"][0]).parent.name: setting["audited"] for setting in settings}
    return write_figure(PICTURE, epsilon_figure(audits, attacked))


def epsilon_figure(audits: dict[str, Any], attacked: dict[str, float]) -> Figure:
    """A panel for each strategy at several budgets.

    Args:
        audits: By setting ("dpsgd-1"): what an audit says, of a run with canaries.
        attacked: By setting, the lower bound of ε from the membership attack.
    """
    figure = new_figure(9, 3.4)
    panels = figure.subplots(1, len(_STRATEGIES), sharex=True, sharey=True)
    for axes, (strategy, title) in zip(panels, _STRATEGIES.items(), strict=True):
        names = [f"{strategy}-{epsilon}" for epsilon in EPSILONS]
        _draw(axes, [audits[name] for name in names], [attacked[name] for name in names])
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("ε")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, audits: list[dict[str, Any]], attacked: list[float]) -> None:
    places = range(len(EPSILONS))
    axes.plot(places, [audit["sound"] for audit in audits], "_", color=_CLAIMED, markersize=26, markeredgewidth=2)
    axes.plot([], [], color=_CLAIMED, linewidth=2, label="claimed: upper bound, PLD")
    axes.plot(places, [audit["audited"] for audit in audits], "^", color=_AUDITED, label="audited: canaries, 95 %")
    axes.plot(places, attacked, "o", color=_ATTACKED, label="attacked: membership of real images, 95 %")
    axes.set_xticks(places, [str(epsilon) for epsilon in EPSILONS])
    axes.set_xlabel("target ε (RDP)")
    axes.set_xlim(-0.5, len(EPSILONS) - 0.5)
    axes.set_ylim(-0.4, 8.4)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    write_picture()
