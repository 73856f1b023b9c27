"""Noise: the right scale and no other, independent everywhere, repeatable by key."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from dpbench.privacy.events import NOISE_END
from dpbench.privacy.mechanism.noise import add_gaussian_noise, checksum, grid_spacing, normal_numbers
from dpbench.privacy.randomness import fresh_key, keyed_generator, keyed_seed
from tests.support.checks import accepts_scale

in_both_tiers = pytest.mark.usefixtures("tier")


@in_both_tiers
def test_independent_across_steps_parameters_and_seeds() -> None:
    segments = [(4000, 1.5), (1000, 1.5)]
    draws = [
        add_gaussian_noise(torch.zeros(5000), segments, (seed, 2, 0, release)).numpy()
        for release, seed in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(stats.pearsonr(a, b).statistic) < 4 / np.sqrt(len(a))
        assert abs(stats.pearsonr(a[:-1], a[1:]).statistic) < 4 / np.sqrt(len(a))
        assert abs(stats.pearsonr(a[:1000], a[4000:]).statistic) < 4 / np.sqrt(1000)


@in_both_tiers
def test_same_key_repeats_and_long_keys_count_in_full() -> None:
    def noise(key: tuple[int, ...]) -> list[float]:
        return add_gaussian_noise(torch.zeros(4), [(4, 1.0)], key).tolist()

    def numbers(key: tuple[int, ...]) -> list[float]:
        return torch.randn(4, generator=keyed_generator(key)).tolist()

    keys = [(5, 7), (7, 5), (5,), (5 + 2**32, 7), (5 + 2**64, 7)]
    for draw in (noise, numbers):
        assert draw((5, 7)) == draw((5, 7))
        assert len({tuple(draw(key)) for key in keys}) == len(keys)
    seeds = {keyed_seed((release, rank)) for release in range(1000) for rank in range(2)}
    assert len(seeds) == 2000 and 2**250 < max(seeds) < 2**256
    assert fresh_key() != fresh_key()


def test_the_whole_state_is_filled() -> None:
    """torch alone would keep 32 bits of a seed; the layout that we write is the one it reads."""
    words = keyed_generator((3,)).get_state()[24 : 24 + 8 * 624].numpy().view(np.uint64)
    reference = np.frombuffer(hashlib.shake_256(b"[3]").digest(4 * 624), np.uint32)
    assert (words == reference).all()
    seeded = torch.Generator().manual_seed(5).get_state()[24 : 24 + 16].numpy().view(np.uint64)
    assert seeded.tolist() == [5, 1812433253 * (5 ^ (5 >> 30)) + 1 & 0xFFFFFFFF]


# ------------------------------------------------------------------------------------------------- tails


def drawing(rng: np.random.Generator) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.from_numpy(rng.integers(-(2**63), 2**63, size, dtype=np.int64))


def in_the_tail(bits: int, least: int) -> tuple[np.ndarray, int]:
    """Radii of pairs whose first `least` random bits are zero, as parts of what is left of (0, 1): uniform if exact.

    Args:
        bits: Random bits that a radius takes; a mutant takes fewer.
        least: That are zero.

    Returns:
        exp(-radius²/2) 2^least, shape (pairs,), and how many of them are different.
    """
    rng = np.random.default_rng(bits)
    pairs = 20_000

    def draw(size: int) -> torch.Tensor:
        words = drawing(rng)(size)
        if size == pairs:  # of a radius, read from the least number on, and an angle
            first = rng.integers(0, 2 ** (32 - least), size) if least < 32 else np.zeros(size, np.int64)
            words.numpy().view(np.int32)[::2] = first - 2**31
        return words

    radii = normal_numbers(2 * pairs, draw).view(2, -1).norm(dim=0).numpy()
    part = np.exp(-(radii**2) / 2)
    if bits < 32:
        part = np.ceil(part * 2**bits) / 2**bits
    return part * 2.0**least, len(np.unique(part))


def test_numbers_of_a_device_are_those_of_the_cpu() -> None:
    """Where nobody counts the pairs far out, they take the same bits, in order; others are drawn and not used."""

    counted, device = (normal_numbers(100_000, drawing(np.random.default_rng(3)), counts) for counts in (True, False))
    squares = counted[:50_000].square() + counted[50_000:].square()
    is_far_out = (squares > 2 * 12 * math.log(2)).repeat(2)
    assert 0 < int(is_far_out.sum()) < 100
    assert torch.equal(counted[~is_far_out], device[~is_far_out])
    torch.testing.assert_close(counted[is_far_out], device[is_far_out], rtol=0.05, atol=0.0)
    assert not torch.equal(counted[is_far_out], device[is_far_out])
    assert len(normal_numbers(0, drawing(np.random.default_rng(3)))) == 0


def test_noise_ends_where_ledgers_say() -> None:
    """All bits of the radius are zero, and those of the angle."""
    words = iter([2**31, 0])
    farthest, _ = normal_numbers(2, lambda size: torch.full((size,), next(words))).tolist()
    assert NOISE_END < farthest < NOISE_END + 0.1


@pytest.mark.parametrize("least", [12, 32])
def test_beyond_four_radii_are_exact(least: int) -> None:
    """At 4.08, 5.27 and 6.66 standard deviations and everywhere beyond, which a sampler of 24 bits fails."""
    right, different = in_the_tail(64, least)
    assert stats.kstest(right, "uniform").pvalue > 1e-4
    assert different > 19_000
    assert 0 < right.min() < 1e-3
    wrong, different = in_the_tail(24, least)
    assert different <= 2 ** max(0, 24 - least)
    assert stats.kstest(wrong, "uniform").pvalue < 1e-4 or least == 12


# ------------------------------------------------------------------------------------------------- grid


@in_both_tiers
@pytest.mark.parametrize(("std", "dtype"), [(1.3, torch.float32), (0.0037, torch.float64)])
def test_what_is_released_lies_on_a_grid_wherever_the_sum_is(std: float, dtype: torch.dtype) -> None:
    size = 100_000
    spacing = grid_spacing(std)
    assert std / 512 < spacing <= std / 256 and np.log2(spacing) % 1 == 0
    sums = torch.linspace(-3, 3, size, dtype=dtype) * std
    released = add_gaussian_noise(sums.clone(), [(size, std)], (5,)).double()
    cells = released / spacing
    assert torch.equal(cells, cells.round())
    noise = (released - sums.double()).numpy()
    assert accepts_scale(noise, std)
    assert not accepts_scale(noise, std * 2 / 3)
    assert not accepts_scale(noise, std * 3 / 2)
    low = np.bincount((cells.long() % 16).numpy(), minlength=16)  # in every cell, near every sum
    assert stats.chisquare(low).pvalue > 1e-5


@in_both_tiers
def test_cells_have_gaussian_probabilities_around_any_sum() -> None:
    size, std = 1_000_000, 1.3
    spacing = grid_spacing(std)
    edges = (np.arange(-200, 201) - 0.5) * spacing
    for place in (0.3 * spacing, 0.123456789):
        released = add_gaussian_noise(torch.full((size,), place), [(size, std)], (6,)).double().numpy()
        counts, _ = np.histogram(released, edges)
        center = float(torch.tensor(place))
        wanted = size * np.diff(stats.norm.cdf((edges - center) / std))
        assert stats.chi2.sf(((counts - wanted) ** 2 / wanted).sum(), len(counts)) > 1e-5


def reachable(released: torch.Tensor, std: float) -> torch.Tensor:
    """Whether numbers are `std` times a float32, rounded to float32: what noise drawn in float32 makes of a zero."""
    scale = torch.tensor(std)
    unit = (released.double() / float(scale)).float()
    possible = torch.zeros(len(released), dtype=torch.bool)
    for step in range(-2, 3):
        near = (unit.view(torch.int32) + step).view(torch.float32)
        possible |= scale * near == released
    return possible


@in_both_tiers
def test_low_bits_do_not_tell_a_sum_from_zero() -> None:
    """Mironov's attack: on noise in float32 it finds the sum in 20 of 20 pairs, with certainty."""
    std, size = 1.3, 200
    sums = torch.rand(size, generator=torch.Generator().manual_seed(1)) / size**0.5
    counts = np.array(
        [
            [
                int((~reachable(add_gaussian_noise(start.clone(), [(size, std)], (run, 8)), std)).sum())
                for start in (sums, torch.zeros(size))
            ]
            for run in range(20)
        ]
    )
    apart = counts[:, 0] - counts[:, 1]
    assert (apart > 0).sum() < 17 and (apart < 0).sum() < 17
    unit = torch.randn(20 * size, generator=torch.Generator().manual_seed(2))  # the attack itself works
    assert reachable(torch.tensor(std) * unit, std).all()
    assert not reachable(sums.repeat(20) + torch.tensor(std) * unit, std).all()


