"""Runs by the command line: what they leave, what ends them, and how they go on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from dpbench.errors import ConfigurationError
from dpbench.harness.run._resume import prepare_folder
from dpbench.harness.run.saved_config import SCHEMA, write_config
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import FEW, PRIVATE, TINY, dpbench, signalled, train, weights
from tests.support.finished_runs import STEPS

LAST = 60
LONG = [*PRIVATE, f"trainer.max_steps={LAST}", "+optimizer.momentum=0.9"]
CONFIG: dict[str, Any] = {"run": {"resume": False}, "data": {}, "strategy": {}}


def result_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "result.json").read_text())
    return record


def test_a_run_leaves_its_record(trained: Callable[[str], Path]) -> None:
    run = trained("seeded")
    names = {".hydra", "metrics.csv", "ledger.jsonl", "checkpoints", "curves.png", "result.json"}
    assert names <= {path.name for path in run.iterdir()}
    result, table = result_of(run), pd.read_csv(run / "metrics.csv")
    assert (result["steps"], result["seed"], result["config"]["model"]["hidden"]) == (STEPS, 0, [16])
    assert 0 < result["metrics"]["test/accuracy"] <= 1
    assert 0 < result["seconds"] <= result["seconds_total"] < 1000
    assert all(key.startswith(("test/", "val/", "nonprivate/", "privacy/")) for key in result["metrics"])
    assert {"commit", "seconds", "config_hash", "hardware", "versions"} <= set(result)
    privacy = result["privacy"]
    epsilon = privacy["epsilon"]
    assert 0 < epsilon["pld"] < epsilon["rdp"] == pytest.approx(table["privacy/epsilon"].dropna().iloc[-1])
    assert (privacy["delta"], privacy["unit"], privacy["population"]) == (1e-4, "example", 1437)
    assert (privacy["neighbouring_relation"], privacy["noise_multiplier"]) == ("add_or_remove_one", 2)
    out, _ = dpbench(run, "account", ".", "--accountant", "rdp,pld", "--json")
    assert json.loads(out)["epsilons"] == pytest.approx(epsilon)
    baseline = trained("not_private")
    assert result_of(baseline)["privacy"]["epsilon"] == {"rdp": None, "pld": None}
    assert not (baseline / "ledger.jsonl").exists()
    assert "trained without privacy" in dpbench(baseline, "account", ".", status=1)[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"), "run", *LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times", "interval", "status", "said"),
    [
        (signal.SIGKILL, 1, 17, -9, ""),
        (signal.SIGKILL, 1, LAST - 1, -9, ""),  # before any checkpoint
        (signal.SIGINT, 2, 17, 130, "interrupted. The last checkpoint and the ledger are kept; continue with: "),
        (signal.SIGTERM, 1, 17, 143, "dpbench resume"),
    ],
)
def test_what_a_signal_ends_is_resumed_to_the_last_bit(
    number: signal.Signals, times: int, interval: int, status: int, said: str, uninterrupted: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    words = ["hydra.run.dir=run", *LONG, f"run.checkpoint_every_n_steps={interval}"]
    ended, err = signalled(tmp_path, number, 30, *words, times=times)
    assert ended == status and said in err and "Traceback" not in err
    made = len(read_ledger(run.ledger).releases)
    assert 30 <= made < LAST and run.checkpoint.exists() == (interval < 30)
    assert run.partial_result.exists() == (bool(said) and times == 1)
    if run.partial_result.exists():
        assert json.loads(run.partial_result.read_text())["steps"] == made
    _, err = dpbench(tmp_path, "train", *TINY, *words, status=1)
    assert "holds an unfinished run: continue it with `dpbench resume" in err
    dpbench(tmp_path, "resume", "run")
    assert torch.equal(weights(run.path), weights(uninterrupted)) and not run.partial_result.exists()
    assert run.ledger.read_bytes() == (uninterrupted / "ledger.jsonl").read_bytes()
    mine, theirs = result_of(run.path), result_of(uninterrupted)
    assert mine["privacy"] == theirs["privacy"]
    assert mine["metrics"]["test/accuracy"] == theirs["metrics"]["test/accuracy"]


@pytest.mark.slow
def test_resume_with_other_settings_counts_everything(tmp_path: Path) -> None:
    run = tmp_path / "run"
    signalled(tmp_path, signal.SIGKILL, 12, "hydra.run.dir=run", *LONG, "run.checkpoint_every_n_steps=5")
    before = len(read_ledger(run / "ledger.jsonl").releases)
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=False)["global_step"]
    assert saved < before
    dpbench(tmp_path, "resume", "run", "optimizer.lr=0.01", "trainer.max_steps=20")
    book = read_ledger(run / "ledger.jsonl")
    assert len(book.headers) == 2 and len(book.releases) == before + 20 - saved
    assert result_of(run)["privacy"]["releases"] == len(book.releases)


def test_unwritable_folder_and_two_runs_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "ledger.jsonl").touch()
    assert prepare_folder(Run(RunFolder(tmp_path / "run"), CONFIG)) is None
    for name, message in {
        "file/run": "cannot be written: Not a directory",
        "run": "unfinished run",
        "left": "holds the ledger of another run",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            prepare_folder(Run(RunFolder(tmp_path / name), CONFIG, private=False))


def test_an_evaluation_on_the_way_is_not_of_the_end(tmp_path: Path) -> None:
    run = Run(RunFolder(tmp_path), {**CONFIG, "run": {"resume": True, "schema": SCHEMA}})
    write_config(run)
    run.folder.evaluation.touch()
    prepare_folder(run)
    assert not run.folder.evaluation.exists()


@pytest.mark.slow
def test_a_signal_ends_the_whole_sweep(tmp_path: Path) -> None:
    sweep = ["-m", *LONG, "seed=1,2", "hydra.sweep.dir=sweep", "run.name=x"]
    status, err = signalled(tmp_path, signal.SIGINT, 10, *sweep)
    assert status == 130 and "dpbench resume" in err
    assert not list((tmp_path / "sweep").glob("1-x*"))


@pytest.mark.slow
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """It would train on, and write to the ledger of the run that somebody resumes."""
    words = [*LONG, "trainer.devices=2", "+trainer.strategy=ddp_fork"]
    status, _ = signalled(tmp_path, signal.SIGKILL, 20, "hydra.run.dir=run", *words)  # returns when all have ended
    assert status == -signal.SIGKILL
    assert len(read_ledger(tmp_path / "run/ledger.jsonl").releases) == 20
    dpbench(tmp_path, "resume", "run")
    assert result_of(tmp_path / "run")["privacy"]["releases"] == LAST


def test_what_is_held_out_is_looked_at_after_the_last_step(tmp_path: Path) -> None:
    """Whatever the interval of validations, and wherever a run was interrupted."""
    run = train(tmp_path, "run", *PRIVATE, "trainer.max_steps=2", "data.val_size=200")
    result, table = result_of(run), pd.read_csv(run / "metrics.csv", index_col="step")
    last = {2: pytest.approx(result["metrics"]["val/accuracy"])}
    assert table["val/accuracy"].dropna().to_dict() == last and table["test/accuracy"].notna().sum() == 1
    (run / "result.json").unlink()
    dpbench(tmp_path, "resume", "run")
    assert result_of(run)["metrics"] == result["metrics"]


def test_strategies_schedules_and_diagnostics_by_a_word(tmp_path: Path) -> None:
    words = ["strategy=adaptive_quantile", "schedule=cosine", "diagnostics=gradients", "trainer.log_every_n_steps=2"]
    run = train(tmp_path, "run", *words, "strategy.noise_multiplier=1", "trainer.max_steps=2")
    table = pd.read_csv(run / "metrics.csv")
    assert any(column.startswith("nonprivate/grad_norm/") for column in table)
    assert "privacy/bound/all" in table and (run / "nonprivate_diagnostics.png").exists()


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("not_private", "DPSGD +strategy.noise_multiplier=1", "not made by a private strategy"),
        ("seeded", "ClipOnly", "holds a private run"),
    ],
    ids=["reference", "private"],
)
def test_a_run_never_changes_between_private_and_not(
    kind: str, words: str, message: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    run = RunFolder(Path(shutil.copytree(trained(kind), tmp_path / "run")))
    run.result.unlink()
    more = f"trainer.max_steps=9 strategy._target_=dpbench.strategies.{words}"
    _, err = dpbench(tmp_path, "resume", "run", *more.split(), status=1)
    assert message in err


def test_priors_from_public_data(tmp_path: Path) -> None:
    out, _ = dpbench(tmp_path, "priors", *TINY, "strategy=discretized", "trainer.max_steps=2")
    override = out.splitlines()[-1]
    assert override.startswith("strategy.priors=[") and not list(tmp_path.iterdir())
    train(tmp_path, "run", *PRIVATE, "strategy=discretized", override, "trainer.max_steps=2")


def test_a_final_test_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """The training is kept, and `resume` with another word ends the run."""
    words = [*FEW, "hydra.run.dir=run", "+trainer.limit_test_batches=0.5"]
    _, err = dpbench(tmp_path, "train", *words, status=1)
    (line,) = [line for line in err.splitlines() if line.startswith("dpbench: error")]
    assert "trainer: You requested to check 0.5 of the" in line
    dpbench(tmp_path, "resume", "run", "trainer.limit_test_batches=1.0")
    assert (tmp_path / "run/result.json").exists()


def test_both_epsilons_of_microbatches(tmp_path: Path) -> None:
    run = train(tmp_path, "run", *PRIVATE, "strategy.microbatch_size=8", "trainer.max_steps=2")
    privacy = result_of(run)["privacy"]
    assert privacy["microbatch_size"] == 8
    assert privacy["epsilon_microbatch"]["rdp"] < privacy["epsilon"]["rdp"]
    out, _ = dpbench(run, "account", ".")
    assert out.index("epsilon ") < out.index("epsilon microbatch") < out.index("nominal")  # per example first
    facts = json.loads(dpbench(run, "account", ".", "--json")[0])
    assert facts["epsilon_microbatch"] == pytest.approx(privacy["epsilon_microbatch"]["rdp"])
