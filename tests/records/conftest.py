"""Fixtures of trainings that are compared with each other."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lots and noise of one key, whatever the settings."""
    monkeypatch.setattr("dpbench.callback.run_key.run_key", lambda *facts: 7)
