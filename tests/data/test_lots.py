"""Lots: binomial sizes, inclusion, ranks, state, empty lots."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs

N, Q, STEPS = 50, 0.2, 4000


@pytest.fixture(scope="module")
def inclusion() -> np.ndarray:
    """(STEPS, N): whether each record is in each lot."""
    lots = PrivateBatchSampler(PoissonSampling(N, Q), seed=3)
    table = np.zeros((STEPS, N), bool)
    for step in range(STEPS):
        table[step, lots.lot(step)] = True
    return table


def test_sizes_are_binomial(inclusion: np.ndarray) -> None:
    sizes = inclusion.sum(1)
    counts = np.bincount(sizes, minlength=N + 1)
    expected = STEPS * stats.binom.pmf(np.arange(N + 1), N, Q)
    common = expected > 8
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(observed, wanted).pvalue > 1e-4
    assert stats.chisquare(np.roll(observed, 1), wanted).pvalue < 1e-4  # the test can fail


def test_every_record_and_every_pair_is_included_at_its_rate(inclusion: np.ndarray) -> None:
    singles = inclusion.mean(0)
    assert np.abs(singles - Q).max() < 5 * np.sqrt(Q * (1 - Q) / STEPS)
    pairs = (inclusion.T.astype(float) @ inclusion) / STEPS
    off = pairs[~np.eye(N, dtype=bool)]
    assert np.abs(off - Q * Q).max() < 5 * np.sqrt(Q * Q * (1 - Q * Q) / STEPS)
    consecutive = (inclusion[1:] & inclusion[:-1]).mean()
    assert abs(consecutive - Q * Q) < 5 * np.sqrt(Q * Q / (STEPS * N))


def test_ranks_share_a_lot_without_overlap_and_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        lots = PrivateBatchSampler(PoissonSampling(N, Q), seed=3)
        shares.append([lot for _ in range(200) for lot in lots_of_epoch(lots)])
    whole = PrivateBatchSampler(PoissonSampling(N, Q), seed=3)
    table = np.zeros((2, len(shares[0]), N))
    for step, (a, b) in enumerate(zip(*shares, strict=True)):
        assert sorted(a + b) == sorted(whole.lot(step).tolist())
        assert not set(a) & set(b)
        table[0, step, a] = table[1, step, b] = 1
    # The presence of record i on one rank says nothing about that of another record on the other.
    joint = np.einsum("ti,tj->ij", table[0], table[1]) / len(shares[0])
    off = joint[~np.eye(N, dtype=bool)]
    assert off.mean() == pytest.approx(Q * Q / 4, rel=0.15)


def lots_of_epoch(lots: PrivateBatchSampler) -> list[list[int]]:
    drawn = []
    for lot in lots:
        drawn.append(lot)
    lots.position += len(drawn)
    return drawn


def test_fixed_size_and_shuffled() -> None:
    fixed = PrivateBatchSampler(FixedSizeSampling(10, 4), seed=0)
    drawn = [fixed.lot(step) for step in range(3000)]
    assert all(len(set(lot)) == 4 for lot in drawn)
    assert np.abs(np.bincount(np.concatenate(drawn)) / 3000 - 0.4).max() < 0.05
    shuffled = PrivateBatchSampler(ShuffledEpochs(10, 4), seed=0)
    epochs = [[shuffled.lot(3 * epoch + i).tolist() for i in range(3)] for epoch in range(2)]
    assert [len(lot) for lot in epochs[0]] == [4, 4, 2]
    assert all(sorted(record for lot in epoch for record in lot) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_no_two_trainings_draw_the_same_lots_by_chance() -> None:
    """Also two branches that go on from one checkpoint: accounting takes the lots of unseeded runs as independent."""

    def drawn(lots: PrivateBatchSampler) -> list[list[int]]:
        lots.start_at(3)
        return [lots.lot(step).tolist() for step in range(3, 8)]

    unseeded, seeded = (
        PrivateBatchSampler(PoissonSampling(N, Q), None),
        PrivateBatchSampler(PoissonSampling(N, Q), seed=1),
    )
    assert drawn(unseeded) != drawn(unseeded)
    assert drawn(seeded) == drawn(seeded)


def dataset(size: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(float(size))[:, None], torch.arange(size))


DATA = dataset()


def test_empty_lots_have_the_right_shape() -> None:
    loader = PrivateDataLoader(dataset(), PrivateBatchSampler(PoissonSampling(20, 0.025), seed=0))
    batches = [batch for _ in range(3) for batch in loader]
    empty = [x for x, _ in batches if len(x) == 0]
    assert empty
    assert all(x.shape == (0, 1) and x.dtype == torch.float32 for x in empty)
    assert any(len(x) for x, _ in batches)
    assert len(loader) == 40


def test_state_resumes_in_mid_epoch() -> None:
    def loader() -> PrivateDataLoader:
        return PrivateDataLoader.poisson(dataset(), 4, seed=1, num_workers=1)

    first = loader()
    seen = []
    for _, y in first:
        seen.append(y.tolist())
        if len(seen) == 2:
            break
    second = loader()
    second.load_state_dict(first.state_dict())
    rest = [y.tolist() for _, y in second] + [y.tolist() for _, y in second]
    one = loader()
    expected = [y.tolist() for _, y in one] + [y.tolist() for _, y in one]
    assert seen + rest == expected


def test_from_dataloader_keeps_its_parts() -> None:
    plain = DataLoader(dataset(), batch_size=5, shuffle=True)
    loader = PrivateDataLoader.from_dataloader(plain, seed=0)
    assert loader.lots.sampling == PoissonSampling(20, 0.25)
    subset = DataLoader(dataset(), batch_size=5, sampler=SubsetRandomSampler(range(10)))
    with pytest.raises(ConfigurationError, match="SubsetRandomSampler"):
        PrivateDataLoader.from_dataloader(subset)
    with pytest.raises(ConfigurationError, match="no batch_size"):
        PrivateDataLoader.from_dataloader(DataLoader(dataset(), batch_size=None))
    workers = DataLoader(dataset(), 5, num_workers=1, prefetch_factor=3, timeout=60, worker_init_fn=print)
    kept = PrivateDataLoader.from_dataloader(workers)
    own: Any = kept.worker_init_fn  # seeds, and calls it
    assert (kept.num_workers, kept.prefetch_factor, kept.timeout, own.worker_init_fn) == (1, 3, 60, print)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (SequentialSampler(range(10)), "from something else of length 10"),
        (RandomSampler(range(20)), "from something else of length 20"),
        (RandomSampler(DATA, replacement=True), "with replacement"),
        (RandomSampler(DATA, num_samples=5), "num_samples"),
        (DistributedSampler(DATA, 2, 0), "leave out the DistributedSampler"),
        (type("Mine", (SequentialSampler,), {"__iter__": lambda self: iter([0, 0])})(DATA), "draws by a Mine"),
    ],
)
def test_loaders_that_draw_otherwise_are_refused(sampler: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PrivateDataLoader.from_dataloader(DataLoader(DATA, batch_size=5, sampler=sampler))


@pytest.mark.parametrize("size", [0.99, math.nan, "12", True])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="must lie between 1 and the 20 training records"):
        PrivateDataLoader.poisson(DATA, size)
    with pytest.raises(ConfigurationError, match="Is it a rate. That is expected_batch_size=2"):
        PrivateDataLoader.poisson(DATA, 0.1)
    assert PrivateDataLoader.poisson(DATA, np.float32(2)).lots.sampling.sample_rate == 0.1


@pytest.mark.parametrize("seed", [-1, 0.5])
def test_seeds_that_are_none(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="seed of batches must be a whole number"):
        PrivateDataLoader.poisson(DATA, 4, seed)


def test_the_size_of_lots_does_not_change_in_silence() -> None:
    loader = PrivateDataLoader.poisson(TensorDataset(torch.zeros(10, 1)), 5)
    with pytest.raises(
        ConfigurationError, match="cannot change once the PrivateDataLoader is made.*expected_batch_size_sch"
    ):
        loader.expected_batch_size = 8
    assert loader.expected_batch_size == 5


def test_they_say_what_they_are() -> None:
    loader = PrivateDataLoader.poisson(DATA, 5, seed=3)
    known = "PoissonSampling(population=20, unit='example', sample_rate=0.25)"
    assert (
        repr(loader)
        == f"PrivateDataLoader(TensorDataset of 20 examples, PrivateBatchSampler({known}, seed=3, position=0))"
    )
    with pytest.raises(AttributeError):
        loader.lots.sampling = PoissonSampling(20, 0.5)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("poisson", 21, "between 1 and the 20"),
        ("fixed_size", 2.5, "whole"),
        ("magic", 3, "unknown sampling 'magic'"),
    ],
)
def test_clear_errors(kind: str, size: float, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_sampling(kind, 20, size)
    with pytest.raises(ConfigurationError, match="draws from 7 records, but the data set has 20"):
        PrivateDataLoader(dataset(), PrivateBatchSampler(PoissonSampling(7, 0.5), 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: PrivateDataLoader.poisson(data, 30, sampler=1), "PrivateDataLoader takes no sampler, because"),
        (lambda data: PrivateDataLoader.poisson(data, 30, foo=1), "unexpected keyword argument 'foo'"),
        (lambda data: PrivateDataLoader.poisson(data, 30, num_workers=-1), "num_workers option should be non-negative"),
        (lambda data: PrivateDataLoader.from_dataloader(None), "takes a torch.utils.data.DataLoader, not a NoneType"),
        (
            lambda data: PrivateDataLoader(data, None),
            "PrivateDataLoader takes a PrivateBatchSampler, not None: PrivateDataLoader.poisson",
        ),
        (
            lambda data: PrivateDataLoader.poisson(pd.DataFrame({"a": [1.0, 2.0]}), 1),
            "a DataFrame is indexed by column",
        ),
        (lambda data: PrivateBatchSampler("poisson", 0), "PrivateBatchSampler takes a Sampling, not 'poisson'"),
        (
            lambda data: PrivateDataLoader.poisson(TensorDataset(torch.zeros(0, 2)), 1),
            "the data set contains no records",
        ),
    ],
)
def test_what_lots_are_not_made_of(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(TensorDataset(torch.zeros(N, 2)))


def test_a_unit_that_plain_examples_may_not_be_is_asked_about() -> None:
    with pytest.warns(
        UserWarning, match="unit='user' requires that each item of the TensorDataset contains all data of one user"
    ):
        PrivateDataLoader.poisson(dataset(), 5, unit="user")
    with pytest.warns(UserWarning, match="each item of the Subset contains all data"):
        PrivateDataLoader(Subset(dataset(), range(10)), PrivateBatchSampler(make_sampling("poisson", 10, 5, "user"), 0))
    sure: Any = dataset()
    sure.unit = "user"
    assert PrivateDataLoader.poisson(sure, 5).lots.sampling.unit == "user"
    assert PrivateDataLoader.poisson(dataset(), 5, unit="example").lots.sampling.unit == "example"
