"""What a training says of itself on a terminal."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from dpbench.callback.lines import LOGGER, show_lines
from dpbench.harness.run.progress import counting, quiet


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_many_runs_have_finished(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(KeyError), counting(3, lambda: 2):
        raise KeyError
    assert ("2/3" in screen.getvalue()) is is_terminal


def test_lines_of_a_training_are_shown_and_lightnings_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning.utilities.rank_zero", LOGGER)]
    for logger in [*loggers, *map(logging.getLogger, ("pytorch_lightning", "lightning.pytorch", "absl"))]:
        monkeypatch.setattr(logger, "level", logger.level)
    quiet()
    show_lines()
    assert [logger.isEnabledFor(logging.INFO) for logger in loggers] == [False, True]
