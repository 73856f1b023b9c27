"""An audited run measures its own records, statistics and lots: right ones pass, and broken ones are found."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dpbench import strategies
from dpbench.capabilities.auditing.declared import statistics_noise
from dpbench.capabilities.canaries.run_probe import is_looked_at
from tests.capabilities.canaries.test_training import is_right, scores_of, train
from tools.audits.mutants import MUTANTS

STEPS = 9  # of which about five are looked at


def test_which_lots_are_looked_at_is_a_function_of_the_key() -> None:
    """No lot is safe from it, and later ones are looked at less often."""
    for release, share in ((0, 1.0), (1, 1.0), (3, 0.5), (39, 0.05)):
        looked = np.array([is_looked_at(key, release) for key in range(2000)])
        assert abs(looked.mean() - share) <= 4.5 * np.sqrt(share * (1 - share) / 2000)


def test_pieces_are_right(tmp_path: Path) -> None:
    train(strategies.DPSGD, tmp_path, steps=STEPS, max_physical_batch_size=20)
    assert is_right(scores_of(tmp_path).probes)


BROKEN = {
    "records clipped at ten bounds, canaries at one": ("largest", 2.0),
    "each parameter clipped by itself": ("largest", 1.5),
    "large records twice": ("difference", 0.1),
    "a tenth of each sum stays for the next lot": ("difference", 0.1),
    "records drawn with replacement": ("surplus", 0),
    "users weighted by examples": ("surplus", 0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_records_that_are_treated_otherwise_are_found(name: str, tmp_path: Path) -> None:
    """Canaries show none of the first three: they are clipped as declared."""
    measured, least = BROKEN[name]
    with MUTANTS[name]():
        train(strategies.DPSGD, tmp_path, unit="user" if "users" in name else "example", steps=STEPS)
    probes = scores_of(tmp_path).probes
    assert getattr(probes, measured) > least and not is_right(probes)


@pytest.mark.parametrize("name", [None, "half of the noise for statistics"])
def test_noise_of_statistics_is_measured(name: str | None, tmp_path: Path) -> None:
    with MUTANTS[name]() if name else nullcontext():
        train(partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0), tmp_path, steps=40)
    noise = statistics_noise(scores_of(tmp_path).probes)
    assert noise is not None
    assert noise.p_value < 1e-4 if name else noise.p_value > 0.01


def test_the_sums_of_a_lot_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the measurements the same is released, bit for bit."""
    first, _ = train(strategies.DPSGD, tmp_path / "with", steps=5)
    monkeypatch.setattr("dpbench.capabilities.canaries.run_probe.RunProbe._due", property(lambda self: False))
    second, _ = train(strategies.DPSGD, tmp_path / "without", steps=5)
    assert scores_of(tmp_path / "without").probes.records == 0
    assert torch.equal(first.mechanism.total, second.mechanism.total)
