"""Watches `pytest.raises` and the command line: a test must see the refusals for which the catalogue names it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

from dpbench import cli
from dpbench.errors import DPBenchError
from tools import refusals
from tools.refusals import Refusal

_catalogue = refusals.read()
_witnesses = frozenset(_catalogue.values())
_seen: set[Refusal] = set()
gone: list[str] = []
"""Cases that the catalogue names, of functions all of whose cases were collected without them."""
_leave = pytest.RaisesExc.__exit__
_one_line_errors = cli._one_line_errors


def _see(error: BaseException | None) -> None:
    if isinstance(error, DPBenchError) and (refusal := refusals.refusal_of(error)) is not None:
        _seen.add(refusal)


def _watched_leave(self: Any, kind: Any, error: BaseException | None, traceback: Any) -> bool:
    expected = _leave(self, kind, error, traceback)
    if expected:
        _see(error)
    return expected


def _watched_errors(command: Callable[[], int]) -> int:
    def watched() -> int:
        try:
            return command()
        except DPBenchError as error:
            _see(error)
            raise

    return _one_line_errors(watched)


pytest.RaisesExc.__exit__ = _watched_leave  # type: ignore[method-assign]
cli._one_line_errors = _watched_errors


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Look for cases that are gone, where no single test was asked for."""
    if any("::" in word for word in config.args):
        return
    nodes = {item.nodeid for item in items}
    functions = {refusals.function_of(node) for node in nodes}
    gone.extend(sorted(test for test in _witnesses - nodes if refusals.function_of(test) in functions))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Compare, or record, what a test that passes has seen."""
    _seen.clear()
    result = yield
    record = os.environ.get(refusals.RECORD)
    test = item.nodeid.replace("\t", " ")
    if record is not None:
        is_slow = any(item.get_closest_marker(name) for name in ("slow", "long", "cluster"))
        with open(record, "a", encoding="utf-8") as file:
            file.write(json.dumps([test, is_slow, sorted(_seen)]) + "\n")
    elif test in _witnesses and (line := refusals.difference(test, _seen, _catalogue)) is not None:
        pytest.fail(line, pytrace=False)
    return result
