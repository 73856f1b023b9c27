"""`--json` prints JSON and nothing else on standard output, whichever command has it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dpbench.cli import main, parser
from tests.capabilities.auditing.test_report import WORLD, leave

CALIBRATE = "calibrate --epsilon 3 --delta 1e-5 --sample-rate 0.01 --steps 100 --json"
COMMANDS = [
    ("account runs/demo --json", "delta"),
    ("account runs/demo runs/again --accountant all --json", "runs"),
    (CALIBRATE, "solved_for"),
    ("audit runs/audited --json", "verdict"),
    ("table runs/demo runs/again --json", "run"),
    ("table runs/demo runs/again --folder --json", "folder"),
    ("table runs/demo runs/again --group-by optimizer.lr --json", "n"),
    ("compare runs/demo runs/again --json", "run"),
    ("compare runs/demo runs/again --mean --json", "run"),
    ("reproduce list --json", "title"),
]
ELSEWHERE = {"evaluate", "attack"}  # test_synthesis.py, which has a GAN, and tests/attack


@pytest.fixture(scope="module")
def folder(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    for kind, name in (("seeded", "demo"), ("seed_1", "again")):
        shutil.copytree(trained(kind), folder / "runs" / name)
    leave(folder / "runs" / "audited", WORLD)
    return folder


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(("words", "key"), COMMANDS)
def test_standard_output_is_json(words: str, key: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(folder):
        assert main(words.split()) == 0
    facts: Any = json.loads(capfd.readouterr().out, parse_constant=refuse)
    assert facts and key in (facts[0] if isinstance(facts, list) else facts)
    if isinstance(facts, list):
        assert len({tuple(row) for row in facts}) == 1  # each has the same keys


def test_every_command_with_json_is_here() -> None:
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")
    having = {
        name
        for name, command in commands.items()  # type: ignore[union-attr]
        if any("--json" in action.option_strings for action in command._actions)
    }
    tried = {getattr(case, "values", case)[0].split()[0] for case in COMMANDS}
    assert having == tried | ELSEWHERE


def test_an_error_leaves_standard_output_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(tmp_path), "--json"]) == 1
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("dpbench: error: ")


def test_json_of_a_table_that_trains_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "claims", "--json"]) == 1
    assert "--json goes with list" in capsys.readouterr().err
