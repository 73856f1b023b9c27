"""The predicted gain of banded noise: table and picture of the command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tools.correlated_gain import main


def test_the_command_prints_and_writes_what_bands_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--population 1000 --batch-size 100 --epsilon 8 --epochs 2 4 --delta 1e-3 --accountant rdp --output"
    main([*words.split(), str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ε=8 epochs=2 steps=20: ratio 0.")
    assert (tmp_path / "predicted.png").stat().st_size > 1000
    with (tmp_path / "predicted.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for epochs in ("2.0", "4.0"):
        ratios = {int(row["bands"]): float(row["ratio"]) for row in rows if row["epochs"] == epochs}
        assert list(ratios) == [1, 2, 3, 4, 6, 8]  # no more than batches of an epoch
        assert ratios[1] == 1
        best = [int(row["bands"]) for row in rows if row["epochs"] == epochs and row["best"] == "1"]
        assert best == [min(ratios, key=lambda bands: ratios[bands])]
        assert min(ratios.values()) < 0.9
