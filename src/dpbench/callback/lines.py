"""Messages of a training that are no warnings."""

from __future__ import annotations

import logging

from pytorch_lightning.utilities import rank_zero_only

LOGGER = "pytorch_lightning.dpbench"
"""Logger below Lightning's, which, unlike others, shows messages that are no warnings."""


def show_lines() -> None:
    """Show them also where Lightning's own are silenced."""
    logging.getLogger(LOGGER).setLevel(logging.INFO)


@rank_zero_only
def log_line(text: str) -> None:
    """Log a line, on the first process."""
    logging.getLogger(LOGGER).info(text)
