"""The picture of how a step grows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.rows import Row
from dpbench.reports.figures import new_figure, write_figure

_PANELS = ("mnist_cnn lot", "small_alexnet lot", "small_alexnet width", "mlp width")
_MARKS = {"plain": "o", "ours": "s", "opacus": "^"}


def report(rows: list[Row], stem: Path) -> None:
    """Write STEM.png: time above, memory below, on logarithmic axes."""
    figure = new_figure(16, 8)
    methods = sorted({row["method"] for row in rows})
    for column, panel in enumerate(_PANELS):
        for line, (key, label) in enumerate((("wall_ms", "ms a step"), ("peak_mb", "memory of a step, MB"))):
            axes = figure.add_subplot(2, len(_PANELS), line * len(_PANELS) + column + 1)
            for method in methods:
                points = sorted(
                    (int(row["workload"].split()[-1]), row[key])
                    for row in rows
                    if row["method"] == method and row["workload"].startswith(panel) and row[key]
                )
                if points:
                    axes.plot(*zip(*points, strict=True), label=method, marker=_MARKS[method.split("/")[0]])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(panel)
            axes.set_xlabel("records in a lot" if panel.endswith("lot") else "channels or hidden units")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    write_figure(stem.with_suffix(".png"), figure)
