"""Number formats in which clipping is right."""

from __future__ import annotations

from dpbench.errors import ConfigurationError

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def refuse_precision(precision: str | int | None) -> None:
    """Raise ConfigurationError for float16: its loss scaling would make clipping wrong."""
    if str(precision) not in (*PRECISIONS, "None", "32", "64", "bf16"):
        raise ConfigurationError(
            f"precision={precision} scales the loss, so that clipping is wrong: use {' or '.join(PRECISIONS)}."
        )
