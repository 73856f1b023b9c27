"""Tables: what is written of finished runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy.stats import t

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.markdown import latex_rows, markdown_rows
from dpbench.harness.reproduce import _pictures
from dpbench.harness.reproduce._outputs import write_logged, write_outputs
from dpbench.harness.reproduce._pictures import draw_table
from dpbench.harness.reproduce._results import (
    collect,
    finished_runs,
    read_logged,
    refuse_other_words,
    runs_of_other_code,
)
from dpbench.harness.reproduce._summary import cells, differences, summary
from dpbench.harness.reproduce.jobs import Job, table_jobs
from dpbench.harness.reproduce.tables import Table, read_table
from tests.harness.reproduce.digits_table import TABLE, edited

RECORD = """
{"metrics": {"test/error": 0.5}, "privacy": {"epsilon": {}}, "config": {"run": {"name": "n"}}, "seed": 0,
"seconds": 1, "steps": 6, "hardware": {}}
"""


def finish(job: Job, logged: str = "", /, **record: Any) -> None:
    """As if a run were finished, which logged these lines."""
    job.path.mkdir(parents=True, exist_ok=True)
    if logged:
        job.run.metrics.write_text(logged, encoding="utf-8")
    job.run.result.write_text(json.dumps({**json.loads(RECORD), **record}), encoding="utf-8")


def runs(text: str, words: str = "", **columns: Any) -> pd.DataFrame:
    """What runs.csv holds; `text` is "ROW COLUMN VALUE...", of seeds 0, 1, ..., and a comma between cells."""
    lines = []
    for cell in text.split(","):
        row, column, *values = cell.split()
        private = column != "plain"
        lines += [
            {
                "row": row, "column": column, "seed": seed, "metric": "test/accuracy", "value": float(value),
                "delta": 1e-5, "epsilon_rdp": 1.25, "epsilon_pld": 1.125, "unit": "example" if private else None,
                "seconds": 2.0, "commit": "abc", "cpu": "x", "gpu": None, "torch": "2", "threads": 2,
                "code_hash": "other", "epsilon_microbatch_rdp": None,
                "neighbouring_relation": "add_or_remove_one" if private else None,
                "config_hash": f"{row}{column}{seed}", "words": f"{words} seed={seed}", **columns,
            }
            for seed, value in enumerate(values)
        ]  # fmt: skip
    return pd.DataFrame(lines)


def page_of(table: Table, measured: pd.DataFrame, folder: Path, **logged: pd.DataFrame) -> str:
    write_outputs(table, measured, logged, folder)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_what_runs_logged_is_kept_and_drawn(definition: Path, tmp_path: Path) -> None:
    more = """seeds: 2
