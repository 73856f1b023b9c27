"""A cohort on several processes: dealt by work, and the same model as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpbench.data.sampler import dealt
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records import LocalTraining
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping
from tests.capabilities.users.test_modules import Measures
from tests.capabilities.users.worlds import WIDTH, fit, loader_of, make_users
from tests.strategies.worlds import assert_same_training, weights_of

pytestmark = pytest.mark.own_key  # other processes take the keys that users get


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 6))
def test_users_are_dealt_evenly(work: list[int], world: int) -> None:
    lot, costs = np.arange(len(work)) * 3 + 1, np.array(work, dtype=np.int64)
    shares = [dealt(lot, costs, rank, world).tolist() for rank in range(world)]
    assert sorted(user for share in shares for user in share) == lot.tolist()
    loads = [sum(work[(user - 1) // 3] + 1 for user in share) for share in shares]
    assert max(loads) - min(loads) <= max(work, default=0) + 1  # whoever got the last one had least before


def quantile(max_grad_norm: float, **options: Any) -> AdaptiveQuantileClipping:
    return AdaptiveQuantileClipping(initial_max_grad_norm=max_grad_norm, count_noise_std=3.0, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "expected", "kind"),
    [(quantile, 5, "poisson"), (DPSGD, 1, "fixed_size")],
    ids=["quantile", "a process without users"],
)
def test_two_processes_agree_with_one(tmp_path: Path, make: Any, expected: float, kind: str) -> None:
    weights, releases = [], []
    local = LocalTraining(lr=0.1, batch_size=2, epochs=2, max_examples=4)
    options = {"max_grad_norm": 0.3, "noise_multiplier": 0.2, "ledger": None}
    for devices, processes in ((2, "ddp_fork"), (1, "auto")):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        module, ledger = Measures(net, momentum=0.5), tmp_path / f"{devices}.jsonl"
        loader, options["ledger"] = loader_of(make_users(), expected, kind), str(ledger)
        trainer = {"devices": devices, "strategy": processes, "log_every_n_steps": 1}
        fit(tmp_path / processes, module, steps=8, local=local, make=make, trainer=trainer, loader=loader, **options)
        weights.append(weights_of(module))
        releases.append([release for _, release in read_ledger(ledger).releases])
    assert_same_training(*weights, noise_std=0.2 * 0.3, expected_batch_size=expected)
    for a, b in zip(*releases, strict=True):
        assert (a.number, a.sampling, a.sampling.unit) == (b.number, b.sampling, "user")
        assert [q.noise_std for q in a.queries] == pytest.approx([q.noise_std for q in b.queries], rel=1e-6)
