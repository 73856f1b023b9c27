"""The catalogue of refusals: every `raise` of a user-correctable error, with key words of its line and a test of it.

`python -m tools.refusals write` brings the catalogue up to date with the source; with tests or files behind it, it also
runs these and enters what they see refused. `tests/refusals/recorder.py` watches the tests.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpbench import errors

ROOT = Path(__file__).parents[1]
SOURCE = Path(errors.__file__).parent
CATALOGUE = ROOT / "tests" / "refusals" / "catalogue.tsv"
RECORD = "DPBENCH_REFUSALS"
"""Environment variable: a file to which tests write what they see refused, instead of comparing it."""
UNSEEN = "unseen"
"""In the place of the test of a refusal that no test sees."""
_HEAD = ("function", "error", "cause", "remedy", "test")
_BASE = "DPBenchError"
_MOST_WORDS = 6
_SHORTEST = 5
_WORD = re.compile(r"[A-Za-z_][A-Za-z_.=]*[A-Za-z_=]")
_PATH = re.compile(r"\S*/\S*")
_COMMON_WORDS = """
about after again another because before being cannot could every first leave other others should their there these
thing those through under until where which while whose without would
"""
_COMMON = frozenset(_COMMON_WORDS.split())


class Refusal(NamedTuple):
    """A `raise` in the source, known by what it says and not by its place.

    Attributes:
        function: Qualified name of the function, without its module.
        error: Name of the error's class.
        cause: Key words of the message's constant text up to the remedy.
        remedy: Key words of its rest, which says what to do.
    """

    function: str
    error: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.function}: {self.error} with {f'{self.cause} {self.remedy}'.strip()!r}"


Catalogue = dict[Refusal, str]
"""Refusal → a test that sees it, or UNSEEN."""


# ------------------------------------------------------------------------------------- the source


class Raise(NamedTuple):
    """A `raise` of a call or a name in one file.

    Attributes:
        function: Qualified name of the function.
        error: Name of the class that is raised, or of another file's function that makes the error.
        message: Constant text of the message.
        lines: First and last line.
    """

    function: str
    error: str
    message: str
    lines: tuple[int, int]


class _File(NamedTuple):
    """What one file says of errors.

    Attributes:
        raises: Its `raise` statements.
        bases: Class → names of its bases.
        makers: Function → name of what it returns.
    """

    raises: tuple[Raise, ...]
    bases: dict[str, list[str]]
    makers: dict[str, str]


@functools.cache
def _read_source(path: Path) -> _File:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bases = {}
    makers = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases[node.name] = [ast.unparse(base) for base in node.bases]
        elif isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name):
            makers[node.name] = node
    raises = tuple(_raises_below(tree, "", _assigned(tree), makers))
    return _File(raises, bases, {name: _returned(maker) for name, maker in makers.items()})


def _raises_below(
    node: ast.AST,
    function: str,
    texts: Mapping[str, ast.expr],
    makers: Mapping[str, ast.FunctionDef],
) -> Iterator[Raise]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}".strip(".")
            yield from _raises_below(child, name, {**texts, **_assigned(child)}, makers)
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            error, message = _raised(child.exc, texts, makers)
            yield Raise(function, error, message, (child.lineno, child.end_lineno or child.lineno))
        yield from _raises_below(child, function, texts, makers)


def _raised(
    raised: ast.expr,
    texts: Mapping[str, ast.expr],
    makers: Mapping[str, ast.FunctionDef],
) -> tuple[str, str]:
    """Name and constant text of an error, that of the function of this file included that makes it."""
    if not isinstance(raised, ast.Call):
        return ast.unparse(raised).rpartition(".")[2], ""
    name = ast.unparse(raised.func).rpartition(".")[2]
    values = [*raised.args, *(keyword.value for keyword in raised.keywords)]
    message = " ".join(_text(value, texts) for value in values)
    maker = makers.get(name)
    if maker is None:
        return name, message
    end = maker.body[-1]
    if isinstance(end, ast.Return) and end.value is not None:
        message = f"{message} {_raised(end.value, {**texts, **_assigned(maker)}, {})[1]}"
    return _returned(maker), message


def _returned(maker: ast.FunctionDef) -> str:
    return "" if maker.returns is None else ast.unparse(maker.returns)


def _assigned(scope: ast.AST) -> dict[str, ast.expr]:
    """Name → what a module or a function assigns to it."""
    return {
        node.targets[0].id: node.value
        for node in _statements(scope)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Walk a scope without the functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child
            yield from _statements(child)


def _text(node: ast.expr, texts: Mapping[str, ast.expr]) -> str:
    """The constant text of an expression, {} for what is known only at runtime."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, texts) for value in values)
        case ast.FormattedValue(value=value):
            return _text(value, texts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, texts) + _text(right, texts)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{_text(body, texts)} {_text(orelse, texts)}"
        case ast.Name(id=name) if name in texts:
            return _text(texts[name], {})
    return "{}"


