"""Record by record nothing of one record may be in the gradient of the next, nor in the module."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate
from torchmetrics import MaxMetric

from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import CarriedRecordsError, ConfigurationError, UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.counters import Counters
from dpbench.strategies import DPSGD
from tests.records.test_separate_records import lots, of_rows, rows
from tests.strategies.worlds import loader_of, trainer_for, weights_of
from tests.support.one_by_one import Module, cross_entropy, data, plain


def fit(folder: Path, module: Any, loader: Any = None, steps: int = 3, **options: Any) -> None:
    options = {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 1, "gradients": "one_by_one", **options}
    strategy = DPSGD(ledger=str(folder / "ledger.jsonl"), **options)
    trainer_for(folder, strategy, steps).fit(module, loader or loader_of(data(40), 12))


class Keeping(Module):
    """Keeps something of a record."""

    def __init__(self, way: Callable[[Any, Tensor, Any], Tensor]) -> None:
        super().__init__(plain(), cross_entropy)
        self._way = (way,)
        self.metric = MaxMetric()
        self.last: Tensor | None = None
        self.ema, self.count, self.largest = 1.0, 1, 10.0
        self.centers: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._way[0](self, super().training_step(batch, batch_idx), batch)


def numbers_of_records(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    """A slow mean, a count of a class (of which a mask tells), a running maximum, and centers of classes."""
    module.ema = 0.999 * module.ema + 0.001 * float(loss.detach())
    module.count += len(batch[0][batch[1] == 1])
    module.largest = max(module.largest, float(batch[0].abs().max()))
    loss = loss / module.ema / module.count / module.largest
    for x, label in zip(batch[0], batch[1].tolist(), strict=True):
        loss = loss * (1 + (x - module.centers.get(label, torch.zeros_like(x))).square().mean())
        module.centers[label] = x
    return loss


@pytest.mark.usefixtures("one_key")
def test_values_that_were_read_are_put_back(tmp_path: Path) -> None:
    """After each record: the order of records does not matter."""
    weights = []
    for name, order in (("a", torch.arange(12)), ("b", torch.arange(12).flip(0))):
        torch.manual_seed(1)
        ordered = TensorDataset(*(x[order] for x in data().tensors))
        module = Keeping(numbers_of_records)
        fit(
            tmp_path / name,
            module,
            PrivateDataLoader(ordered, PrivateBatchSampler(make_sampling("full", 12, 12), None)),
            2,
        )
        assert (module.ema, module.count, module.largest, module.centers) == (1.0, 1, 10.0, {})
        weights.append(weights_of(module.net))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)


def host_random(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    """Draws numbers of which nobody knows which record they are for."""
    before, module.last = module.last, batch[0].mean()
    return loss * (1 + 0.001 * random.gauss(0, 1)) * (1 if before is None else 1 + before)


def metric_of_earlier_records(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    before = float(module.metric.compute()) if module.metric.update_called else 0.0
    module.metric.update(batch[0].abs().max())
    return loss * (2.0 if before > 1 else 1.0)


def logged_number_of_earlier_records(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    before = module.trainer.callback_metrics.get("largest")
    module.log("largest", batch[0].abs().max().item())
    return loss * (2.0 if before is not None and float(before) > 1 else 1.0)


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        (metric_of_earlier_records, CarriedRecordsError, "a value of an earlier batch is read into Python"),
        (logged_number_of_earlier_records, CarriedRecordsError, "a value of an earlier batch is read into Python"),
        (host_random, UnsupportedModuleError, "depends on records of an earlier batch"),
    ],
)
def test_what_is_kept_in_tensors_is_refused(tmp_path: Path, way: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(tmp_path, Keeping(way))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: said.append(text))
    return said


def test_values_that_are_read_in_the_backward_pass(tmp_path: Path, lines: list[str]) -> None:
    def clipped(gradient: Tensor) -> Tensor:
        norms = gradient.flatten(1).norm(dim=1)
        return gradient * min(1.0, (norms.median() / norms.max()).item())

    class Hooked(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.net[:2](batch[0])
            if self.global_step:
                hidden.register_hook(clipped)
            return nn.functional.cross_entropy(self.net[2:](hidden), batch[1])

    fit(tmp_path, Hooked(plain(), cross_entropy), gradients="auto")
    assert any("a value is read into Python, in the backward pass" in line for line in lines)
    with pytest.raises(UnsupportedModuleError, match="a value is read into Python, in the backward pass"):
        fit(tmp_path / "engine", Hooked(plain(), cross_entropy), gradients="engine")


class Counting(Module):
    """A warm-up by a count of steps, as people write it."""

    def __init__(self) -> None:
        super().__init__(plain(), cross_entropy)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.count / 50)


@pytest.mark.usefixtures("one_key")
def test_steps_are_counted_once_a_lot(tmp_path: Path) -> None:
    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        module = Counting()
        fit(tmp_path / gradients, module, gradients=gradients)
        assert module.count == 3
        weights.append(weights_of(module.net))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0.02)


def test_each_record_finds_the_numbers_of_the_first() -> None:
    module = nn.Linear(1, 1)
    module.count, module.counts, module.helper = 3, {"steps": 3}, SimpleNamespace(count=3)
    counters = Counters(module)
    for _ in range(3):
        counters.before_record()
        assert (module.count, module.counts, module.helper.count) == (3, {"steps": 3}, 3)
        assert not hasattr(module, "new")
        module.count += 1
        module.counts["steps"] += 1
        module.helper.count += 1
        module.new = 1
    assert module.count == 4


def test_gradients_of_the_records_before(tmp_path: Path) -> None:
    """A step that calls backward itself sees the sum over them in p.grad."""

    class Penalized(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.backward(retain_graph=True)
            return loss

    with pytest.raises(UnsupportedModuleError, match="p.grad contains unclipped gradients of records"):
        fit(tmp_path, Penalized(plain(), cross_entropy))


def scaled(items: list[Any], number: Callable[[Tensor], Any] = float) -> Any:
    x, y = default_collate(items)
    return {"x": x, "y": y, "scale": number(x.abs().max())}


@pytest.mark.parametrize("number", [float, torch.clone])
def test_a_number_of_the_lot(tmp_path: Path, number: Any) -> None:
    """Of a record alone it is a number of the record."""

    def step(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["x"] / batch["scale"]), batch["y"])

    loader = lots(rows(), partial(scaled, number=number))
    fit(tmp_path / "alone", Module(nn.Linear(6, 4), step), loader)
    with pytest.raises(ConfigurationError, match="values shared by all records"):
        fit(tmp_path / "engine", Module(nn.Linear(6, 4), step), loader, gradients="engine")


def test_the_line_tells_nothing_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """Neither what somebody else's error says, nor how many there are."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("cannot handle 0.25, 0.5")

    monkeypatch.setattr(PerRecordEngine, "backward", fail)
    fit(tmp_path, Module(nn.Linear(6, 4), of_rows), lots(rows(), None, 5), gradients="auto")
    (line,) = [line for line in lines if "record by record" in line]
    assert "raises ValueError" in line and "cannot handle" not in line