histogram: true
series:
- {name: bounds, metrics: privacy/bound/, label: clipping bound}
- {name: one, metrics: privacy/bound/a, label: a bound, scale: linear}
"""
    table = read_table(edited(definition, "seeds: 2\n", more))
    jobs = table_jobs(table, tmp_path)[2:4]
    for job in jobs:
        finish(
            job,
            "step,privacy/bound/a,privacy/bound/b.bias,test/accuracy\n1,0.5,2,\n2,0.25,,\n6,,,0.5\n7,,,0.6\n8,,,0.8\n",
        )
        histogram = "log10_from,log10_to,count\n-inf,-9,6\n-9,-8,3\n-8,inf,1\n"
        (job.path / "nonprivate_gradient_histogram.csv").write_text(histogram, encoding="utf-8")
    logged = collect(table, jobs)
    assert set(logged) == {"curves", "bounds", "one", "gradient_values"}
    curves = logged["curves"]
    assert curves[["step", "value"]].to_numpy().tolist() == [[6, 0.5], [7, 0.6], [8, 0.8]] * 2
    bounds = logged["bounds"]
    own = bounds[bounds["column"] == "private"]
    assert own[["step", "name", "value"]].to_numpy().tolist() == [[1, "a", 0.5], [2, "a", 0.25], [1, "b.bias", 2]]
    assert logged["gradient_values"]["count"].sum() == 2 * 10
    drawn = write_logged(table, logged, tmp_path)
    assert [path.name for path in drawn] == ["curves.png", "bounds.png", "one.png", "gradient_values.png"]
    assert read_logged(table, tmp_path)["bounds"]["value"].tolist() == bounds["value"].tolist()
    assert write_logged(table, {}, tmp_path) == []
    assert not list(tmp_path.glob("*.png"))


def test_cells_show_mean_spread_and_paired_difference(definition: Path) -> None:
    table = read_table(str(definition))
    measured = runs("short private 0.80 0.84, short plain 0.90 0.92 0.10")
    line = summary(table, measured).iloc[0]
    assert line["mean"] == pytest.approx(82)
    assert line["sd"] == pytest.approx(8**0.5)
    assert line["half"] == pytest.approx(12.706 * 8**0.5 / 2**0.5, rel=1e-3)  # Student's t, one degree of freedom
    gap = differences(table, measured).loc["private", "plain", "short"]
    assert gap["mean"] == pytest.approx(-9)
    assert gap["n"] == 2  # seed 2 has no partner
    _, short, long = cells(table, measured)
    assert short[:7] == ["3 steps", "82.00 ± 2.83", "2", "90.0 ± 0.1", "64.00 ± 46.78", "3", "95.0"]
    assert short[-3:] == ["1.5", "1.250", "1.125"]
    assert " ".join(long) == "6 steps – 0 – – 0 – – – – –"
    assert r"\toprule" in latex_rows(cells(table, measured))
    assert "–" not in latex_rows(cells(table, measured))


def test_differences_are_tested_together(definition: Path) -> None:
    """By Holm's method: the larger one is told from zero at half the level, then the smaller one at all of it."""
    table = read_table(str(definition))
    long = "short plain .5 .5 .5 .5, long plain .5 .5 .5 .5, long private .6 .62 .6 .62"
    measured = runs(f"{long}, short private .7 .72 .7 .72")
    frame = differences(table, measured).loc["private", "plain"]
    assert frame.loc["short", "holm"] == pytest.approx(t.ppf(1 - 0.05 / 4, 3) * frame.loc["short", "sd"] / 2)
    assert frame.loc["long", "holm"] == pytest.approx(frame.loc["long", "half"])
    assert "+21.00 [± 1.84, Holm ± 2.41]" in markdown_rows(cells(table, measured))


def test_means_over_the_last_evaluations(definition: Path, tmp_path: Path) -> None:
    definition.write_text(f"{TABLE}last_evaluations: 2\n")
    table = read_table(str(definition))
    line = {"row": "short", "step": [9, 19, 29, 30]}  # the validation after the last step, and the test of the same
    every = [
        line | {"column": "private", "seed": 0, "value": [0.9, 0.5, 0.6, 0.6]},
        line | {"column": "private", "seed": 1, "value": [0.1, 0.7, 0.8, 0.8]},
        line | {"column": "plain", "seed": 0, "step": [9, 19, 27, 30], "value": [0.0, 0.1, 0.9, 0.8]},  # older runs
    ]
    curves = pd.concat(map(pd.DataFrame, every)).sample(frac=1, random_state=0)
    measured = runs("short private 0.6 0.8, short plain 0.8")
    page = page_of(table, measured, tmp_path, curves=curves)
    assert "| 3 steps | 65.00 ± 14.14 | 2 | 85.00 | 1 | -30.00 |" in page
    assert "| 6 steps | – | 0 | – | 0 | – |" in page
    assert "Mean over the last 2 evaluations" in page
    assert "last 2 evaluations" not in page_of(table, measured, tmp_path)  # nothing was evaluated on the way


