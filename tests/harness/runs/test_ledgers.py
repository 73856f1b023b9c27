"""A ledger that is not what its run left is noticed by whoever states its epsilon."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.cli import main
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.harness.reports.end_of_run import summary
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.ledgers import find_ledgers, read_one_ledger
from dpbench.harness.runs.numbers import noise_text
from dpbench.harness.runs.record import write_result
from dpbench.privacy.accounting.ledger import Header, Release
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling

CONFIG = {"run": {"name": "x"}, "seed": 3, "strategy": {"delta": 1e-5}, "logger": {}}


def ledger(run: Path, steps: int, start: int = 0) -> dict[str, object]:
    """Releases appended to a run's ledger; what a checkpoint then says of it."""
    writer = LedgerWriter(run / "ledger.jsonl", Header("example", "add_or_remove_one", 1000, 1e-5), start, start > 0)
    for number in range(start, start + steps):
        writer.append(Release(number, PoissonSampling(1000, 0.05), (SumQuery("all", 1.0, 1.5),), "0x1p0"))
    writer.close()
    return {"private": True, "releases": start + steps, "ledger": writer.seal._asdict()}


def checkpoint(run: Path, state: dict[str, object]) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    rest = {"state_dict": {}, "global_step": 1, "loops": {"fit_loop": {}}}
    torch.save({**rest, "callbacks": {"dpbench.PrivateStrategy": state}}, run / "checkpoints" / "last.ckpt")


def written(run: Path, steps: int = 20, finished: bool = True) -> dict[str, Any]:
    return write_result(Run(RunFolder(run), CONFIG), {"test/accuracy": 0.5}, steps, 1.0, 1.0, finished=finished)


def by_result(run: Path) -> None:
    ledger(run, 20)
    written(run)


def by_partial_result(run: Path) -> None:
    ledger(run, 20)
    written(run, finished=False)


def by_checkpoint(run: Path) -> None:
    checkpoint(run, ledger(run, 20))


def rewrite(run: Path, old: str, new: str) -> None:
    path = run / "ledger.jsonl"
    path.write_text(re.sub(old, new, path.read_text()))


def accounted(capsys: pytest.CaptureFixture[str], run: Path, status: int) -> str:
    assert main(["account", str(run), "--json"]) == status
    out, err = capsys.readouterr()
    assert err.count("dpbench: error: ") == bool(status) and json.loads(out)["complete"] == (not status)
    return err


@pytest.mark.parametrize(
    ("known", "old", "new", "word"),
    [
        (by_result, r".*\n\Z", "", "it was cut"),
        (by_checkpoint, r".{9}\n\Z", "", "line 21 is cut off"),
        (by_checkpoint, '"noise_std":1.5', '"noise_std":15.0', "it was edited"),
        (by_result, '"delta":1e-05', '"delta":0.1', "it was edited"),
        (by_partial_result, "0x1p0", "0x1p1", "to another run"),
    ],
    ids=["cut", "cut off", "noise", "delta", "another run"],
)
def test_whoever_reads_it_says_so(
    known: Callable[[Path], None], old: str, new: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known(tmp_path)
    assert accounted(capsys, tmp_path, 0) == ""
    rewrite(tmp_path, old, new)
    assert word in accounted(capsys, tmp_path, 3)
    main(["account", str(tmp_path)])
    assert " unproven" in capsys.readouterr().out
    with pytest.raises(LedgerError, match=word):
        read_one_ledger(tmp_path)
    if known is by_result:
        table = RunTable.read([tmp_path])
        assert word in table.frame()["ledger"][0] and " (ledger not intact) |" in table.to_markdown()
        assert "x, seed 3 (ledger not intact)" in table.compare()


def test_it_may_grow_until_the_run_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_partial_result(tmp_path)
    state = ledger(tmp_path, 5, start=20)
    checkpoint(tmp_path, state)
    accounted(capsys, tmp_path, 0)
    written(tmp_path, 25)
    ledger(tmp_path, 5, start=25)
    assert "continued by another run" in accounted(capsys, tmp_path, 3)


def test_results_that_are_older_than_the_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_result(tmp_path)
    record = json.loads((tmp_path / "result.json").read_text())
    del record["privacy"]["ledger"]
    (tmp_path / "result.json").write_text(json.dumps(record))
    accounted(capsys, tmp_path, 0)
    rewrite(tmp_path, r".*\n\Z", "")
    assert "19 releases, and result.json counts 20" in accounted(capsys, tmp_path, 3)


def test_a_run_whose_ledger_was_damaged_meanwhile_says_so(tmp_path: Path) -> None:
    """As by two processes that a file system without locks let in."""
    by_checkpoint(tmp_path)
    rewrite(tmp_path, r".*\n\Z", "")
    record = written(tmp_path)
    assert "it was cut" in record["privacy"]["damage"]
    assert "(ledger not intact) at delta" in summary(record, RunFolder(tmp_path), "not logged")


def test_an_epsilon_without_its_ledger_is_marked(tmp_path: Path) -> None:
    by_result(tmp_path)
    intact = RunTable.read([tmp_path])
    assert "ledger" not in intact.frame() and "not intact" not in intact.compare()
    (tmp_path / "ledger.jsonl").unlink()
    marked = RunTable.read([tmp_path])
    assert marked.frame()["ledger"][0] == "ledger.jsonl is missing, although result.json refers to it"
    assert "not intact" in marked.compare()
    with pytest.raises(ConfigurationError, match="No such file or directory; name the folder of a run"):
        find_ledgers([tmp_path / "nowhere"])


def test_the_noise_of_several_phases_and_of_lots_of_a_fixed_size(tmp_path: Path) -> None:
    for phase, std in enumerate((3.0, 4.0)):
        header = replace(Header("example", "replace_one", 1000, 1e-5), replay=str(phase))
        writer = LedgerWriter(tmp_path / "ledger.jsonl", header, start=phase, resume=phase > 0)
        writer.append(Release(phase, FixedSizeSampling(1000, 50), (SumQuery("all", 2.0, std),)))
        writer.close()
    privacy = written(tmp_path, 2)["privacy"]
    assert privacy["noise_multiplier"] == [1.5, 2.0]
    assert privacy["noise_std_over_max_grad_norm"] == [3.0, 4.0]  # strategy.noise_multiplier
    assert "noise multiplier 3 to 4, expected batch size 50" in noise_text(privacy)
