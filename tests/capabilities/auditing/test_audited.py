"""The third column: an audit at the end of a run, in its result, tables and wandb, or why there is none."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import wandb

from dpbench.capabilities.auditing.report import audit_run, kept_audit, read_scores
from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.end_of_run import summary
from dpbench.harness.reports.run_table import AUDITED_LABEL, RunTable
from dpbench.harness.run import train
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.run.logs import mirror_result
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.record import read_result, write_result
from tests.capabilities.auditing.test_report import continued, leave
from tests.capabilities.auditing.worlds import World

WORLD = World(z=0.8, releases=40, canaries=800)
NO_CHECKPOINT: dict[str, Any] = {"callbacks": {}}
CANARIES = {"_target_": "dpbench.capabilities.canaries.canaries.GradientCanaries"}
WORDS = [
    "audit=gradient_canaries", "audit.canaries=100", "model=mlp", "model.hidden=[16]", "data.image_size=8",
    "logger=none", "trainer.max_steps=8", "strategy.target_epsilon=4",
    "run.checkpoint_every_n_steps=4",
]  # fmt: skip


@cache
def audited(noise: float) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files of a run with so much of its noise, and what its audit finds, once."""
    with TemporaryDirectory() as place:
        folder = leave(Path(place) / "run", replace(WORLD, noise=noise), WORLD)
        found = kept_audit(RunFolder(folder), NO_CHECKPOINT)
        return {path.name: path.read_bytes() for path in folder.iterdir()}, dict(found or {})


def finished(folder: Path, noise: float = 1.0) -> RunFolder:
    """What a run of such a world leaves in the end."""
    files, found = audited(noise)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    config = {"run": {"name": folder.name}, "seed": 0, "strategy": {"delta": 1e-5}, "audit": CANARIES}
    write_result(Run(RunFolder(folder), config), {"test/accuracy": 0.5}, 40, 1.0, 1.0, audit=found)
    return RunFolder(folder)


def audit_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())["privacy"]["audit"]
    return found


def without_scores(audit: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in audit.items() if name != "scores"}


