"""Tables that choose on validation data: the best of trials, and another table that looks up what was chosen."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce._outputs import write_outputs
from dpbench.harness.reproduce._results import best_trials, of_best_trials, refuse_other_words, with_choices
from dpbench.harness.reproduce._summary import cells
from dpbench.harness.reproduce.jobs import table_jobs
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
VALUES = """
tight low slow .8, tight low fast .7, loose low slow .5, loose low fast .6,
tight high slow .3, tight high fast .4, loose high slow .45, loose high fast .5
"""
"""Row, column, trial, and mean of two seeds; the best of each column: tight slow, loose fast."""


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


def runs_of(table: Table, text: str) -> pd.DataFrame:
    """What runs.csv holds; the second seed is a tenth better, and half a percent worse in the middle."""
    values = {tuple(cell.split()[:-1]): float(cell.split()[-1]) for cell in text.split(",")}
    lines = [
        {
            "row": row.name, "column": column.name, "trial": trial.name, "seed": seed, "metric": table.metric,
            "value": values[key] + 0.1 * place - 0.05, "delta": 1e-3, "epsilon_rdp": 7.0,
            "epsilon_pld": None, "epsilon_microbatch_rdp": None, "unit": "user", "population": 90,
            "neighbouring_relation": "add_or_remove_one", "seconds": 1.0, "commit": "abc", "cpu": "x", "gpu": None,
            "torch": "2", "threads": 1, "words": " ".join((*table.words_of(row, column, trial), f"seed={seed}")),
        }
        for row in table.rows
        for column in table.columns
        for trial in table.trials
        if (key := tuple(filter(None, (row.name, column.name, trial.name)))) in values
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
    assert sorted(" ".join((*cell, trial)) for cell, trial in best.items()) == [
        "loose high fast",
        "loose low fast",
        "tight high fast",
        "tight low slow",
    ]
    assert len(of_best_trials(tuning, runs)) == 2 * 4
    _, tight, loose = cells(tuning, runs)
    assert tight[1:5] == ["80.00 ± 7.07", "2", "40.00 ± 7.07", "2"] and loose[1] == "60.00 ± 7.07"
    partly = runs[(runs["row"] != "tight") | (runs["trial"] == "fast")]
    write_outputs(tuning, partly, {}, tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| C = 0.1 | rate 3 (of 1) | rate 3 (of 1) |" in page and "| C = 1 | rate 3 | rate 3 |" in page
    assert "the best of 2 trials (rate 1; rate 3)" in page
    with pytest.raises(ConfigurationError, match="tight, low, fast was run with other overrides"):
        refuse_other_words(tuning, partly.assign(words=partly["words"].str.replace("optimizer.lr=3", "optimizer.lr=1")))


def test_of_errors_the_least_is_best(tuning: Table, tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.yaml"
    path.write_text(TUNING.replace("val/accuracy", "val/mean_squared_error"))
    table = read_table(str(path))
    runs = runs_of(table, VALUES)
    assert best_trials(table, runs)["tight", "low"][0].name == "fast"
    chosen = with_choices(final(tmp_path), kept(tmp_path, table, runs))
    assert chosen.choices["low", "any"].label == "C = 1, z = 0.1, rate 1"


def test_another_table_looks_up_what_was_best(tuning: Table, tmp_path: Path) -> None:
    results = kept(tmp_path, tuning, runs_of(tuning, VALUES))
    table = with_choices(final(tmp_path), results)
    words = {" ".join(cell): " ".join(chosen.words) for cell, chosen in table.choices.items()}
    assert words == {
        "low any": "strategy.max_grad_norm=0.1 strategy.noise_multiplier=0.1 optimizer.lr=1",
        "low tight": "strategy.max_grad_norm=0.1 strategy.noise_multiplier=0.1 optimizer.lr=1",
        "high any": "strategy.max_grad_norm=1 strategy.noise_multiplier=1 optimizer.lr=3",
        "high tight": "strategy.max_grad_norm=0.1 strategy.noise_multiplier=1 optimizer.lr=3",
    }
    for job in table_jobs(table.selected((), (), 1), tmp_path):
        assert words[f"{job.row} {job.column}"] in " ".join(job.words)
        assert "data.val_users=10" not in job.words
    measured = runs_of(table, "low any .7, low tight .6").assign(trial=None)
    refuse_other_words(table, measured)
    write_outputs(table, measured, {}, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"Chosen in [{tuning.name}]" in page and "| z = 1 | C = 1, z = 1, rate 3 | C = 0.1, z = 1, rate 3 |" in page
    head, low, high = cells(table, measured)
    assert head[5:7] == ["best bound − C = 0.1", "C = 0.1 − best bound"]
    assert low[5:7] == ["+10.00 [± 0.00, Holm ± 0.00]", "-10.00 [± 0.00, Holm ± 0.00]"] and high[5:7] == ["–", "–"]


def test_nothing_is_chosen_of_an_unfinished_table(tuning: Table, tmp_path: Path) -> None:
    runs = runs_of(tuning, VALUES)
    with pytest.raises(ConfigurationError, match=r"no .*runs.csv: run it first \(dpbench reproduce .*tuning.yaml"):
        with_choices(final(tmp_path), tmp_path / "results")
    lacking = runs[~((runs["trial"] == "slow") & (runs["row"] == "loose") & (runs["seed"] == 1))]
    message = r"z = 0.1, best bound among 4 trials of .*, of which 1 are not finished .*such as C = 1, z = 0.1, rate 1"
    with pytest.raises(ConfigurationError, match=message):
        with_choices(final(tmp_path), kept(tmp_path, tuning, lacking))
    results = kept(tmp_path, tuning, pd.concat([runs, runs.tail(1)]))
    with pytest.raises(ConfigurationError, match="loose, high, seed 1 twice, which would count as two runs"):
        with_choices(final(tmp_path), results)


def test_a_choice_that_cannot_be_made_is_one_clear_error(tuning: Table, tmp_path: Path) -> None:
    results = kept(tmp_path, tuning, runs_of(tuning, VALUES))
    whole = (tmp_path / "own" / "final.yaml").read_text()
    for old, new, message in (
        ("seeds: [5, 6]", "seeds: [1, 6]", r"share the seeds \[1\]"),
        ("rows: [tight]", "rows: [tigth]", "which has no 'tigth'; known: tight, loose"),
        ("tuning.yaml", "final.yaml", "whose metric test/accuracy is not a validation metric"),
    ):
        (tmp_path / "own" / "final.yaml").write_text(whole)
        with pytest.raises(ConfigurationError, match=message):
            with_choices(final(tmp_path, old, new), results)


def test_a_wrong_definition_of_choices_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "tuning.yaml"
    for old, new, message in (
        ("metric: val/accuracy", "metric: test/accuracy", "chosen by a metric of validation data"),
        ("rows:\n", "chosen_from: x\nrows:\n", "give both"),
        ("label: C = 1,", "label: C = 1, chosen: [a],", "rows.1.chosen: Input should be a valid dictionary"),
        ("data.val_users=10, ", "", "tight-low-slow-0 holds out no records: set data.val_users"),
    ):
        path.write_text(TUNING.replace(old, new, 1))
        with pytest.raises(ConfigurationError, match=message):
            table_jobs(read_table(str(path)), tmp_path)
