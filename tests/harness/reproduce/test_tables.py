"""Tables: their definitions, and which runs they take."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from dpbench.cli.experiments import part_of
from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce import reproduction
from dpbench.harness.reproduce._results import finished_runs, with_choices
from dpbench.harness.reproduce.jobs import table_jobs
from dpbench.harness.reproduce.tables import MEASURES, read_table, table_names
from tests.harness.reproduce.digits_table import edited
from tests.harness.reproduce.test_outputs import finish


def test_generators_are_evaluated_after_training(definition: Path, tmp_path: Path) -> None:
    asked = "evaluation/accuracy_cnn\nmore: [evaluation/coverage]"
    table = read_table(edited(definition, "test/accuracy", asked))
    job = table_jobs(table, tmp_path)[0]
    train = ["train", *job.words, f"hydra.run.dir='{job.folder}'"]
    judge = ["evaluate", job.folder, "--num-samples", "60000", "--split", "test"]
    assert job.commands() == [train, judge] and job.state() == "new"
    job.path.mkdir(parents=True)
    (job.path / "config.yaml").touch()
    assert job.commands() == [["resume", job.folder], judge] and job.state() == "begun"
    finish(job, config_hash=job.config_hash, code_hash="def", commit="abc", versions={}, steps=3)
    assert job.commands() == [judge] and job.state() == "begun" and job.result() is None
    found = {"seed": 0, "features": "digits_cnn", "judged_on": "test", "accuracy_cnn": 0.75, "coverage": 0.5}
    for images, steps, commands in (
        (200, 3, [judge]),  # somebody looked at fewer images
        (60_000, 2, [judge]),  # somebody looked before it was finished
        (60_000, 3, []),
    ):
        evaluation = {**found, "images": images, "steps": steps}
        (job.path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
        assert job.commands() == commands
    assert job.state() == "done"
    done = finished_runs(table, [job])
    assert done["value"].tolist() == [0.75] and done["evaluation/coverage"].tolist() == [0.5]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("_tuning")) for name in table_names()],
)
def test_every_table_of_the_project_composes(name: str, tmp_path: Path) -> None:
    table = read_table(name)
    if table.chosen_from:
        table = with_choices(table, _tuned(table.chosen_from, tmp_path))
    cells = [" ".join(table.words_of(*cell)) for cell in product(table.rows, table.columns, table.trials)]
    assert len(set(cells)) == len(cells)
    # Each line once, not each pair of lines: a job takes a tenth of a second.
    lines = [table.rows, table.columns, table.trials]
    for place in range(max(map(len, lines))):
        rows, columns, trials = ((group[place % len(group)],) for group in lines)
        one = table.selected((), (), 1).model_copy(update={"rows": rows, "columns": columns, "trials": trials})
        assert len(table_jobs(one, tmp_path)) == 1


def _tuned(name: str, folder: Path) -> Path:
    """Results in which a tuning table is finished, its last row and trial the best."""
    tuning = read_table(name)
    lines = [
        {"row": row.name, "column": column.name, "trial": trial.name, "seed": seed, "value": place}
        for place, (row, trial) in enumerate((row, trial) for row in tuning.rows for trial in tuning.trials)
        for column in tuning.columns
        for seed in tuning.seeds
    ]
    (folder / tuning.folder).mkdir()
    pd.DataFrame(lines).to_csv(folder / tuning.folder / "runs.csv", index=False)
    return folder


def test_jobs_are_named_by_what_they_compute(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition))
    jobs = table_jobs(table, tmp_path)
    assert [job.seed for job in jobs] == [0] * 4 + [1] * 4  # an interrupted table has every cell
    assert [job.steps for job in jobs[:4]] == [3, 3, 6, 6]
    again = table_jobs(read_table(edited(definition, "[8]", "[9]")), tmp_path)
    elsewhere = table_jobs(table, tmp_path, part_of(["trainer=gpu"]).trainer)
    assert len({job.folder for job in (*jobs, *again, *elsewhere)}) == 24
    assert all(job.words[-1] == "trainer=gpu" for job in elsewhere)


def test_a_wrong_definition_is_one_clear_error(definition: Path) -> None:
    for old, new, message in (
        ("metric: test/accuracy", "metric: test/", "metric must be one of .*not 'test/'"),
        ("seeds: 2", "seeds: 0", r"seeds must be a list, or how many there are \(1 to 1,000\), not 0"),
        ("seeds: 2", "seeds: [1, -1]", "seeds.1: Input should be greater than or equal to 0"),
        ("seeds: 2", "seeds: [1, 1]", "seeds contains a seed twice: 1, 1"),
        ("hours: 0.01", "samples: 1\nhours: 0.01", "samples: Input should be a valid boolean"),
        ("title: Digits", "titel: Digits", "title: Field required; titel: Extra inputs are not permitted"),
        ("hours: 0.01", "name: own/name\nhours: 0.01", "multiple values for keyword argument 'name'"),
        ("[strategy=none]", "[3]", "columns.1.words.0: Input should be a valid string"),
        ("  short: {private", "  shorter: {private", "which is not a cell"),
        (
            "[private, plain]",
            "[private, none]",
            "must name two columns.* 'none' is not a column; known: private, plain",
        ),
        ("rows:", "rows: [", "defines no table: line [0-9]+: "),
        ("hours: 0.01", "series: [bounds]\nhours: 0.01", "series.0: Input should be a valid dictionary"),
        ("hours: 0.01", "trials: 5\nhours: 0.01", r"trials: it must be a mapping \(KEY: VALUE\)"),
        ("[strategy=none]", "strategy=none", "columns.1.words: Input should be a valid tuple"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            read_table(edited(definition, old, new))


def test_choices_need_records_that_are_held_out(definition: Path, tmp_path: Path) -> None:
    table = read_table(edited(definition, "metric: test/accuracy", "metric: val/accuracy"))
    with pytest.raises(ConfigurationError, match="shows val/accuracy, and short-private-0 holds out no records"):
        table_jobs(table, tmp_path)


def test_words_that_do_not_compose_name_the_cell(definition: Path, tmp_path: Path) -> None:
    table = read_table(edited(definition, "strategy=none", "strategy=nothing"))
    with pytest.raises(ConfigurationError, match="own/digits, short, plain: there is no strategy=nothing"):
        table_jobs(table, tmp_path)


def test_a_table_shows_only_what_its_runs_measure(definition: Path, tmp_path: Path) -> None:
    asked = "nonprivate/train_accuracy\nmore: {nonprivate/accuracy_gap: gap}"
    table = read_table(edited(definition, "test/accuracy", asked)).selected(["short"], (), 1)
    with pytest.raises(ConfigurationError, match=r"set diagnostics\.training_records"):
        table_jobs(table, tmp_path)
    assert len(table_jobs(table, tmp_path, ["diagnostics=memorization"])) == 2
    assert table.measure.clipped(-200, 200) == (0, 100)
    assert MEASURES["nonprivate/accuracy_gap"].clipped(-200, 200) == (-100, 100)


def test_results_of_the_checkout_are_made_by_committed_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = Path(__file__).parents[3] / "results"
    for state in ("abc", None):
        monkeypatch.setattr(reproduction, "commit", lambda state=state: state)
        reproduction.refuse_changed_code(results)
    monkeypatch.setattr(reproduction, "commit", lambda: "abc+changes")
    reproduction.refuse_changed_code(tmp_path)
    with pytest.raises(ConfigurationError, match="made by committed code"):
        reproduction.reproduce_table("recipes/mnist", reproduction.Part(), results, tmp_path, existing="keep")
    assert not list(tmp_path.iterdir())
