"""Whoever shows two runs beside each other says that they share noise, as `dpbench account` does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.harness.reports.end_of_run import EndOfRun
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.ledgers import shared_noise, shared_with_neighbors
from dpbench.harness.runs.record import read_result
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.writer import LedgerWriter
from tests.support.cli import dpbench


def rewritten(run: Path, checksum: str, source: str) -> None:
    """The ledger of a run as another one of its seed would have left it."""
    ledger = read_ledger(run / "ledger.jsonl")
    (run / "ledger.jsonl").unlink()
    header = replace(ledger.header, noise_source=source, lot_source=None)
    with closing(LedgerWriter(run / "ledger.jsonl", header)) as writer:
        for _, release in ledger.releases:
            writer.append(replace(release, checksum=checksum))


def test_table_compare_and_train_say_what_account_says(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / "runs" / name for name in ("first", "second", "third"))
    for run, checksum, source in (
        (first, "0x1.0p+0", "same"),
        (second, "0x1.8p+0", "same"),
        (third, "0x1p1", "other"),
    ):
        shutil.copytree(trained("seeded"), run)
        rewritten(run, checksum, source)
    complaint = "runs/second and runs/first drew their noise from the same seed, for different releases"
    for words in (("table", "runs"), ("compare", "runs")):
        _, err = dpbench(tmp_path, *words)
        assert err.count("drew their noise") == 1 and complaint in err
    assert len(shared_noise([RunFolder(run) for run in (first, second, third)])) == 1
    folder = RunFolder(second)
    assert len(shared_with_neighbors(folder)) == 1 and not shared_with_neighbors(RunFolder(third))
    EndOfRun().summarize(Run(folder, {}, True), read_result(folder), "not logged")
    assert "drew their noise from the same seed" in capsys.readouterr().out
