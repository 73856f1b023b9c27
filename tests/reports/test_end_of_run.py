"""The short table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpbench.reports.end_of_run import summary
from dpbench.runs.folder import RunFolder


def text_of(
    delta: float | None = 1e-5,
    epsilons: dict[str, float] | None = None,
    membership: dict[str, Any] | None = None,
    **config: Any,
) -> str:
    privacy = {"delta": delta, "epsilon": epsilons or {"rdp": 1.0}, "unit": "user", "membership": membership}
    record = {
        "privacy": privacy,
        "metrics": {},
        "steps": 3,
        "seconds": 1.0,
        "seconds_total": 2.0,
        "config": {"data": {}, **config},
    }
    return summary(record, RunFolder(Path("run")), "not logged")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"val_size": 300, "split": "hash"}, "300 records, in expectation: each by a hash of itself"),
        ({"val_users": 20, "split": "hash"}, "20 users, in expectation: each by a hash of itself"),
        (
            {"val_size": 300, "split": "permutation"},
            "300 records, by a permutation of all: epsilon is for",
        ),
        (
            {"val_users": 5, "split": "hash", "options": {"held_out": 0.1, "test_path": None}},
            "5 users and a share of 0.1 of the records, for the test, in expectation",
        ),
        ({"val_users": 0, "split": "hash", "options": {"held_out": 0.1, "test_path": "t.csv"}}, None),
        ({"val_size": 0, "split": "hash"}, None),
        ({"val_size": 300}, None),  # of a class that says nothing of it
    ],
)
def test_it_says_who_is_held_out(data: dict[str, Any], line: str | None) -> None:
    text = text_of(data=data)
    assert ("held out" in text) == (line is not None)
    assert line is None or line in text


def test_it_says_that_times_tell_of_large_users() -> None:
    assert "not private: they tell of very large users" in text_of(records={"local": {"max_examples": None}})
    assert "large users" not in text_of(records={"local": {"max_examples": 100}})
    assert "large users" not in text_of(records={"local": {"max_examples": None, "max_steps": 3}})
    assert "large users" not in text_of(None, records={"local": {"max_examples": None}})
    assert "large users" not in text_of(records={"_target_": None})


def test_it_says_what_a_membership_test_reaches() -> None:
    """Rounded up: what is printed is a bound, too."""
    facts = {"accountant": "pld", "nominal": False, "advantage": 0.12301, "true_positive_rates": {"0.01": 0.0730}}
    line = (
        "an attacker with a false positive rate of 1 % identifies at most 7.3 % of the members (advantage at most 0.124"
    )
    assert f"membership      {line})" in text_of(membership=facts)
    assert f"{line}; a loose bound, by RDP)" in text_of(membership={**facts, "accountant": "rdp"})
    assert "membership" not in text_of()  # a record of an older version


@pytest.mark.parametrize(
    ("epsilon", "planned", "target", "noise_multiplier", "is_short"),
    [
        (2.9, 500, 3.0, 1.1, True),
        (2.9, -1, 3.0, 1.1, True),  # a number of epochs was planned
        (2.9, 3, 3.0, 1.1, False),  # all steps were made
        (1.0, 500, 3.0, 1.1, False),  # ended by a time or a callback
        (2.9, 500, 3.0, None, False),
        (2.9, 500, None, 1.1, False),
    ],
)
def test_it_says_that_the_budget_ended_the_training(
    epsilon: float,
    planned: int,
    target: float | None,
    noise_multiplier: float | None,
    is_short: bool,
) -> None:
    strategy = {"target_epsilon": target, "noise_multiplier": noise_multiplier, "accountant": "rdp"}
    text = text_of(epsilons={"rdp": epsilon}, strategy=strategy, trainer={"max_steps": planned})
    assert ("allows no more; strategy.noise_multiplier=null computes" in text) == is_short
    assert ("3 of 500" in text) == (is_short and planned > 0)


@pytest.mark.parametrize(
    ("accountant", "noise_multiplier", "tighter", "is_said"),
    [
        ("rdp", None, 2.0, True),
        ("rdp", None, 2.99, False),
        ("rdp", 1.1, 2.0, False),
        ("pld", None, 2.0, False),
    ],
)
def test_it_says_what_another_accountant_would_leave(
    accountant: str,
    noise_multiplier: float | None,
    tighter: float,
    is_said: bool,
) -> None:
    strategy = {"target_epsilon": 3.0, "noise_multiplier": noise_multiplier, "accountant": accountant}
    text = text_of(epsilons={"rdp": 3.0, "pld": tighter}, strategy=strategy)
    assert ("strategy.accountant=pld needs less noise" in text) == is_said
