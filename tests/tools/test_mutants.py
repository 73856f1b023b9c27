"""Mutants: where they are in a file, their names, and the tests that notice them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants.__main__ import PACKAGE, ROOT, copy_tree, files_of_tests, is_noticed, read_table
from tools.mutants.mutation import mutations_of

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
    (sign,) = [one for one in mutations if one.kind == "sign"]
    assert sign.source().decode() == SOURCE.replace("-self.total", "(self.total)")


def test_a_move_changes_no_name(source: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.py"
    moved.write_text(f'"""Moved."""\n\nOTHER = 7\n\n{SOURCE}')
    there = [one.name for one in mutations_of(moved) if "7" not in one.change]
    assert there == [one.name for one in mutations_of(source)]


def test_most_killers_of_the_table_are_there() -> None:
    killed = [one for one in read_table() if one.verdict == "killed"]
    files = files_of_tests()
    assert len(killed) > 200
    assert sum(one.by in files for one in killed) > 0.8 * len(killed)


@pytest.mark.long
def test_a_mutant_is_noticed_by_its_test_and_by_no_other(tmp_path: Path) -> None:
    name = ("clip_factors", "constant", "0.0 → 1.0")
    (mutant,) = [one for one in mutations_of(ROOT / PACKAGE / "privacy/mechanism/clipping.py") if one.name == name]
    tree = copy_tree(tmp_path)
    assert is_noticed(mutant, "test_weights", ["tests/privacy/test_clipping.py"], tree)
    assert not is_noticed(mutant, "test_", ["tests/test_files.py"], tree)
