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


def test_the_page_pairs_the_seeds_of_a_table(tmp_path: Path) -> None:
    """A seed that has one of both only is left out."""
    table = tmp_path / "own_table"
    table.mkdir()
    lines = ["row,column,seed,metric,value"]
    for seed, independent, banded in ((1, 0.90, 0.92), (2, 0.91, 0.95)):
        lines.append(f"epoch_2_epsilon_8,independent,{seed},test/accuracy,{independent}")
        lines.append(f"epoch_2_epsilon_8,banded,{seed},test/accuracy,{banded}")
    lines.append("epoch_2_epsilon_8,banded,3,test/accuracy,0.5")
    (table / "runs.csv").write_text("\n".join(lines), encoding="utf-8")
    words = "--population 1000 --batch-size 100 --epsilon 8 --epochs 2 --delta 1e-3 --accountant rdp --bands 4 --output"
    main([*words.split(), str(tmp_path), "--measured", str(table)])
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| 2 epochs, ε = 8 |" in page
    assert "| 90.50 ± 0.71 | 93.50 ± 2.12 | +3.00 ± 1.41 | 2 |" in page
    assert (tmp_path / "measured.png").stat().st_size > 1000
