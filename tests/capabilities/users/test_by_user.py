"""`dpbench train … records=users`, as a new user would: what is printed, written, drawn, resumed and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.cli import main

TINY = [
    "data=digits_users", "records=users", "model=mlp", "model.hidden=[8]", "logger=none", "trainer.max_steps=4",
    "data.expected_batch_size=10", "trainer.log_every_n_steps=1",
]  # fmt: skip
pytestmark = pytest.mark.own_key
PRIVATE = ["strategy.noise_multiplier=1.0", "strategy.delta=1e-4"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(run: str, *words: str) -> int:
    return main(["train", *TINY, f"hydra.run.dir={run}", *words])


@pytest.mark.slow
def test_the_unit_is_said_wherever_epsilon_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", *PRIVATE) == 0
    privacy = json.loads(Path("run/result.json").read_text())["privacy"]
    assert (privacy["unit"], privacy["population"], privacy["sampling"]["unit"]) == ("user", 100, "user")
    shown = capsys.readouterr().out
    assert "unit: user" in shown and "expected batch size 10 of 100 users" in shown
    assert main(["account", "run"]) == 0
    assert "unit                       user" in (shown := capsys.readouterr().out) and "10 users" in shown
    assert main(["table", "run"]) == 0
    assert "| user |" in capsys.readouterr().out


def test_the_baseline_is_federated_averaging() -> None:
    assert train("run", "strategy=none", "trainer.max_steps=12") == 0
    result = json.loads(Path("run/result.json").read_text())
    assert result["privacy"]["unit"] is None and not Path("run/ledger.jsonl").exists()
    assert result["metrics"]["test/accuracy"] > 0.25  # of ten classes


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.unit=example", "with data.unit=user); or leave out records= (records=examples)"),
        ("records.local.lrr=1", "there is no key records.local.lrr. Did you mean records.local.lr"),
        ("+trainer.accumulate_grad_batches=2", "users are trained one by one anyway"),
        ("trainer.precision=16-mixed", "scales the loss"),
    ],
)
def test_one_clear_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = train("run", *PRIVATE, word)
    shown = capsys.readouterr().err
    assert status != 0 and message in shown and len(shown.strip().splitlines()) == 1
