"""A cohort on several processes: dealt by work, and the same model as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench.data.lots import dealt
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records import LocalTraining
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, loader_of, make_users
from tests.strategies.worlds import assert_same_training, weights_of

pytestmark = pytest.mark.own_key  # other processes take the keys that users get

TWO = {"devices": 2, "strategy": "ddp_fork"}


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 6))
def test_users_are_dealt_evenly(work: list[int], world: int) -> None:
    lot, costs = np.arange(len(work)) * 3 + 1, np.array(work, dtype=np.int64)
    shares = [dealt(lot, costs, rank, world) for rank in range(world)]
    again = [dealt(lot, costs, rank, world) for rank in range(world)]
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    assert sorted(np.concatenate(shares).tolist()) == lot.tolist()
    loads = [sum(work[(user - 1) // 3] + 1 for user in share.tolist()) for share in shares]
    assert max(loads) - min(loads) <= max(work, default=0) + 1  # whoever got the last one had least before


def test_real_sizes_are_dealt_to_within_a_few_percent() -> None:
    """Long-tailed, as roles of plays and authors of posts are."""
    rng = np.random.default_rng(0)
    work = rng.lognormal(3.0, 1.2, size=(50, 100)).astype(np.int64) + 1
    uneven = []
    for costs in work:
        loads = np.array([costs[dealt(np.arange(100), costs, rank, 4)].sum() for rank in range(4)])
        uneven.append(loads.max() / loads.mean())
    assert np.mean(uneven) < 1.05


class Logged(Toy):
    """With dropout and everything that people log."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.3), nn.Linear(6, 1)), momentum=0.5)
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.error(self.net(batch[0]).squeeze(1), batch[1])
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("train/error", self.error, on_step=False, on_epoch=True)
        return loss


def run(folder: Path, two: bool, make: Any, expected: float, kind: str) -> Tensor:
    module = Logged()
    trainer = {**(TWO if two else {}), "log_every_n_steps": 1}
    local = LocalTraining(lr=0.1, batch_size=2, epochs=2, max_examples=4)
    ledger = str(folder / "ledger.jsonl")
    fit(folder, module, steps=8, local=local, make=make, ledger=ledger, trainer=trainer,
        loader=loader_of(make_users(), expected, kind), max_grad_norm=0.3, noise_multiplier=0.2)  # fmt: skip
    return weights_of(module)


def quantile(max_grad_norm: float, **options: Any) -> AdaptiveQuantileClipping:
    return AdaptiveQuantileClipping(initial_max_grad_norm=max_grad_norm, count_noise_std=3.0, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "expected", "kind"),
    [
        (DPSGD, 5, "poisson"),
        (quantile, 5, "poisson"),
        (DPSGD, 1, "poisson"),
        (DPSGD, 1, "fixed_size"),
        (DPSGD, len(SIZES), "poisson"),
    ],
    ids=["flat", "quantile", "empty shares", "a process without users", "everybody"],
)
def test_two_processes_agree_with_one(tmp_path: Path, make: Any, expected: float, kind: str) -> None:
    one, two = (run(tmp_path / str(two), two, make, expected, kind) for two in (False, True))
    assert_same_training(two, one, noise_std=0.2 * 0.3, expected_batch_size=expected)
    books = [read_ledger(tmp_path / str(two) / "ledger.jsonl") for two in (False, True)]
    assert books[0].header.unit == books[1].header.unit == "user"
    for (_, a), (_, b) in zip(books[0].releases, books[1].releases, strict=True):
        assert (a.number, a.sampling) == (b.number, b.sampling)
        assert [q.noise_std for q in a.queries] == pytest.approx([q.noise_std for q in b.queries], rel=1e-6)
