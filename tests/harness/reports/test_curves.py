"""The picture of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dpbench.harness.reports.plots import plot_curves
from dpbench.harness.runs.folder import RunFolder


def test_curves(tmp_path: Path) -> None:
    assert plot_curves(RunFolder(tmp_path), "t") is None
    pd.DataFrame({"step": [1, 2], "test/accuracy": [0.5, 0.6]}).to_csv(tmp_path / "metrics.csv", index=False)
    short = plot_curves(RunFolder(tmp_path), "without privacy")
    assert short is not None
    size = short.stat().st_size
    table = pd.DataFrame({"step": [1, 2, 3], "val/accuracy": [0.5, None, 0.6], "privacy/epsilon": [0.1, 0.2, None]})
    table.to_csv(tmp_path / "metrics.csv", index=False)
    tall = plot_curves(RunFolder(tmp_path), "private")
    assert tall is not None
    assert tall.stat().st_size != size
