"""A user's local training is a function of seed, round and user: resumed, in other cohorts, in empty ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.records import Rows
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.records import LocalTraining, Users
from tests.capabilities.users.test_cohorts import STRATEGIES
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users, owners
from tests.strategies.worlds import weights_of


class Augmented(Rows):
    """Examples that are made anew each time, by every generator that people use."""

    def __getitems__(self, positions: Any) -> Any:
        return [self[position] for position in positions]

    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(position)
        shift = torch.randn(()) + np.random.normal() + random.gauss(0, 1)
        return inputs + 0.1 * shift, target


def augmented(sizes: Any = SIZES) -> UserDataset:
    generator = torch.Generator().manual_seed(9)
    rows = Augmented(torch.randn(sum(sizes), WIDTH, generator=generator), torch.randn(sum(sizes), generator=generator))
    return UserDataset(rows, owners(sizes), names=range(len(sizes)))


class Noisy(Toy):
    """Dropout, numpy's and Python's random numbers, logs, and momentum at the server."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.3), nn.Linear(6, 1)), momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())
        self.log("train/loss", loss, prog_bar=True)
        return loss


class Stop(pl.Callback):
    observes_only = True

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:  # in mid-epoch
            trainer.save_checkpoint(self.place)
        if trainer.global_step == 7:
            raise RuntimeError("crash")


@pytest.mark.own_key
@pytest.mark.parametrize("name", ["dpsgd", "quantile", "corrected", "groups"])
def test_resume_in_mid_training_is_bit_identical(tmp_path: Path, name: str) -> None:
    def run(folder: str, *more: pl.Callback, start: Path | None = None) -> Tensor:
        module, place = Noisy(), tmp_path / folder
        place.mkdir(exist_ok=True)
        options = {"logger": [MetricsCSV(RunFolder(place))], "log_every_n_steps": 3, "more": list(more)}
        local = LocalTraining(lr=0.1, batch_size=2, epochs=2, max_examples=3)
        make = STRATEGIES[name]
        fit(
            place,
            module,
            augmented(),
            10,
            local,
            make,
            trainer=options,
            start=start,
            fingerprint="x",
            noise_multiplier=0.05,  # its key is another in each run: with 0.2, a user's local training diverged in one
        )
        return weights_of(module)

    whole = run("whole")
    with pytest.raises(RuntimeError, match="crash"):
        run("crashed", Stop(tmp_path / "mid.ckpt"))
    assert torch.equal(run("crashed", start=tmp_path / "mid.ckpt"), whole)
    for file in ("ledger.jsonl", "metrics.csv"):
        assert (tmp_path / "crashed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


class Spy:
    """Watches what each user hands in, by (release, user)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.updates: dict[tuple[int, int], Tensor] = {}
        own = Users._update

        def spied(source: Users, user: int, loss_of: Any) -> list[Tensor]:
            update = own(source, user, loss_of)
            self.updates[source._releases.num_releases, user] = torch.cat([one.flatten() for one in update])
            return update

        patch.setattr(Users, "_update", spied)


def updates(folder: Path, patch: pytest.MonkeyPatch, expected: float = 4, **options: Any) -> dict[Any, Tensor]:
    with patch.context() as context:
        spy = Spy(context)
        options = {"steps": 1, "local": LocalTraining(lr=0.1, batch_size=2, max_examples=3), **options}
        fit(folder, Noisy(), loader=loader_of(augmented(), expected), **options)
    return spy.updates


def test_an_update_is_the_same_whoever_else_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, all_ = (updates(tmp_path / str(size), monkeypatch, size) for size in (4, len(SIZES)))
    assert len(all_) == len(SIZES) > len(few) > 1
    assert all(torch.equal(all_[place], update) for place, update in few.items())


def test_seeds_and_rounds_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = updates(tmp_path / "a", monkeypatch, len(SIZES))
    other = updates(tmp_path / "b", monkeypatch, len(SIZES), seed=1)
    rounds = updates(tmp_path / "c", monkeypatch, len(SIZES), steps=2, noise_multiplier=1e-9, max_grad_norm=1e-9)
    for user, size in enumerate(SIZES):
        if size > 0:
            assert torch.equal(first[0, user], rounds[0, user])
            assert not torch.allclose(first[0, user], other[0, user], rtol=1e-3)
            assert not torch.allclose(rounds[0, user], rounds[1, user], rtol=1e-3)


def test_nothing_is_left_of_the_random_numbers_of_a_lot(tmp_path: Path) -> None:
    class Draws(Noisy):
        def on_train_batch_end(self, *_: Any) -> None:
            self.history.append(torch.tensor([float(torch.rand(())), np.random.rand(), random.random()]))

    drawn = []
    for sizes in (SIZES, [size + 3 for size in SIZES]):
        random.seed(3), np.random.seed(3)
        module = Draws()
        fit(tmp_path / str(len(drawn)), module, augmented(sizes), 3, noise_multiplier=1.0)
        drawn.append(torch.stack(module.history))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("expected", [0.3, len(SIZES)])
def test_empty_cohorts_and_cohorts_of_everybody(tmp_path: Path, expected: float) -> None:
    users = make_users()
    sampling = make_sampling("poisson", len(users), max(expected, 1), "user")
    sampling = type(sampling)(len(users), expected / len(users), unit="user")
    loader = LotLoader(users, Lots(sampling, 0))
    sizes = [len(loader.lots.lot(step)) for step in range(5)]
    assert 0 in sizes if expected < 1 else set(sizes) == {len(users)}
    module = Toy(linear())
    strategy = fit(tmp_path, module, steps=5, loader=loader)
    assert strategy.releases == 5 and weights_of(module).isfinite().all()
