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
from dpbench.capabilities.canaries.file import FILE_NAME, write_scores
from dpbench.cli import main
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.ledger import Header
from dpbench.privacy.accounting.seal import seal_of
from dpbench.privacy.accounting.writer import LedgerWriter
from tests.capabilities.auditing.worlds import World, ledger_of

WORLD = World(z=1.0, releases=40, canaries=400)


def leave(folder: Path, world: World, declared: World | None = None) -> Path:
    """Write what a run of such a world leaves."""
    folder.mkdir(parents=True)
    ledger, path = ledger_of(declared or world), folder / RunFolder.ledger
    facts = ledger.header
    writer = LedgerWriter(path, Header(facts.unit, facts.neighboring_relation, facts.population, facts.delta))
    for _, release in ledger.releases:
        writer.append(release)
    writer.close()
    write_scores(folder / FILE_NAME, world.scores(), seal_of(path))
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
        "CONSISTENT",
        "not a proof",
        "(PLD)",
    ):
        assert words in text, words
    rows = [line.split(">=")[0].split() for line in text.splitlines() if ">=" in line]
    assert rows[0] == ["audited", "family"] and len(rows) == 4  # the limit that stands for all comes first
    assert "not seen     effects on a record before it is clipped" in text
    assert "how records, not canaries, are clipped and added up: nothing was measured" in text  # of a simulated run
    assert (run / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert RunFolder.audit == FILE_NAME


def test_json_tells_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run), "--json", "--confidence", "0.9"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "CONSISTENT" and facts["confidence"] == 0.9 and "not a proof" in facts["note"]
    bounds = {bound["name"]: bound["epsilon"] for bound in facts["bounds"]}
    assert 0 < bounds["release game"] < facts["sound"]
    assert bounds["family"] == facts["audited"] < facts["sound"] < facts["claimed"]
    assert facts["stored"] is None
    passed = {check["name"]: check["passed"] for check in facts["checks"]}
    probed = {"lot sizes", "noise of statistics", "record over bound", "sum apart from records", "more than the lot"}
    assert {name for name, right in passed.items() if right is None} == probed  # of a run that measured nothing
    assert all(right for name, right in passed.items() if name not in probed)


def test_less_noise_than_declared_is_a_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave(tmp_path / "run", replace(WORLD, noise=0.5), WORLD)
    assert main(["audit", str(run)]) == 3
    verdict = capsys.readouterr().out.partition("VIOLATED (")[2].partition(")")[0]
    assert {"release game", "noise over declared"} <= set(verdict.split("; "))


@pytest.mark.long
def test_no_noise_at_all_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave(tmp_path / "run", replace(WORLD, noise=0.0), WORLD)
    assert main(["audit", str(run)]) == 3
    assert "> 1000" in capsys.readouterr().out


def test_more_noise_than_declared_is_not_as_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave(tmp_path / "run", replace(WORLD, noise=2**0.5), WORLD)
    assert main(["audit", str(run)]) == 3
    assert "NOT AS DECLARED (noise over declared)" in capsys.readouterr().out


@pytest.mark.parametrize("noise", [1.0, 0.5])
def test_the_picture_has_the_bound_below_what_the_ledger_allows_unless_noise_is_missing(
    tmp_path: Path, noise: float
) -> None:
    declared = replace(WORLD, z=0.6)
    report = audit_run(leave(tmp_path / "run", replace(declared, noise=noise), declared))
    panel = report.roc_panel
    assert list(panel.measured) == ["these canaries"]
    assert panel.proven is not None and panel.allowed is not None
    assert (panel.proven > panel.allowed)[:-1].any() == (noise < 1)
    assert (panel.proven < panel.allowed)[:-1].any() == (noise == 1)
    # The curve is that of the limit of ε that is shown.
    bound = report.result.shown
    assert bound is not None
    assert bound.noise_scale is not None
    assert report.family.epsilon(bound.noise_scale) == bound.epsilon


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def apply(run: Path) -> None:
        data = json.loads((run / FILE_NAME).read_text())
        change(data)
        (run / FILE_NAME).write_text(json.dumps(data))

    return apply


