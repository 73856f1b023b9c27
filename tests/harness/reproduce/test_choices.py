"""Tables that choose on validation data: the best of trials, and another table that looks up what was chosen."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest

from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce._outputs import write_outputs
from dpbench.harness.reproduce._results import best_trials, collect, of_best_trials, refuse_other_words, with_choices
from dpbench.harness.reproduce._summary import cells
from dpbench.harness.reproduce.jobs import _JOB_FILE, table_jobs
from dpbench.harness.reproduce.tables import Table, read_table

TUNING = """
title: Tuning
source: nowhere
metric: val/accuracy
seeds: 2
hours: 0.01
words: [data=digits_users, model=mlp, "model.hidden=[8]", records=users, data.val_users=10, trainer.max_steps=2]
rows:
  tight: {label: C = 0.1, words: [strategy.max_grad_norm=0.1]}
  loose: {label: C = 1, words: [strategy.max_grad_norm=1]}
columns:
  low: {label: z = 0.1, words: [strategy.noise_multiplier=0.1]}
  high: {label: z = 1, words: [strategy.noise_multiplier=1]}
trials:
  slow: {label: rate 1, words: [optimizer.lr=1]}
  fast: {label: rate 3, words: [optimizer.lr=3]}
"""
FINAL = """
title: Final
source: nowhere
metric: test/accuracy
seeds: [5, 6]
hours: 0.01
words: [data=digits_users, model=mlp, "model.hidden=[8]", records=users, trainer.max_steps=2]
chosen_from: TUNING
rows:
  low: {label: z = 0.1, chosen: {columns: [low]}}
  high: {label: z = 1, chosen: {columns: [high]}}
columns:
  any: {label: best bound, chosen: {rows: [tight, loose]}}
  tight: {label: C = 0.1, chosen: {rows: [tight]}}
difference: [[any, tight], [tight, any]]
"""
VALUES = {  # row, column, trial → mean of two seeds; the best of each column: tight slow, loose fast
    ("tight", "low", "slow"): 0.8, ("tight", "low", "fast"): 0.7, ("loose", "low", "slow"): 0.5,
    ("loose", "low", "fast"): 0.6, ("tight", "high", "slow"): 0.3, ("tight", "high", "fast"): 0.4,
    ("loose", "high", "slow"): 0.45, ("loose", "high", "fast"): 0.5,
}  # fmt: skip


@pytest.fixture
def tuning(tmp_path: Path) -> Table:
    path = tmp_path / "own" / "tuning.yaml"
    path.parent.mkdir()
    path.write_text(TUNING)
    (tmp_path / "own" / "final.yaml").write_text(FINAL.replace("TUNING", str(path)))
    return read_table(str(path))


def final(tmp_path: Path, old: str = "", new: str = "") -> Table:
    path = tmp_path / "own" / "final.yaml"
    path.write_text(path.read_text().replace(old, new))
    return read_table(str(path))


def runs_of(table: Table, values: dict[tuple[str, str, str], float], **columns: object) -> pd.DataFrame:
    """What runs.csv holds; the second seed is a tenth better, and half a percent worse in the middle."""
    lines = [
        {
            "row": row.name, "column": column.name, "trial": trial.name, "seed": seed, "metric": table.metric,
            "value": values[row.name, column.name, trial.name] + 0.1 * place - 0.05, "delta": 1e-3, "epsilon_rdp": 7.0,
            "epsilon_pld": None, "epsilon_microbatch_rdp": None, "unit": "user", "population": 90,
            "neighbouring_relation": "add_or_remove_one", "seconds": 1.0, "commit": "abc", "cpu": "x", "gpu": None,
            "torch": "2", "threads": 1, "words": " ".join((*table.words_of(row, column, trial), f"seed={seed}")),
            **columns,
        }
        for row in table.rows
        for column in table.columns
        for trial in table.trials
        if (row.name, column.name, trial.name) in values
        for place, seed in enumerate(table.seeds)
    ]  # fmt: skip
    return pd.DataFrame(lines)


def kept(tmp_path: Path, table: Table, runs: pd.DataFrame) -> Path:
    """A folder of results that holds the tuning table's runs."""
    folder = tmp_path / "results" / table.folder
    folder.mkdir(parents=True, exist_ok=True)
    runs.to_csv(folder / "runs.csv", index=False)
    return tmp_path / "results"


