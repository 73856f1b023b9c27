"""The size of the project: what is counted, and that the committed sizes are of all rooms."""

from __future__ import annotations

import subprocess

import pytest

from tools import size


def test_the_committed_sizes_have_the_rooms_of_today(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if subprocess.run(["git", "rev-parse"], cwd=size.ROOT, capture_output=True, check=False).returncode:
        pytest.skip("needs a git checkout")
    monkeypatch.setattr(size, "_nodes", lambda source: 1)  # which rooms there are, and not how large
    monkeypatch.setattr(size, "_installed_bytes", lambda packages: 0)
    size.main([])
    printed = capsys.readouterr().out
    committed = {line.split("\t")[0] for line in size.COMMITTED.read_text().splitlines()}
    assert {line[:32].strip() for line in printed.splitlines() if line[32:33] == " "} == committed
    assert "nodes: privacy" in committed and "nodes: all" in committed
