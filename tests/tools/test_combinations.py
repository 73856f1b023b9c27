"""The matrix in docs/ is what happens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tools.combinations import (
    DENOISERS,
    OPTIMIZERS,
    SAMPLERS,
    STRATEGIES,
    TRANSFORMS,
    UNITS,
    Cell,
    outcomes,
)

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
pytestmark = pytest.mark.filterwarnings("ignore")


def covering() -> list[Cell]:
    """Every value of every axis with every clipping, the optimizers in turn."""
    optimizers = itertools.cycle(OPTIMIZERS)
    chosen = [
        Cell(clipping, transform, denoiser, sampler, unit, next(optimizers))
        for clipping, transform, denoiser, sampler, unit in itertools.product(
            STRATEGIES, TRANSFORMS, DENOISERS, SAMPLERS, UNITS
        )
    ]
    return [cell for i, cell in enumerate(chosen) if i % 2 == 0 or cell.sampler == "poisson"]


def in_the_page(cell: Cell) -> str:
    """ "✓" or "[n]"."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    column = lines[0].index(f"{cell.sampler}, {cell.unit}")
    (row,) = [line for line in lines if line[:3] == [cell.clipping, cell.transform, cell.denoiser]]
    return row[column]


@pytest.mark.long
def test_the_page_tells_the_truth() -> None:
    chosen = covering()
    found = outcomes(chosen)
    for cell, reason in found.items():
        mark = in_the_page(cell)
        assert (mark == "✓") == (not reason), (cell, reason)
        if reason:
            assert f"{mark.strip('[]')}. {reason}" in PAGE.read_text(encoding="utf-8")