def refusals(source: Path = SOURCE) -> list[Refusal]:
    """List the refusals of the source; two with the same words in functions of one name are one."""
    files = [_read_source(path) for path in sorted(source.rglob("*.py"))]
    errors_below = {_BASE}
    before = 0
    while len(errors_below) > before:
        before = len(errors_below)
        for file in files:
            errors_below |= {name for name, bases in file.bases.items() if errors_below.intersection(bases)}
    made = {name: error for file in files for name, error in file.makers.items() if error in errors_below}
    listed: dict[Refusal, None] = {}
    for file in files:
        for one in file.raises:
            error = made.get(one.error, one.error)
            if error in errors_below:
                listed[_refusal(one, error)] = None
    return list(listed)


def _refusal(one: Raise, error: str) -> Refusal:
    cause, remedy = parts(one.message)
    return Refusal(one.function, error, " ".join(key_words(cause)), " ".join(key_words(remedy)))


def refusal_of(error: BaseException) -> Refusal | None:
    """Find the `raise` of an error that was caught; None if it is not in the source, or was in another process."""
    traceback = error.__traceback__
    if traceback is None:
        return None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    path = Path(traceback.tb_frame.f_code.co_filename)
    if not path.is_relative_to(SOURCE):
        return None
    for one in _read_source(path).raises:
        first, last = one.lines
        if first <= traceback.tb_lineno <= last:
            return _refusal(one, type(error).__name__)
    return None


def parts(message: str) -> tuple[str, str]:
    """Cause and remedy: what stands before and after the first colon, else semicolon, else sentence."""
    for separator in (": ", "; ", ". "):
        if separator in message:
            cause, _, remedy = message.partition(separator)
            return cause, remedy
    return message, ""


def key_words(text: str) -> tuple[str, ...]:
    """The names of options and classes in a text, and its longest words, in their order; no paths and no numbers."""
    words = dict.fromkeys(_WORD.findall(_PATH.sub(" ", text)))
    candidates = [word for word in words if _is_name(word) or _is_long(word)]
    ranked = sorted(candidates, key=lambda word: (not _is_name(word), -len(word)))
    chosen = set(ranked[:_MOST_WORDS])
    return tuple(word for word in candidates if word in chosen)


def _is_name(word: str) -> bool:
    return "_" in word or "=" in word or any(letter.isupper() for letter in word[1:])


def _is_long(word: str) -> bool:
    return len(word) >= _SHORTEST and word.lower() not in _COMMON


# ------------------------------------------------------------------------------------- the table


def read(path: Path = CATALOGUE) -> Catalogue:
    """The committed catalogue; empty where there is none."""
    catalogue: Catalogue = {}
    if not path.exists():
        return catalogue
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        *refusal, test = line.split("\t")
        catalogue[Refusal(*refusal)] = test
    return catalogue


def text_of(catalogue: Catalogue) -> str:
    """The table: a line for each refusal, sorted by function."""
    rows = [_HEAD, *sorted((*refusal, test) for refusal, test in catalogue.items())]
    return "".join("\t".join(row) + "\n" for row in rows)


def function_of(test: str) -> str:
    """A test without its parameters.

    >>> function_of("tests/privacy/test_noise.py::test_scale[a/b]")
    'tests/privacy/test_noise.py::test_scale'
    """
    return test.partition("[")[0]


def all_tests(root: Path = ROOT) -> set[str]:
    """Every test function, and every method of a class of tests."""
    tests = set()
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = path.relative_to(root).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                place = f"{file}::{node.name}"
                functions = node.body
            else:
                place = file
                functions = [node]
            for function in functions:
                if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                    tests.add(f"{place}::{function.name}")
    return tests


# ------------------------------------------------------------------------------------- compare and write


class Seen(NamedTuple):
    """What one test saw refused.

    Attributes:
        test: Its node.
        is_slow: Whether `make test` leaves it out.
        refusals: In any order.
    """

    test: str
    is_slow: bool
    refusals: frozenset[Refusal]


def difference(test: str, seen: Iterable[Refusal], catalogue: Catalogue) -> str | None:
    """Name a refusal for which the catalogue names this test, and that it did not see; None if it saw all of them."""
    missing = sorted({refusal for refusal, witness in catalogue.items() if witness == test} - {*seen})
    if not missing:
        return None
    return (
        f"{test} does not see a refusal for which the catalogue of refusals names it, {missing[0]}: "
        f"if that is meant, run `python -m tools.refusals write '{function_of(test)}'`."
    )


