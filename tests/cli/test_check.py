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
        if self.way == "mixed":
            losses = losses.sort().values
        if self.way == "reads" and losses.max().item() > 1e9:
            losses = losses * 0
        if self.way == "kept":
            losses = losses - self.center
            self.center = losses.detach().mean()
        return losses.mean()
'''
SEPARABLE = "records are separable: the engine computes all gradients of a batch together"


def line_of(code: str) -> str:
    """The place of a line of `SOURCE`, as a command in the folder above names it."""
    number = next(number for number, line in enumerate(SOURCE.splitlines(), 1) if code in line)
    return f"mine/own_classifier.py:{number}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module, beside its configuration."""
    (tmp_path / "mine" / "conf" / "module").mkdir(parents=True)
    (tmp_path / "mine" / "own_classifier.py").write_text(SOURCE)
    (tmp_path / "mine" / "conf" / "module" / "own.yaml").write_text(
        "_target_: own_classifier.OwnClassifier\nway: separable\n"
    )
    monkeypatch.delitem(sys.modules, "own_classifier", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("way", "status", "lines"),
    [
        ("separable", 0, [SEPARABLE]),
        ("mixed", 0, ["mixed, so that training takes them one by one", f"{line_of('losses.sort()')} (sort): "]),
        ("reads", 0, ["read into Python", f"{line_of('losses.max().item()')} (_local_scalar_dense): "]),
        ("kept", 1, ["training is refused", f"{line_of('losses - self.center')} (sub): records of an earlier batch"]),
    ],
)
def test_the_command_names_the_line_and_writes_nothing(way: str, status: int, lines: list[str], folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    words = ["--config-dir", "mine/conf", *TINY, "module=own", f"module.way={way}"]
    out, err = command(folder, "check", *words, status=status)
    assert all(line in out for line in lines), out
    assert out.count("\n") == len(lines) and not err
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)] == before


def test_kinds_of_the_zoo(tmp_path: Path) -> None:
    out, _ = command(tmp_path, "check", "experiment=digits_gan", "logger=none")  # manual optimization, two networks
    assert out.strip() == SEPARABLE
    by_user = ["data=digits_users", "records=users", "records.local.lr=0.1", "model=mlp", "logger=none"]
    out, _ = command(tmp_path, "check", *by_user)
    assert out.strip() == "not checked: users are trained one by one"
    _, err = command(tmp_path, "check", "-m", *TINY, "seed=0,1", status=1)
    assert "one run is asked for here" in err


class Steps(pl.LightningModule):
    """A network, and the loss that a test gives."""

    def __init__(self, net: nn.Module, loss: Callable[[Steps, Any], Tensor], manual: bool = False) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(self, batch)
        self.log("nonprivate/loss", 0.0 if loss is None else loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def numbers(rows: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 6, generator=torch.Generator().manual_seed(0)))


class Centered(nn.Module):
    """Subtracts the mean of a batch, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.detach().mean(0))
        return x - self.mean


def test_a_network_that_no_training_begins_with() -> None:
    module = Steps(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), lambda m, b: m.net(b[0]).mean())
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d.*GroupNorm"):
        dpbench.check(module, dpbench.LotLoader.poisson(numbers(), 8, seed=0))


def test_a_step_in_another_precision() -> None:
    module = Steps(nn.Linear(6, 1), lambda m, b: m.net(b[0]).mean())
    trainer = pl.Trainer(precision="bf16-true", accelerator="cpu", logger=False, max_steps=1)
    assert dpbench.check(module, dpbench.LotLoader.poisson(numbers(), 8, seed=0), trainer=trainer).kind == "separable"


@pytest.mark.parametrize("manual", [False, True])
def test_nothing_of_it_stays(manual: bool) -> None:
    """Statistics of records that the first check has written must look public to the second."""
    module = Steps(nn.Sequential(Centered(), nn.Linear(6, 1)), lambda m, b: m.net(b[0]).square().mean(), manual)
    loader = dpbench.LotLoader.poisson(numbers(), 8, seed=0)
    state = copy.deepcopy(module.state_dict())
    random = torch.get_rng_state()
    first = dpbench.check(module, loader)
    assert first.kind == "mixed" and "(copy_): records are written to what outlives the step" in str(first)
    assert str(dpbench.check(module, loader)) == str(first)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in module.parameters())
    assert module._trainer is None and loader.lots.position == 0 and not loader.lots.in_use


def test_records_of_several_rows() -> None:
    """Two rows of each record lie side by side; a record's rows may be combined, and layers may fold them."""

    def loss(module: Steps, batch: Any) -> Tensor:
        record_of = batch["of"]
        of_record = torch.zeros(int(record_of[-1]) + 1).index_add(0, record_of, torch.ones(len(record_of)))
        assert of_record.min() > 0  # numbers of records ascend by one, as in a training
        folded: Tensor = module.net(batch["x"].reshape(-1, 3))
        return folded.mean()

    def rows(records: list[Any], times: Callable[[Tensor], int]) -> dict[str, Tensor]:
        index = [place for place, (x,) in enumerate(records) for _ in range(times(x))]
        return {"x": torch.stack([x for (x,) in records])[index], "of": torch.tensor(index)}

    module = Steps(nn.Linear(3, 1), loss)
    alike = dpbench.LotLoader.poisson(numbers(), 8, collate_fn=lambda r: rows(r, lambda _: 2), record_of_row="of")
    checked = dpbench.check(module, alike)
    assert checked.kind == "separable"
    unequal = dpbench.LotLoader.poisson(
        numbers(), 8, collate_fn=lambda r: rows(r, lambda x: 1 + int(x[0] > 0)), record_of_row="of"
    )
    assert dpbench.check(module, unequal).kind == "separable"


def test_a_network_that_the_engine_does_not_know() -> None:
    """Records are separable all the same; the reason is the one that a training gives."""
    module = Steps(nn.LSTM(3, 4, proj_size=2), lambda m, b: m.net(b[0].reshape(-1, 2, 3))[0].mean())
    module.net.batch_first = True
    checked = dpbench.check(module, dpbench.LotLoader.poisson(numbers(), 8))
    assert checked.kind == "limited" and "proj_size" in checked.reason
    assert str(checked).startswith("the engine cannot be used, so that training takes records one by one:\n  LSTM is")


def test_what_is_kept_counts_more_than_a_limit_of_the_engine() -> None:
    def loss(module: Steps, batch: Any) -> Tensor:
        mean: Tensor = module.net(batch[0].reshape(-1, 2, 3))[0].mean()
        before = module.__dict__.get("before", 1.0)
        module.before = mean.detach()
        return mean * before

    module = Steps(nn.LSTM(3, 4, proj_size=2), loss)
    module.net.batch_first = True
    assert dpbench.check(module, dpbench.LotLoader.poisson(numbers(), 8)).kind == "kept"


def test_a_verdict_by_values_says_so() -> None:
    """Where targets are ignored, a mean counts what counts in the batch."""

    def loss(module: Steps, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(module.net(batch[0]), batch[1])

    targets = torch.arange(40) % 4 - 1
    data = TensorDataset(*numbers().tensors, torch.where(targets < 0, -100, targets))
    checked = dpbench.check(Steps(nn.Linear(6, 3), loss), DataLoader(data, batch_size=10))
    assert checked.kind == "mixed" and "this depends on values" in str(checked)


def test_what_is_no_step_of_records_is_said() -> None:
    module = Steps(nn.Linear(6, 1), lambda m, b: m.net(torch.ones(2, 6)).mean())
    assert str(dpbench.check(module, DataLoader(numbers(), batch_size=10))).startswith("not checked: the first loss")


def test_what_no_training_begins_with_is_refused() -> None:
    def refused(message: str, module: Any, rows: int = 10, **options: Any) -> None:
        loader = DataLoader(numbers(), batch_size=10, collate_fn=lambda _: [torch.zeros(rows, 6)])
        with pytest.raises(ConfigurationError, match=message):
            dpbench.check(module, loader, **options)

    def no_loss(module: Steps, batch: Any) -> Any:
        return None

    step = Steps(nn.Linear(6, 1), lambda m, b: m.net(b[0]).mean())
    refused("takes a LightningModule, not a Linear", nn.Linear(6, 1))
    refused("No `training_step", pl.LightningModule())
    refused("training_step returns no loss", Steps(nn.Linear(6, 1), no_loss))
    refused("all batches that were drawn are empty", step, rows=0)
    refused("records must be a source of records", step, records=["user"])
    refused("would train on no batch", step, trainer=pl.Trainer(limit_train_batches=0, logger=False))
