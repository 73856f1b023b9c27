"""Modules, loaders and settings with which local training would not be private, or not train: one clear line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, random_split

from dpbench.callback.non_private import NonPrivate
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import ConfigurationError, DPBenchError, LedgerError
from dpbench.records import LocalTraining, Users
from dpbench.strategies import DPSGD, ClipOnly
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.worlds import trainer_for

LOCAL = LocalTraining(lr=0.1, batch_size=2, epochs=2)


class NoLoss(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class NoGradient(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch).detach()


class ManyLosses(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]).squeeze(1) - batch[1]).square()


class Manual(Toy):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False


class Adversarial(Manual):
    private_module = "net"


class Closure(Toy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Skips(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class NeedsNumbers(Toy):
    """Writes a buffer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return self.loss(batch)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


REFUSED: dict[str, tuple[Callable[[], Toy], str]] = {
    "batch norm": (lambda: Toy(normed()), "num_batches_tracked"),
    "buffer": (lambda: NeedsNumbers(linear()), "count"),
    "no loss": (lambda: NoLoss(linear()), "returned no loss for a batch of a user"),
    "no gradient": (lambda: NoGradient(linear()), "depends on no trainable parameter"),
    "many losses": (lambda: ManyLosses(linear()), "one number"),
    "manual": (lambda: Manual(linear()), "manual optimization"),
    "gan": (lambda: Adversarial(linear()), "manual optimization, or a private_module"),
    "closure": (lambda: Closure(linear()), "LBFGS and line searches"),
    "skips": (lambda: Skips(linear()), "a batch was drawn but never released"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_refused(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    users = make_users([max(size, 2) // 2 * 2 for size in SIZES])  # no batch of one, for BatchNorm's own error
    with pytest.raises(DPBenchError, match=message) as caught:
        fit(tmp_path, make(), users, steps=1)
    assert "\n" not in str(caught.value)


def test_a_metric_that_is_never_returned_is_no_zero(tmp_path: Path) -> None:
    module = Toy(linear())
    module.record_metrics = {"accuracy": 1}
    with pytest.raises(DPBenchError, match='must return "record_metrics" with .accuracy.'):
        fit(tmp_path, module, metrics={"accuracy": 1.0})


class Halves(LotLoader):
    def __iter__(self) -> Any:
        for cohort in super().__iter__():
            yield type(cohort)(cohort.users[::2])


def examples() -> TensorDataset:
    return TensorDataset(torch.zeros(20, WIDTH), torch.zeros(20))


def sampling_of(data: Any, unit: str) -> Lots:
    return Lots(make_sampling("poisson", len(data), 4, unit), 0)


def called_users() -> Any:
    """Examples of which somebody says that they are users."""
    data: Any = examples()
    data.unit = "user"
    return data


LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "collate_fn": (
        lambda: LotLoader(make_users(), sampling_of(make_users(), "user"), lambda items: default_collate(items)),
        "collate_fn and record_of_row are for examples",
    ),
    "record_of_row": (
        lambda: LotLoader(make_users(), sampling_of(make_users(), "user"), record_of_row=lambda batch: batch[0]),
        "collate_fn and record_of_row are for examples",
    ),
    "halved": (lambda: Halves(make_users(), sampling_of(make_users(), "user")), "overrides __iter__"),
    "subset": (
        lambda: LotLoader(Subset(make_users(), range(8)), sampling_of(range(8), "user")), "Subset of users .* has lost",
    ),
    "random split": (
        lambda: LotLoader.poisson(random_split(make_users(), [8, 4])[0], 4), r"use UserDataset.subset\(positions\)",
    ),
    "examples": (lambda: LotLoader(examples(), sampling_of(examples(), "example")), "a record is a user, but batches"),
    "called users": (lambda: LotLoader(called_users(), sampling_of(examples(), "user")), "has no users"),
    "no lots": (lambda: DataLoader(make_users(), batch_size=4), "the sampling of the training data loader"),
}  # fmt: skip


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


def test_a_hook_may_not_change_the_cohort(tmp_path: Path) -> None:
    class Changes(pl.LightningDataModule):
        def train_dataloader(self) -> LotLoader:
            return loader_of(make_users())

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert len(batch) == 2  # inputs and targets
            return batch

    strategy = ClipOnly(noise_multiplier=1.0, seed=0, records=Users(LOCAL))
    trainer_for(tmp_path, strategy, 1).fit(Toy(linear()), Changes())
    assert strategy.releases == 1


@pytest.mark.parametrize(
    "option", [{"microbatch_size": 2}, {"max_physical_batch_size": 4}, {"loss_reduction": "sum"}], ids=str
)
def test_options_of_examples_do_not_go_with_users(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="applies to records made of examples"):
        DPSGD(noise_multiplier=1.0, records=Users(LOCAL), **option)


@pytest.mark.parametrize("local", [None, 0.1, "users"])
def test_users_need_a_local_training(local: Any) -> None:
    with pytest.raises(ConfigurationError, match="local must be a LocalTraining"):
        Users(local)


OBJECT = "records must be a source of records, an object with the methods of dpbench.records.source.RecordSource"
MAKERS: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (lambda: DPSGD(noise_multiplier=1.0, records=Users), OBJECT),  # type: ignore[arg-type]
    "word": (lambda: DPSGD(noise_multiplier=1.0, records="users"), OBJECT),  # type: ignore[arg-type]
    "no privacy": (
        lambda: NonPrivate(records=Users(LOCAL)),
        r"NonPrivate .*FederatedAveraging\(records=",
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_no_source_of_users_is_refused(name: str) -> None:
    make, message = MAKERS[name]
    with pytest.raises(ConfigurationError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_users_without_any_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none of the 12 users has an example"):
        fit(tmp_path, Toy(linear()), make_users([0] * 12))


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
    with pytest.raises(
        LedgerError, match=r"version_1/ledger.jsonl is missing or empty: .* \(ledger=.../ledger.jsonl\)"
    ):
        go(2, start=checkpoint)
    assert go(2, start=checkpoint, ledger=str(tmp_path / "lightning_logs/version_0/ledger.jsonl")) == 2


def test_times_that_tell_of_large_users_are_spoken_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dpbench.callback.lightning_training.log_line", said.append)
    fit(tmp_path / "all", Toy(linear()), steps=3)
    assert len(said) == 1
    assert "no noise covers that" in said[0] and "LocalTraining(max_examples=...) bounds it" in said[0]
    for number, bound in enumerate(({"max_examples": 3}, {"max_steps": 2})):
        fit(tmp_path / str(number), Toy(linear()), local=LocalTraining(lr=0.1, batch_size=2, **bound), steps=1)
    fit(tmp_path / "not private", Toy(linear()), make=ClipOnly, steps=1)
    assert len(said) == 1
