"""Tables: what is written of finished runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy.stats import t, ttest_1samp

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.markdown import latex_rows, markdown_rows
from dpbench.harness.reproduce import _pictures as pictures
from dpbench.harness.reproduce._outputs import write_logged, write_outputs
from dpbench.harness.reproduce._results import (
    collect,
    finished_runs,
    read_logged,
    refuse_other_words,
    runs_of_other_code,
)
from dpbench.harness.reproduce._summary import cells, differences, summary
from dpbench.harness.reproduce.jobs import table_jobs
from dpbench.harness.reproduce.tables import read_table
from tests.harness.reproduce.digits_table import TABLE, edited
from tools.results.refresh import refresh

RECORD = (
    '{"metrics": {}, "privacy": {"epsilon": {}}, "config": {"run": {"name": "n"}}, "seed": 0, "seconds": 1, "steps": 6}'
)


def test_learning_curves_come_from_the_metrics(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    job = next(job for job in table_jobs(table, tmp_path) if job.row == "long")
    job.path.mkdir(parents=True)
    lines = ["step,privacy/epsilon,test/accuracy", "2,0.5,", "2,,0.25", "3,,0.5", "4,0.75,0.625"]
    (job.path / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert collect(table, [job]) == {}  # not finished
    (job.path / "result.json").write_text(RECORD, encoding="utf-8")
    curves = collect(table, [job])["curves"]
    assert curves[["step", "value"]].to_numpy().tolist() == [[2, 0.25], [3, 0.5], [4, 0.625]]
    assert set(curves["row"]) == {"long"} and set(curves["seed"]) == {0}


def test_what_runs_logged_is_kept_and_drawn(definition: Path, tmp_path: Path) -> None:
    more = "histogram: true\nseries: [{name: bounds, metrics: privacy/bound/, label: clipping bound}, ONE]\nseeds: 2"
    more = more.replace("ONE", "{name: one, metrics: privacy/bound/a, label: a bound, scale: linear}")
    table = read_table(edited(definition, "seeds: 2", more))
    jobs = [job for job in table_jobs(table, tmp_path) if job.row == "long"]
    for job in jobs:
        job.path.mkdir(parents=True)
        (job.path / "result.json").write_text(RECORD, encoding="utf-8")
        lines = ["step,privacy/bound/a,privacy/bound/b.bias,test/accuracy", "1,0.5,2,", "2,0.25,,", "6,,,0.5"]
        (job.path / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        histogram = "log10_from,log10_to,count\n-inf,-9,6\n-9,-8,3\n-8,inf,1\n"
        (job.path / "nonprivate_gradient_histogram.csv").write_text(histogram, encoding="utf-8")
    logged = collect(table, jobs)
    assert set(logged) == {"bounds", "one", "gradient_values"}  # one evaluation is no curve
    assert set(logged["bounds"]["seed"]) == {0} and len(logged["bounds"]) == 2 * 3
    own = logged["bounds"][logged["bounds"]["column"] == "private"]
    assert own[["step", "name", "value"]].to_numpy().tolist() == [[1, "a", 0.5], [2, "a", 0.25], [1, "b.bias", 2]]
    assert logged["gradient_values"]["count"].sum() == 2 * 10
    pictures_drawn = write_logged(table, logged, tmp_path)
    assert [path.name for path in pictures_drawn] == ["bounds.png", "one.png", "gradient_values.png"]
    other = edited(definition, "seeds: 2", more.replace("linear", "log"))
    (tmp_path / "log").mkdir()
    write_logged(read_table(other), logged, tmp_path / "log")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "log" / "one.png").read_bytes()
    again, drawn = read_logged(table, tmp_path), (tmp_path / "one.png").read_bytes()
    assert again["bounds"]["value"].tolist() == logged["bounds"]["value"].tolist()
    write_logged(table, again, tmp_path)
    assert (tmp_path / "one.png").read_bytes() == drawn
    assert write_logged(table, {}, tmp_path) == [] and not list(tmp_path.glob("*.png"))


def runs(values: dict[tuple[str, str, int], float], words: str = "") -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "row": row, "column": column, "seed": seed, "metric": "test/accuracy", "value": value,
                "delta": 1e-5, "epsilon_rdp": 1.25, "epsilon_pld": 1.125,
                "unit": "example" if column == "private" else None, "seconds": 2.0, "commit": "abc", "cpu": "x",
                "gpu": None, "torch": "2", "threads": 2, "code_hash": "other", "epsilon_microbatch_rdp": None,
                "neighbouring_relation": "add_or_remove_one" if column == "private" else None,
                "config_hash": f"{row}{column}{seed}", "words": f"{words} seed={seed}",
            }
            for (row, column, seed), value in values.items()
        ]
    )  # fmt: skip


def test_cells_show_mean_spread_and_paired_difference(definition: Path) -> None:
    table = read_table(str(definition))
    values = {("short", "private", 0): 0.80, ("short", "private", 1): 0.84, ("short", "plain", 0): 0.90}
    values |= {("short", "plain", 1): 0.92, ("short", "plain", 2): 0.10}
    measured = runs(values)
    line = summary(table, measured).iloc[0]
    assert line["mean"] == pytest.approx(82) and line["sd"] == pytest.approx(8**0.5)
    assert line["half"] == pytest.approx(12.706 * 8**0.5 / 2**0.5, rel=1e-3)  # Student's t, one degree of freedom
    gap = differences(table, measured).loc["private", "plain", "short"]
    assert gap["mean"] == pytest.approx(-9) and gap["n"] == 2  # seed 2 has no partner
    head, short, long = cells(table, measured)
    assert short[:7] == ["3 steps", "82.00 ± 2.83", "2", "90.0 ± 0.1", "64.00 ± 46.78", "3", "95.0"]
    assert short[-3:] == ["1.5", "1.250", "1.125"]
    assert long == ["6 steps", "–", "0", "–", "–", "0", "–", "–", "–", "–", "–"] and len(head) == len(long)
    measured["unit"] = "example"  # of both columns, one of which an accountant does not cover
    measured.loc[measured["column"] == "plain", "epsilon_pld"] = float("nan")
    assert cells(table, measured)[1][-2:] == ["1.250", "1.125 / –"]
    assert r"\toprule" in latex_rows(cells(table, measured)) and "–" not in latex_rows(cells(table, measured))
    assert markdown_rows(cells(table, measured)).count("\n") == 3


def test_differences_are_tested_together(definition: Path) -> None:
    """By Holm's method: the larger one is told from zero at half the level, then the smaller one at all of it."""
    table = read_table(str(definition))
    values = {}
    for row, gain in (("short", 0.2), ("long", 0.1)):
        for seed in range(4):
            values[row, "plain", seed] = 0.5
            values[row, "private", seed] = 0.5 + gain + 0.02 * (seed % 2)
    frame = differences(table, runs(values)).loc["private", "plain"]
    p_values = ttest_1samp([[20, 22, 20, 22], [10, 12, 10, 12]], 0, axis=1).pvalue
    assert frame.loc["short", "holm"] == pytest.approx(t.ppf(1 - 0.05 / 4, 3) * frame.loc["short", "sd"] / 2)
    assert frame.loc["long", "holm"] == pytest.approx(frame.loc["long", "half"]) and max(p_values) < 0.05
    assert "+21.00 [± 1.84, Holm ± 2.41]" in markdown_rows(cells(table, runs(values)))
    for seed in range(4):  # which is not told from zero: then none after it is
        values["short", "private", seed] = 0.5 + 0.1 * (seed - 1)
    frame = differences(table, runs(values)).loc["private", "plain"]
    assert (frame["holm"] > frame["half"] - 1e-9).all() and frame.loc["short", "holm"] > frame.loc["short", "mean"]


