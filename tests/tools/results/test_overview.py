"""The overview: private results on test data, and what papers claim, each in its unit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dpbench.harness.reproduce._results import RUNS
from dpbench.harness.reproduce.tables import read_table, table_names
from tools.results.front import BENCHMARK, best, step_times
from tools.results.overview import FIELD, OURS, points, write_overview

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    every = [read_table(name) for name in table_names()]
    shown = [table for table in every if (RESULTS / table.folder / RUNS).is_file()]
    held = {table.name: (table, pd.read_csv(RESULTS / table.folder / RUNS)) for table in shown}
    return points(held, every)


def test_committed_overview_is_that_of_the_committed_runs(frame: pd.DataFrame, tmp_path: Path) -> None:
    write_overview(frame, tmp_path)
    assert (tmp_path / "overview.csv").read_bytes() == (RESULTS / "overview.csv").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["overview.csv"]


def test_front_shows_for_each_method_what_no_smaller_epsilon_surpasses(frame: pd.DataFrame) -> None:
    shown = best(frame)
    assert set(shown["data"]) == {"mnist", "cifar10"} and set(shown["unit"]) == {"example"}
    assert set(shown["whose"]) == {OURS, FIELD} and shown["epsilon"].max() <= 20
    for _, line in shown.groupby(["data", "whose", "method", "is_chosen"]):
        for name in ("epsilon", "value"):
            assert line[name].is_monotonic_increasing and line[name].is_unique, line
    ours = frame[(frame["whose"] == OURS) & (frame["data"] == "cifar10") & (frame["epsilon"] <= 20)]
    assert ours["value"].max() in set(shown["value"])
    assert {"De et al. 2022", "DP-RandP, Tang et al. 2023"} <= set(shown["method"])


def test_front_shows_the_times_that_the_readme_prints() -> None:
    readme = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    for title, times in step_times(RESULTS / BENCHMARK).iterrows():
        row = next(line for line in readme.splitlines() if line.startswith(f"| {title}"))
        assert [f"{time:.2f}" for time in times] == [cell.strip() for cell in row.strip("|").split("|")][2:]
