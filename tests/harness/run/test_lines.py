"""What a training says of itself, on the command line."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from dpbench.callback.lines import LOGGER, show_lines
from dpbench.harness.run.progress import quiet

LIGHTNING = "pytorch_lightning.utilities.rank_zero"


@pytest.fixture
def levels() -> Iterator[None]:
    """Levels of the loggers as they were."""
    loggers = [
        logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "absl", LIGHTNING, LOGGER)
    ]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("levels")
def test_lines_of_a_training_are_shown_and_lightnings_are_not() -> None:
    quiet()
    show_lines()
    assert logging.getLogger(LOGGER).isEnabledFor(logging.INFO)
    assert not logging.getLogger(LIGHTNING).isEnabledFor(logging.INFO)