def test_a_run_is_audited_when_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *WORDS, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    end = capsys.readouterr().out
    kept, now = audit_in(tmp_path / "run"), audit_run(tmp_path / "run").result
    assert without_scores(kept) == now.summary() and kept["confidence"] == 0.95
    for words in (">= ", "(family)", f"verdict         {now.verdict}"):
        assert words in end, words
    figure = f"{now.audited:.3f}"
    assert main(["table", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    # Not always CONSISTENT: one correct run in twenty is accused, and each change of the code gives other noise.
    assert (
        AUDITED_LABEL in table
        and f"| {figure} |" in table
        and f"| {now.verdict} |" in table
        and AUDITED_LABEL == "audited epsilon (95 %)"
    )
    assert main(["table", "--csv", str(tmp_path)]) == 0
    assert f"{now.audited}" in capsys.readouterr().out
    compared = RunTable.read([tmp_path]).compare()
    assert f"| {AUDITED_LABEL} | {figure} |" in compared and "accuracy" not in table + compared


def test_only_the_real_end_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full on the way, a crash between audit and result, and a budget with nothing left to train."""
    run, save, audits = RunFolder(tmp_path / "run"), LastCheckpoint._save, []
    audit = train._audit

    def full(self: LastCheckpoint, trainer: pl.Trainer) -> None:
        if trainer.global_step > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, trainer)

    def killed(*_: Any, **__: Any) -> None:
        raise ConfigurationError("killed")

    def counted(run: Run, checkpoint: Any) -> Any:
        audits.append(audit(run, checkpoint))
        return audits[-1]

    monkeypatch.setattr(train, "_audit", counted)
    with monkeypatch.context() as patch:
        patch.setattr(LastCheckpoint, "_save", full)
        assert main(["train", *WORDS, f"hydra.run.dir={run}"]) == 1
    assert run.audit.is_file() and not run.finished and not audits
    with monkeypatch.context() as patch:
        patch.setattr("dpbench.harness.run.train.write_result", killed)
        assert main(["resume", str(run)]) == 1
    assert len(audits) == 1 and not run.finished
    run.audit.unlink()  # as after a kill: what was written last may be lost
    assert main(["resume", str(run)]) == 0
    assert audits[0] == audits[1] == without_scores(audit_in(run.path)) and read_scores(run).scores.releases == 8


@pytest.mark.slow
def test_another_confidence_keeps_what_tables_show(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    kept = audit_in(run.path)
    report = audit_run(run.path, 0.5)
    facts = json.loads(json.dumps(report.facts, allow_nan=False))
    assert facts["stored"] == kept and facts["audited"] > kept["audited"]["family"]


@pytest.mark.parametrize(
    ("noise", "verdict"), [(0.5, "VIOLATED"), (2**0.5, "NOT AS DECLARED")], ids=["half the noise", "more noise"]
)
def test_what_speaks_against_a_run_stands_beside_its_epsilons(noise: float, verdict: str, tmp_path: Path) -> None:
    run = finished(tmp_path / "wrong", noise)
    finished(tmp_path / "right")
    table = RunTable.read([tmp_path]).frame().set_index("run")
    assert dict(table["verdict"]) == {"right": "CONSISTENT", "wrong": verdict}
    right, wrong = RunTable.read([tmp_path]).to_markdown().splitlines()[2:]
    assert wrong.count(f"({verdict}) |") == 2 and f"| {verdict} |" in wrong and verdict not in right
    text = RunTable.read([tmp_path]).compare()
    assert f"| right, seed 0 | wrong, seed 0 ({verdict}) |" in text
    assert f"| verdict | CONSISTENT | {verdict} |" in text
    record = read_result(run)
    end = summary(record, run, "")
    assert f"verdict         {verdict} (" in end and end.count(f" ({verdict}) at delta=") == 2


def test_runs_without_canaries_have_no_column(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    record = json.loads(run.result.read_text())
    del record["privacy"]["audit"], record["config"]["audit"]
    run.result.write_text(json.dumps(record))
    assert not {AUDITED_LABEL, "verdict"} & set(RunTable.read([tmp_path]).frame())
    assert (
        AUDITED_LABEL not in RunTable.read([tmp_path]).compare()
        and "verdict" not in RunTable.read([tmp_path]).compare()
    )
    finished(tmp_path / "other")
    text = RunTable.read([tmp_path]).to_markdown()
    assert "| – |" in text and "| CONSISTENT |" in text


def edited(run: Path) -> None:
    """One coin is turned: a file that can be read, of the same ledger."""
    data = json.loads((run / RunFolder.audit).read_text())
    data["scores"]["llr"][0] += 1
    (run / RunFolder.audit).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("spoil", "words", "mark"),
    [
        (edited, "audit.json is not what was audited", ""),
        (continued, "it was continued by another run", " (ledger not intact)"),
    ],
)
def test_what_was_changed_since_shows_no_figure(
    spoil: Callable[[Path], None], words: str, mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path / "run")
    spoil(run.path)
    table = RunTable.read([tmp_path]).frame()
    assert table[AUDITED_LABEL].isna().all() and words in table["verdict"][0]
    shown = RunTable.read([tmp_path]).to_markdown()
    assert words in shown and "CONSISTENT" not in shown
    text = RunTable.read([tmp_path]).compare()
    assert f"| {AUDITED_LABEL} | – |" in text and words in text and f"run, seed 0{mark} |" in text
    assert main(["audit", str(run)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_result_of_a_damaged_audit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path / "run")
    record = json.loads(run.result.read_text())
    record["privacy"]["audit"]["audited"] = ["many"]
    run.result.write_text(json.dumps(record))
    assert main(["table", str(tmp_path)]) == 1
    assert "result.json is damaged: delete" in capsys.readouterr().err


def test_a_run_that_cannot_be_audited_says_why(tmp_path: Path) -> None:
    """It went on without its canaries; its result is there all the same."""
    leave(tmp_path / "run", WORLD)
    continued(tmp_path / "run")
    run = Run(RunFolder(tmp_path / "run"), {"run": {"name": "x"}, "seed": 0, "audit": CANARIES})
    record = write_result(run, {}, 40, 1.0, 1.0, audit=kept_audit(run.folder, NO_CHECKPOINT))
    end = summary(record, run.folder, "")
    assert "verdict         none: " in end and "continued" in end
    table = RunTable.read([tmp_path]).frame()
    assert table[AUDITED_LABEL].isna().all() and table["verdict"][0].startswith("none: ")
    assert kept_audit(RunFolder(tmp_path), NO_CHECKPOINT) is None  # nothing was released
    assert train._audit(Run(run.folder, {"audit": None}), NO_CHECKPOINT) is None


@pytest.mark.slow
def test_wandb_holds_each_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path / "run", 0.5)
    record, told = read_result(run), SimpleNamespace(summary={})
    monkeypatch.setattr(wandb, "run", told)
    mirror_result(record, {}, {})
    limits = record["privacy"]["audit"]["audited"]
    assert {f"privacy/audited_epsilon_{name}" for name in limits} < set(told.summary)
    assert told.summary["privacy/audited_epsilon"] == limits["family"] > 0
    assert told.summary["privacy/audited_verdict"] == "VIOLATED"
    assert told.summary["privacy/audited_confidence"] == 0.95
