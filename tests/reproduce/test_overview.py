"""The overview: private results on test data, and what papers claim, each in its unit."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from dpbench.reproduce import _overview as overview
from dpbench.reproduce._overview import FIELD, OURS, PAPER, points, write_overview
from dpbench.reproduce._results import RUNS
from dpbench.reproduce.tables import read_table, table_names

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    every = [read_table(name) for name in table_names()]
    shown = [table for table in every if (RESULTS / table.folder / RUNS).is_file()]
    held = {table.name: (table, pd.read_csv(RESULTS / table.folder / RUNS)) for table in shown}
    return points(held, every)


def test_committed_overview_is_that_of_the_committed_runs(frame: pd.DataFrame, tmp_path: Path) -> None:
    write_overview(frame, tmp_path)
    assert (tmp_path / "overview.csv").read_bytes() == (RESULTS / "overview.csv").read_bytes()
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".png", ".pdf"}


def test_only_private_results_on_test_data_at_several_epsilons(frame: pd.DataFrame) -> None:
    assert {"mnist", "cifar10", "mnist_writers"} <= set(frame["data"])
    assert not set(frame["data"]) & {"user_noise", "random_noise", "digits"}
    assert frame["metric"].str.startswith("test/").all() and (frame["epsilon"] > 0).all()
    assert not frame["label"].str.contains("not private").any()
    few = frame[(frame["whose"] == OURS) & (frame["n"] <= 2)]
    assert len(few) and few["half"].isna().all()


def test_papers_stand_at_the_epsilon_that_they_claim_in_their_unit(frame: pd.DataFrame) -> None:
    printed = frame[frame["whose"] == PAPER].set_index("table")
    assert set(printed.loc["gradient_compression_table2", "unit"]) == {"microbatch"}
    assert set(printed.loc["gradient_compression_table1", "unit"]) == {"example"}
    assert set(printed.loc["three_tools_table1", "epsilon"]) == {20.0}
    assert (printed["accountant"] == "as claimed").all()
    assert set(frame.loc[frame["data"] == "mnist_writers", "unit"]) == {"user"}


def test_others_are_in_the_picture_and_no_paper_of_ours(frame: pd.DataFrame) -> None:
    field = frame[frame["whose"] == FIELD]
    assert {"mnist", "cifar10"} == set(field["data"]) and (field["delta"] == 1e-5).all()
    assert not frame.loc[frame["whose"] == PAPER, "table"].str.startswith("recipes").any()
    assert 98.7 in set(field.loc[field["data"] == "mnist", "value"])


def test_the_picture_at_a_glance(frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only images by example; what is left out is counted; few runs are hollow, and what was chosen has a ring."""
    drawn: list[Figure] = []
    monkeypatch.setattr(overview, "write_figure", lambda path, figure: drawn.append(figure))
    overview._write_front(frame[frame["unit"] != "user"], tmp_path)
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert [title.split(" (")[0] for title in titles] == ["MNIST", "CIFAR-10"]
    for axes, data in zip(drawn[0].axes, ("mnist", "cifar10"), strict=True):
        own = frame[(frame["data"] == data) & (frame["unit"] != "user")]
        marks = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() in ("o", "x", "D", "*"))
        left_out = int(re.findall(r"\((\d+) lower", axes.get_title())[0])
        assert marks + left_out == len(own) and left_out <= 1 + 0.1 * len(own)
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        hollow = sum(len(line.get_xdata()) for line in dots if line.get_markerfacecolor() == "white")
        assert 0 <= (own["n"] <= 2).sum() - hollow <= left_out
        rings = len(axes.collections[-1].get_offsets())
        assert 0 <= own.loc[own["whose"] == OURS, "is_chosen"].sum() - rings <= left_out
    assert {"Tramèr & Boneh 2021", "De et al. 2022"} <= {text.get_text() for text in drawn[0].axes[1].texts}


def test_every_method_has_a_color_and_tables_one_for_each_of_theirs(frame: pd.DataFrame) -> None:
    assert set(frame["method"].dropna()) <= set(overview._METHODS)
    compared = frame[frame["table"] == "gradient_compression_table1"]
    assert set(compared["method"]) == {"dpsgd", "discretized"}
    assert set(frame.loc[frame["table"].str.startswith("recipes"), "is_chosen"]) == {True}
    assert frame.loc[frame["whose"] == FIELD, "method"].isna().all()


def test_nothing_is_written_of_nothing(frame: pd.DataFrame, tmp_path: Path) -> None:
    write_overview(frame.iloc[:0], tmp_path)
    assert not list(tmp_path.iterdir())
