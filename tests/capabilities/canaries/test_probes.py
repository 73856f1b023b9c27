"""What an audited run keeps of its own records: nothing that depends on them while the mechanism is right."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from dpbench.capabilities.auditing.declared import lot_sizes, statistics_noise
from dpbench.capabilities.canaries.probes import LARGEST, Probes
from dpbench.privacy.sampling import FixedSizeSampling, FullParticipation, PoissonSampling, Sampling


def with_records(*measured: tuple[int, float, float, int]) -> Probes:
    probes = Probes()
    for one in measured:
        probes.add_records(*one)
    return probes


def test_what_is_right_leaves_the_same_whatever_the_records() -> None:
    small, large = (with_records((16, norm, apart, 0)) for norm, apart in ((0.01, 1e-7), (1.019, 0.04)))
    assert small == large and (small.largest, small.difference) == (1.0, 0.0)


@pytest.mark.parametrize("norm", [1.03, 10.0, math.inf, math.nan])
def test_what_is_wrong_is_kept(norm: float) -> None:
    probes = with_records((16, norm, 0.0, 0), (16, 0.5, 0.0, 0))
    assert probes.largest == (norm if math.isfinite(norm) else LARGEST) and probes.records == 32
    assert with_records((16, 1.0, norm, 0)).difference == (norm if math.isfinite(norm) else LARGEST)
    assert with_records((16, 1.0, 0.0, 3), (16, 1.0, 0.0, 1)).surplus == 3


def test_json_round_trip_is_exact_and_damage_is_named() -> None:
    probes = with_records((16, 1.2, 0.3, 1))
    probes.add_statistics(3, 2.7)
    probes.add_size(41, 50.0, (47.5, 33.9))
    kept = probes.model_dump()
    assert Probes.model_validate(json.loads(json.dumps(kept))) == probes
    for damage in ({"largest": "much"}, {"records": 1.5}, {"difference": math.nan}):
        with pytest.raises(ValueError, match=next(iter(damage))):
            Probes.model_validate(kept | damage)


def sized(sampling: Sampling, seed: int, lots: int = 60, declared: Sampling | None = None) -> Probes:
    declared = declared or sampling
    probes, rng = Probes(), np.random.default_rng(seed)
    for _ in range(lots):
        assert declared.lot_size_cumulants is not None
        size = len(sampling.draw(rng)[0])
        probes.add_size(size, declared.expected_batch_size, declared.lot_size_cumulants)
    return probes


@pytest.mark.parametrize("size", [4, 64, 900])
def test_sizes_of_poisson_lots_are_tested_at_their_level(size: int) -> None:
    poisson = PoissonSampling(1000, size / 1000)
    values = [lot_sizes(sized(poisson, seed)).p_value for seed in range(300)]  # type: ignore[union-attr]
    for level in (0.05 / 20, 0.05):
        assert (np.array(values) < level).sum() <= stats.binom.isf(1e-3, 300, level)
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_lots_of_another_size_are_found() -> None:
    poisson, fixed = PoissonSampling(1000, 0.064), FixedSizeSampling(1000, 64)
    for drawn, declared in ((fixed, poisson), (poisson, fixed), (PoissonSampling(1000, 0.09), poisson)):
        test = lot_sizes(sized(drawn, 0, declared=declared))
        assert test is not None and test.p_value < 1e-6
    for sampling in (fixed, FullParticipation(64)):
        test = lot_sizes(sized(sampling, 0))
        assert test is not None and test.p_value == test.value == 1
    assert lot_sizes(Probes()) is statistics_noise(Probes()) is None


@pytest.mark.parametrize("factor", [0.0, 2 / 3, 1.0, 3 / 2])
def test_noise_of_statistics_is_accepted_at_its_scale_only(factor: float) -> None:
    rng, probes = np.random.default_rng(0), Probes()
    for _ in range(150):
        noise = factor * rng.standard_normal(2)
        probes.add_statistics(2, float(noise @ noise))
    test = statistics_noise(probes)
    assert test is not None and (test.p_value > 0.01) == (factor == 1)
    assert test.value == pytest.approx(factor, rel=0.1)
