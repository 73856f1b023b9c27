"""Options that were renamed work for one release, with one line that says the new word."""

from __future__ import annotations

import pytest

from dpbench.cli import main, parser
from dpbench.cli.arguments import _RENAMED_OPTIONS, current_options

RENAMED = [(command, old, new) for command, options in _RENAMED_OPTIONS.items() for old, new in options.items()]


@pytest.mark.parametrize(("command", "old", "new"), RENAMED)
def test_old_words_are_replaced(command: str, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert current_options(command, [old, "1"]) == [new, "1"]
    assert current_options(command, ["x", f"{old}=1"]) == ["x", f"{new}=1"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("dpbench: note: ") and new in line for line in lines)
    assert current_options("account", [old, "1"]) == [old, "1"]


@pytest.mark.parametrize(("command", "old", "new"), RENAMED)
def test_help_shows_new_words_only(command: str, old: str, new: str) -> None:
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")
    words = commands[command].format_help().replace(",", " ").replace("]", " ").split()  # type: ignore[index, call-overload]
    assert new in " ".join(words) and old not in words


def test_an_old_word_works(tmp_path: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), "--n", "100", "--on=test"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["note", "note", "error"]
