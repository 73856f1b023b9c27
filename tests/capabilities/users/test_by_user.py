"""`dpbench train … records=users`, as a new user would: what is printed, written, drawn, resumed and refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.cli import main
from tests.support.cli import ROOT, start, weights

TINY = [
    "data=digits_users", "records=users", "model=mlp", "model.hidden=[8]", "logger=none", "trainer.max_steps=4",
    "data.expected_batch_size=10", "trainer.log_every_n_steps=1",
]  # fmt: skip
pytestmark = pytest.mark.own_key
PRIVATE = ["strategy.noise_multiplier=1.0", "strategy.delta=1e-4"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(run: str, *words: str) -> tuple[int, Path]:
    return main(["train", *TINY, f"hydra.run.dir={run}", *words]), Path(run)


def trained(run: str, *words: str) -> dict[str, Any]:
    status, folder = train(run, *words)
    assert status == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.slow
def test_the_unit_is_said_wherever_epsilon_is(capsys: pytest.CaptureFixture[str]) -> None:
    result = trained("run", *PRIVATE)
    privacy = result["privacy"]
    assert (privacy["unit"], privacy["population"], privacy["sampling"]["unit"]) == ("user", 100, "user")
    shown = capsys.readouterr().out
    assert "unit: user" in shown and "expected batch size 10 of 100 users" in shown
    assert main(["account", "run"]) == 0
    assert "unit                       user" in (shown := capsys.readouterr().out) and "10 users" in shown
    trained("example", *PRIVATE, "records=examples", "data.unit=example")
    capsys.readouterr()
    assert main(["table", "run", "example"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert {row[rows[0].index("unit")] for row in rows[2:]} == {"user", "example"}


def test_the_baseline_is_federated_averaging() -> None:
    result = trained("run", "strategy=none", "trainer.max_steps=20")
    assert result["privacy"]["unit"] is None and not Path("run/ledger.jsonl").exists()
    assert result["metrics"]["test/accuracy"] > 0.3  # of ten classes


@pytest.mark.slow
def test_everything_else_goes_with_it() -> None:
    options = ["diagnostics=gradients", "ema_decay=0.5", "strategy.metrics={accuracy: 1.0, loss: 3.0}"]
    trained("run", *PRIVATE, *options)
    metrics = Path("run/metrics.csv").read_text().splitlines()[0]
    assert "private/accuracy" in metrics and "nonprivate/grad_norm" in metrics


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_identically() -> None:
    words = [*PRIVATE, "trainer.max_steps=8", "run.checkpoint_every_n_steps=3"]
    trained("whole", *words)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    killed = [str(int(signal.SIGKILL)), "5", "1", "train", *TINY, *words, "hydra.run.dir=part"]
    start(Path(), *killed, module="tests.support.signalled", PYTHONPATH=path).communicate(timeout=600)
    assert not Path("part/result.json").exists() and main(["resume", "part"]) == 0
    assert torch.equal(weights(Path("whole")), weights(Path("part")))
    assert Path("part/ledger.jsonl").read_bytes() == Path("whole/ledger.jsonl").read_bytes()


@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_users_that_diverge_are_counted_where_metrics_are_logged() -> None:
    status, run = train("run", *PRIVATE, "records.local.lr=1e25")
    assert status == 0 and "nonprivate/diverged_users" in (run / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["records=examples"], "the items of the data set are users"),
        (["data.unit=example"], "with data.unit=user); or leave out records= (records=examples)"),
        (["records.local.batch_size=0"], "records.local.batch_size must be a whole number from 1 on or null, not 0"),
        (["records.local.lr=0"], "records.local.lr must be a positive number, not 0"),
        (["records.local.lrr=1"], "there is no key records.local.lrr. Did you mean records.local.lr"),
        (["data.expected_batch_size=101"], "between 1 and the 100 training users, not 101"),
        (["data.sampling=shuffled"], "no accountant covers"),
        (["data.sampling=full"], "full batches hold all 100 training users: set expected_batch_size=100"),
        (["strategy.microbatch_size=2"], "microbatch_size applies to records made of examples"),
        (["strategy.max_physical_batch_size=2"], "max_physical_batch_size applies to records made of examples"),
        (["+trainer.accumulate_grad_batches=2"], "where records are users, who are trained one by one"),
        (["trainer.precision=16-mixed"], "scales the loss"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_one_clear_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = train("run", *PRIVATE, *words)
    shown = capsys.readouterr().err
    assert status != 0 and message in shown and len(shown.strip().splitlines()) == 1
