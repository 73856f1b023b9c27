"""Mutants: where they are in a file, their names, and which tests try them."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    assert {one.kind for one in mutations} == {kind for _, kind, _ in CHANGES}
    (sign,) = [one for one in mutations if one.kind == "sign"]
    assert sign.source().decode() == SOURCE.replace("-self.total", "(self.total)")
    for one in mutations:
        compile(one.source(), "sums.py", "exec")
