"""Figures as people read them."""

from __future__ import annotations

from math import inf, nan

from dpbench.harness.runs.numbers import (
    epsilon_text,
    epsilons_text,
    mean_text,
    metric_text,
    range_text,
    seconds_text,
)


def test_an_epsilon_has_one_form() -> None:
    texts = list(map(epsilon_text, (1.92345, 12345.678, 3.2e7, None, inf, nan)))
    assert texts == ["1.923", "12345.678", "3.2e+07", "inf", "inf", "–"]
    assert epsilon_text(1.923456, significant=5) == "1.9235"
    assert epsilons_text({"rdp": 1.92345, "pld": None}) == "1.923 (RDP)"
    assert epsilons_text({"rdp": None}).startswith("none: ")


def test_means_and_ranges() -> None:
    means = [mean_text(0.12345, 0.0123), mean_text(1.5, nan), mean_text(nan, 1.0), mean_text(None)]
    assert means == ["0.1235 ± 0.012", "1.5", "–", "–"]
    assert mean_text(2.0, percent=True, sign="+") == "+2.00"
    assert metric_text("test/accuracy", 0.85, 0.0707) == "85.00 ± 7.07 %"
    assert list(map(range_text, ([0.1, 0.25], [0.1, 0.1]))) == ["0.1 to 0.25", "0.1"]
    assert seconds_text(12.34) == "12.3"
