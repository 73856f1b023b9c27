"""A ledger that is not what its run left is noticed by whoever states its epsilon."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from dpbench.cli import main
from dpbench.errors import LedgerError
from dpbench.harness.reports.end_of_run import summary
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.ledgers import read_one_ledger
from dpbench.harness.runs.numbers import noise_text
from dpbench.harness.runs.record import read_result, write_result
from dpbench.privacy.accounting.ledger import Header, Release
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling

POISSON = PoissonSampling(1000, 0.05)
CONFIG = {"run": {"name": "x"}, "seed": 3, "strategy": {"delta": 1e-5}, "logger": {}}


def ledger(run: Path, steps: int, start: int = 0, checksum: str = "0x1p0") -> dict[str, object]:
    """Releases appended to a run's ledger; what a checkpoint then says of it."""
    writer = LedgerWriter(run / "ledger.jsonl", Header("example", "add_or_remove_one", 1000, 1e-5), start, start > 0)
    for number in range(start, start + steps):
        writer.append(Release(number, POISSON, (SumQuery("all", 1.0, 1.5),), checksum))
    writer.close()
    return {"private": True, "releases": start + steps, "ledger": writer.seal._asdict()}


def checkpoint(run: Path, state: dict[str, object]) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    rest = {"state_dict": {}, "global_step": 1, "loops": {"fit_loop": {}}}
    torch.save({**rest, "callbacks": {"dpbench.PrivateStrategy": state}}, run / "checkpoints" / "last.ckpt")


def by_result(run: Path) -> None:
    ledger(run, 20)
    write_result(Run(RunFolder(run), CONFIG), {"test/accuracy": 0.5}, 20, 1.0, 1.0)


def by_partial_result(run: Path) -> None:
    ledger(run, 20)
    write_result(Run(RunFolder(run), CONFIG), {"test/accuracy": 0.5}, 20, 1.0, 1.0, finished=False)


def by_checkpoint(run: Path) -> None:
    checkpoint(run, ledger(run, 20))


def edited(old: str, new: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        assert any(old in line for line in lines)
        return [line.replace(old, new) for line in lines]

    return change


def accounted(capsys: pytest.CaptureFixture[str], run: Path, status: int) -> tuple[bool, str]:
    assert main(["account", str(run), "--json"]) == status
    out, err = capsys.readouterr()
    assert err.count("dpbench: error: ") == bool(status)
    return json.loads(out)["complete"], err


@pytest.mark.parametrize("known", [by_result, by_partial_result, by_checkpoint])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda lines: lines[:-5], "it was cut"),
        (lambda lines: lines[:1] + lines[1:2], "it was cut"),
        (edited('"noise_std":1.5', '"noise_std":15.0'), "it was edited"),
        (edited('"population":1000', '"population":10000'), "it was edited"),
        (edited('"delta":1e-05', '"delta":0.1'), "it was edited"),
        (edited('"0x1p0"', '"0x1p1"'), "of another run"),
    ],
    ids=["cut", "nearly all cut", "noise", "population", "delta", "another run"],
)
def test_whoever_reads_it_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    known: Callable[[Path], None],
    change: Callable[[list[str]], list[str]],
    word: str,
) -> None:
    known(tmp_path)
    assert accounted(capsys, tmp_path, 0) == (True, "")
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    complete, err = accounted(capsys, tmp_path, 3)
    assert not complete and word in err
    assert accounted(capsys, path, 3)[1] == err
    main(["account", str(tmp_path)])
    assert " unproven" in capsys.readouterr().out
    with pytest.raises(LedgerError, match=word):
        read_one_ledger(tmp_path)
    if known is by_result:
        table = RunTable.read([tmp_path]).frame()
        assert word in table["ledger"][0]
        epsilon = read_result(RunFolder(tmp_path))["privacy"]["epsilon"]["rdp"]
        assert f"| {epsilon:.3f} (ledger not intact) |" in RunTable.read([tmp_path]).to_markdown()
        assert "x, seed 3 (ledger not intact)" in RunTable.read([tmp_path]).compare()


def test_it_may_grow_until_the_run_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_partial_result(tmp_path)
    state = ledger(tmp_path, 5, start=20)
    assert accounted(capsys, tmp_path, 0)[0]
    checkpoint(tmp_path, state)
    assert accounted(capsys, tmp_path, 0)[0]
    write_result(Run(RunFolder(tmp_path), CONFIG), {}, 25, 1.0, 1.0)
    assert accounted(capsys, tmp_path, 0)[0]
    ledger(tmp_path, 5, start=25)
    assert "continued by another run" in accounted(capsys, tmp_path, 3)[1]


