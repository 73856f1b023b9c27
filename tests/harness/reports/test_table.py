"""Runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.groups import group_by
from dpbench.harness.reports.run_table import RunTable
from tests.support.finished_runs import finished


def test_columns_are_what_differs(tmp_path: Path) -> None:
    finished(tmp_path / "sweep/a", 0.95, 1.5, max_grad_norm=1.0, clipping="flat")
    finished(tmp_path / "sweep/b", 0.96, None, max_grad_norm=2.0, clipping="flat")
    finished(tmp_path / "c", None, 2.0, quantile=0.5, clipping="flat")
    table = RunTable.read([tmp_path / "sweep", tmp_path / "c"]).frame()
    assert list(table["run"]) == ["a", "b", "c"]
    assert "strategy.max_grad_norm" in table and "strategy.clipping" not in table and "strategy.quantile" not in table
    assert list(table["epsilon (RDP)"]) == [1.5, float("inf"), 2.0]
    text = RunTable.read([tmp_path / "sweep", tmp_path / "c"]).to_markdown()
    assert "| a | 1 | 95.00 | 1.500 | inf | 3.0 | 1000 |" in text
    assert "| c | – | – |" in text  # a missing cell stays


def test_options_may_be_lists(tmp_path: Path) -> None:
    for name, hidden in (("a", [200, 200]), ("b", [16])):
        finished(tmp_path / name, 0.9, 1.5, hidden=hidden)
    finished(tmp_path / "c", 0.9, 1.5, hidden=None)
    assert "| a | [200, 200] |" in RunTable.read([tmp_path]).to_markdown()


def test_a_unit_other_than_the_example_is_told(tmp_path: Path) -> None:
    for name, unit in (("a", "user"), ("b", "example"), ("c", None)):
        finished(tmp_path / name, 0.9, 1.5)
        path = tmp_path / name / "result.json"
        record = json.loads(path.read_text())
        record["privacy"]["unit"] = unit
        path.write_text(json.dumps(record))
    table = RunTable.read([tmp_path]).frame()
    assert dict(zip(table["run"], table["unit"], strict=True)) == {"a": "user", "b": "example", "c": "–"}
    assert "unit" not in RunTable.read([tmp_path / "b", tmp_path / "c"]).frame()
    assert "| unit | user | example | – |" in RunTable.read([tmp_path]).compare()


def test_what_was_found_of_a_generator_is_shown(tmp_path: Path) -> None:
    finished(tmp_path / "a", None, 1.5)
    found = {"accuracy_cnn": 0.875, "coverage": 0.5, "judged_on": "test", "steps": 1000}
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps(found))
    table = RunTable.read([tmp_path]).frame()
    assert list(table["accuracy of a CNN on synthetic images (%)"]) == [87.5]
    assert "| 87.50 | 1.500 |" in RunTable.read([tmp_path]).to_markdown()
    text = RunTable.read([tmp_path]).compare()
    assert "| accuracy of a CNN on synthetic images (%) | 87.50 |" in text and "| evaluation/coverage | 0.5 |" in text
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps({**found, "judged_on": "val"}))
    assert RunTable.read([tmp_path]).frame()["evaluation split"].tolist() == ["val"]
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps({**found, "steps": 900}))  # of a checkpoint on the way
    assert "accuracy of a CNN on synthetic images (%)" not in RunTable.read([tmp_path]).frame()
    (tmp_path / "a" / "evaluation.json").write_text("{")
    with pytest.raises(ConfigurationError, match="evaluation.json is damaged: delete"):
        RunTable.read([tmp_path]).frame()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no finished run"):
        RunTable.read([tmp_path]).frame()


def test_each_folder_that_is_named_holds_a_run(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.9, 1.5)
    (tmp_path / "empty").mkdir()
    for name, why in {"nowhere": "is not there", "a/result.json": "is a file", "empty": "no finished run"}.items():
        with pytest.raises(ConfigurationError, match=why):
            RunTable.read([tmp_path / "a", tmp_path / name]).frame()


def test_a_model_that_learned_from_canaries_shows_no_accuracy(tmp_path: Path) -> None:
    for name, target in (("a", "dpbench.capabilities.canaries.canaries.GradientCanaries"), ("b", None)):
        finished(tmp_path / name, 0.9, 1.5)
        path = tmp_path / name / "result.json"
        record = json.loads(path.read_text())
        record["config"]["audit"] = {"_target_": target}
        path.write_text(json.dumps(record))
    table = RunTable.read([tmp_path]).frame().set_index("run")
    assert table.loc["b", "test accuracy (%)"] == 90 and table["test accuracy (%)"].isna()["a"]
    assert list(table["trained with canaries"]) == ["yes", "–"]


def test_a_column_says_where_runs_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "a", 0.9, 1.0)
    finished(tmp_path / "b", 0.9, 1.0)
    assert main(["table", str(tmp_path), "--folder"]) == 0
    shown = capsys.readouterr().out
    assert main(["table", str(tmp_path), "--latex"]) == 0
    assert "run & test accuracy (\\%) & epsilon (RDP)" in capsys.readouterr().out
    assert f"| a | {tmp_path / 'a'} |" in shown and f"| b | {tmp_path / 'b'} |" in shown
    assert main(["table", str(tmp_path), "--folder", "--group-by", "seed"]) == 1
    assert "leave one out" in capsys.readouterr().err


def test_records_are_fit_for_json(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.95, 1.5, max_grad_norm=1.0, hidden=[200])
    finished(tmp_path / "b", None, None, max_grad_norm=2.0)
    one, two = json.loads(json.dumps(RunTable.read([tmp_path]).to_records(), allow_nan=False))
    assert one["run"] == "a" and one["test accuracy (%)"] == 95 and one["epsilon (RDP)"] == 1.5
    assert two["test accuracy (%)"] is None and two["epsilon (RDP)"] is None  # infinite
    (group,) = json.loads(json.dumps(group_by(RunTable.read([tmp_path]), ["seed"]).to_records(), allow_nan=False))
    assert group["n"] == 2 and group["test accuracy (%)"] is None
    one, two = json.loads(json.dumps(RunTable.read([tmp_path]).to_records(wide=True), allow_nan=False))
    assert one["strategy.max_grad_norm"] == 1 and two["strategy.max_grad_norm"] == 2
    assert one["test accuracy (%)"] == 95 and two["test accuracy (%)"] is None
