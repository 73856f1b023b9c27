"""`dpbench resume RUN trainer.max_steps=more` of a finished run: as if it had been that long from the beginning."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dpbench.errors import BudgetExhausted, Interrupted
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import read_result
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import dpbench
from tests.support.finished_runs import STEPS
from tests.support.processes import TWO, config_of, content_of, files_of
from tests.support.signalled import Signals

EPOCHS = ["trainer.max_steps=-1", "data.expected_batch_size=480"]  # three lots each

PLAIN = "strategy._target_=dpbench.strategies.NonPrivate"


def state_of(run: Path) -> torch.Tensor:
    """Weights, and what the optimizer keeps."""
    kept = torch.load(RunFolder(run).checkpoint, weights_only=False)
    leaves = tree_leaves([kept["state_dict"], kept["optimizer_states"][0]["state"], kept["global_step"]])
    return torch.cat([torch.as_tensor(leaf).double().flatten() for leaf in leaves if leaf is not None])


@pytest.mark.parametrize(
    ("words", "length", "first", "then"),
    [
        (["+optimizer.momentum=0.9", "ema_decay=0.9", "data.val_size=100"], "steps", 2, 4),
        (["strategy=adaptive_quantile", *EPOCHS], "epochs", 1, 2),
        ([PLAIN], "steps", 2, 4),
        pytest.param(TWO, "steps", 4, 7, marks=pytest.mark.long),
    ],
    ids=["steps", "epochs", "none", "two"],
)
def test_it_is_the_longer_run_to_the_last_bit(
    words: list[str], length: str, first: int, then: int, tmp_path: Path
) -> None:
    part, whole = tmp_path / "part", tmp_path / "whole"
    longer = [*words, f"trainer.max_{length}={then}"]
    train(config_of(*words, f"trainer.max_{length}={first}"), part)
    train(config_of(*longer), whole)
    train(config_of(*longer, "run.resume=true"), part)
    assert torch.equal(state_of(part), state_of(whole))
    one, other = (read_result(RunFolder(run)) for run in (part, whole))
    assert all(one[key] == other[key] for key in ("metrics", "steps", "privacy"))
    if PLAIN not in words:
        assert RunFolder(part).ledger.read_bytes() == RunFolder(whole).ledger.read_bytes()


@pytest.fixture
def run(trained: Callable[[str], Path], tmp_path: Path) -> RunFolder:
    """A finished run."""
    return RunFolder(Path(shutil.copytree(trained("seeded"), tmp_path / "run")))


def test_one_that_is_stopped_is_resumed_without_a_word(tmp_path: Path) -> None:
    run, whole = RunFolder(tmp_path / "run"), tmp_path / "whole"
    longer = "trainer.max_steps=4"
    train(config_of("trainer.max_steps=2"), run.path)
    with pytest.raises(Interrupted):
        train(config_of(longer, "run.resume=true"), run.path, [Signals(signal.SIGTERM, 3)])
    assert json.loads(run.partial_result.read_text())["steps"] == 3 and not run.finished
    dpbench(tmp_path, "resume", "run")
    train(config_of(longer), whole)
    assert content_of(run.path) == content_of(whole)
    assert not run.partial_result.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trainer.max_step=60", "there is no key trainer.max_step. Did you mean trainer.max_steps?"),
        (f"trainer.max_steps={STEPS}", f"has made {STEPS} steps: raise trainer.max_steps"),
        ("trainer.max_steps=9 optimizer.lr=3 seed=4", "remove optimizer.lr, seed, or train a new run"),
        ("trainer.max_steps=9 strategy.target_epsilon=0.01", "target_epsilon=0.01 allows no further step"),
        ("trainer.max_steps=9 trainer.precision=bf16-mixed", "original settings: remove trainer.precision"),
    ],
)
def test_what_is_refused_changes_nothing(words: str, message: str, run: RunFolder) -> None:
    before = files_of(run.path)
    _, err = dpbench(run.path.parent, "resume", "run", *words.split(), status=1)
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1 and message in err
    assert {**files_of(run.path), **before} == files_of(run.path)


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
    assert 3 < record["privacy"]["epsilon"]["rdp"] <= 4
    assert 5 < record["steps"] == len(read_ledger(RunFolder(run).ledger).releases) <= 9


def test_a_budget_that_allows_no_step_is_told(tmp_path: Path) -> None:
    with pytest.raises(BudgetExhausted):
        train(config_of("strategy.target_epsilon=0.01", "strategy.noise_multiplier=1"), tmp_path)


def test_a_schedule_that_was_planned_for_the_first_length_is_told(tmp_path: Path) -> None:
    config = config_of("schedule=linear", "trainer.max_steps=2")
    train(config, tmp_path)
    config["run"]["resume"] = True
    config["trainer"]["max_steps"] = 3
    told = r"planned for 2 steps \(schedule.total_iters\) and continues past its end as LinearLR does"
    with pytest.warns(UserWarning, match=told):
        train(config, tmp_path)
