"""The log of metrics."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dpbench.errors import ConfigurationError
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV


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
    assert "epoch" not in table


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "No columns"),
        ("a,b\n", ""),
        ("step,a\n1,x\n", "could not convert"),
    ],
)
def test_a_file_without_steps_is_not_overwritten(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ConfigurationError, match=f"metrics.csv is damaged: move it away, .*{why}"):
        MetricsCSV(RunFolder(tmp_path)).check()