def test_means_over_the_last_evaluations(definition: Path, tmp_path: Path) -> None:
    definition.write_text(f"{TABLE}last_evaluations: 2\n")
    table = read_table(str(definition))
    line = {"row": "short", "step": [9, 19, 29, 30]}  # the validation after the last step, and the test of the same
    every = [
        line | {"column": "private", "seed": 0, "value": [0.9, 0.5, 0.6, 0.6]},
        line | {"column": "private", "seed": 1, "value": [0.1, 0.7, 0.8, 0.8]},
        line | {"column": "plain", "seed": 1, "step": [9, 19, 27, 30], "value": [0.0, 0.1, 0.9, 0.8]},  # older runs
    ]
    curves = pd.concat([pd.DataFrame(one) for one in every])
    measured = runs({("short", "private", 0): 0.6, ("short", "private", 1): 0.8, ("short", "plain", 1): 0.8})
    write_outputs(table, measured, {"curves": curves.sample(frac=1, random_state=0)}, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| 3 steps | 65.00 ± 14.14 | 2 | 85.00 | 1 | -10.00 |" in page
    assert "| 6 steps | – | 0 | – | 0 | – |" in page and "Mean over the last 2 evaluations" in page
    write_outputs(table, measured, {}, tmp_path / "out")  # nothing was evaluated on the way
    assert "last 2 evaluations" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    definition.write_text(f"{TABLE}last_evaluations: none\n")
    with pytest.raises(ConfigurationError, match="last_evaluations: Input should be a valid integer"):
        read_table(str(definition))


def test_files_are_written_and_written_again_the_same(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs({("short", "private", 0): 0.80, ("short", "private", 1): 0.84})
    steps = {"row": "short", "column": "private", "seed": 0, "step": [1, 2, 3], "value": [0.2, 0.5, 0.8]}
    curves = pd.DataFrame(steps)
    write_outputs(table, measured, {"curves": curves}, tmp_path / "out")
    names = {"runs.csv", "table.md", "table.tex", "figure.png", "figure.pdf", "README.md", "curves.csv", "curves.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    read = pd.read_csv(tmp_path / "out" / "runs.csv")
    write_outputs(table, read, read_logged(table, tmp_path / "out"), tmp_path / "out")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write_outputs(table, measured, {}, tmp_path / "out")
    assert not list((tmp_path / "out").glob("curves.*"))  # nothing stays of another definition
    assert "curves" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/reproduced.md", "docs/discretized_gradients.md"])
def test_pages_show_committed_tables(tmp_path: Path, page: str) -> None:
    folder = tmp_path / "results" / "gradient_compression_table1"
    folder.mkdir(parents=True)
    table = read_table("gradient_compression/table1").selected(["sigma_1.1"], ["dpsgd"], None)
    words = " ".join(table.words_of(table.rows[0], table.columns[0]))
    values = {("sigma_1.1", "dpsgd", 0): 0.955, ("sigma_1.1", "dpsgd", 1): 0.957}
    runs(values, words).to_csv(folder / "runs.csv", index=False)
    readme = tmp_path / page
    readme.parent.mkdir(exist_ok=True)
    readme.write_text("before\n<!-- table gradient_compression_table1 -->\nold\n<!-- end -->\nafter\n")
    assert refresh(tmp_path) == ["gradient_compression/table1"]
    shown = readme.read_text()
    assert "95.60 ± 0.14" in shown and "old" not in shown and shown.endswith("<!-- end -->\nafter\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refresh(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    readme.write_text("<!-- table nowhere -->\n<!-- end -->\n")
    with pytest.raises(ConfigurationError, match=f"{page} has a place for table nowhere, but there is no"):
        refresh(tmp_path)
    runs(values, words.replace("1.1", "1.2")).to_csv(folder / "runs.csv", index=False)
    with pytest.raises(ConfigurationError, match="sigma_1.1, dpsgd was run with other words.*restore the definition"):
        refresh(tmp_path)
    assert all(
        path.read_bytes() == old
        for path, old in before.items()
        if path.name not in (readme.name, "README.md", "runs.csv")
    )


def test_runs_of_a_cell_that_is_no_more_are_not_shown(definition: Path) -> None:
    table = read_table(str(definition))
    with pytest.raises(ConfigurationError, match="shorter, private was run with other words than own/digits has now"):
        refuse_other_words(table, runs({("shorter", "private", 0): 0.5}))


@pytest.mark.parametrize("shown", ["metric: val/accuracy", "metric: test/accuracy\nmore: [evaluation/coverage]"])
def test_figures_are_not_shown_under_another_name(definition: Path, shown: str) -> None:
    table = read_table(edited(definition, "metric: test/accuracy", shown))
    with pytest.raises(ConfigurationError, match="does not hold (val/accuracy|evaluation/coverage), which own/digits"):
        refuse_other_words(table, runs({("short", "private", 0): 0.5}))


def test_runs_of_other_code_settings_or_packages_are_told_apart(definition: Path, tmp_path: Path) -> None:
    jobs = table_jobs(read_table(str(definition)), tmp_path)
    two = runs({("short", "private", 0): 0.80, ("short", "private", 1): 0.84})
    two["config_hash"] = [job.config_hash for job in jobs if (job.row, job.column) == ("short", "private")]
    two["code_hash"] = jobs[0].code_hash
    assert runs_of_other_code(pd.DataFrame(), jobs) == runs_of_other_code(two, jobs) == 0
    assert runs_of_other_code(two, jobs[:1]) == 1
    assert runs_of_other_code(two.drop(columns="config_hash"), jobs) == 2  # of an older version
    assert runs_of_other_code(two.assign(code_hash="new"), jobs) == 2
    foreign = two.assign(foreign_code="nets=0123 theirs=4567")
    assert runs_of_other_code(foreign, jobs) == 2
    edited_since = [replace(job, foreign_code={"nets": "0123", "theirs": "4567"}) for job in jobs]
    assert runs_of_other_code(foreign, edited_since) == 0


def test_the_readme_says_what_epsilon_is_for(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs({("short", "private", 0): 0.80, ("short", "plain", 0): 0.84})
    measured["neighbouring_relation"] = measured["neighbouring_relation"].replace("add_or_remove_one", "replace_one")
    measured.loc[measured["column"] == "private", "epsilon_microbatch_rdp"] = 0.5
    write_outputs(table, measured, {}, tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert (
        "ε is for δ = 1e-05 and one example replaced" in text
        and "For the nominal ε a record is a fixed microbatch" in text
    )
    head, short, long = cells(table, measured)
    assert head[-4:] == ["ε claimed", "ε nominal (RDP)", "ε (RDP)", "ε (PLD)"]
    assert short[-4:] == ["1.5", "0.500", "1.250", "1.125"] and len(long) == len(head)
    assert f"dpbench reproduce {definition}`" in text  # as it was called


def test_one_run_far_off_does_not_flatten_the_picture(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs({("short", "private", seed): value for seed, value in enumerate((0.101, 0.873, 0.826))})
    seen: list[tuple[float, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "write_figure", lambda _, figure: seen.append(figure.axes[0].get_xlim()))
        pictures.draw_table(table, measured, summary(table, measured), tmp_path)
    assert all(0 <= left < 10.1 and 95 <= right <= 100 for left, right in seen) and len(seen) == 2


def test_rows_and_columns_that_nobody_ran_are_in_no_picture(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs({("short", "private", seed): value for seed, value in enumerate((0.80, 0.81))})
    seen: list[tuple[list[str], set[str]]] = []

    def look(_: Path, figure: Figure) -> None:
        (axes,) = figure.axes
        legend = {label.partition(",")[0] for label in axes.get_legend_handles_labels()[1]}
        seen.append(([label.get_text() for label in axes.get_yticklabels()], legend))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "write_figure", look)
        pictures.draw_table(table, measured, summary(table, measured), tmp_path)
    own = {column.name: column.label for column in table.columns}
    assert seen[0] == ([row.label for row in table.rows if row.name == "short"], {own["private"]})


def test_errors_are_shown_as_they_are_and_in_their_own_range(definition: Path, tmp_path: Path) -> None:
    table = read_table(edited(definition, "test/accuracy", "test/mean_squared_error")).model_copy(update={"paper": {}})
    values = {("short", "private", 0): 0.01234, ("short", "private", 1): 0.01434, ("short", "plain", 0): 0.01}
    measured = runs(values).assign(metric="test/mean_squared_error")
    _, short, _ = cells(table, measured)
    assert (
        short[1] == "0.01334 ± 0.0014" and short[5] == "+0.00234" and table.measure.label.endswith("(lower is better)")
    )
    steps = {"row": "short", "column": "private", "seed": 0, "step": [1, 2, 3], "value": [0.9, 0.03, 0.0123]}
    limits: list[tuple[float, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pictures,
            "write_figure",
            lambda path, figure: limits.append(
                figure.axes[0].get_ylim() if path.name == "curves.png" else figure.axes[0].get_xlim()
            ),
        )
        write_outputs(table, measured, {"curves": pd.DataFrame(steps)}, tmp_path)
    (left, right), (bottom, top) = limits[0], limits[-1]
    assert 0 <= left < 0.01 and 0.01434 < right < 0.02  # no percent
    assert bottom == 0 and 0.0123 < top < 1
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "Test mean squared error after the last step (lower is better): mean" in page


def test_a_figure_of_any_name_is_shown_as_it_is(definition: Path, tmp_path: Path) -> None:
    """As modules of others log them."""
    table = read_table(edited(definition, "test/accuracy", "test/energy"))
    measured = runs({("short", "private", 0): -0.25}).assign(metric="test/energy")
    assert cells(table, measured)[1][1] == "-0.25" and table.measure.label == "test/energy"
    job = table_jobs(table, tmp_path)[0]
    job.path.mkdir(parents=True)
    hashes = {"config_hash": job.config_hash, "code_hash": job.code_hash}
    record = {**json.loads(RECORD), **hashes, "metrics": {"test/error": 0.5}, "hardware": {}}
    job.run.result.write_text(json.dumps(record))
    with pytest.raises(ConfigurationError, match="shows test/energy, which its runs do not have: they have test/error"):
        finished_runs(table, [job])


def test_recall_is_a_share_in_percent(definition: Path) -> None:
    table = read_table(edited(definition, "test/accuracy", "test/recall_at_5"))
    measured = runs({("short", "private", 0): 0.25}).assign(metric="test/recall_at_5")
    assert cells(table, measured)[1][1] == "25.00" and table.measure.label == "test recall@5 (%)"


def test_further_figures_may_have_a_name_of_their_own(definition: Path, tmp_path: Path) -> None:
    more = "test/accuracy\nmore: {val/accuracy: base rate (%)}"
    table = read_table(edited(definition, "test/accuracy", more))
    measured = runs({("short", "private", 0): 0.80, ("short", "private", 1): 0.84})
    measured["val/accuracy"] = [0.1, 0.12]
    write_outputs(table, measured, {}, tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "|  |  | base rate (%) |" in page and "| 3 steps | DP-SGD | 11.00 ± 1.41 |" in page


def test_a_unit_other_than_the_example_is_told(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs({("short", "private", 0): 0.80, ("long", "private", 0): 0.84, ("short", "plain", 0): 0.9})
    assert "unit" not in markdown_rows(cells(table, measured))
    private = measured["column"] == "private"
    measured.loc[private, ["unit", "population"]] = ["user", 539]
    measured.loc[private, "epsilon_pld"], measured.loc[1, "epsilon_rdp"] = float("nan"), 54999999998212.7
    assert cells(table, measured)[0][-1] == "ε (RDP, unit: user)" and cells(table, measured)[2][-1] == "5.5e+13"
    assert "unit: user" in latex_rows(cells(table, measured))
    write_outputs(table, measured, {}, tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "ε is for δ = 1e-05 and one user of 539 (unit: user), with all examples, added or removed" in page
    measured.loc[2, ["unit", "epsilon_rdp"]] = ["example", 0.5]  # what both units cost, side by side
    assert cells(table, measured)[1][-2] == "1.250 (user) / 0.500 (example)"
    assert cells(table, measured)[0][-2:] == ["ε (RDP)", "ε (PLD)"]
