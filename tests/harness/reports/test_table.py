"""Runs one below the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.groups import group_by
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs.folder import finished_runs_below
from dpbench.harness.runs.record import read_result
from tests.support.cli import TINY, dpbench
from tests.support.finished_runs import written

RUNS = """
a: {accuracy: 0.95, config.strategy.clipping: flat, config.strategy.hidden: [200, 200]}
b: {accuracy: null, privacy.unit: null, rdp: null, config.strategy.clipping: flat, config.strategy.hidden: [16]}
c: {accuracy: 0.9, rdp: 2.0, config.strategy.clipping: flat, config.strategy.hidden: null}
"""


def test_columns_are_what_differs(tmp_path: Path) -> None:
    table = RunTable.read([written(tmp_path, RUNS)])
    assert table.to_markdown().splitlines() == [
        "| run | strategy.hidden | test accuracy (%) | epsilon (RDP) | epsilon (PLD) | ms per step | steps |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| a | [200, 200] | 95.00 | 1.500 | – | 3.0 | 1000 |",
        "| b | [16] | – | inf | inf | 3.0 | 1000 |",
        "| c | – | 90.00 | 2.000 | – | 3.0 | 1000 |",
    ]
    assert list(table.frame()["epsilon (RDP)"]) == [1.5, float("inf"), 2.0]


def test_records_are_fit_for_json(tmp_path: Path) -> None:
    table = RunTable.read([written(tmp_path, RUNS)])
    for records in (table.to_records(), table.to_records(wide=True)):
        a, b, _ = json.loads(json.dumps(records, allow_nan=False))
        names = ("strategy.hidden", "test accuracy (%)", "epsilon (RDP)")
        assert [a[name] for name in names] == [[200, 200], 95, 1.5]
        assert [b[name] for name in names] == [[16], None, None]  # infinite
    groups = json.loads(json.dumps(group_by(table, ["seed"]).to_records(), allow_nan=False))
    assert {group["n"]: group["test accuracy (%)"] for group in groups} == {2: 92.5, 1: None}


def test_a_unit_other_than_the_example_is_told(tmp_path: Path) -> None:
    written(tmp_path, "a: {privacy.unit: user}\nb/b: {}\nb/c: {privacy.unit: null}")
    table = RunTable.read([tmp_path])
    assert list(table.frame()["unit"]) == ["user", "example", "–"]
    assert "| unit | user | example | – |" in table.compare()
    assert "unit" not in RunTable.read([tmp_path / "b"]).frame()


def test_what_was_found_of_a_generator_is_shown(tmp_path: Path) -> None:
    found = {"accuracy_cnn": 0.875, "coverage": 0.5, "judged_on": "test", "steps": 1000}
    evaluation = written(tmp_path, "a: {accuracy: null}") / "a" / "evaluation.json"
    evaluation.write_text(json.dumps(found))
    table = RunTable.read([tmp_path])
    assert list(table.frame()["accuracy of a CNN on synthetic images (%)"]) == [87.5]
    assert "| 87.50 | 1.500 |" in table.to_markdown()
    assert "| evaluation/coverage | 0.5 |" in table.compare()
    evaluation.write_text(json.dumps({**found, "steps": 900}))  # of a checkpoint on the way
    assert "accuracy of a CNN on synthetic images (%)" not in RunTable.read([tmp_path]).frame()


def test_each_folder_that_is_named_holds_a_run(tmp_path: Path) -> None:
    written(tmp_path, "a: {}")
    (tmp_path / "empty").mkdir()
    for name, why in {"nowhere": "no folder /", "a/result.json": "no folder /", "empty": "below the folder"}.items():
        for folders in ([tmp_path / name], [tmp_path / "a", tmp_path / name]):
            with pytest.raises(ConfigurationError, match=why):
                RunTable.read(folders)


def test_a_leaderboards_entry(tmp_path: Path) -> None:
    """A claim for each setting, over its seeds; its ε is that of the ledgers, rounded up."""
    small = [*TINY, "trainer.max_steps=2", "hydra.sweep.dir=runs"]
    dpbench(tmp_path, "train", "-m", *small, "seed=0,1", "optimizer.lr=0.1,0.2")
    (entry,) = yaml.safe_load(dpbench(tmp_path, "table", "runs", "--leaderboard")[0])
    assert [claim["seeds"] for claim in entry["claims"]] == [[0, 1], [0, 1]]
    claim = entry["claims"][0]
    records = [read_result(run) for run in finished_runs_below([tmp_path / "runs"])]
    largest = max(record["privacy"]["epsilon"]["pld"] for record in records)
    assert largest <= claim["epsilon"] < largest + 0.001 and claim["dp_accountant"] == "PLD"
    assert set(claim["ledgers_sha256"]) < {record["privacy"]["ledger"]["sha256"] for record in records}
    assert claim["command"].startswith("dpbench train ") and "seed" not in claim["command"]
    assert "remove --group-by" in dpbench(tmp_path, "table", "runs", "--leaderboard", "--group-by", "seed", status=1)[1]
    dpbench(tmp_path, "train", *TINY, "strategy=none", "trainer.max_steps=1", "hydra.run.dir=open")
    assert "no run has an epsilon" in dpbench(tmp_path, "table", "open", "--leaderboard", status=1)[1]


def test_a_column_says_where_runs_lie(tmp_path: Path) -> None:
    written(tmp_path, "a: {}\nb: {}")
    shown, _ = dpbench(tmp_path, "table", ".", "--folder")
    assert "| a | a |" in shown
    assert "run & test accuracy (\\%) & epsilon (RDP)" in dpbench(tmp_path, "table", ".", "--latex")[0]
    assert "remove one of them" in dpbench(tmp_path, "table", ".", "--folder", "--group-by", "seed", status=1)[1]
