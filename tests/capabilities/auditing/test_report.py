"""`dpbench audit`: table, JSON, picture and exit status of a run with canaries, and one line for each bad input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.capabilities.auditing.report import audit_run
from dpbench.capabilities.canaries.file import write_scores
from dpbench.cli import main
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.seal import seal_of
from dpbench.privacy.accounting.writer import LedgerWriter
from tests.capabilities.auditing.worlds import World, ledger_of

WORLD = World(z=0.6, releases=40, canaries=400)


def leave(folder: Path, world: World, declared: World | None = None) -> Path:
    """Write what a run of such a world leaves."""
    folder.mkdir(parents=True)
    ledger, path = ledger_of(declared or world), folder / RunFolder.ledger
    writer = LedgerWriter(path, ledger.header)
    for _, release in ledger.releases:
        writer.append(release)
    writer.close()
    write_scores(folder / RunFolder.audit, world.scores(), seal_of(path))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return leave(tmp_path / "run", WORLD)


def test_a_correct_run_is_consistent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0
    text = capsys.readouterr().out
    for words in (
        "400 canaries, 40 releases, 95 % confidence",
        "claimed",
        "sound",
        "(PLD)",
        "CONSISTENT",
        "not a proof",
        "not seen     effects on a record before it is clipped",
        "clipping and summation of records (not canaries), which were not measured",
    ):
        assert words in text, words
    rows = [line.split(">=")[0].split() for line in text.splitlines() if ">=" in line]
    assert rows[0] == ["audited", "family"] and len(rows) == 4  # the limit that stands for all comes first
    assert (run / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_more_noise_than_declared_is_not_as_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave(tmp_path / "run", replace(WORLD, noise=2**0.5), WORLD)
    assert main(["audit", str(run)]) == 3
    assert "NOT AS DECLARED (noise over declared)" in capsys.readouterr().out


@pytest.mark.parametrize("noise", [1.0, 0.5])
def test_the_picture_has_the_bound_below_what_the_ledger_allows_unless_noise_is_missing(
    tmp_path: Path, noise: float
) -> None:
    report = audit_run(leave(tmp_path / "run", replace(WORLD, noise=noise), WORLD))
    panel = report.roc_panel
    assert list(panel.measured) == ["these canaries"]
    assert (panel.proven > panel.allowed)[:-1].any() == (noise < 1)  # type: ignore[operator]
    assert (panel.proven < panel.allowed)[:-1].any() == (noise == 1)  # type: ignore[operator]
    bound = report.result.shown  # the curve is that of the limit of ε that is shown
    assert report.family.epsilon(bound.noise_scale) == bound.epsilon  # type: ignore[arg-type,union-attr]


def change(run: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((run / RunFolder.audit).read_text())
    how(data)
    (run / RunFolder.audit).write_text(json.dumps(data))


def continued(run: Path) -> None:
    lines = (run / RunFolder.ledger).read_text().splitlines(keepends=True)
    (run / RunFolder.ledger).write_text("".join([*lines, lines[-1].replace('"number":39', '"number":40')]))


def of_another_run(run: Path) -> None:
    shutil.copy(leave(run.parent / "other" / "run", replace(WORLD, z=2.0)) / RunFolder.ledger, run)


def of_a_sweep(run: Path) -> None:
    (run / "run").mkdir()
    shutil.move(run / RunFolder.audit, run / "run")


def with_canaries(run: Path) -> None:
    (run / RunFolder.config).write_text("audit:\n  _target_: dpbench.capabilities.canaries.GradientCanaries\n")


def without_scores(run: Path) -> None:
    with_canaries(run)
    (run / RunFolder.result).write_text("{}")
    (run / RunFolder.audit).unlink()


BAD: dict[str, Callable[[Path], Any]] = {
    "has no canaries.*audit=gradient_canaries": lambda run: (run / RunFolder.audit).unlink(),
    "lost the file.*restore a copy": without_scores,
    "has not ended.*`dpbench resume": with_canaries,  # who reads an audit and goes on chooses what the next one shows
    "it is not a run.*train with": lambda run: [path.unlink() for path in run.iterdir()],
    "holds several runs": of_a_sweep,
    "audit.json is damaged": lambda run: (run / RunFolder.audit).write_text("[1]"),
    "has schema 9, .* reads schemas up to 4": lambda run: change(run, lambda data: data.update(schema=9)),
    "is damaged.*ledger: field required": lambda run: change(run, lambda data: data.pop("ledger")),
    "is damaged.*left_out: ": lambda run: change(run, lambda data: data.update(left_out=["bias"])),
    "ledger.jsonl does not belong to audit.json .*lines that do not match": of_another_run,
    "ledger.jsonl does not belong to audit.json .*continued by another run": continued,
    "ledger": lambda run: (run / RunFolder.ledger).unlink(),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BAD[words](run)
    assert main(["audit", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dpbench: error: ") and error.count("\n") == 1, error
    assert re.search(words, error), error
    assert not (run / "audit.png").exists()


def test_what_is_left_out_is_told(run: Path) -> None:
    groups = {f"bias {number}": 10 + number for number in range(8)}
    change(run, lambda data: data.update(left_out=groups))
    out = audit_run(run).text
    assert "left out     bias 0 (10 coordinates), bias 1 (11 coordinates), " in out
    assert "bias 5 (15 coordinates) and 2 more: no room for all canaries" in out
    change(run, lambda data: data.pop("left_out"))  # as it was before it was told
    assert "left out" not in audit_run(run).text
