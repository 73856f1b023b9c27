"""`dpbench resume RUN trainer.max_steps=more` of a finished run: as if it had been that long from the beginning."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.cli import main
from dpbench.errors import BudgetExhausted, Interrupted
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import read_result
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.processes import TWO, config_of, content_of
from tests.support.signalled import Signals

EPOCHS = ["trainer.max_steps=-1", "data.expected_batch_size=480"]  # three lots each

PLAIN = "strategy._target_=dpbench.strategies.NonPrivate"


def state_of(run: Path) -> dict[str, Any]:
    kept = torch.load(RunFolder(run).checkpoint, weights_only=False)
    return {
        "weights": kept["state_dict"],
        "optimizer": kept["optimizer_states"][0]["state"],
        "step": kept["global_step"],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("words", "first", "then"),
    [
        (["+optimizer.momentum=0.9"], "trainer.max_steps=5", "trainer.max_steps=9"),
        (["ema_decay=0.9", "data.val_size=100"], "trainer.max_steps=6", "trainer.max_steps=8"),
        (["strategy=adaptive_quantile", *EPOCHS], "trainer.max_epochs=1", "trainer.max_epochs=3"),
        ([PLAIN], "trainer.max_steps=3", "trainer.max_steps=7"),
        pytest.param(TWO, "trainer.max_steps=4", "trainer.max_steps=7", marks=pytest.mark.long),
    ],
    ids=["momentum", "average", "epochs", "none", "two"],
)
def test_it_is_the_longer_run_to_the_last_bit(tmp_path: Path, words: list[str], first: str, then: str) -> None:
    part, whole = tmp_path / "part", tmp_path / "whole"
    train(config_of(*words, first), part)
    train(config_of(*words, then), whole)
    train(config_of(*words, then, "run.resume=true"), part)
    assert same(state_of(part), state_of(whole))
    one, other = (read_result(RunFolder(run)) for run in (part, whole))
    assert (one["metrics"], one["steps"]) == (other["metrics"], other["steps"])
    assert one["privacy"] == other["privacy"]
    if PLAIN not in words:
        assert content_of(part)[0] == content_of(whole)[0]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("short") / "run"
    train(config_of("trainer.max_steps=5"), run)
    return run


def test_one_that_is_stopped_is_resumed_without_a_word(short: Path, tmp_path: Path) -> None:
    run, whole = shutil.copytree(short, tmp_path / "run"), tmp_path / "whole"
    before = RunFolder(run).result.read_bytes()
    with pytest.raises(Interrupted):
        train(config_of("run.resume=true"), run, [Signals(signal.SIGTERM, 6)])
    partial = json.loads(RunFolder(run).partial_result.read_text())
    assert partial["steps"] == 6 and not RunFolder(run).finished
    assert json.loads(before)["steps"] == 5
    assert main(["resume", str(run)]) == 0
    train(config_of(), whole)
    assert content_of(run) == content_of(whole)
    assert not RunFolder(run).partial_result.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "holds a finished run, and there is nothing to resume: raise trainer.max_steps"),
        (["trainer.max_step=60"], "there is no key trainer.max_step. Did you mean trainer.max_steps?"),
        (["run.max_time=1h"], "steps: raise trainer.max_steps."),
        (["trainer.max_steps=5"], "has made 5 steps: raise trainer.max_steps"),
        (["trainer.max_steps=3"], "trainer.max_steps=3 is less than the 5 steps that"),
        (["trainer.max_steps=9", "optimizer.lr=3", "seed=4"], "remove optimizer.lr, seed, or train a new run"),
        (["trainer.max_steps=9", "strategy.target_epsilon=0.01"], "target_epsilon=0.01 allows no further step"),
        (["trainer.max_steps=9", "trainer.precision=bf16-mixed"], "original settings: remove trainer.precision"),
        (
            ["trainer.max_steps=9", "model.hidden=[9]"],
            "can only be continued with its original settings: remove model.hidden",
        ),
    ],
)
def test_what_is_refused_changes_nothing(
    short: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(short, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["resume", str(run), *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1 and message in err
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert before == {path: content for path, content in after.items() if path in before}
    assert RunFolder(run).finished


@pytest.mark.slow
def test_a_budget_that_is_spent_stays_spent_and_a_larger_one_keeps_the_noise(tmp_path: Path) -> None:
    run = tmp_path / "run"
    solved = ["strategy.target_epsilon=3", "trainer.max_steps=5"]
    noise = train(config_of(*solved), run)["privacy"]["noise_multiplier"]
    more = config_of(solved[0], "trainer.max_steps=9", "run.resume=true")
    with pytest.raises(BudgetExhausted, match="target_epsilon=3 allows no further step"):
        train(more, run)
    assert read_result(RunFolder(run))["steps"] == 5
    more["strategy"]["target_epsilon"] = 4
    record = train(more, run)
    assert record["privacy"]["noise_multiplier"] == noise
    assert 3 < record["privacy"]["epsilon"]["rdp"] <= 4 and 5 < record["steps"] <= 9
    assert record["steps"] == len(read_ledger(RunFolder(run).ledger).releases)


def test_a_schedule_that_was_planned_for_the_first_length_is_told(tmp_path: Path) -> None:
    words = ["schedule=linear", "trainer.max_steps=4"]
    train(config_of(*words), tmp_path / "run")
    more = config_of(*words, "run.resume=true")
    more["trainer"]["max_steps"] = 6
    with pytest.warns(
        UserWarning, match=r"planned for 4 steps \(schedule.total_iters\) and continues past its end as LinearLR does"
    ):
        assert train(more, tmp_path / "run")["steps"] == 6
