"""A user's local training is a function of seed, round and user: resumed, in other cohorts, in empty ones."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.privacy.sampling import PoissonSampling
from dpbench.records import LocalTraining, Users
from tests.capabilities.users.test_cohorts import STRATEGIES
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.worlds import Crash, weights_of

LOCAL = LocalTraining(lr=0.1, batch_size=2, epochs=2, max_examples=3)


class Augmented(Rows):
    """Examples that are made anew each time, by every generator that people use."""

    def __getitems__(self, positions: Any) -> Any:
        return [self[position] for position in positions]

    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(position)
        return inputs + 0.1 * (torch.randn(()) + np.random.normal() + random.gauss(0, 1)), target


def augmented(sizes: Any = SIZES) -> UserDataset:
    users = make_users(sizes)
    users._examples = users._source = Augmented(*users.examples.tensors)  # type: ignore[attr-defined]
    return users


class Noisy(Toy):
    """Dropout, numpy's and Python's random numbers, logs, and momentum at the server."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.3), nn.Linear(6, 1)), momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(torch.tensor([float(torch.rand(())), np.random.rand(), random.random()]))


@pytest.mark.own_key
def test_resume_in_mid_training_is_bit_identical(tmp_path: Path) -> None:
    def run(place: Path, *more: pl.Callback, start: Path | None = None) -> Tensor:
        module = Noisy()
        place.mkdir(exist_ok=True)
        options = {"logger": [MetricsCSV(RunFolder(place))], "log_every_n_steps": 3, "more": list(more)}
        go = partial(fit, place, module, augmented(), 10, LOCAL, STRATEGIES["quantile"], trainer=options, start=start)
        go(fingerprint="x", noise_multiplier=0.05)  # its key is another in each run: with 0.2, one diverged
        return weights_of(module)

    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    expected = run(whole)
    with pytest.raises(RuntimeError, match="crash"):
        run(crashed, Crash(crashed / "mid.ckpt", 5))  # in mid-epoch
    assert torch.equal(run(crashed, start=crashed / "mid.ckpt"), expected)
    for file in ("ledger.jsonl", "metrics.csv"):
        assert (crashed / file).read_bytes() == (whole / file).read_bytes()


def updates(folder: Path, patch: pytest.MonkeyPatch, expected: float = len(SIZES), **options: Any) -> dict[Any, Tensor]:
    """What each user hands in, by (release, user)."""
    seen: dict[Any, Tensor] = {}
    own = Users._update

    def spied(source: Users, user: int, loss_of: Any) -> list[Tensor]:
        update = own(source, user, loss_of)
        seen[source._releases.num_releases, user] = torch.cat([one.flatten() for one in update])
        return update

    with patch.context() as context:
        context.setattr(Users, "_update", spied)
        fit(folder, Noisy(), loader=loader_of(augmented(), expected), **{"steps": 1, "local": LOCAL, **options})
    return seen


def test_an_update_is_a_function_of_seed_round_and_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = updates(tmp_path / "few", monkeypatch, 4)
    first = updates(tmp_path / "first", monkeypatch)
    assert len(first) == len(SIZES) > len(few) > 1
    assert all(torch.equal(first[place], update) for place, update in few.items())
    other = updates(tmp_path / "other", monkeypatch, seed=1)
    rounds = updates(tmp_path / "rounds", monkeypatch, steps=2, noise_multiplier=1e-9, max_grad_norm=1e-9)
    for user in np.flatnonzero(SIZES):
        assert torch.equal(first[0, user], rounds[0, user])
        for update in (other[0, user], rounds[1, user]):
            assert not torch.allclose(first[0, user], update, rtol=1e-3)


def test_nothing_is_left_of_the_random_numbers_of_a_lot(tmp_path: Path) -> None:
    drawn = []
    for more in (0, 3):
        random.seed(3), np.random.seed(3)
        module = Noisy()
        fit(tmp_path / str(more), module, augmented([size + more for size in SIZES]), 3)
        drawn.append(torch.stack(module.history))
    assert torch.equal(*drawn)


def test_empty_cohorts(tmp_path: Path) -> None:
    sampling = PoissonSampling(len(SIZES), 0.3 / len(SIZES), unit="user")
    loader = PrivateDataLoader(make_users(), PrivateBatchSampler(sampling, 0))
    assert 0 in {len(loader.lots.lot(step)) for step in range(5)}
    module = Toy(linear())
    strategy = fit(tmp_path, module, steps=5, loader=loader)
    assert strategy.releases == 5 and weights_of(module).isfinite().all()
