"""`dpbench audit` of runs on noise: real trainings, correct and broken, and one line for each bad input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dpbench.capabilities.auditing.label_scores import label_scores, margins
from dpbench.cli import main
from dpbench.harness.runs.folder import RunFolder
from tests.support.finished_runs import RUNS
from tools.audits.mutants import MUTANTS


def train(folder: Path, steps: int, *words: str) -> Path:
    assert main(["train", *RUNS["noise"], f"trainer.max_steps={steps}", *words, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def run(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained("noise"), tmp_path / "run"))


def test_margins_are_log_odds() -> None:
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    odds = logits.softmax(1)[range(5), labels]
    torch.testing.assert_close(margins(logits, labels), (odds / (1 - odds)).log())


@pytest.mark.slow
def test_records_that_were_inserted_are_no_canaries(tmp_path: Path) -> None:
    """Copies of one record are learned together, which epsilon for one record does not forbid."""
    words = ["strategy.noise_multiplier=0.7", "data.inserted.records=5", "data.inserted.copies=20"]
    run = train(tmp_path / "run", 3, *words)
    scores = label_scores(RunFolder(run))
    assert (len(scores.members), scores.left_out) == (300, 100)
    assert main(["audit", str(run)]) == 0


def test_a_correct_run_is_consistent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0
    text = capsys.readouterr().out
    for words in ("by labels: 300 training records, final weights", "labels, family", "CONSISTENT", "not a proof"):
        assert words in text, words
    assert main(["audit", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["by"], facts["members"], facts["others"]) == ("labels", 300, 400)
    tested = json.loads((run / RunFolder.result).read_text())["metrics"]["test/accuracy"]
    assert facts["recalled"] > facts["guessed"] == pytest.approx(tested)  # the final weights, those that were tested


SPOILED = {
    "of another architecture": (RunFolder.config, r"hidden:\n  - 32", "hidden:\n  - 31"),
    "records, and the data set contains 301": (RunFolder.config, "train_size: 300", "train_size: 301"),
    "ledger.jsonl: ": (RunFolder.ledger, '"number":39.*\n', ""),
    "has no canaries": (RunFolder.config, "name: random_noise", "name: digits"),
    "went on from 39 to 40 steps": (RunFolder.result, '"steps": 40', '"steps": 39'),
    "has no ledger: a run without privacy": (RunFolder.ledger, "", None),
}


@pytest.mark.parametrize("words", SPOILED)
def test_bad_input_is_one_line(words: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, old, new = SPOILED[words]
    text = (run / name).read_text()
    (run / name).unlink()
    if new is not None:
        (run / name).write_text(re.sub(old, new, text))
    assert main(["audit", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dpbench: error: ") and error.count("\n") == 1, error
    assert re.search(words, error), error


@pytest.mark.long
def test_half_the_noise_is_found_and_correct_code_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From final weights alone, at ε ≈ 3.8: 2,000 images of MNIST's shape, a minute or so each."""
    words = "data.like=mnist data.image_size=null data.train_size=2000 data.test_size=2000 data.expected_batch_size=128"
    words = [*words.split(" "), "model.hidden=[256]", "strategy.noise_multiplier=1.7"]
    assert main(["audit", str(train(tmp_path / "correct", 625, *words))]) == 0
    with MUTANTS["half of the noise"]():
        run = train(tmp_path / "broken", 625, *words)
    capsys.readouterr()
    assert main(["audit", str(run)]) == 3
    assert "VIOLATED (labels, family" in capsys.readouterr().out