def test_each_cell_shows_its_best_trial(tuning: Table, tmp_path: Path) -> None:
    runs = runs_of(tuning, VALUES)
    best = {cell: trial.name for cell, (trial, _) in best_trials(tuning, runs).items()}
    assert best == {
        ("tight", "low"): "slow",
        ("loose", "low"): "fast",
        ("tight", "high"): "fast",
        ("loose", "high"): "fast",
    }
    shown = of_best_trials(tuning, runs)
    assert len(shown) == 2 * 4 and len(of_best_trials(tuning, shown)) == len(shown)
    _, tight, loose = cells(tuning, runs)
    assert tight[1:5] == ["80.00 ± 7.07", "2", "40.00 ± 7.07", "2"] and loose[1] == "60.00 ± 7.07"
    partly = runs[(runs["row"] != "tight") | (runs["trial"] == "fast")]
    write_outputs(tuning, partly, {}, tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| C = 0.1 | rate 3 (of 1) | rate 3 (of 1) |" in page and "| C = 1 | rate 3 | rate 3 |" in page
    assert "the best of 2 trials (rate 1; rate 3)" in page
    assert len(pd.read_csv(tmp_path / "runs.csv")) == len(partly)  # those that were not chosen too
    refuse_other_words(tuning, partly)
    with pytest.raises(ConfigurationError, match="tight, low, fast was run with other words"):
        refuse_other_words(tuning, partly.assign(words=partly["words"].str.replace("optimizer.lr=3", "optimizer.lr=1")))


def test_of_errors_the_least_is_best(tuning: Table, tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.yaml"
    path.write_text(TUNING.replace("val/accuracy", "val/mean_squared_error"))
    table = read_table(str(path))
    runs = runs_of(table, VALUES)
    assert best_trials(table, runs)["tight", "low"][0].name == "fast"
    chosen = with_choices(final(tmp_path), kept(tmp_path, table, runs))
    assert chosen.choices["low", "any"].label == "C = 1, z = 0.1, rate 1"


def test_every_trial_is_a_job_of_its_own(tuning: Table, tmp_path: Path) -> None:
    jobs = table_jobs(tuning, tmp_path)
    assert len(jobs) == len({job.folder for job in jobs}) == len({job.config_hash for job in jobs}) == 16
    assert jobs[1].name == "tight, low, fast, seed 0" and "optimizer.lr=3" in jobs[1].words
    assert _JOB_FILE.validate_json(json.dumps(asdict(jobs[0]))) == jobs[0]  # as other machines of a cluster read it


def test_what_the_best_trials_logged_is_kept_with_their_names(tuning: Table, tmp_path: Path) -> None:
    jobs = table_jobs(tuning, tmp_path)[:2]
    for job in jobs:
        job.path.mkdir(parents=True)
        (job.path / "metrics.csv").write_text("step,val/accuracy\n1,0.1\n2,0.2\n3,0.3\n", encoding="utf-8")
        (job.path / "result.json").write_text(
            '{"metrics": {}, "privacy": {"epsilon": {}}, "config": {"run": {"name": "n"}}, "seed": 0, "seconds": 1, '
            '"steps": 2}',
            encoding="utf-8",
        )
    curves = collect(tuning, jobs)["curves"]
    assert list(curves) == ["row", "column", "trial", "seed", "step", "value"]
    assert curves["trial"].tolist() == ["slow"] * 3 + ["fast"] * 3


def test_another_table_looks_up_what_was_best(tuning: Table, tmp_path: Path) -> None:
    results = kept(tmp_path, tuning, runs_of(tuning, VALUES))
    table = with_choices(final(tmp_path), results)
    words = {cell: chosen.words for cell, chosen in table.choices.items()}
    assert words["low", "any"] == ("strategy.max_grad_norm=0.1", "strategy.noise_multiplier=0.1", "optimizer.lr=1")
    assert words["high", "any"] == ("strategy.max_grad_norm=1", "strategy.noise_multiplier=1", "optimizer.lr=3")
    assert words["high", "tight"] == ("strategy.max_grad_norm=0.1", "strategy.noise_multiplier=1", "optimizer.lr=3")
    for job in table_jobs(table, tmp_path):
        own = table.words_of(
            next(r for r in table.rows if r.name == job.row), next(c for c in table.columns if c.name == job.column)
        )
        assert job.words[: len(own)] == own and set(words[job.row, job.column]) <= set(own)
        assert "data.val_users=10" not in job.words and job.seed in (5, 6)
    measured = runs_of(table, {("low", "any", ""): 0.7, ("low", "tight", ""): 0.6}, trial=None)
    refuse_other_words(table, measured)
    write_outputs(table, measured, {}, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"Chosen in [{tuning.name}]" in page and "| z = 1 | C = 1, z = 1, rate 3 | C = 0.1, z = 1, rate 3 |" in page
    head, low, high = cells(table, measured)
    assert head[5:7] == ["best bound − C = 0.1", "C = 0.1 − best bound"]
    assert low[5:7] == ["+10.00 [± 0.00, Holm ± 0.00]", "-10.00 [± 0.00, Holm ± 0.00]"] and high[5:7] == ["–", "–"]


def test_a_cell_without_candidates_keeps_its_own_words(tuning: Table, tmp_path: Path) -> None:
    results = kept(tmp_path, tuning, runs_of(tuning, VALUES))
    alone = "  low: {label: z = 0.1, chosen: {rows: [tight], columns: [low]}}\n  own: {words: [optimizer.lr=7]}\n"
    rows = "  low: {label: z = 0.1, chosen: {columns: [low]}}\n  high: {label: z = 1, chosen: {columns: [high]}}\n"
    final(tmp_path, rows, alone)
    final(tmp_path, "  tight: {label: C = 0.1, chosen: {rows: [tight]}}\ndifference: [[any, tight], [tight, any]]\n")
    table = with_choices(final(tmp_path, ", chosen: {rows: [tight, loose]}"), results)
    assert list(table.choices) == [("low", "any")]
    _, own = table.rows
    assert table.words_of(own, table.columns[0]) == (*table.words, "optimizer.lr=7")


def test_nothing_is_chosen_of_an_unfinished_table(tuning: Table, tmp_path: Path) -> None:
    runs = runs_of(tuning, VALUES)
    with pytest.raises(
        ConfigurationError, match=r"there is no .*runs.csv: run it first \(dpbench reproduce .*tuning.yaml"
    ):
        with_choices(final(tmp_path), tmp_path / "results")
    lacking = runs[~((runs["trial"] == "slow") & (runs["row"] == "loose") & (runs["seed"] == 1))]
    message = r"z = 0.1, best bound among 4 trials of .*, of which 1 are not finished .*such as C = 1, z = 0.1, rate 1"
    with pytest.raises(ConfigurationError, match=message):
        with_choices(final(tmp_path), kept(tmp_path, tuning, lacking))


def test_a_tuning_run_that_stands_there_twice_is_one_clear_error(tuning: Table, tmp_path: Path) -> None:
    runs = runs_of(tuning, VALUES)
    results = kept(tmp_path, tuning, pd.concat([runs, runs.tail(1)]))
    with pytest.raises(ConfigurationError, match="loose, high, seed 1 twice, which would count as two runs"):
        with_choices(final(tmp_path), results)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: [5, 6]", "seeds: [1, 6]", r"share the seeds \[1\]"),
        ("rows: [tight]", "rows: [tigth]", "which has no 'tigth'; known: tight, loose"),
        ("tuning.yaml", "final.yaml", "whose metric test/accuracy is not a validation metric"),
    ],
)
def test_a_choice_that_cannot_be_made_is_one_clear_error(
    tuning: Table, tmp_path: Path, old: str, new: str, message: str
) -> None:
    results = kept(tmp_path, tuning, runs_of(tuning, VALUES))
    with pytest.raises(ConfigurationError, match=message):
        with_choices(final(tmp_path, old, new), results)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric: val/accuracy", "metric: test/accuracy", "chosen by a metric of validation data"),
        ("rows:\n", "chosen_from: x\nrows:\n", "give both"),
        ("label: C = 1,", "label: C = 1, chosen: [a],", "rows.1.chosen: Input should be a valid dictionary"),
        ("rows:\n", "nominal: 7\nrows:\n", "nominal: Input should be a valid dictionary"),
        ("rows:\n", "difference: [[low]]\nrows:\n", "difference.0.1: Field required"),
    ],
)
def test_a_wrong_definition_of_choices_is_one_clear_error(
    tuning: Table, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "own" / "tuning.yaml"
    path.write_text(TUNING.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=message):
        read_table(str(path))


def test_choices_among_users_need_users_that_are_held_out(tuning: Table, tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.yaml"
    path.write_text(TUNING.replace("data.val_users=10, ", ""))
    with pytest.raises(ConfigurationError, match=r"tight-low-slow-0 holds nothing out: data.val_users=0"):
        table_jobs(read_table(str(path)), tmp_path)
