"""The third column: an audit at the end of a run, in its result, tables and wandb, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from dpbench.capabilities.auditing.report import audit_run, kept_audit
from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.end_of_run import summary
from dpbench.harness.reports.run_table import AUDITED_LABEL, RunTable
from dpbench.harness.run import train
from dpbench.harness.run.logs import mirror_result
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.record import read_result, write_result
from tests.capabilities.auditing.test_report import change, continued, leave
from tests.capabilities.auditing.worlds import World

WORLD = World(z=0.8, releases=40, canaries=800)
NO_CHECKPOINT: dict[str, Any] = {"callbacks": {}}
CANARIES = {"_target_": "dpbench.capabilities.canaries.canaries.GradientCanaries"}
WORDS = [
    "audit=gradient_canaries", "audit.canaries=100", "model=mlp", "model.hidden=[16]", "data.image_size=8",
    "logger=none", "trainer.max_steps=4", "strategy.target_epsilon=4",
]  # fmt: skip


def finished(folder: Path, noise: float = 1.0) -> RunFolder:
    """What a run of such a world leaves in the end."""
    run = RunFolder(leave(folder, replace(WORLD, noise=noise), WORLD))
    config = {"run": {"name": folder.name}, "seed": 0, "strategy": {"delta": 1e-5}, "audit": CANARIES}
    write_result(Run(run, config), {"test/accuracy": 0.5}, 40, 1.0, 1.0, audit=kept_audit(run, NO_CHECKPOINT))
    return run


def audit_in(folder: Path) -> dict[str, Any]:
    """What is kept of an audit, without the hash of the scores."""
    audit = json.loads((folder / "result.json").read_text())["privacy"]["audit"]
    return {name: value for name, value in audit.items() if name != "scores"}


def test_a_run_is_audited_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Again after a crash between audit and result, with nothing to train."""
    run = RunFolder(tmp_path / "run")

    def killed(*_: Any, **__: Any) -> None:
        raise ConfigurationError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(train, "write_result", killed)
        assert main(["train", *WORDS, f"hydra.run.dir={run}"]) == 1
    assert not run.finished
    run.audit.unlink()  # as after a kill: what was written last may be lost
    capsys.readouterr()
    assert main(["resume", str(run)]) == 0
    end, now = capsys.readouterr().out, audit_run(run.path).result
    assert audit_in(run.path) == now.summary() and now.confidence == 0.95
    # Not always CONSISTENT: one correct run in twenty is accused, and each change of the code gives other noise.
    assert ">= " in end and "(family)" in end and f"verdict         {now.verdict}" in end
    assert main(["table", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "audited epsilon (95 %)" in table and f"| {now.audited:.3f} |" in table and f"| {now.verdict} |" in table
    assert f"| {AUDITED_LABEL} | {now.audited:.3f} |" in RunTable.read([tmp_path]).compare()


def test_what_speaks_against_a_run_stands_beside_its_epsilons(tmp_path: Path) -> None:
    verdict = "NOT AS DECLARED"
    run = finished(tmp_path / "wrong", 2**0.5)
    finished(tmp_path / "right")
    table = RunTable.read([tmp_path])
    right, wrong = table.to_markdown().splitlines()[2:]
    assert wrong.count(f"({verdict}) |") == 2 and f"| {verdict} |" in wrong
    assert "| CONSISTENT |" in right and verdict not in right
    assert f"| right, seed 0 | wrong, seed 0 ({verdict}) |" in table.compare()
    end = summary(read_result(run), run, "")
    assert f"verdict         {verdict} (" in end and end.count(f" ({verdict}) at delta=") == 2


def edited(run: Path) -> None:
    """One coin is turned: a file that can be read, of the same ledger."""
    change(run, lambda data: data["scores"]["llr"].append(data["scores"]["llr"].pop() + 1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(edited, "audit.json is not what was audited"), (continued, "it was continued by another run")],
)
def test_what_was_changed_since_shows_no_figure(
    spoil: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path / "run")
    spoil(run.path)
    table = RunTable.read([tmp_path]).to_markdown()
    assert words in table and "CONSISTENT" not in table
    assert main(["audit", str(run)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_run_that_cannot_be_audited_says_why(tmp_path: Path) -> None:
    """It went on without its canaries; its result is there all the same."""
    folder = RunFolder(leave(tmp_path / "run", WORLD))
    continued(folder.path)
    run = Run(folder, {"run": {"name": "x"}, "seed": 0, "audit": CANARIES})
    record = write_result(run, {}, 40, 1.0, 1.0, audit=kept_audit(folder, NO_CHECKPOINT))
    assert "verdict         none: " in summary(record, folder, "")
    table = RunTable.read([tmp_path]).frame()
    assert table[AUDITED_LABEL].isna().all() and table["verdict"][0].startswith("none: ")
    assert kept_audit(RunFolder(tmp_path), NO_CHECKPOINT) is None  # nothing was released
    assert train._audit(Run(folder, {"audit": None}), NO_CHECKPOINT) is None


def test_wandb_holds_each_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path / "run", 0.5)
    told = SimpleNamespace(summary={})
    monkeypatch.setattr(wandb, "run", told)
    mirror_result(read_result(run), {}, {})
    limits = audit_in(run.path)["audited"]
    expected = {f"privacy/audited_epsilon_{name}": limit for name, limit in limits.items()}
    expected |= {"privacy/audited_epsilon": limits["family"], "privacy/audited_verdict": "VIOLATED"}
    assert expected.items() <= told.summary.items() and told.summary["privacy/audited_confidence"] == 0.95
