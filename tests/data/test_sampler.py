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

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs
from tests.support.loaders import reserved

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
    shares: list[list[list[int]]] = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        lots = PrivateBatchSampler(PoissonSampling(N, Q), seed=3)
        shares.append([])
        while len(shares[rank]) < 400:
            shares[rank] += list(lots)
            lots.position = len(shares[rank])
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


def test_fixed_size_and_shuffled() -> None:
    fixed = PrivateBatchSampler(FixedSizeSampling(10, 4), seed=0)
    drawn = [fixed.lot(step) for step in range(1000)]
    assert all(len(set(lot)) == 4 for lot in drawn)
    assert np.abs(np.bincount(np.concatenate(drawn)) / 1000 - 0.4).max() < 0.05
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


DATA = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20))


def test_empty_lots_have_the_right_shape() -> None:
    loader = PrivateDataLoader(DATA, PrivateBatchSampler(PoissonSampling(20, 0.025), seed=0))
    batches = list(reserved(loader))
    assert len(batches) == len(loader) == 40
    assert {len(x) for x, _ in batches} >= {0, 1}
    assert all(x.shape == (len(x), 1) and x.dtype == torch.float32 for x, _ in batches)


def test_state_resumes_in_mid_epoch() -> None:
    """Where a worker has fetched lots ahead, too."""
    first, second, one = (
        reserved(PrivateDataLoader.poisson(DATA, 4, seed=1, num_workers=count)) for count in (1, 0, 0)
    )
    seen = [y.tolist() for _, (_, y) in zip(range(2), first, strict=False)]
    second.load_state_dict(first.state_dict())
    rest, expected = ([y.tolist() for _ in range(2) for _, y in loader] for loader in (second, one))
    assert seen + rest == expected


def test_from_dataloader_keeps_its_parts() -> None:
    plain = DataLoader(DATA, batch_size=5, shuffle=True)
    loader = PrivateDataLoader.from_dataloader(plain, seed=0)
    assert loader.lots.sampling == PoissonSampling(20, 0.25)
    subset = DataLoader(DATA, batch_size=5, sampler=SubsetRandomSampler(range(10)))
    with pytest.raises(ConfigurationError, match="SubsetRandomSampler"):
        PrivateDataLoader.from_dataloader(subset)
    with pytest.raises(ConfigurationError, match="no batch_size"):
        PrivateDataLoader.from_dataloader(DataLoader(DATA, batch_size=None))
    workers = DataLoader(DATA, 5, num_workers=1, prefetch_factor=3, timeout=60, worker_init_fn=print)
    kept = PrivateDataLoader.from_dataloader(workers)
    own: Any = kept.worker_init_fn  # seeds, and calls it
    assert (kept.num_workers, kept.prefetch_factor, kept.timeout, own.worker_init_fn) == (1, 3, 60, print)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (SequentialSampler(range(10)), "from something else of length 10"),
        (RandomSampler(DATA, replacement=True), "with replacement"),
        (RandomSampler(DATA, num_samples=5), "num_samples"),
        (DistributedSampler(DATA, 2, 0), "leave out the DistributedSampler"),
        (type("Mine", (SequentialSampler,), {"__iter__": lambda self: iter([0, 0])})(DATA), "draws by a Mine"),
    ],
)
def test_loaders_that_draw_otherwise_are_refused(sampler: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PrivateDataLoader.from_dataloader(DataLoader(DATA, batch_size=5, sampler=sampler))


SHORT = TensorDataset(torch.zeros(0, 2))
SIZES = "must lie between 1 and the 20 training records, not .*: set it .data.expected_batch_size on"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrivateDataLoader.poisson(DATA, 0.99), SIZES),
        (lambda: PrivateDataLoader.poisson(DATA, math.nan), SIZES),
        (lambda: PrivateDataLoader.poisson(DATA, True), SIZES),
        (lambda: PrivateDataLoader.poisson(DATA, 21), SIZES),
        (lambda: PrivateDataLoader.poisson(DATA, 0.1), "Is it a rate. That is expected_batch_size=2"),
        (lambda: PrivateDataLoader.poisson(DATA, 4, 0.5), "seed of batches must be None or a whole number"),
        (lambda: PrivateDataLoader.poisson(DATA, 4, -1), "seed of batches must be None or a whole number"),
        (lambda: PrivateDataLoader.poisson(DATA, 5, sampler=1), "PrivateDataLoader takes no sampler, because"),
        (lambda: PrivateDataLoader.poisson(DATA, 5, foo=1), "unexpected keyword argument 'foo'"),
        (lambda: PrivateDataLoader.poisson(SHORT, 1), "the data set contains no records"),
        (lambda: PrivateDataLoader.from_dataloader(None), "takes a torch.utils.data.DataLoader, not a NoneType"),
        (lambda: PrivateDataLoader(DATA, None), "takes a PrivateBatchSampler, not None: PrivateDataLoader.poisson"),
        (lambda: PrivateDataLoader(DATA, PrivateBatchSampler(PoissonSampling(7, 0.5), 0)), "from 7 records, but .* 20"),
        (lambda: PrivateDataLoader.poisson(pd.DataFrame({"a": [1.0, 2.0]}), 1), "a DataFrame is indexed by column"),
        (lambda: PrivateBatchSampler("poisson", 0), "PrivateBatchSampler takes a Sampling, not 'poisson'"),
        (lambda: make_sampling("fixed_size", 20, 2.5), "whole"),
        (lambda: make_sampling("magic", 20, 3), "unknown sampling 'magic'"),
    ],
)
def test_what_lots_are_not_made_of(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_the_size_of_lots_does_not_change_in_silence() -> None:
    loader = PrivateDataLoader.poisson(DATA, np.float32(2))
    with pytest.raises(ConfigurationError, match="cannot change once .* is made.*expected_batch_size_sch"):
        loader.expected_batch_size = 8
    assert loader.expected_batch_size == 2


def test_a_unit_that_plain_examples_may_not_be_is_asked_about() -> None:
    with pytest.warns(
        UserWarning, match="unit='user' requires that each item of the TensorDataset contains all data of one user"
    ):
        PrivateDataLoader.poisson(DATA, 5, unit="user")
    with pytest.warns(UserWarning, match="each item of the Subset contains all data"):
        PrivateDataLoader(Subset(DATA, range(10)), PrivateBatchSampler(make_sampling("poisson", 10, 5, "user"), 0))
    sure: Any = TensorDataset(*DATA.tensors)
    sure.unit = "user"
    assert PrivateDataLoader.poisson(sure, 5).lots.sampling.unit == "user"
    for unit in ("example", "item", "block"):
        assert PrivateDataLoader.poisson(DATA, 5, unit=unit).lots.sampling.unit == unit
