"""Fixtures for the tests of tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.reproduce.digits_table import TABLE


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    path = tmp_path / "own" / "digits.yaml"
    path.parent.mkdir()
    path.write_text(TABLE)
    return path


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code whose tables may go to `results/`, also where the tests run before a commit."""
    monkeypatch.setattr("dpbench.harness.reproduce.reproduction.commit", lambda: "abc")
