"""`dpbench check` and `dpbench.check`: the verdict on a training step, of which nothing stays."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpbench
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from tests.support.cli import TINY
from tests.support.cli import dpbench as command

SOURCE = '''\
"""A classifier that does with the losses of records what `way` says."""

import torch
from dpbench.modules import ImageClassifier
from torch.nn.functional import cross_entropy


class OwnClassifier(ImageClassifier):
    def __init__(self, *args, way="separable", **kwargs):
        super().__init__(*args, **kwargs)
        self.way = way
        self.register_buffer("center", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        losses = cross_entropy(self(batch[0]), batch[1], reduction="none")
        if self.way == "reads" and losses.max().item() > 1e9:
            losses = losses * 0
        if self.way == "kept":
            losses = losses - self.center
            self.center = losses.detach().mean()
        return losses.mean()
'''
SEPARABLE = "records are separable: the engine computes all gradients of a batch together"


@pytest.mark.parametrize(
    ("way", "status", "said", "code"),
    [
        ("separable", 0, SEPARABLE, ""),
        ("reads", 0, "read into Python", "losses.max().item()"),
        ("kept", 1, "training is refused", "losses - self.center"),
    ],
)
def test_the_command_names_the_line_and_writes_nothing(
    way: str, status: int, said: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "mine" / "conf" / "module"
    conf.mkdir(parents=True)
    (tmp_path / "mine" / "own_classifier.py").write_text(SOURCE)
    (conf / "own.yaml").write_text("_target_: own_classifier.OwnClassifier\nway: separable\n")
    monkeypatch.delitem(sys.modules, "own_classifier", raising=False)
    out, err = command(
        tmp_path, "check", "--config-dir", "mine/conf", *TINY, "module=own", f"module.way={way}", status=status
    )
    lines = [number for number, line in enumerate(SOURCE.splitlines(), 1) if code in line]
    assert said in out and not err
    assert not code or f"mine/own_classifier.py:{lines[0]} (" in out
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_kinds_of_the_zoo(tmp_path: Path) -> None:
    out, _ = command(tmp_path, "check", "experiment=digits_gan", "logger=none")  # manual optimization, two networks
    assert out.strip() == SEPARABLE
    by_user = ["data=digits_users", "records=users", "records.local.lr=0.1", "model=mlp", "logger=none"]
    out, _ = command(tmp_path, "check", *by_user)
    assert out.strip() == "not checked: users are trained one by one"
    _, err = command(tmp_path, "check", "-m", *TINY, "seed=0,1", status=1)
    assert "this command takes a single run" in err


class Steps(pl.LightningModule):
    """A network, and the loss that a test gives."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


NUMBERS = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)))


def lots(**options: Any) -> Any:
    return dpbench.PrivateDataLoader.poisson(NUMBERS, 8, seed=0, **options)


class Centered(nn.Module):
    """Subtracts the mean of a batch, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.detach().mean(0))
        return x - self.mean


def test_nothing_of_it_stays() -> None:
    """Statistics of records that the first check has written must look public to the second."""
    module = Steps(nn.Sequential(Centered(), nn.Linear(6, 1)), lambda net, batch: net(batch[0]).square().mean())
    loader = lots()
    state = copy.deepcopy(module.state_dict())
    random = torch.get_rng_state()
    first = dpbench.check(module, loader)
    assert first.kind == "mixed" and "(copy_): records are written to what outlives the step" in str(first)
    assert str(dpbench.check(module, loader)) == str(first)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in module.parameters())
    assert module._trainer is None and loader.lots.position == 0 and not loader.lots.in_use


def test_records_of_several_rows() -> None:
    """Rows of each record lie side by side; a record's rows may be combined, and layers may fold them."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        assert batch["of"].diff().max() <= 1  # numbers of records ascend by one, as in a training
        return net(batch["x"].reshape(-1, 3)).mean()

    def rows(records: list[Any]) -> dict[str, Tensor]:
        index = [place for place, (x,) in enumerate(records) for _ in range(1 + int(x[0] > 0))]
        return {"x": torch.stack([x for (x,) in records])[index], "of": torch.tensor(index)}

    loader = lots(collate_fn=rows, record_of_row="of")
    assert dpbench.check(Steps(nn.Linear(3, 1), loss), loader).kind == "separable"


def test_other_verdicts() -> None:
    """Of a network that the engine does not know, of what depends on values, and of no record at all."""
    lstm = nn.LSTM(3, 4, proj_size=2, batch_first=True)
    limited = dpbench.check(Steps(lstm, lambda net, batch: net(batch[0].reshape(-1, 2, 3))[0].mean()), lots())
    assert limited.kind == "limited"
    assert "training takes records one by one:\n  the engine does not support LSTM" in str(limited)
    ignored = TensorDataset(*NUMBERS.tensors, torch.arange(40) % 4 - 1)
    entropy = nn.CrossEntropyLoss(ignore_index=-1)
    module = Steps(nn.Linear(6, 3), lambda net, batch: entropy(net(batch[0]), batch[1]))
    checked = dpbench.check(module, DataLoader(ignored, batch_size=10))
    assert checked.kind == "mixed" and "the mean of each record's own is faster" in str(checked)
    module = Steps(nn.Linear(6, 1), lambda net, batch: net(torch.ones(2, 6)).mean())
    assert str(dpbench.check(module, lots())).startswith("not checked: the first loss")


def test_what_is_kept_counts_more_than_a_limit_of_the_engine() -> None:
    def loss(net: nn.LSTM, batch: Any) -> Tensor:
        mean: Tensor = net(batch[0].reshape(-1, 2, 3))[0].mean()
        before = getattr(net, "before", 1.0)
        net.before = mean.detach()
        return mean * before

    assert dpbench.check(Steps(nn.LSTM(3, 4, proj_size=2, batch_first=True), loss), lots()).kind == "kept"


def test_what_no_training_begins_with_is_refused() -> None:
    def refused(message: str, module: Any, rows: int = 10, **options: Any) -> None:
        loader = DataLoader(NUMBERS, batch_size=10, collate_fn=lambda _: [torch.zeros(rows, 6)])
        with pytest.raises((ConfigurationError, UnsupportedModuleError), match=message):
            dpbench.check(module, loader, **options)

    step = Steps(nn.Linear(6, 1), lambda net, batch: net(batch[0]).mean())
    refused("BatchNorm1d.*GroupNorm", Steps(nn.BatchNorm1d(6), step.loss))
    refused("takes a LightningModule, not a Linear", nn.Linear(6, 1))
    refused("No `training_step", pl.LightningModule())
    refused("training_step returns no loss", Steps(nn.Linear(6, 1), lambda net, batch: None))
    refused("all batches that were drawn are empty", step, rows=0)
    refused("records must be a source of records", step, records=["user"])
    refused("would train on no batch", step, trainer=pl.Trainer(limit_train_batches=0, logger=False))
