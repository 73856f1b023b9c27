"""Watches `pytest.raises`: what a test sees refused must be what the catalogue of refusals says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any

import pytest

from dpbench.errors import DPBenchError
from tools import refusals

_catalogue = refusals.read()
_seen: list[tuple[str, str]] = []
_leave = pytest.RaisesExc.__exit__


def _watched(self: Any, kind: Any, error: BaseException | None, traceback: Any) -> bool:
    expected = _leave(self, kind, error, traceback)
    if expected and isinstance(error, DPBenchError):
        _seen.append((type(error).__name__, str(error)))
    return expected


pytest.RaisesExc.__exit__ = _watched  # type: ignore[method-assign]


def _is_rarely_run(item: pytest.Item, test: str) -> bool:
    """Whether a test may not have run where the catalogue was written."""
    marked = any(item.get_closest_marker(name) for name in ("slow", "long", "cluster"))
    function = refusals.function_of(test)
    return marked or (function in _catalogue and "[" in test and _is_unseen(function))


def _is_unseen(function: str) -> bool:
    return _catalogue[function][0].error == refusals.NOT_SEEN


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Compare, or record, what a test that passes has seen."""
    _seen.clear()
    result = yield
    record = os.environ.get(refusals.RECORD)
    test = item.nodeid.replace("\t", " ")
    if record is not None:
        with open(record, "a", encoding="utf-8") as file:
            file.write(json.dumps([test, _seen]) + "\n")
    elif test not in _catalogue and _is_rarely_run(item, test):
        return result
    elif (line := refusals.difference(test, _seen, _catalogue)) is not None:
        pytest.fail(line, pytrace=False)
    return result
