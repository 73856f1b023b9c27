"""Record by record nothing of one record may be in the gradient of the next, nor in the module."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics import MaxMetric

from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import CarriedRecordsError, ConfigurationError, UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.counters import Counters
from dpbench.strategies import DPSGD, ClipOnly
from tests.records.test_separate_records import Items, lots, of_rows, rows
from tests.strategies.worlds import loader_of, trainer_for, weights_of
from tests.support.one_by_one import BOUND, Module, cross_entropy, data, plain


def fit(folder: Path, module: Any, loader: Any = None, steps: int = 3, **options: Any) -> Any:
    options = {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 1, "gradients": "one_by_one", **options}
    strategy = DPSGD(ledger=str(folder / "ledger.jsonl"), **options)
    trainer_for(folder, strategy, steps).fit(module, loader or loader_of(data(40), 12))
    return strategy


class Keeping(Module):
    """Keeps something of a record in one of several ways."""

    def __init__(self, way: Callable[[Keeping, Tensor, Tensor], Tensor]) -> None:
        super().__init__(plain(), cross_entropy)
        self._way = (way,)
        self.ema = 1.0
        self.largest = 10.0
        self.centers: dict[int, Tensor] = {}
        self.last: Tensor | None = None
        self.metric = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self._way[0](self, loss, batch)


def slow_mean(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    module.ema = 0.999 * module.ema + 0.001 * float(loss.detach())
    return loss / module.ema


def count_of_a_class(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    """Its mask says how many rows there are."""
    module.ema += len(batch[0][batch[1] == 1])
    return loss / module.ema


def running_maximum(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    module.largest = max(module.largest, float(batch[0].abs().max()))
    return loss / module.largest


def centers_of_classes(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    distance = loss * 0
    for x, label in zip(batch[0].flatten(1), batch[1].tolist(), strict=True):
        before = module.centers.get(label, torch.zeros_like(x))
        distance = distance + loss * (x - before).square().mean()
        module.centers[label] = x
    return distance


def host_random(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    """Draws numbers of which nobody knows which record they are for."""
    before, module.last = module.last, batch[0].mean()
    scale = 1 + 0.001 * random.gauss(0, 1)
    return loss * scale * (1 if before is None else 1 + before)


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("way", [slow_mean, count_of_a_class, running_maximum, centers_of_classes])
def test_values_that_were_read_are_put_back(tmp_path: Path, way: Any) -> None:
    """After each record: the order of records does not matter."""
    records = data(40)
    weights = []
    for order in (torch.arange(40), torch.arange(40).flip(0)):
        torch.manual_seed(1)
        ordered = TensorDataset(*(x[order] for x in records.tensors))
        everybody = LotLoader(ordered, Lots(make_sampling("full", 40, 40), None))
        module = Keeping(way)
        fit(tmp_path / str(int(order[0])), module, everybody)
        assert (module.ema, module.largest, module.centers) == (1.0, 10.0, {})
        weights.append(weights_of(module.net))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)


def metric_of_earlier_records(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    before = float(module.metric.compute()) if module.metric.update_called else 0.0
    module.metric.update(batch[0].abs().max())
    return loss * (2.0 if before > 1 else 1.0)


def logged_number_of_earlier_records(module: Keeping, loss: Tensor, batch: Any) -> Tensor:
    before = module.trainer.callback_metrics.get("largest")
    module.log("largest", batch[0].abs().max().item())
    return loss * (2.0 if before is not None and float(before) > 1 else 1.0)


@pytest.mark.parametrize("way", [metric_of_earlier_records, logged_number_of_earlier_records])
def test_values_of_earlier_records_that_are_read_are_refused(tmp_path: Path, way: Any) -> None:
    """They are in tensors, of which Python makes a number."""
    with pytest.raises(CarriedRecordsError, match="a value of an earlier batch is read into Python"):
        fit(tmp_path, Keeping(way))


def test_values_that_are_read_in_the_backward_pass(tmp_path: Path) -> None:
    def clipped(gradient: Tensor) -> Tensor:
        norms = gradient.flatten(1).norm(dim=1)
        return gradient * min(1.0, (norms.median() / norms.max()).item())

    class Hooked(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.net[:2](batch[0])
            if self.global_step:
                hidden.register_hook(clipped)
            return nn.functional.cross_entropy(self.net[2:](hidden), batch[1])

    torch.manual_seed(1)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
        fit(tmp_path, Hooked(plain(), cross_entropy), loader_of(data(40), 12), steps=3, gradients="auto")
    assert any("a value is read into Python, in the backward pass" in line for line in lines)
    with pytest.raises(UnsupportedModuleError, match="a value is read into Python, in the backward pass"):
        fit(tmp_path / "engine", Hooked(plain(), cross_entropy), loader_of(data(40), 12), gradients="engine")


def test_memory_in_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match="depends on records of an earlier batch"):
        fit(tmp_path, Keeping(host_random))


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
        fit(tmp_path / gradients, module, loader_of(data(40), 12), steps=6, gradients=gradients)
        assert module.count == 6
        weights.append(weights_of(module.net))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0.02)


class Helper:
    """Counts beside the module."""

    count = 0

    def __init__(self) -> None:
        self.count = 3


def test_each_record_finds_the_numbers_of_the_first() -> None:
    module = nn.Linear(1, 1)
    module.count, module.counts, module.helper = 3, {"steps": 3}, Helper()
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


class First(nn.Module):
    """Its first value is the mean of the first lot (ActNorm), in a network that the engine does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(6))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 6))])

    def forward(self, x: Tensor) -> Tensor:
        if not self.loc.any():
            self.loc.data.copy_(-x.mean((0, 1)))
        return (x + self.loc).mean(1) @ self.weights[0].T


