"""The picture of a run."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from dpbench.harness.reports.plots import plot_curves
from dpbench.harness.runs.folder import RunFolder


def test_curves(tmp_path: Path) -> None:
    """Private runs have a panel of epsilon beside the others."""
    run = RunFolder(tmp_path)
    assert plot_curves(run, "t") is None
    sizes = []
    for epsilon in ("", ",privacy/epsilon"):
        run.metrics.write_text(f"step,val/accuracy{epsilon}\n1,0.5,0.1\n2,,0.2\n3,0.6,\n")
        with Image.open(plot_curves(run, "t")) as picture:
            sizes.append(picture.width)
    assert sizes[0] < sizes[1]
