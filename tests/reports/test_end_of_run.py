"""The short table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpbench.reports.end_of_run import summary
from dpbench.runs.folder import RunFolder


def text_of(delta: float | None = 1e-5, **config: Any) -> str:
    privacy = {"delta": delta, "epsilon": {"rdp": 1.0}, "unit": "user"}
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
            "5 users and a share of 0.1 of the users, for the test, in expectation",
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
