"""What one step tells of the number of records, by its divisor and noise: docs/one_step.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpbench.data.sampler import make_sampling
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.mechanism.noise import grid_spacing
from dpbench.privacy.sampling import FullParticipation, PoissonSampling, Sampling
from tests.support.releases import WIDTH, made, release

N = 59_904
"""234 batches of 256 records: with one record more there are 235, so that 1 / number of batches is another rate."""
EXPECTED = 256.0
Z = 1.0


def step(folder: Path, sampling: Sampling) -> tuple[float, Tensor]:
    """Make one release of no records: its planned deviation after the division, and the noise."""
    releases = made(folder, z=Z, sampling=sampling)
    noise = release(releases)
    return releases.mechanism.plan.gradient_stds[0], noise


@pytest.mark.parametrize("kind", ["poisson", "cyclic_poisson", "fixed_size"])
def test_a_declared_batch_size_gives_the_same_scale_with_one_record_more(tmp_path: Path, kind: str) -> None:
    stds = []
    for population in (N, N + 1):
        sampling = make_sampling(kind, population, EXPECTED)
        std, noise = step(tmp_path / str(population), sampling)
        stds.append(std)
        # The released noise, too: a sum on the grid, divided by 256 and no other number.
        places = noise.double() * EXPECTED / grid_spacing(Z)
        assert len(noise) == WIDTH and torch.equal(places, places.round())
        assert float(noise.std()) == pytest.approx(Z / EXPECTED, rel=0.15)
    assert stds[0] == stds[1]


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        (FullParticipation(N), FullParticipation(N + 1)),
        (PoissonSampling(N, EXPECTED / N), PoissonSampling(N + 1, EXPECTED / N)),  # a declared rate
    ],
)
def test_a_divisor_that_is_a_share_of_the_records_tells_them(tmp_path: Path, fewer: Sampling, more: Sampling) -> None:
    std_of_fewer, _ = step(tmp_path / "fewer", fewer)
    std_of_more, _ = step(tmp_path / "more", more)
    assert std_of_fewer / std_of_more == pytest.approx((N + 1) / N, rel=1e-12)


def test_noise_that_is_computed_for_a_budget_follows_the_number_of_records(tmp_path: Path) -> None:
    multipliers = []
    for population in (1000, 1001):
        releases = made(
            tmp_path / str(population),
            z=None,
            target=1.0,
            horizon=TrainingLength(10),
            sampling=make_sampling("poisson", population, 100),
        )
        assert releases.noise_multiplier is not None
        multipliers.append(releases.noise_multiplier)
    assert multipliers[0] > multipliers[1]


def test_the_rate_follows_the_number_of_records() -> None:
    assert make_sampling("poisson", N, EXPECTED).rate > make_sampling("poisson", N + 1, EXPECTED).rate


def test_epochs_are_another_number_of_steps_where_one_record_more_rounds_them_up() -> None:
    assert make_sampling("poisson", 60_032, EXPECTED).steps_of(1) == 234
    assert make_sampling("poisson", 60_033, EXPECTED).steps_of(1) == 235


def test_a_divisor_differs_in_its_last_bit_only_which_single_precision_does_not_show() -> None:
    divisors = {make_sampling("poisson", n, EXPECTED).expected_batch_size for n in range(50_000, 50_100)}
    assert divisors - {EXPECTED}, "then double precision shows nothing either, and docs/one_step.md says too little"
    sums = torch.arange(1, 1000, dtype=torch.float32)
    for divisor in divisors:
        assert divisor == pytest.approx(EXPECTED, rel=1e-15)
        assert torch.equal(sums / divisor, sums / EXPECTED)
