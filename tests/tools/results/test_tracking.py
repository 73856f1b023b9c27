"""The simulation of adaptive_quantile_clipping_2021, Fig. 2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tools.results.tracking import SOURCES, Source, reproduce_tracking, track


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.label)
def test_bounds_end_at_the_quantile(source: Source) -> None:
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(200_000, generator=generator, dtype=torch.float64) * source.std + source.mean).exp()
    assert source.quantile(0.7) == pytest.approx(float(data.quantile(0.7)), rel=0.02)
    bounds = track(source, 0.7, generator)
    assert bounds[0] == 0.1 and np.mean(bounds[150:]) == pytest.approx(source.quantile(0.7), rel=0.1)
    assert max(np.diff(np.log(bounds))) <= 0.2 * 0.7 * 1.5  # geometric: at most η γ, and noise


def test_a_table_and_a_picture_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "figure2"
    shown = reproduce_tracking(folder)
    assert len(pd.read_csv(folder / "bounds.csv")) == 3 * 5 * 200
    assert (folder / "figure.png").read_bytes()[:4] == b"\x89PNG"
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page in shown
    (near,) = [
        int(line.split("|")[5]) for line in page.splitlines() if line.startswith("| exp N(0, 1) | 0.5 | 1.000 |")
    ]
    rounds = pd.read_csv(folder / "bounds.csv").query("data == 'exp N(0, 1)' and quantile == 0.5").set_index("round")
    far = (rounds["bound"] / rounds["true"] - 1).abs() >= 0.1
    assert far[near - 1] and not far[near:].any()
