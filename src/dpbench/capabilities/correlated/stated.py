"""Banded noise as the header of a ledger states it, for readers of the ledger alone."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from dpbench.privacy.accounting.stated_plan import ROUNDING, StatedNoise


class StatedBanded(StatedNoise, frozen=True):
    """A plan's statement on banded noise; an entry point of `dpbench.stated_noises`.

    Attributes:
        coefficients: First column of C, of norm 1 at most.
    """

    coefficients: Annotated[
        tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
        Field(strict=False, min_length=2),
    ]

    parameters: ClassVar = {"banded": {"process", "noise_multiplier", "coefficients"}}

    @model_validator(mode="after")
    def _has_sensitivity_of_one(self) -> StatedBanded:
        norm = math.hypot(*self.coefficients)
        if not self.coefficients[0] > 0 or norm > 1 + ROUNDING:
            raise ValueError(f"the first of coefficients must be positive and their norm at most 1, not {norm:.10g}")
        return self

    @property
    def bands(self) -> int:
        """Number of coefficients."""
        return len(self.coefficients)
