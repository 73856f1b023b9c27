"""Mutants: where they are in a file, their names, and which tests try them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants.mutation import KINDS, mutations_of, sample
from tools.mutants.reached import Reach, instrument
from tools.mutants.trial import KILLED, ROOT, SURVIVES, UNREACHED

SOURCE = '''"""A module."""

LIMIT = 3


class Sum:
    """A sum."""

    def add(self, values: "list[float]", weight: float = 1.0) -> float:
        """Add values."""
        if not values:
            raise ValueError("no values")
        for value in values:
            if value < LIMIT and weight:
                self.total += weight * value
        self.log(f"{LIMIT + 1}")
        return -self.total
'''
CHANGES = {
    ("", "constant", "3 → 4"),
    ("Sum.add", "comparison", "value < LIMIT → (value <= LIMIT)"),
    ("Sum.add", "condition", "value < LIMIT and weight → (value < LIMIT or weight)"),
    ("Sum.add", "condition", "not values → bool(values)"),
    ("Sum.add", "constant", "1.0 → 2.0"),
    ("Sum.add", "operator", "weight * value → (weight / value)"),
    ("Sum.add", "sign", "-self.total → (self.total)"),
    ("Sum.add", "statement", "raise ValueError('no values') → pass"),
    ("Sum.add", "statement", "self.total += weight * value → pass"),
    ("Sum.add", "statement", "self.log(f'{LIMIT + 1}') → pass"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "package" / "sums.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_each_kind_of_change_is_made_where_it_stands(source: Path) -> None:
    mutations = mutations_of(source)
    negated = {one.name for one in mutations if one.change.startswith("value < LIMIT and weight → (not")}
    assert {one.name for one in mutations} - negated == CHANGES
    assert {one.kind for one in mutations} == set(KINDS)
    (sign,) = [one for one in mutations if one.kind == "sign"]
    assert sign.source().decode() == SOURCE.replace("-self.total", "(self.total)")
    assert all(one.compiles() for one in mutations)


def test_a_move_changes_neither_the_names_nor_the_draw(source: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.py"
    moved.write_text(f'"""Moved."""\n\nOTHER = 7\n\n{SOURCE}')
    before = sample(mutations_of(source), 6)
    assert {one.kind for one in before} == set(KINDS)
    there = [one for one in mutations_of(moved) if "7" not in one.change]
    assert [one.name for one in sample(there, 6)] == [one.name for one in before]


def test_tests_are_those_that_reach_a_function_or_use_a_fixture_that_does(tmp_path: Path) -> None:
    record = tmp_path / "reach.tsv"
    lines = [
        "a.py::slow\tsums.py:Sum.add",
        "a.py::slow\tseconds 2.0",
        "a.py::user\tfixture a.py::trained",
        "a.py::user\tseconds 0.5",
        "fixture a.py::trained\tsums.py:Sum.add",
        "a.py::other\tsums.py:mean",
        "a.py::other\tseconds 0.1",
    ]
    record.write_text("\n".join(lines))
    reach = Reach(record)
    assert reach.tests(Path("sums.py"), "Sum.add") == ["a.py::user", "a.py::slow"]
    assert reach.tests(Path("sums.py"), "") == ["a.py::other", "a.py::user", "a.py::slow"]
    assert reach.tests(Path("sums.py"), "gone") == []


def test_an_instrumented_file_says_what_is_reached(source: Path) -> None:
    instrument(source, source.parent)
    text = source.read_text()
    assert text.count("_reached_('sums.py:Sum.add')") == 1
    compile(text, "sums.py", "exec")


TRIALS = r"""
import sys
from pathlib import Path
from tools.mutants.__main__ import rooms
from tools.mutants.reached import Reach
from tools.mutants.trial import Trials, copy_tree

folder = Path(sys.argv[1])
record = folder / "reach.tsv"
tree = copy_tree(folder / "tree")
(mutant,) = [one for one in rooms()["mechanism"] if one.name == ("clip_factors", "constant", "0.0 → 1.0")]
for test in ("tests/privacy/test_clipping.py::test_weights", "tests/test_files.py", "tests/test_files.py::gone"):
    record.write_text(f"{test}\tprivacy/mechanism/clipping.py:clip_factors\n{test}\tseconds 1\n")
    print(*Trials(tree, Reach(record), seconds=10).verdict(mutant), sep=": ")
"""


@pytest.mark.long
def test_a_mutant_is_killed_by_a_test_that_notices_and_by_no_other(tmp_path: Path) -> None:
    words = [sys.executable, "-c", TRIALS, str(tmp_path)]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"{KILLED}: test_weights", f"{SURVIVES}: 1 tests, 1 s", f"{UNREACHED}: "]
