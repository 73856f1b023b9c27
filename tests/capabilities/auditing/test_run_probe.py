"""An audited run measures its own records, statistics and lots: right ones pass, and broken ones are found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpbench import strategies
from dpbench.capabilities.auditing.declared import lot_sizes, statistics_noise
from dpbench.capabilities.canaries.canaries import GradientCanaries
from dpbench.capabilities.canaries.probes import Probes
from dpbench.capabilities.canaries.run_probe import is_looked_at
from dpbench.capabilities.canaries.scores import Scores
from tests.capabilities.canaries.test_training import PRIVATE, scores_of, train
from tools.audits.mutants import MUTANTS, RECORD_MUTANTS

STEPS = 9  # of which about five are looked at


def test_which_lots_are_looked_at_is_a_function_of_the_key() -> None:
    """No lot is safe from it, and later ones are looked at less often."""
    for release, share in ((0, 1.0), (1, 1.0), (3, 0.5), (9, 0.2), (39, 0.05)):
        looked = np.array([is_looked_at(key, release) for key in range(2000)])
        assert abs(looked.mean() - share) <= 4.5 * np.sqrt(share * (1 - share) / 2000)
    numbers = [sum(is_looked_at(key, release) for release in range(1000)) for key in range(20)]
    assert 10 < np.mean(numbers) < 20


def probes_of(folder: Path) -> Probes:
    probes = Scores.model_validate(scores_of(folder)["scores"]).probes
    assert probes is not None
    return probes


def is_right(probes: Probes) -> bool:
    tests = lot_sizes(probes), statistics_noise(probes)
    exact = (probes.largest, probes.difference, probes.surplus) == (1.0, 0.0, 0)
    return exact and all(test is None or test.p_value > 1e-3 for test in tests)


@pytest.mark.parametrize("name", PRIVATE)
def test_records_of_every_strategy_are_within_their_bounds(name: str, tmp_path: Path) -> None:
    train(PRIVATE[name], tmp_path, steps=5)
    probes = probes_of(tmp_path)
    assert is_right(probes) and probes.records >= 4 * 4 and probes.lots == 5


@pytest.mark.parametrize("unit", ["example", "microbatch", "user"])
@pytest.mark.parametrize(
    "sampling",
    ["poisson", "fixed_size", *(pytest.param(s, marks=pytest.mark.slow) for s in ("truncated_poisson", "full"))],
)
def test_every_unit_and_sampling_is_right(sampling: str, unit: str, tmp_path: Path) -> None:
    train(strategies.DPSGD, tmp_path, sampling, unit, steps=3)
    probes = probes_of(tmp_path)
    assert is_right(probes) and probes.records > 0
    assert probes.lots == (0 if sampling == "truncated_poisson" else 3)


@pytest.mark.parametrize(
    "options",
    [
        {"max_physical_batch_size": 20},
        {"discretization_threshold": 1e-3},
        {"metrics": {"accuracy": 1.0, "loss": 3.0}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_pieces_transforms_and_metrics_are_right(options: dict[str, Any], tmp_path: Path) -> None:
    train(strategies.DPSGD, tmp_path, steps=STEPS, **options)
    probes = probes_of(tmp_path)
    assert is_right(probes) and (probes.statistics > 0) == ("metrics" in options)


@pytest.mark.parametrize("name", [*RECORD_MUTANTS, "no clipping", "clipping of the mean", "users weighted by examples"])
def test_records_that_are_treated_otherwise_are_found(name: str, tmp_path: Path) -> None:
    """Canaries show none of the first five: they are clipped as declared."""
    unit, steps = ("user", STEPS) if name.startswith("users") else ("example", 40 if "fixed" in name else STEPS)
    with MUTANTS[name]():
        train(strategies.DPSGD, tmp_path, unit=unit, steps=steps)
    probes = probes_of(tmp_path)
    if name == "each lot twice":  # the audit's test of dispersion finds it
        return
    assert not is_right(probes)
    expected = {
        "records clipped at ten bounds, canaries at one": probes.largest > 2,
        "each parameter clipped by itself": 1.5 < probes.largest <= 2.01,
        "clipping by the largest coordinate": probes.largest > 2,
        "norms without the first layer": probes.largest > 1.1,
        "large records twice": probes.difference > 0.1,
        "a tenth of each sum stays for the next lot": probes.difference > 0.1,
        "lots of a fixed size as Poisson lots": probes.size_squared < 40,
        "records drawn with replacement": probes.surplus > 0,
        "users weighted by examples": probes.surplus > 0,
    }
    assert expected.get(name, True)


@pytest.mark.parametrize("name", ["counts without noise", "half of the noise for statistics"])
def test_noise_of_statistics_is_measured(name: str, tmp_path: Path) -> None:
    make = partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0)
    train(make, tmp_path / "right", steps=40)
    with MUTANTS[name]():
        train(make, tmp_path / "wrong", steps=40)
    right, wrong = (statistics_noise(probes_of(tmp_path / run)) for run in ("right", "wrong"))
    assert right is not None and right.p_value > 0.01
    assert wrong is not None and wrong.p_value < 1e-4


def test_the_sums_of_a_lot_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the measurements the same is released, bit for bit."""
    first, _ = train(strategies.DPSGD, tmp_path / "with", steps=5)
    monkeypatch.setattr("dpbench.capabilities.canaries.run_probe.RunProbe._due", property(lambda self: False))
    second, _ = train(strategies.DPSGD, tmp_path / "without", steps=5)
    assert probes_of(tmp_path / "without").records == 0
    assert torch.equal(first.mechanism.total, second.mechanism.total)


def test_a_training_without_canaries_is_not_watched(tmp_path: Path) -> None:
    strategy, _ = train(strategies.DPSGD, tmp_path, steps=2)
    assert strategy.observers == [] and probes_of(tmp_path).lots > 0  # taken back at the end
    plain, _ = train(strategies.DPSGD, tmp_path / "plain", steps=2, audit=None)
    assert plain.observers == []


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    options = {"fingerprint": "f", "audit": GradientCanaries(200, seed=1)}
    make = partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0)
    train(make, tmp_path / "whole", steps=STEPS, **options)
    _, trainer = train(make, tmp_path / "parts", steps=3, **options)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    train(make, tmp_path / "parts", steps=STEPS, checkpoint=tmp_path / "three.ckpt", **options)
    assert probes_of(tmp_path / "whole") == probes_of(tmp_path / "parts")
    assert scores_of(tmp_path / "whole") == scores_of(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.own_key
def test_two_processes_measure_what_one_measures(tmp_path: Path) -> None:
    for name, devices in (("one", {}), ("two", {"devices": 2, "processes": "ddp_fork"})):
        train(strategies.DPSGD, tmp_path / name, steps=4, **devices)
    one, two = probes_of(tmp_path / "one"), probes_of(tmp_path / "two")
    assert is_right(one) and is_right(two) and two.records > one.records  # each process measures some of its own
    assert (one.lots, one.size_squared) == (two.lots, two.size_squared)
