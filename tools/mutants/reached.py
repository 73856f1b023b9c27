"""Record of the functions that each test reaches.

A copy of the source has a call of `reached` at the beginning of each function; the plugin says which test runs, or
which fixture is made. Processes that a test starts take that from the environment.
"""

from __future__ import annotations

import ast
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = "DPBENCH_REACHRECORD"
_LABEL = "DPBENCH_REACH_LABEL"
_MOST_FILES = 6
_seen: set[str] = set()
# Open from the beginning: dpbench takes note of what is opened while records are read.
_file = os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT) if RECORD in os.environ else None


def reached(function: str) -> None:
    """Note a function, once for each test and process."""
    if function not in _seen:
        _seen.add(function)
        _write(os.environ.get(_LABEL, ""), function)


def _write(*words: str) -> None:
    if _file is not None:
        os.write(_file, ("\t".join(words) + "\n").encode())


# ------------------------------------------------------------------------------------- the copy that records


def instrument(path: Path, package: Path) -> None:
    """Have each function of a file say that it is reached."""
    tree = ast.parse(path.read_bytes())
    module = path.relative_to(package).as_posix()
    _instrument(tree, module, [])
    place = 0
    for place, statement in enumerate(tree.body):  # noqa: B007  after the docstring and `from __future__`
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_docstring and getattr(statement, "module", None) != "__future__":
            break
    tree.body.insert(place, ast.parse("from tools.mutants.reached import reached as _reached_").body[0])
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def _instrument(node: ast.AST, module: str, scope: list[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = ".".join([*scope, child.name])
            call = ast.parse(f"_reached_({f'{module}:{name}'!r})").body[0]
            child.body.insert(1 if ast.get_docstring(child) is not None else 0, call)
            _instrument(child, module, [*scope, child.name])
        elif isinstance(child, ast.ClassDef):
            _instrument(child, module, [*scope, child.name])
        else:
            _instrument(child, module, scope)


# ------------------------------------------------------------------------------------- the plugin of pytest


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no label."""
    os.environ[_LABEL] = ""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give what a shared fixture reaches to every test that uses it."""
    if fixturedef.scope == "function":
        return (yield)
    outer = os.environ[_LABEL]
    _begin(f"fixture {fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        _begin(outer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Name the test that runs, and the shared fixtures that it uses."""
    _begin(item.nodeid)
    info = getattr(item, "_fixtureinfo", None)
    for definitions in getattr(info, "name2fixturedefs", {}).values():
        for definition in definitions:
            if definition.scope != "function":
                _write(item.nodeid, f"fixture {definition.baseid}::{definition.argname}")
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took."""
    if not hasattr(report, "node"):  # with xdist in the worker, not again where it reports
        _write(report.nodeid, f"seconds {report.duration:.3f}")


def _begin(label: str) -> None:
    os.environ[_LABEL] = label
    _seen.clear()


# ------------------------------------------------------------------------------------- reading


class Reach:
    """Tests by the functions that they reach, and their seconds."""

    def __init__(self, record: Path) -> None:
        direct: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        for line in record.read_text(encoding="utf-8").splitlines():
            label, _, value = line.partition("\t")
            if value.startswith("seconds "):
                self.seconds[label] += float(value.removeprefix("seconds "))
            else:
                direct[value].add(label)
        self._direct = direct
        self._sizes = Counter(map(_file_of, self.seconds))

    def tests(self, path: Path, function: str) -> list[str]:
        """Tests that reach a function of a file, or for "" any function of it.

        Those of the few files whose tests reach it most often, the shortest first: each file takes seconds to collect.
        """
        labels: set[str] = set()
        for place, reaching in self._direct.items():
            file, _, name = place.partition(":")
            if file == path.as_posix() and (name == function or not function):
                labels |= reaching
        for fixture in [label for label in labels if label.startswith("fixture ")]:
            labels |= self._direct[fixture]
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in labels & self.seconds.keys():
            by_file[_file_of(test)].append(test)
        shares = {file: len(tests) / self._sizes[file] for file, tests in by_file.items()}
        files = sorted(by_file, key=lambda file: (-shares[file], file))[:_MOST_FILES]
        tests = [test for file in files for test in by_file[file]]
        return sorted(tests, key=lambda test: (self.seconds[test], test))


def _file_of(test: str) -> str:
    return test.partition("::")[0]
