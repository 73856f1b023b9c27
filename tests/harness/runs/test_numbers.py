"""Figures as people read them."""

from __future__ import annotations

import math

import pytest

from dpbench.harness.runs.numbers import (
    audit_text,
    epsilon_text,
    epsilons_text,
    limit_or_none,
    limit_text,
    mean_text,
    metric_text,
    range_text,
    seconds_text,
)


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (1.92345, "1.923"),
        (12345.678, "12345.678"),
        (3.2e7, "3.2e+07"),
        (None, "inf"),
        (math.inf, "inf"),
        (math.nan, "–"),
    ],
)
def test_an_epsilon_has_one_form(epsilon: float | None, text: str) -> None:
    assert epsilon_text(epsilon) == text


def test_figures_that_are_compared_have_as_many_digits() -> None:
    assert epsilon_text(1.923456, significant=5) == "1.9235" and epsilon_text(None, significant=5) == "inf"
    assert epsilons_text({"rdp": 1.92345, "pld": None}) == "1.923 (RDP)"
    assert epsilons_text({"rdp": None}).startswith("none: ")
    assert limit_text(None) == limit_text(2000.0) == "> 1000" and limit_text(0.5) == ">= 0.50"
    assert audit_text(8.0) == "8.00" and audit_text(None) == audit_text(0.0) == "none"
    assert limit_or_none(math.nan) == limit_or_none(None) == "none" and limit_or_none(0.5) == ">= 0.50"


def test_means_and_ranges() -> None:
    assert mean_text(85.0, 7.071, percent=True) == "85.00 ± 7.07" and mean_text(0.12345, 0.0123) == "0.1235 ± 0.012"
    assert mean_text(1.5, math.nan) == "1.5" and mean_text(None) == mean_text(math.nan, 1.0) == "–"
    assert mean_text(2.0, percent=True, sign="+") == "+2.00"
    assert metric_text("test/accuracy", 0.85, 0.0707) == "85.00 ± 7.07 %" and metric_text("test/loss", 0.5) == "0.5"
    assert metric_text("test/accuracy", None) == "–"
    assert range_text([0.1, 0.25]) == "0.1 to 0.25" and range_text([0.1, 0.1]) == range_text(0.1) == "0.1"
    assert seconds_text(12.34) == "12.3"