def outdated(catalogue: Catalogue, present: Sequence[Refusal], tests: set[str]) -> str | None:
    """Say where the catalogue is not that of the source and the tests; None if it is."""
    remedy = "run `python -m tools.refusals write TEST`, with a test that sees it."
    for refusal, test in sorted(carried(catalogue, present, tests).items()):
        if refusal not in catalogue:
            return f"the catalogue of refusals has no entry for {refusal}: {remedy}"
        if catalogue[refusal] != test:
            return f"{catalogue[refusal]} is gone, the test of {refusal}: {remedy}"
    gone = sorted(catalogue.keys() - {*present})
    return f"the source has no more {gone[0]}: run `python -m tools.refusals write`." if gone else None


def carried(catalogue: Catalogue, present: Sequence[Refusal], tests: set[str]) -> Catalogue:
    """The catalogue of another state of the source and the tests.

    A refusal whose function has another name, or that has other words, keeps its test; so does one whose test is in
    another file. What is new is unseen.

    Args:
        catalogue: The catalogue of the state before.
        present: Refusals of the source.
        tests: Functions of tests that there are.
    """
    by_name: dict[str, set[str]] = {}
    for test in tests:
        by_name.setdefault(test.partition("::")[2], set()).add(test)
    remaining = set(present)
    gone = [refusal for refusal in catalogue if refusal not in remaining]
    carried = {}
    for refusal in present:
        earlier = refusal
        if refusal not in catalogue:
            alike = [one for one in gone if one[1:] == refusal[1:]] or [one for one in gone if one[:2] == refusal[:2]]
            if not alike:
                carried[refusal] = UNSEEN
                continue
            earlier = alike[0]
            gone.remove(earlier)
        carried[refusal] = _moved(catalogue[earlier], tests, by_name)
    return carried


def _moved(test: str, tests: set[str], by_name: Mapping[str, set[str]]) -> str:
    """The node of a test where it is now; UNSEEN if it is gone."""
    function = function_of(test)
    if test == UNSEEN or function in tests:
        return test
    namesakes = by_name.get(function.partition("::")[2], set())
    if len(namesakes) != 1:
        return UNSEEN
    (namesake,) = namesakes
    return test.replace(function, namesake)


def updated(catalogue: Catalogue, records: Sequence[Seen]) -> Catalogue:
    """The catalogue after some tests ran: a test that did not see its refusal gives way to one that did.

    Args:
        catalogue: Refusals of the source.
        records: The tests that ran.
    """
    witnesses: dict[Refusal, list[Seen]] = {}
    for record in records:
        for refusal in record.refusals:
            witnesses.setdefault(refusal, []).append(record)
    ran = {UNSEEN} | {function_of(record.test) for record in records}
    entries = {}
    for refusal, test in catalogue.items():
        seen = witnesses.get(refusal, [])
        entries[refusal] = test
        if function_of(test) in ran and all(record.test != test for record in seen):
            seen.sort(key=lambda record: (record.is_slow, len(record.test), record.test))
            entries[refusal] = seen[0].test if seen else UNSEEN
    return entries


def write(chosen: Sequence[str]) -> None:
    """Bring the catalogue up to date.

    Args:
        chosen: Tests or files to run beside the tests of refusals that have changed.
    """
    before = read()
    catalogue = carried(before, refusals(), all_tests())
    changed = {function_of(test) for refusal, test in catalogue.items() if before.get(refusal) != test}
    words = [*chosen, *sorted(changed - {UNSEEN})]
    records: list[Seen] = []
    status = 0
    if words:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "records.jsonl"
            environment = {**os.environ, RECORD: str(record)}
            command = [sys.executable, "-m", "pytest", "-q", "-m", "not long and not cluster", *words]
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            records = _records(record) if record.exists() else []
    catalogue = updated(catalogue, records)
    _save(catalogue)
    for refusal, test in sorted(catalogue.items()):
        if test == UNSEEN and before.get(refusal) != UNSEEN:
            print(f"new, and seen by no test that ran: {refusal}")
    if status:
        raise SystemExit("some tests failed: what they saw is not in the catalogue.")


def _records(path: Path) -> list[Seen]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        test, is_slow, seen = json.loads(line)
        records.append(Seen(test, is_slow, frozenset(Refusal(*refusal) for refusal in seen)))
    return records


def _save(catalogue: Catalogue) -> None:
    CATALOGUE.write_text(text_of(catalogue), encoding="utf-8")
    unseen = list(catalogue.values()).count(UNSEEN)
    print(f"{len(catalogue)} refusals, {unseen} of them unseen, in {CATALOGUE.relative_to(ROOT)}")


def main() -> None:
    """Write the catalogue."""
    parser = argparse.ArgumentParser(prog="python -m tools.refusals", description=__doc__)
    parser.add_argument("command", choices=["write"], help="run tests that changes concern, too")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="tests or files whose refusals are entered")
    options = parser.parse_args()
    write(options.tests)


if __name__ == "__main__":
    main()
