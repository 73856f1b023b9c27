"""The overview: private results on test data, and what papers claim, each in its unit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from dpbench.harness.reproduce._results import RUNS, with_choices
from dpbench.harness.reproduce.tables import read_table, table_names
from tools.results import front, overview
from tools.results.front import BENCHMARK, best, step_times, write_front
from tools.results.overview import FIELD, OURS, PAPER, points, write_overview

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


def test_front_takes_the_best_of_a_budget_and_shows_what_no_choice_on_the_data_preceded(frame: pd.DataFrame) -> None:
    """Solved noise costs 0.99999998 of a budget of 1: the worse result is not another, smaller budget's best."""
    cifar10 = frame[(frame["data"] == "cifar10") & (frame["whose"] == OURS) & frame["epsilon"].between(0.99, 1.01)]
    assert cifar10["epsilon"].nunique() > 1
    shown = best(frame)
    shown = shown[(shown["data"] == "cifar10") & (shown["whose"] == OURS) & (shown["epsilon"] == 1)]
    highest = cifar10.groupby("is_chosen")["value"].max()
    assert shown.set_index("is_chosen")["value"].to_dict() == highest.to_dict()
    assert set(highest.index) == {True, False}


def test_front_marks_few_runs_and_the_cost_of_design_and_names_its_sources(
    frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(front, "write_figure", lambda path, figure: drawn.update({path.name: figure}))
    write_front(frame, RESULTS)
    assert set(drawn) == {"front.png"}
    shown = best(frame)
    for figure in drawn.values():
        *panels, speed = figure.axes
        assert [axes.get_title() for axes in panels] == ["MNIST", "CIFAR-10"]
        for axes, data in zip(panels, ("mnist", "cifar10"), strict=True):
            own = shown[shown["data"] == data]
            unfilled = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
            hollow = [line for line in axes.lines if line.get_markerfacecolor() == "#ffffff"]
            assert sum(len(line.get_xdata()) for line in unfilled) == own["is_chosen"].sum()
            assert sum(len(line.get_xdata()) for line in hollow) == (own["n"] <= 2).sum()
            assert {text.get_text() for text in axes.texts} == set(own.loc[own["whose"] == FIELD, "source"])
        assert len(speed.patches) == 12


def test_front_shows_the_times_that_the_readme_prints() -> None:
    readme = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    for title, times in step_times(RESULTS / BENCHMARK).iterrows():
        row = next(line for line in readme.splitlines() if line.startswith(f"| {title}"))
        assert [f"{time:.2f}" for time in times] == [cell.strip() for cell in row.strip("|").split("|")][2:]


def test_every_method_has_a_color_and_tables_one_for_each_of_theirs(frame: pd.DataFrame) -> None:
    assert set(frame["method"].dropna()) <= set(overview.METHODS)
    compared = frame[frame["table"] == "gradient_compression_table1"]
    assert set(compared["method"]) == {"dpsgd", "discretized"}
    recipes = frame[frame["table"].str.startswith("recipes")]
    elsewhere = recipes["table"].str.startswith(("recipes_frozen", "recipes_random_prior"))
    assert set(recipes.loc[~elsewhere, "is_chosen"]) == {True}
    assert frame.loc[frame["whose"] == FIELD, "method"].isna().all()


@pytest.mark.parametrize(
    ("name", "chosen_here"),
    [
        ("recipes/frozen", {"cifar10"}),
        ("recipes/frozen_mnist", {"mnist"}),
        ("recipes/published", {"cifar10", "fashion_mnist"}),
        ("recipes/random_prior", set()),
    ],
)
def test_a_ring_is_where_settings_were_chosen_on_the_same_data(name: str, chosen_here: set[str]) -> None:
    table = with_choices(read_table(name), RESULTS)
    entries = [overview._entry(table, row, column) for row, column in table.cells]
    assert {entry["row"] for entry in entries if entry["is_chosen"]} == chosen_here
    others = {row.name for row in table.rows} - chosen_here
    assert {entry["row"] for entry in entries if not entry["is_chosen"]} == others


def test_nothing_is_written_of_nothing(frame: pd.DataFrame, tmp_path: Path) -> None:
    write_overview(frame.iloc[:0], tmp_path)
    assert not list(tmp_path.iterdir())
