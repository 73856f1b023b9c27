"""The picture of the README: private results on test data, what others publish, and times."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd
import pytest

from dpbench.harness.reproduce._results import RUNS
from dpbench.harness.reproduce.tables import read_table, table_names
from tools.results import overview
from tools.results.front import BENCHMARK, best, step_times

RESULTS = Path(__file__).parents[3] / "results"


def test_the_picture_has_the_committed_runs_and_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    read = functools.cache(read_table)
    monkeypatch.setattr(overview, "read_table", read)
    every = [read(name) for name in table_names()]
    shown = [table for table in every if (RESULTS / table.folder / RUNS).is_file()]
    held = {table.name: (table, pd.read_csv(RESULTS / table.folder / RUNS)) for table in shown}
    lines = best(overview.points(held))
    assert {*zip(lines["data"], lines["whose"], strict=True)} == {
        (data, whose) for data in ("mnist", "cifar10") for whose in ("ours", "field")
    }
    assert lines["is_chosen"].any() and not lines["is_chosen"].all()
    assert (lines["delta"] > 0).all()


def test_front_joins_what_no_smaller_epsilon_surpasses() -> None:
    rows = [
        ("ours", False, 0.99999998, 45.98),  # solved noise ends a little below its target
        ("ours", False, 0.99999999, 63.06),
        ("ours", True, 1.0, 64.87),
        ("ours", False, 3.0, 60.0),
        ("field", None, 1.0, 72.3),
        ("reproduced", None, 1.0, 72.48),
    ]
    frame = pd.DataFrame(rows, columns=["whose", "is_chosen", "epsilon", "value"])
    frame = frame.assign(data="cifar10", unit="example", method="dpsgd", source="authors")
    shown = best(frame)
    assert shown["value"].tolist() == [72.3, 64.87, 63.06]
    assert set(shown["epsilon"]) == {1.0}


def test_what_others_publish_has_its_delta_and_accountant() -> None:
    published = overview._field()
    assert {entry["accountant"] for entry in published} == {"RDP", "PRV", "moments"}
    assert all(entry["delta"] > 0 for entry in published)
    accuracies = {entry["epsilon"]: entry["value"] for entry in published if entry["source"] == "De et al. 2022"}
    assert accuracies == {1: 56.8, 2: 65.9, 4: 73.5, 8: 81.4}


def test_tunings_stand_with_the_epsilon_that_covers_the_choice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["row,accuracy,epsilon_rdp,epsilon_pld,delta"]
    lines += [f"mnist_3,0.9{number},3.{number},3,1e-5" for number in (4, 5, 6)]
    lines += ["cifar10_3,0.66,3.4,3,1e-5", "speeches_3,0.45,3.4,3,1e-5"]  # the last is in no panel
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "runs.csv").write_text("\n".join(lines))
    monkeypatch.setattr(overview, "_RESULTS", tmp_path)
    cifar10, mnist = overview._tuned()
    assert (cifar10["data"], cifar10["is_chosen"], mnist["data"], mnist["is_chosen"]) == (
        "cifar10",
        True,
        "mnist",
        False,
    )
    assert (mnist["epsilon"], mnist["n"]) == (3.6, 3)
    assert mnist["value"] == pytest.approx(95) and mnist["half"] == pytest.approx(2.484, abs=0.001)


def test_front_shows_the_times_that_the_readme_prints() -> None:
    readme = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    for title, times in step_times(RESULTS / BENCHMARK).iterrows():
        row = next(line for line in readme.splitlines() if line.startswith(f"| {title}"))
        assert [f"{time:.2f}" for time in times] == [cell.strip() for cell in row.strip("|").split("|")][2:]
