"""The catalogue of refusals: what each test sees refused, with the kind of the error and the key words of its line.

`python -m tools.refusals write` runs the tests that have no entry yet, or were not seen, and adds them; with tests or
files behind it, it writes theirs again. `tests/refusals/recorder.py` watches them and compares.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dpbench import errors

ROOT = Path(__file__).parents[1]
CATALOGUE = ROOT / "tests" / "refusals" / "catalogue.tsv"
RECORD = "DPBENCH_REFUSALS"
"""Environment variable: a file to which tests write what they see refused, instead of comparing it."""
NOT_SEEN = "not seen"
"""Kind of an entry whose test did not run where the catalogue was written, or sees its refusal in another process."""
_HEAD = ("test", "error", "cause", "remedy")
_KINDS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.DPBenchError)
}
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
    """One refusal that a test sees.

    Attributes:
        error: Name of its class.
        cause: Key words of the first part of its line, which says what is wrong.
        remedy: Key words of the rest, which says what to do.
    """

    error: str
    cause: tuple[str, ...]
    remedy: tuple[str, ...]

    @classmethod
    def of(cls, error: str, message: str) -> Refusal:
        """The refusal that an error states.

        >>> Refusal.of("ConfigurationError", "seed must not be negative, got -3: leave out seed=-3, or give another.")
        Refusal(error='ConfigurationError', cause=('negative',), remedy=('seed=',))
        """
        cause, remedy = parts(message)
        return cls(error, key_words(cause), key_words(remedy))

    def is_in(self, error: str, message: str) -> bool:
        """Whether an error is still of this kind, and its line has these words."""
        return error == self.error and {*self.cause, *self.remedy} <= set(_words(message))


Catalogue = dict[str, list[Refusal]]
"""Node of a test → what it sees refused, in its order."""


def parts(message: str) -> tuple[str, str]:
    """Cause and remedy: what stands before and after the first colon, else semicolon, else sentence."""
    for separator in (": ", "; ", ". "):
        if separator in message:
            cause, _, remedy = message.partition(separator)
            return cause, remedy
    return message, ""


def key_words(text: str) -> tuple[str, ...]:
    """The names of options and classes in a text, and its longest words, in their order; no paths and no numbers."""
    candidates = [word for word in dict.fromkeys(_words(text)) if _is_name(word) or _is_long(word)]
    ranked = sorted(candidates, key=lambda word: (not _is_name(word), -len(word)))
    chosen = set(ranked[:_MOST_WORDS])
    return tuple(word for word in candidates if word in chosen)


def _words(text: str) -> list[str]:
    return _WORD.findall(_PATH.sub(" ", text))


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
        test, error, cause, remedy = line.split("\t")
        entries = catalogue.setdefault(test, [])
        entries.append(Refusal(error, tuple(cause.split()), tuple(remedy.split())))
    return catalogue


def text_of(catalogue: Catalogue) -> str:
    """The table: a line for each refusal, sorted by test."""
    rows = [_HEAD]
    for test in sorted(catalogue):
        for refusal in catalogue[test]:
            rows.append((test, refusal.error, " ".join(refusal.cause), " ".join(refusal.remedy)))
    return "".join("\t".join(row) + "\n" for row in rows)


def function_of(test: str) -> str:
    """A test without its parameters.

    >>> function_of("tests/privacy/test_noise.py::test_scale[a/b]")
    'tests/privacy/test_noise.py::test_scale'
    """
    return test.partition("[")[0]


def refusing_tests(root: Path = ROOT) -> Iterator[str]:
    """The tests in whose text `pytest.raises` names an error that users can correct."""
    for test, function in _test_functions(root):
        if any(_raises_ours(node) for node in ast.walk(function)):
            yield test


def all_tests(root: Path = ROOT) -> set[str]:
    """Every test function."""
    return {test for test, _ in _test_functions(root)}


def _test_functions(root: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Node and syntax of each function of a test, and of each method of a class of tests."""
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
                    yield f"{place}::{function.name}", function