def test_a_trial_leaves_no_record_in_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = First()
    with pytest.raises((UnsupportedModuleError, ConfigurationError), match="net.loc|records of an earlier batch"):
        fit(tmp_path, Module(net, cross_entropy), gradients="auto")


def test_arrays_are_cut(tmp_path: Path) -> None:
    """Labels that the collate_fn leaves in NumPy: each record sees its own."""

    def with_arrays(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]), np.array([y for _, y in items])

    def step(net: nn.Module, batch: Any) -> Tensor:
        assert len(batch[0]) == len(batch[1])
        return F.cross_entropy(net(batch[0]), torch.from_numpy(batch[1]))

    releases = []
    for collate, loss in ((None, of_rows), (with_arrays, step)):
        torch.manual_seed(1)
        net = nn.Linear(6, 4)
        strategy = ClipOnly(max_grad_norm=BOUND, gradients="one_by_one")
        trainer_for(tmp_path, strategy, 1).fit(Module(net, loss), lots(rows(), collate))
        releases.append(weights_of(net))
    assert torch.equal(*releases)


@pytest.mark.parametrize("gradients", ["engine", "one_by_one"])
@pytest.mark.parametrize("number", [lambda x: x.abs().max(), lambda x: float(x.abs().max())])
def test_a_number_of_the_lot(tmp_path: Path, gradients: str, number: Any) -> None:
    def scaled(items: list[Any]) -> Any:
        x = torch.stack([x for x, _ in items])
        return {"x": x, "y": torch.tensor([y for _, y in items]), "scale": number(x)}

    def step(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["x"] / batch["scale"]), batch["y"])

    if gradients == "one_by_one":  # where it is a number of the record
        fit(tmp_path, Module(nn.Linear(6, 4), step), lots(rows(), scaled), gradients=gradients)
        return
    with pytest.raises(ConfigurationError, match="what all records share"):
        fit(tmp_path, Module(nn.Linear(6, 4), step), lots(rows(), scaled), gradients=gradients)


def test_the_line_tells_nothing_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what somebody else's error says, nor how many there are."""
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("cannot handle 0.25, 0.5")

    monkeypatch.setattr(PerRecordEngine, "backward", fail)
    torch.manual_seed(1)
    fit(tmp_path, Module(nn.Linear(6, 4), of_rows), lots(rows(), None, 5), gradients="auto")
    (line,) = [line for line in lines if "record by record" in line]
    assert "ends in a ValueError" in line and "cannot handle" not in line


class Routed(nn.Module):
    """Hard routing: a layer sees the records that choose it, perhaps none or all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 4)
        chosen = (x[:, 0] > 1.2).long()
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().flatten()
            if len(where):
                out = out.index_add(0, where, expert(x[where]))
        return out


def test_a_lot_that_the_engine_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knew those before: the training goes on record by record, with that very lot, and once."""
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 6, generator=generator)
    x[:, 0] = 0
    x[::10, 0] = 2
    items = [(one, number % 4) for number, one in enumerate(x)]
    updates = []
    for gradients in ("auto", "one_by_one"):
        torch.manual_seed(1)
        net = Routed()
        drawn = Lots(make_sampling("fixed_size", 40, 4), seed=3)
        strategy = ClipOnly(max_grad_norm=BOUND, gradients=gradients)
        trainer_for(tmp_path, strategy, 8).fit(Module(net, of_rows), LotLoader(Items(items), drawn))
        updates.append(weights_of(net))
    torch.testing.assert_close(*updates, rtol=1e-5, atol=1e-6)
    assert len([line for line in lines if "record by record" in line]) == 1


def test_a_resumed_run_keeps_the_method(tmp_path: Path) -> None:
    """Whatever its first lot would say."""
    torch.manual_seed(1)
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(tmp_path / "ledger.jsonl"))
    trainer = trainer_for(tmp_path, strategy, 3)
    net = Routed()
    trainer.fit(Module(net, of_rows), lots(rows(), None, 4, data_id="rows"))
    assert strategy._source.method == "one_by_one"  # type: ignore[union-attr]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again_net = Routed()
    again = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(tmp_path / "ledger.jsonl"))
    trials: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpbench.guards.engine_trial.EngineTrial.limit", lambda self, batch: trials.append(batch))
        trainer_for(tmp_path, again, 6).fit(
            Module(again_net, of_rows),
            lots(rows(), None, 4, data_id="rows"),
            ckpt_path=tmp_path / "last.ckpt",
            weights_only=False,
        )
    assert again._source.method == "one_by_one" and not trials and again.releases == 6  # type: ignore[union-attr]
