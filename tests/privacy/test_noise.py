"""Noise: the right scale and no other, independent everywhere, repeatable by key."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from dpbench.privacy.mechanism.groups import flat_groups, per_layer_groups
from dpbench.privacy.mechanism.noise import add_gaussian_noise, checksum
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.native import kernels
from dpbench.privacy.randomness import fresh_key, keyed_generator, keyed_seed
from dpbench.privacy.sampling import PoissonSampling
from tests.checks import accepts_scale

pytestmark = pytest.mark.usefixtures("tier")

SIZES = (4000, 1000)
NAMES = ["a.weight", "b.weight"]


def released(clipping: str, release: int = 0, seed: int = 0) -> tuple[np.ndarray, float]:
    groups = {"flat": flat_groups, "per_layer": per_layer_groups}[clipping](NAMES, SIZES, 0.5)
    plan = ReleasePlan(PoissonSampling(1000, 0.05), groups, 3.0, SIZES)
    total = plan.privatize(torch.zeros(sum(SIZES)), (seed, 2, 0, release))
    return total.numpy().copy(), 3.0 * 0.5


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_scale(clipping: str) -> None:
    noise, std = released(clipping)
    start = 0
    for size in SIZES:
        part = noise[start : start + size]
        assert accepts_scale(part, std)
        assert not accepts_scale(part, std * 2 / 3)
        assert not accepts_scale(part, std * 3 / 2)
        start += size


def test_segments_have_their_own_scale() -> None:
    total = add_gaussian_noise(torch.zeros(4000), [(2000, 1.0), (2000, 5.0)], (1,))
    assert accepts_scale(total[:2000].numpy(), 1.0)
    assert accepts_scale(total[2000:].numpy(), 5.0)
    with pytest.raises(ValueError, match="cover 3 of 4"):
        add_gaussian_noise(torch.zeros(4), [(3, 1.0)], (1,))


def test_independent_across_steps_parameters_and_seeds() -> None:
    draws = [released("flat", release, seed)[0] for release, seed in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(stats.pearsonr(a, b).statistic) < 4 / np.sqrt(len(a))
    for draw in draws:
        assert abs(stats.pearsonr(draw[:-1], draw[1:]).statistic) < 4 / np.sqrt(len(draw))
        assert abs(stats.pearsonr(draw[:1000], draw[4000:]).statistic) < 4 / np.sqrt(1000)


@pytest.mark.parametrize("noise", [True, False])
def test_same_key_repeats_and_long_keys_count_in_full(noise: bool) -> None:
    def draw(*key: int) -> list[float]:
        if noise:
            return add_gaussian_noise(torch.zeros(4), [(4, 1.0)], key).tolist()
        return torch.randn(4, generator=keyed_generator(key)).tolist()

    assert draw(5, 7) == draw(5, 7)
    keys = [(5, 7), (7, 5), (5,), (5, 7, 1), (5 + 2**32, 7), (5 + 2**64, 7), (5, 7 + 2**32)]
    assert len({tuple(draw(*key)) for key in keys}) == len(keys)
    assert fresh_key() != fresh_key()


def test_the_whole_state_is_filled() -> None:
    """torch alone would keep 32 bits of a seed; the layout that we write is the one it reads."""
    state = keyed_generator((3,)).get_state()
    words = state[24 : 24 + 8 * 624].numpy().view(np.uint64)
    assert (words < 2**32).all()
    assert len(set(words.tolist())) > 600
    reference = np.frombuffer(hashlib.shake_256(b"[3]").digest(4 * 624), np.uint32)
    assert (words == reference).all()
    seeded = torch.Generator().manual_seed(5).get_state()[24 : 24 + 16].numpy().view(np.uint64)
    assert seeded.tolist() == [5, 1812433253 * (5 ^ (5 >> 30)) + 1 & 0xFFFFFFFF]
    assert all(a != b for a, b in pairwise(words[:10]))


def test_seeds_of_keys() -> None:
    seeds = {keyed_seed((release, rank)) for release in range(1000) for rank in range(2)}
    assert len(seeds) == 2000 and max(seeds) < 2**62 and keyed_seed((0, 0)) in seeds


def test_the_sum_by_which_a_release_is_known() -> None:
    for size in (0, 1, 31, 1000, 65_536, 200_001):
        x = torch.randn(size)
        assert checksum(x) == pytest.approx(float(x.double().sum()), rel=1e-12, abs=1e-9)
        before = torch.get_num_threads()
        try:
            sums = set()
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                sums.add(checksum(x))
        finally:
            torch.set_num_threads(before)
        assert len(sums) == 1 or not kernels.suits(x)  # the same run on more threads is the same run
    x = torch.zeros(100_000)
    x[77_777] = float("nan")
    assert np.isnan(checksum(x))
    assert checksum(x.nan_to_num().double().add_(1e-9)) == pytest.approx(1e-4)
