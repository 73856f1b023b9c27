"""Accounting from Python: the figures of the commands, and their refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dpbench
from dpbench.cli import main
from dpbench.errors import ConfigurationError, LedgerError

LEDGER = Path(__file__).parents[2] / "golden" / "ledgers" / "full.jsonl"


def test_calibrate_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    setting = dpbench.calibrate(epsilon=3.0, delta=1e-5, population=60_000, batch_size=256, epochs=2)
    words = "calibrate --epsilon 3 --delta 1e-5 --population 60000 --batch-size 256 --epochs 2 --json"
    assert main(words.split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (setting.noise_multiplier, setting.steps) == (facts["noise_multiplier"], facts["steps"])
    assert setting.epsilon == 3.0
    with pytest.raises(ConfigurationError, match="batch_size requires population"):
        dpbench.calibrate(epsilon=3.0, delta=1e-5, batch_size=256, epochs=2)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 10.5}, {"population": 0}, {"epsilon": "3"}, {"delta": 1.5}, {"epochs": 2}, {"steps": True}],
)
def test_values_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        dpbench.calibrate(**{"epsilon": 3.0, "delta": 1e-5, "population": 1000, "batch_size": 50, "steps": 20, **wrong})


def test_what_is_no_bound_is_said() -> None:
    with pytest.warns(UserWarning, match="the epsilon of gdp is not a proven bound"):
        dpbench.epsilon(LEDGER, delta=1e-6, accountant="gdp")
    with pytest.warns(UserWarning, match=r"delta=0.01 is not below 1/1000"):
        dpbench.calibrate(epsilon=3.0, delta=0.01, population=1000, batch_size=50, steps=20)
    with pytest.raises(ConfigurationError, match="unknown accountant 'all'"):
        dpbench.epsilon(LEDGER, accountant="all")
    with pytest.raises(ConfigurationError, match="at least one ledger"):
        dpbench.epsilon()


def test_calibrate_names_what_is_missing_by_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--epsilon", "3"]) == 1
    assert "missing: --noise-multiplier, --sample-rate, --steps, --delta" in capsys.readouterr().err


def test_epsilon_is_that_of_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", str(LEDGER), "--delta", "1e-6", "--json"]) == 0
    assert dpbench.epsilon(LEDGER, delta=1e-6) == json.loads(capsys.readouterr().out)["epsilon"]
    cut = tmp_path / "ledger.jsonl"
    cut.write_bytes(LEDGER.read_bytes()[:-5])
    with pytest.raises(LedgerError, match="cut off; the epsilon of the rest is not a guarantee"):
        dpbench.epsilon(cut)


def test_a_ledger_is_a_table_of_its_sums() -> None:
    ledger = dpbench.read_ledger(LEDGER)
    table = ledger.to_pandas()
    assert len(table) == sum(len(release.queries) for _, release in ledger.releases)
    first = ledger.releases[0][1]
    assert table.loc[0, "noise_std"] == first.queries[0].noise_std
    assert table.loc[0, "rate"] == first.sampling.rate