def without_scores(run: Path) -> None:
    (run / RunFolder.config).write_text("audit:\n  _target_: dpbench.capabilities.canaries.GradientCanaries\n")
    (run / RunFolder.result).write_text("{}")
    (run / FILE_NAME).unlink()


def of_another_run(run: Path) -> None:
    other = leave(run.parent / "other", replace(WORLD, z=2.0))
    shutil.copy(other / RunFolder.ledger, run)


def continued(run: Path) -> None:
    lines = (run / RunFolder.ledger).read_text().splitlines(keepends=True)
    (run / RunFolder.ledger).write_text("".join([*lines, lines[-1].replace('"number":39', '"number":40')]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "has no audit.json: it is no run"),
        (lambda run: (run / FILE_NAME).unlink(), "was trained without canaries.*audit=gradient_canaries"),
        (without_scores, "has lost the file.*restore a copy"),
        (lambda run: [path.unlink() for path in run.iterdir()], "it is no run.*train one"),
        (lambda run: (run / FILE_NAME).write_text("{"), "audit.json is damaged: train again"),
        (lambda run: (run / FILE_NAME).write_text("[1]"), "audit.json is damaged"),
        (changed(lambda data: data.update(schema=9)), "has schema 9, .* reads schemas up to 4"),
        (changed(lambda data: data.pop("scores")), "is damaged.*scores: field required"),
        (changed(lambda data: data["scores"]["llr"].pop()), "is damaged.*differ in length"),
        (changed(lambda data: data.pop("ledger")), "is damaged.*ledger: field required"),
        (changed(lambda data: data.update(left_out=["bias"])), "is damaged.*left_out: "),
        (changed(lambda data: data["scores"].update(releases=39)), "holds 40 releases and the canaries saw 39"),
        (of_another_run, "ledger.jsonl does not belong to audit.json .*other lines"),
        (continued, "ledger.jsonl does not belong to audit.json .*continued by another run"),
        (lambda run: (run / RunFolder.ledger).write_text(""), "ledger"),
        (lambda run: (run / RunFolder.ledger).unlink(), "ledger"),
    ],
)
def test_bad_input_is_one_line(
    spoil: Callable[[Path], Any], words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run)
    assert main(["audit", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dpbench: error: ") and error.count("\n") == 1, error
    assert re.search(words, error), error
    assert not (run / "audit.png").exists()


def test_what_is_left_out_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {f"bias {number}": 10 + number for number in range(8)}
    changed(lambda data: data.update(left_out=groups))(run)
    assert main(["audit", str(run)]) == 0
    assert "left out     bias 0 (10 coordinates), bias 1 (11 coordinates), " in (out := capsys.readouterr().out)
    assert "bias 5 (15 coordinates) and 2 more: no room for all canaries" in out
    changed(lambda data: data.pop("left_out"))(run)  # as it was before it was told
    report = audit_run(run)
    assert report.left_out == {} and "left out" not in report.text


def test_a_sweep_and_a_confidence_out_of_range_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run.parent)]) == 1
    assert "holds several runs" in capsys.readouterr().err
    for word in ("0", "1", "1.5", "nan"):
        assert main(["audit", str(run), "--confidence", word]) == 1
        assert "confidence must lie strictly between 0 and 1" in capsys.readouterr().err


def test_an_interrupted_run_is_resumed_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / FILE_NAME).unlink()
    (run / RunFolder.config).write_text("audit:\n  _target_: dpbench.capabilities.canaries.canaries.GradientCanaries\n")
    assert main(["audit", str(run)]) == 1
    assert "`dpbench resume" in capsys.readouterr().err


def test_scores_of_a_run_that_goes_on_are_not_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who reads an audit and goes on chooses what the next one shows."""
    RunFolder(run).config.write_text("audit: {_target_: dpbench.capabilities.canaries.GradientCanaries}\n")
    assert main(["audit", str(run)]) == 1
    assert "has not ended" in capsys.readouterr().err


@pytest.mark.long
def test_the_experiment_of_audits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With other noise after each edit of the source: at 95 % some is accused."""
    assert main(["train", "experiment=audit", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert main(["audit", str(tmp_path / "run"), "--confidence", "0.999999"]) == 0
    out = capsys.readouterr().out
    assert "CONSISTENT" in out and "1,000 canaries, 200 releases" in out
