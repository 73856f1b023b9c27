"""Modules, loaders and settings with which local training would not be private, or not train: one clear line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from dpbench.callback.non_private import NonPrivate
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, DPBenchError
from dpbench.records import LocalTraining, Users
from dpbench.strategies import DPSGD
from tests.capabilities.users.worlds import WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.worlds import trainer_for

LOCAL = LocalTraining(lr=0.1, batch_size=2, epochs=2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no loss": ({"training_step": lambda self, batch, batch_idx: None}, "returned no loss for a batch of a user"),
    "no gradient": (
        {"training_step": lambda self, batch, batch_idx: self.loss(batch).detach()},
        "depends on no trainable parameter",
    ),
    "many losses": ({"training_step": lambda self, batch, batch_idx: self.net(batch[0]).square()}, "one number"),
    "gan": ({"private_module": "net"}, "manual optimization, or a private_module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_refused(tmp_path: Path, name: str) -> None:
    replaced, message = REFUSED[name]
    module = type("Own", (Toy,), replaced)(linear())
    module.automatic_optimization = name != "gan"
    with pytest.raises(DPBenchError, match=message) as caught:
        fit(tmp_path, module, steps=1)
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
        "no collate_fn and no record_of_row",
    ),
    "halved": (lambda: Halves(make_users(), lots()), "overrides __iter__"),
    "subset": (lambda: PrivateDataLoader(Subset(make_users(), range(12)), lots()), "Subset of users .* loses"),
    "examples": (lambda: PrivateDataLoader(examples(), lots("example")), "a record is a user, but batches"),
    "called users": (lambda: PrivateDataLoader(examples(unit="user"), lots()), "has no users"),
    "no examples": (lambda: loader_of(make_users([0] * 12)), "none of the 12 users has an example"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_are_refused(tmp_path: Path, name: str) -> None:
    make, message = LOADERS[name]
    with pytest.raises(ConfigurationError, match=message) as caught:
        fit(tmp_path, Toy(linear()), loader=make(), steps=1)
    assert "\n" not in str(caught.value)


def test_users_need_a_strategy_of_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="train by user, with records=Users"):
        fit(tmp_path, Toy(linear()), records=None, steps=1)
    with pytest.raises(ConfigurationError, match="train by user"):
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


def test_times_that_tell_of_large_users_are_spoken_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dpbench.callback.lightning_training.log_line", said.append)
    fit(tmp_path / "all", Toy(linear()))
    (line,) = [line for line in said if "no noise covers that" in line]
    assert "LocalTraining(max_examples=...) bounds it" in line
    fit(tmp_path / "bounded", Toy(linear()), local=LocalTraining(batch_size=2, max_examples=3), steps=1)
    assert sum("no noise covers that" in line for line in said) == 1
