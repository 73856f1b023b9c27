"""Modules, loaders and settings with which local training would not be private, or not train: one clear line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from dpbench.callback.non_private import NonPrivate
from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader, make_sampling
from dpbench.errors import ConfigurationError, DPBenchError, LedgerError
from dpbench.records import LocalTraining, Users
from dpbench.strategies import DPSGD, ClipOnly
from tests.capabilities.users.worlds import WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.worlds import trainer_for

LOCAL = LocalTraining(lr=0.1, batch_size=2, epochs=2)


def normed() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(1))


def lbfgs(self: Toy) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch norm": ({}, "num_batches_tracked"),
    "no loss": ({"training_step": lambda self, batch, batch_idx: None}, "returned no loss for a batch of a user"),
    "no gradient": (
        {"training_step": lambda self, batch, batch_idx: self.loss(batch).detach()},
        "depends on no trainable parameter",
    ),
    "many losses": ({"training_step": lambda self, batch, batch_idx: self.net(batch[0]).square()}, "one number"),
    "gan": ({"private_module": "net"}, "manual optimization, or a private_module"),
    "closure": ({"configure_optimizers": lbfgs}, "LBFGS and line searches"),
    "skips": ({"on_train_batch_start": lambda self, *_: -1}, "a batch was drawn but never released"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_refused(tmp_path: Path, name: str) -> None:
    replaced, message = REFUSED[name]
    module = type("Own", (Toy,), replaced)(normed() if name == "batch norm" else linear())
    module.automatic_optimization = name != "gan"
    users = make_users([4, 2, 6, 2] * 3)  # no batch of one, for BatchNorm's own error
    with pytest.raises(DPBenchError, match=message) as caught:
        fit(tmp_path, module, users, steps=1)
    assert "\n" not in str(caught.value)


def test_a_metric_that_is_never_returned_is_no_zero(tmp_path: Path) -> None:
    module = Toy(linear())
    module.record_metrics = {"accuracy": 1}
    with pytest.raises(DPBenchError, match='must return "record_metrics" with .accuracy.'):
        fit(tmp_path, module, metrics={"accuracy": 1.0})


class Halves(PrivateDataLoader):
    def __iter__(self) -> Any:
        return (type(cohort)(cohort.positions[::2]) for cohort in super().__iter__())


def lots(unit: str = "user") -> PrivateBatchSampler:
    return PrivateBatchSampler(make_sampling("poisson", 12, 4, unit), 0)


def examples(**attributes: Any) -> Any:
    data = TensorDataset(torch.zeros(12, WIDTH), torch.zeros(12))
    vars(data).update(attributes)
    return data


LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "collate_fn": (
        lambda: PrivateDataLoader(make_users(), lots(), list),
        "collate_fn and record_of_row are for examples",
    ),
    "record_of_row": (
        lambda: PrivateDataLoader(make_users(), lots(), record_of_row=lambda batch: batch[0]),
        "collate_fn and record_of_row are for examples",
    ),
    "halved": (lambda: Halves(make_users(), lots()), "overrides __iter__"),
    "subset": (lambda: PrivateDataLoader(Subset(make_users(), range(12)), lots()), "Subset of users .* has lost"),
    "random split": (
        lambda: PrivateDataLoader.poisson(random_split(make_users(), [8, 4])[0], 4),
        r"use UserDataset.subset\(positions\)",
    ),
    "examples": (lambda: PrivateDataLoader(examples(), lots("example")), "a record is a user, but batches"),
    "called users": (lambda: PrivateDataLoader(examples(unit="user"), lots()), "has no users"),
    "no lots": (lambda: DataLoader(make_users(), batch_size=4), "the sampling of the training data loader"),
    "no examples": (lambda: loader_of(make_users([0] * 12)), "none of the 12 users has an example"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_are_refused(tmp_path: Path, name: str) -> None:
    make, message = LOADERS[name]
    with pytest.raises(ConfigurationError, match=message) as caught:
        fit(tmp_path, Toy(linear()), loader=make(), steps=1)
    assert "\n" not in str(caught.value)


def test_users_need_a_strategy_of_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="train them by user, with records=Users"):
        fit(tmp_path, Toy(linear()), records=None, steps=1)
    with pytest.raises(ConfigurationError, match="train them by user"):
        trainer_for(tmp_path, NonPrivate(), 1).fit(Toy(linear()), loader_of(make_users()))


MAKERS: dict[str, tuple[Callable[[], Any], str]] = {
    "microbatches": (
        lambda: DPSGD(noise_multiplier=1.0, records=Users(LOCAL), microbatch_size=2),
        "applies to records made of examples",
    ),
    "local": (lambda: Users(0.1), "local must be a LocalTraining"),  # type: ignore[arg-type]
    "no privacy": (lambda: NonPrivate(records=Users(LOCAL)), r"NonPrivate .*FederatedAveraging\(records="),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_no_source_of_users_is_refused(name: str) -> None:
    make, message = MAKERS[name]
    with pytest.raises(ConfigurationError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_large_delta_is_one_of_users(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"not below 1/12 \(the number of users\).* publishing one user in the clear"):
        fit(tmp_path, Toy(linear()), steps=1, delta=0.1)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_ledger_in_the_folder_of_another_version(tmp_path: Path) -> None:
    def go(steps: int, **more: Any) -> int:
        options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "enable_checkpointing": True}
        return fit(tmp_path, Toy(linear()), steps=steps, trainer=options, **more).releases

    go(1)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    message = r"version_1/ledger.jsonl is missing or empty: .* \(ledger=.../ledger.jsonl\)"
    with pytest.raises(LedgerError, match=message):
        go(2, start=checkpoint)
    assert go(2, start=checkpoint, ledger=str(tmp_path / "lightning_logs/version_0/ledger.jsonl")) == 2


def test_times_that_tell_of_large_users_are_spoken_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dpbench.callback.lightning_training.log_line", said.append)
    fit(tmp_path / "all", Toy(linear()))
    assert len(said) == 1
    assert "no noise covers that" in said[0] and "LocalTraining(max_examples=...) bounds it" in said[0]
    for bound in ({"max_examples": 3}, {"max_steps": 2}):
        fit(tmp_path / str(bound), Toy(linear()), local=LocalTraining(batch_size=2, **bound), steps=1)
    fit(tmp_path / "not private", Toy(linear()), make=ClipOnly, steps=1)
    assert len(said) == 1