def test_results_that_are_older_than_the_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_result(tmp_path)
    record = json.loads((tmp_path / "result.json").read_text())
    del record["privacy"]["ledger"]
    (tmp_path / "result.json").write_text(json.dumps(record))
    assert accounted(capsys, tmp_path, 0)[0]
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-5]))
    assert "15 releases of 20 that result.json counts" in accounted(capsys, tmp_path, 3)[1]
    (tmp_path / "result.json").write_text("{")
    checkpoint(tmp_path, {"private": True, "releases": 10})
    assert accounted(capsys, tmp_path, 0)[0]


def test_a_run_whose_ledger_was_damaged_meanwhile_says_so(tmp_path: Path) -> None:
    """As by two processes that a file system without locks let in."""
    checkpoint(tmp_path, ledger(tmp_path, 20))
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[3]]))
    record = write_result(Run(RunFolder(tmp_path), CONFIG), {"test/accuracy": 0.5}, 20, 1.0, 1.0)
    assert "release 2 follows release 19" in record["privacy"]["damage"]
    text = summary(record, RunFolder(tmp_path), "not logged")
    assert "(ledger not intact) at delta" in text and "release 2 follows release 19" in text
    table = RunTable.read([tmp_path]).frame()
    assert "release 2 follows" in table["ledger"][0] and isinstance(table, pd.DataFrame)
    path.write_text("".join(lines[:10]))  # and what the checkpoint knows
    assert "it was cut" in write_result(Run(RunFolder(tmp_path), CONFIG), {}, 20, 1.0, 1.0)["privacy"]["damage"]


def test_a_figure_that_is_missing_says_why(tmp_path: Path) -> None:
    sampling = FixedSizeSampling(1000, 50)
    writer = LedgerWriter(tmp_path / "ledger.jsonl", Header("example", "replace_one", 1000, 1e-5))
    writer.append(Release(0, sampling, (SumQuery("all", 1.0, 1.5),)))
    writer.close()
    record = write_result(Run(RunFolder(tmp_path), CONFIG), {}, 1, 1.0, 1.0)
    text = summary(record, RunFolder(tmp_path), "not logged")
    assert "not computed (dpbench account RUN --accountant pld says why) at delta" in text


def test_an_intact_run_says_nothing(tmp_path: Path) -> None:
    by_result(tmp_path)
    assert "damage" not in read_result(RunFolder(tmp_path))["privacy"]
    assert "ledger" not in RunTable.read([tmp_path]).frame()
    assert "not intact" not in RunTable.read([tmp_path]).compare()


def test_an_epsilon_without_its_ledger_is_marked(tmp_path: Path) -> None:
    by_result(tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    damage = read_result(RunFolder(tmp_path))["privacy"]["damage"]
    assert damage == "ledger.jsonl is missing, of which result.json tells"
    assert (
        RunTable.read([tmp_path]).frame()["ledger"][0] == damage and "not intact" in RunTable.read([tmp_path]).compare()
    )


def test_the_noise_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it was solved for a target, and stands in no configuration."""
    by_result(tmp_path)
    privacy = read_result(RunFolder(tmp_path))["privacy"]
    assert (privacy["noise_multiplier"], privacy["sample_rate"], privacy["expected_batch_size"]) == (1.5, 0.05, 50)
    assert "noise_std_over_max_grad_norm" not in privacy
    record = json.loads((tmp_path / "result.json").read_text())
    assert "noise multiplier 1.5, expected batch size 50 of 1,000 examples (sampling rate 0.05)" in summary(
        record, RunFolder(tmp_path), "not logged"
    )
    main(["account", str(tmp_path)])
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["noise multiplier"].strip() == "1.5"
    assert lines["expected batch size"].strip() == "50 examples, sampling rate 0.05"


def test_the_noise_of_several_phases_and_of_lots_of_a_fixed_size(tmp_path: Path) -> None:
    header = Header("example", "replace_one", 1000, 1e-5)
    for phase, std in enumerate((3.0, 4.0)):
        other = replace(header, replay=str(phase))
        writer = LedgerWriter(tmp_path / "ledger.jsonl", other, start=2 * phase, resume=phase > 0)
        for number in (0, 1):
            writer.append(Release(2 * phase + number, FixedSizeSampling(1000, 50), (SumQuery("all", 2.0, std),)))
        writer.close()
    privacy = write_result(Run(RunFolder(tmp_path), CONFIG), {}, 4, 1.0, 1.0)["privacy"]
    assert privacy["noise_multiplier"] == [1.5, 2.0]
    assert privacy["noise_std_over_max_grad_norm"] == [3.0, 4.0]  # strategy.noise_multiplier
    assert privacy["sample_rate"] == 0.05
    assert "noise multiplier 3 to 4, expected batch size 50" in noise_text(privacy)