@in_both_tiers
def test_segments_that_end_within_a_piece_have_their_own_grid() -> None:
    stds = [0.3, 5.0, 0.3, 40.0]
    lengths = [100_001, 70_000, 1, 130_000]
    released = add_gaussian_noise(torch.zeros(sum(lengths)), list(zip(lengths, stds, strict=True)), (1,))
    for part, std in zip(released.split(lengths), stds, strict=True):
        cells = part.double() / grid_spacing(std)
        assert torch.equal(cells, cells.round())
        assert len(part) == 1 or accepts_scale(part.numpy(), std)


@in_both_tiers
def test_noise_without_a_scale_is_refused() -> None:
    for std in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive standard deviation"):
            add_gaussian_noise(torch.zeros(4), [(4, std)], (1,))
    with pytest.raises(ValueError, match="cover 3 of 4"):
        add_gaussian_noise(torch.zeros(4), [(3, 1.0)], (1,))


@in_both_tiers
@pytest.mark.parametrize("size", [0, 31, 2_200_001])
def test_the_checksum_is_that_of_every_number_of_threads(size: int) -> None:
    x = torch.randn(size)
    seen = set()
    for threads in (3, 2, 1):
        torch.set_num_threads(threads)
        seen.add(checksum(x))
    assert len(seen) == 1


@in_both_tiers
def test_the_checksum_tells_apart_what_adds_up_to_the_same() -> None:
    """Gradients of a softmax layer add up to zero: a plain sum would take one replay for another."""
    x = torch.randn(10, 50)
    of_softmax = torch.full((10, 1), -0.1)
    of_softmax[0] += 1
    other = x + of_softmax
    assert float((x - other).sum()) == pytest.approx(0, abs=1e-4)
    last = x.clone()
    last[-1, -1] = torch.nextafter(last[-1, -1], torch.tensor(9.0))
    assert len({checksum(y.flatten()) for y in (x, other, x.flip(0), last)}) == 4
    assert checksum(x.flatten()) == checksum(x.flatten().clone())
