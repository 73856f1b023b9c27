"""Fixtures for the tests of tables."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dpbench.reproduce import _jobs
from tests.reproduce.digits_table import TABLE

_composed_once = functools.cache(_jobs._compose)


@pytest.fixture(autouse=True)
def _cells_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests have a table of the same four cells, and composing them takes longer than all the rest."""

    def compose(words: Sequence[str], cell: str) -> DictConfig:
        return copy.deepcopy(_composed_once(tuple(words), cell))

    monkeypatch.setattr(_jobs, "_compose", compose)


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    path = tmp_path / "own" / "digits.yaml"
    path.parent.mkdir()
    path.write_text(TABLE)
    return path
