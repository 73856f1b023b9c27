"""A bar counts the runs that other processes make."""

from __future__ import annotations

import io
import sys

import pytest

from dpbench.harness.run.progress import counting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_runs_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with counting(3, lambda: 2):
        pass
    assert "2/3" in screen.getvalue()


def test_without_a_terminal_nothing_is_shown_and_errors_come_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), counting(3, lambda: 2):
        raise KeyError
    assert capsys.readouterr().err == ""
