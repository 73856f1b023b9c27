"""The log of metrics."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV, best_validation


def test_metrics_are_continued_and_merged_by_step(tmp_path: Path) -> None:
    first = MetricsCSV(RunFolder(tmp_path))
    first.log_metrics({"a": 1.0, "epoch": 0}, step=3)
    first.log_metrics({"b": 2.0}, step=3)
    first.save()
    second = MetricsCSV(RunFolder(tmp_path))
    second.log_metrics({"a": 5.0}, step=4)
    second.finalize("success")
    table = pd.read_csv(tmp_path / "metrics.csv", index_col="step")
    assert table.loc[3].to_dict() == {"a": 1.0, "b": 2.0}
    assert table.loc[4, "a"] == 5.0


def test_best_validation(tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("step,val/accuracy,val/mse,val/real_rate,test/accuracy\n1,0.5,2,1,1\n2,0.9,3,1,1\n3,0.8,,1,1\n")
    assert best_validation(log) == {"val/accuracy": 0.9, "val/mse": 2.0}
    assert best_validation(tmp_path / "none.csv") == {}
