"""Whoever shows two runs beside each other says that they share noise, as `dpbench account` does."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.harness.reports.end_of_run import EndOfRun
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.ledgers import shared_noise, shared_with_neighbors
from dpbench.harness.runs.record import read_result
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.writer import LedgerWriter
from tests.support.processes import config_of


def rewritten(run: Path, checksum: str, source: str | None) -> None:
    """The ledger of a run as another one of its seed would have left it."""
    ledger = read_ledger(run / "ledger.jsonl")
    (run / "ledger.jsonl").unlink()
    header = Header(**{**vars(ledger.header), "noise_source": source, "lot_source": None})
    with closing(LedgerWriter(run / "ledger.jsonl", header)) as writer:
        for _, release in ledger.releases:
            writer.append(Release(release.number, release.sampling, release.queries, checksum))


def test_table_compare_and_train_say_what_account_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Path("runs/first")
    train(config_of("trainer.max_steps=2"), first)
    for name in ("second", "third"):
        shutil.copytree(first, first.with_name(name))
    rewritten(first, "0x1.0p+0", "same")
    rewritten(first.with_name("second"), "0x1.8p+0", "same")
    rewritten(first.with_name("third"), "0x1.8p+0", "other")

    def said(*words: Any) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().err

    complaint = "runs/second and runs/first drew their noise from one seed, for different releases"
    for words in (("table", "runs"), ("table", "runs", "--group-by", "seed"), ("compare", "runs")):
        assert said(*words).count("drew their noise") == 1
        assert complaint in said(*words)
    assert "drew" not in said("table", first, first.with_name("third"))
    assert len(shared_noise([RunFolder(one) for one in sorted(Path("runs").iterdir())])) == 1
    folder = RunFolder(first.with_name("second"))
    assert len(shared_with_neighbors(folder)) == 1 and not shared_with_neighbors(RunFolder(first.with_name("third")))
    EndOfRun().summarize(Run(folder, {}, True), read_result(folder), "not logged")
    assert "drew their noise from one seed" in capsys.readouterr().out
    (first / "ledger.jsonl").write_text("torn")
    assert not shared_with_neighbors(folder)