@pytest.mark.drawn
def test_files_are_written_and_written_again_the_same(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs("short private 0.80 0.84")
    steps = {"row": "short", "column": "private", "seed": 0, "step": [1, 2, 3], "value": [0.2, 0.5, 0.8]}
    out = tmp_path / "out"
    page_of(table, measured, out, curves=pd.DataFrame(steps))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    names = "README.md curves.csv curves.png figure.pdf figure.png runs.csv table.md table.tex"
    assert sorted(before) == names.split()
    page_of(table, pd.read_csv(out / "runs.csv"), out, **read_logged(table, out))
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert "curves" not in page_of(table, measured, out)
    assert not list(out.glob("curves.*"))  # nothing stays of another definition


def test_intervals_stay_on_the_axis(definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read_table(str(definition))
    measured = runs("short private 0.50 0.54 0.52")
    figures: list[Any] = []
    monkeypatch.setattr(_pictures, "write_figure", lambda path, figure: figures.append(figure))
    line = summary(table, measured)
    draw_table(table, measured, line, tmp_path)
    (low, high), half = figures[0].axes[0].get_xlim(), line.iloc[0]["half"]
    assert low < 52 - half < 52 + half < high


def test_figures_are_not_shown_under_another_name_nor_of_a_cell_that_is_no_more(definition: Path) -> None:
    for shown, cell, message in (
        (
            "test/accuracy",
            "shorter private 0.5",
            "shorter, private was run with other overrides than own/digits has now",
        ),
        ("val/accuracy", "short private 0.5", "has no val/accuracy, which own/digits"),
        ("test/accuracy\nmore: [evaluation/coverage]", "short private 0.5", "has no evaluation/coverage, which"),
    ):
        table = read_table(edited(definition, "test/accuracy", shown))
        with pytest.raises(ConfigurationError, match=message):
            refuse_other_words(table, runs(cell))


def test_runs_of_other_code_settings_or_packages_are_told_apart(definition: Path, tmp_path: Path) -> None:
    jobs = table_jobs(read_table(str(definition)), tmp_path)
    two = runs("short private 0.80 0.84", code_hash=jobs[0].code_hash)
    two["config_hash"] = [jobs[0].config_hash, jobs[4].config_hash]
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
    measured = runs("short private 0.80, short plain 0.84", epsilon_microbatch_rdp=0.5)
    measured.loc[0, "neighbouring_relation"] = "replace_one"
    text = page_of(table, measured, tmp_path)
    assert "ε is for δ = 1e-05 and one example replaced" in text
    assert "For the nominal ε a record is a fixed microbatch" in text
    assert f"dpbench reproduce {definition}`" in text  # as it was called
    head, short, _ = cells(table, measured)
    assert head[-4:] == ["ε claimed", "ε nominal (RDP)", "ε (RDP)", "ε (PLD)"]
    assert short[-4:] == ["1.5", "0.500", "1.250", "1.125"]


def test_the_readme_counts_runs_of_code_that_no_commit_holds(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs("short private 0.80, short plain 0.84", commit="abc")
    assert "+changes" not in page_of(table, measured, tmp_path)
    measured.loc[0, "commit"] = "abc+changes"
    text = page_of(table, measured, tmp_path)
    assert "- commit: abc, abc+changes\n- " in text
    assert "+changes: 1 of 2 runs, made by code that no commit holds\n" in text


def test_a_figure_of_any_name_is_shown_as_it_is(definition: Path, tmp_path: Path) -> None:
    """As modules of others log them."""
    table = read_table(edited(definition, "test/accuracy", "test/energy"))
    assert cells(table, runs("short private -0.25", metric="test/energy"))[1][1] == "-0.25"
    job = table_jobs(table, tmp_path)[0]
    finish(job, config_hash=job.config_hash, code_hash=job.code_hash)
    with pytest.raises(ConfigurationError, match="shows test/energy, which its runs do not have: they have test/error"):
        finished_runs(table, [job])


def test_a_unit_other_than_the_example_is_told(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    measured = runs("short private 0.80, long private 0.84, short plain 0.9")
    assert "unit" not in markdown_rows(cells(table, measured))
    measured.loc[:1, ["unit", "population"]] = ["user", 539]
    measured.loc[:1, "epsilon_pld"] = float("nan")
    measured.loc[1, "epsilon_rdp"] = 54999999998212.7
    head, _, long = cells(table, measured)
    assert head[-1] == "ε (RDP, unit: user)"
    assert long[-1] == "5.5e+13"
    page = page_of(table, measured, tmp_path)
    assert "ε is for δ = 1e-05 and one user of 539 (unit: user), with all examples, added or removed" in page
