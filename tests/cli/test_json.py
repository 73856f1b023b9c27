"""`--json` prints JSON and nothing else on standard output, whichever command has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dpbench.cli import main, parser
from tests.capabilities.auditing.test_report import WORLD, leave
from tests.support.cli import dpbench

COMMANDS = {
    "account runs/demo --json": "delta",
    "account runs/demo runs/again --accountant rdp,pld --json": "runs",
    "calibrate --epsilon 3 --delta 1e-5 --sample-rate 0.01 --steps 100 --json": "solved_for",
    "audit runs/audited --json": "verdict",
    "table runs/demo runs/again --folder --json": "folder",
    "table runs/demo runs/again --group-by optimizer.lr --json": "n",
    "compare runs/demo runs/again --mean --json": "run",
    "reproduce list --json": "title",
}
ELSEWHERE = {"evaluate", "attack"}  # test_synthesis.py, which has a GAN, and tests/attack


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_standard_output_is_json(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for kind, name in (("seeded", "demo"), ("seed_1", "again")):
        shutil.copytree(trained(kind), tmp_path / "runs" / name)
    leave(tmp_path / "runs" / "audited", WORLD)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    for words, key in COMMANDS.items():
        assert main(words.split()) == 0
        facts: Any = json.loads(capfd.readouterr().out, parse_constant=refuse)
        rows = facts if isinstance(facts, list) else [facts]
        assert key in rows[0], words
        assert len({tuple(row) for row in rows}) == 1, words  # each has the same keys


def test_every_command_with_json_is_here() -> None:
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")
    having = {
        name
        for name, command in commands.items()  # type: ignore[union-attr]
        if any("--json" in action.option_strings for action in command._actions)
    }
    assert having == {words.split()[0] for words in COMMANDS} | ELSEWHERE


def test_an_error_leaves_standard_output_empty(tmp_path: Path) -> None:
    assert dpbench(tmp_path, "table", ".", "--json", status=1)[0] == ""
    assert "--json is only for list" in dpbench(tmp_path, "reproduce", "claims", "--json", status=1)[1]
