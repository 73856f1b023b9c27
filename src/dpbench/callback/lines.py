"""What a training says of itself that is no warning."""

from __future__ import annotations

import logging

from pytorch_lightning.utilities import rank_zero_only

LOGGER = "pytorch_lightning.dpbench"
"""Below Lightning's, which, unlike others, shows what is no warning."""


def show_lines() -> None:
    """Show them also where Lightning's own are silenced."""
    logging.getLogger(LOGGER).setLevel(logging.INFO)


@rank_zero_only
def log_line(text: str) -> None:
    """Log a line, on the first process."""
    logging.getLogger(LOGGER).info(text)