def _raises_ours(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not node.args or ast.unparse(node.func) not in ("pytest.raises", "raises"):
        return False
    return any(isinstance(word, ast.Name) and word.id in _KINDS for word in ast.walk(node.args[0]))


# ------------------------------------------------------------------------------------- compare and write


def difference(test: str, seen: Sequence[tuple[str, str]], catalogue: Catalogue) -> str | None:
    """Say how the refusals of a test differ from its entries; None if they do not.

    Of a function without any entry nothing is said here: `uncatalogued` names it.

    Args:
        test: Its node.
        seen: (name of the error's class, message), in their order.
        catalogue: The committed one, by test.
    """
    function = function_of(test)
    remedy = f"if that is meant, run `python -m tools.refusals write '{function}'`."
    if test not in catalogue:
        is_new_case = bool(seen) and function not in catalogue and function in map(function_of, catalogue)
        return f"the catalogue of refusals has no entry for {test}: {remedy}" if is_new_case else None
    entries = catalogue[test]
    if entries[0].error == NOT_SEEN:
        return None
    if len(seen) != len(entries):
        return f"{test} sees {len(seen)} refusals, where the catalogue has {len(entries)}: {remedy}"
    for entry, (error, message) in zip(entries, seen, strict=True):
        if not entry.is_in(error, message):
            return (
                f"{test} is refused by another line than the catalogue's {entry.error} with "
                f"{' '.join((*entry.cause, *entry.remedy))!r}, by {error} with {message!r}: {remedy}"
            )
    return None


def uncatalogued(catalogue: Catalogue) -> list[str]:
    """Tests with refusals that have no entry."""
    catalogued = {function_of(test) for test in catalogue}
    return [test for test in refusing_tests() if test not in catalogued]


def updated(catalogue: Catalogue, records: Iterable[tuple[str, list[tuple[str, str]]]]) -> Catalogue:
    """The catalogue with the records of some tests in the place of their entries, and without tests that are gone."""
    by_test = dict(records)
    recorded = {function_of(test) for test in by_test}
    present = all_tests()
    entries = {}
    for test, refusals in catalogue.items():
        if function_of(test) in present - recorded:
            entries[test] = refusals
    for test, seen in by_test.items():
        if seen and function_of(test) in present:
            entries[test] = [Refusal.of(error, message) for error, message in seen]
    for test in uncatalogued(entries):
        entries[test] = [Refusal(NOT_SEEN, (), ())]
    return entries


def write(chosen: Sequence[str], recorded: Path | None = None) -> None:
    """Run tests, and write their entries.

    Args:
        chosen: Tests or files; none: the tests without an entry.
        recorded: What a run of tests under `RECORD` has left; None: run them.
    """
    catalogue = read()
    if recorded is not None:
        _save(updated(catalogue, _records(recorded)))
        return
    unseen = {function_of(test) for test, entries in catalogue.items() if entries[0].error == NOT_SEEN}
    words = list(chosen) or sorted({*uncatalogued(catalogue), *unseen})
    if not words:
        print("every test with a refusal has its entry, and was seen")
        return
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "records.jsonl"
        environment = {**os.environ, RECORD: str(record)}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not long and not cluster", *words]
        process = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        records = _records(record) if record.exists() else []
    _save(updated(catalogue, records))
    if process.returncode:
        raise SystemExit("some tests failed: what they saw is not in the catalogue.")


def _records(path: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        test, seen = json.loads(line)
        records.append((test, [(error, message) for error, message in seen]))
    return records


def _save(catalogue: Catalogue) -> None:
    CATALOGUE.write_text(text_of(catalogue), encoding="utf-8")
    count = sum(map(len, catalogue.values()))
    print(f"{count} refusals of {len(catalogue)} tests in {CATALOGUE.relative_to(ROOT)}")


def main() -> None:
    """Write the catalogue."""
    parser = argparse.ArgumentParser(prog="python -m tools.refusals", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="run tests, and write their entries")
    writing.add_argument("tests", nargs="*", metavar="TEST", help="tests or files; none: the tests without an entry")
    writing.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help=f"take what a run of tests with {RECORD}=FILE has left",
    )
    options = parser.parse_args()
    write(options.tests, options.record)


if __name__ == "__main__":
    main()
