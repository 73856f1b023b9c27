"""Commands of plug-ins."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from dpbench.cli import main


def test_a_command_that_cannot_be_loaded_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> Any:
        raise ImportError("no module named mine")

    entry = mock.Mock(load=load, value="mine:add")
    entry.name = "mine"
    monkeypatch.setattr("dpbench.cli.entry_points", lambda group: [entry])
    with pytest.raises(SystemExit):
        main(["account", "--help"])
    captured = capsys.readouterr()
    assert "dpbench account" in captured.out
    assert captured.err == "dpbench: warning: no command mine: mine:add fails (no module named mine).\n"
