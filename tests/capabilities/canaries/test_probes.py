"""What an audited run keeps of its own records: nothing that depends on them while the mechanism is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpbench.capabilities.auditing.declared import lot_sizes, statistics_noise
from dpbench.capabilities.canaries.probes import LARGEST, Probes
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling


def with_records(largest: float, difference: float, surplus: int = 0) -> Probes:
    probes = Probes()
    probes.add_records(16, largest, difference, surplus)
    probes.add_records(16, 0.5, 0.0, 0)
    return probes


def test_what_is_right_leaves_the_same_whatever_the_records() -> None:
    small, large = with_records(0.01, 1e-7), with_records(1.019, 0.04)
    assert small == large and (small.records, small.largest, small.difference) == (32, 1.0, 0.0)


@pytest.mark.parametrize("norm", [1.03, math.inf, math.nan])
def test_what_is_wrong_is_kept(norm: float) -> None:
    kept = norm if math.isfinite(norm) else LARGEST
    assert with_records(norm, 0.0).largest == with_records(1.0, norm).difference == kept
    assert with_records(1.0, 0.0, 3).surplus == 3


def sized(sampling: Sampling, seed: int, lots: int = 60, declared: Sampling | None = None) -> Probes:
    declared = declared or sampling
    probes, rng = Probes(), np.random.default_rng(seed)
    for _ in range(lots):
        assert declared.lot_size_cumulants is not None
        size = len(sampling.draw(rng)[0])
        probes.add_size(size, declared.expected_batch_size, declared.lot_size_cumulants)
    return probes


@pytest.mark.parametrize("rate", [0.004, 0.9])
def test_sizes_of_poisson_lots_are_tested_at_their_level(rate: float) -> None:
    poisson = PoissonSampling(1000, rate)
    values = [lot_sizes(sized(poisson, seed)).p_value for seed in range(300)]  # type: ignore[union-attr]
    for level in (0.05 / 20, 0.05):
        assert (np.array(values) < level).sum() <= stats.binom.isf(1e-3, 300, level)
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_lots_of_another_size_are_found() -> None:
    poisson, fixed = PoissonSampling(1000, 0.064), FixedSizeSampling(1000, 64)
    for drawn, declared in ((fixed, poisson), (poisson, fixed), (PoissonSampling(1000, 0.09), poisson)):
        assert lot_sizes(sized(drawn, 0, declared=declared)).p_value < 1e-6  # type: ignore[union-attr]
    assert lot_sizes(sized(fixed, 0)).p_value == 1  # type: ignore[union-attr]
    assert lot_sizes(Probes()) is statistics_noise(Probes()) is None


@pytest.mark.parametrize("factor", [2 / 3, 1.0, 3 / 2])
def test_noise_of_statistics_is_accepted_at_its_scale_only(factor: float) -> None:
    rng, probes = np.random.default_rng(0), Probes()
    for _ in range(150):
        noise = factor * rng.standard_normal(2)
        probes.add_statistics(2, float(noise @ noise))
    test = statistics_noise(probes)
    assert test is not None and (test.p_value > 0.01) == (factor == 1)
    assert test.value == pytest.approx(factor, rel=0.1)
