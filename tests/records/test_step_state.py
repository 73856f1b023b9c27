"""What a step has left behind is put back: all of it after a trial; after a read, what may depend on it."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import MeanMetric

import dpbench
from dpbench.errors import ConfigurationError
from dpbench.privacy.record_axis.tags import Axis
from dpbench.privacy.record_axis.verdict import new_axis
from dpbench.records.step_state import PublicState, StepState
from tests.guards.plain_training import plain_training


class Metric(nn.Module):
    """Counts its calls and keeps a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]
        self.mean = MeanMetric()


class Net(pl.LightningModule):
    """Holds tensors, numbers and generators of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(6, 3), Metric())
        self.bank: Any = []
        self.register_buffer("seen", torch.zeros(6))
        self.rng, self.drawn = np.random.default_rng(1), torch.Generator().manual_seed(1)


def test_what_a_step_holds_is_put_back() -> None:
    module = Net()
    module.helper = SimpleNamespace(count=0, found={"a": [1]}, kind=dict[str, int])
    module.table, module.names, module.half = np.zeros(3), {1}, torch.zeros(2).expand(2, 2)
    gradient = module.net[0].weight.grad = torch.ones(3, 6)
    version = module.seen._version
    training = plain_training(module)
    state = StepState(training)

    def draws() -> list[float]:
        numbers = [float(torch.rand(())), random.random(), np.random.rand(), float(module.rng.random())]
        return [*numbers, float(torch.rand((), generator=module.drawn))]

    first = draws()
    assert module.net[0].weight.grad is None
    module.seen.data.add_(1)
    module.seen = torch.ones(6)
    module.helper.count, module.helper.found["a"], module.helper.found["b"] = 1, [2], 3
    module.table += 1
    module.names.add(2)
    module.bank.append(torch.ones(1))
    module.net[1].sizes.append(7)
    module.net[1].mean(torch.ones(3))
    module.net[1].eval()
    module.net[0].weight.requires_grad_(False).grad = torch.zeros(3, 6)
    module.register_buffer("late", torch.zeros(1))
    module.new = 1
    training.should_stop = True
    state.restore()
    assert draws() == first
    state.finish()
    assert draws() == first
    assert not module.seen.any() and module.seen._version == version
    assert (module.helper.count, module.helper.found) == (0, {"a": [1]})
    assert not module.table.any() and module.names == {1} and not module.bank
    assert module.net[1].sizes == [0] and module.net[1].mean.update_count == 0 and module.net[1].training
    assert module.net[0].weight.requires_grad and module.net[0].weight.grad is gradient
    assert not hasattr(module, "late") and not hasattr(module, "new") and not training.should_stop


def test_random_numbers_gradients_and_metrics_stay_after_a_read() -> None:
    module = Net()
    module.count = 0
    gradient = module.net[0].weight.grad = torch.ones(3, 6)
    state = PublicState(plain_training(module))
    assert module.net[0].weight.grad is gradient
    first = torch.rand(())
    module.count = 1
    module.new = 1
    module.bank.append(1)
    module.seen.add_(1)
    module.log = print
    axis, records = new_axis(1), torch.ones(3)
    axis.tag(records, Axis(0))
    with axis:
        module.net[1].mean.update(records)
    state.put_back()
    assert module.count == 0 and not hasattr(module, "new") and not module.bank and not module.seen.any()
    assert module.net[1].mean.compute() == 1
    assert torch.rand(()) != first
    assert vars(module)["log"] is print  # a stand-in, which others take away


GLOBAL: dict[str, float] = {}


def test_what_code_of_the_users_holds_is_put_back_after_a_read() -> None:
    """Numbers at classes, functions, parameters and the trainer; in closures, defaults and global variables."""

    class Elsewhere(Net):
        largest = 0.0
        history: ClassVar[list[float]] = []

        def keep(self, value: float, last: list[float] = []) -> None:  # noqa: B006 (on purpose)
            nonlocal inner
            inner = value
            last.append(value)
            self.history.append(value)
            type(self).largest = value
            GLOBAL["value"] = value
            Elsewhere.keep.value = value  # type: ignore[attr-defined]
            self.net[0].weight.value = value
            self._trainer.value = value  # type: ignore[union-attr]
            self.net[1].mean.update(torch.tensor(value))  # a number that was read has no tag

    inner = 0.0
    module = Elsewhere()
    module._trainer = SimpleNamespace()  # type: ignore[assignment]
    state = PublicState(plain_training(module))
    module.keep(3.0)
    state.put_back()
    assert (inner, Elsewhere.largest, Elsewhere.history, GLOBAL) == (0.0, 0.0, [], {})
    assert Elsewhere.keep.__defaults__ == ([],)
    for owner in (Elsewhere.keep, module.net[0].weight, module._trainer):
        assert not hasattr(owner, "value")
    assert not module.net[1].mean.weight.any()


def test_a_dictionary_is_never_empty_and_keeps_its_order() -> None:
    """Other threads may read it."""

    class Attributes(dict[str, Any]):
        def clear(self) -> None:
            raise AssertionError("cleared")

    module = Net()
    module.seen_by_threads = Attributes(a=1, b=2)
    state = PublicState(plain_training(module))
    module.seen_by_threads.update(a=3, c=4)
    state.put_back()
    assert module.seen_by_threads == {"a": 1, "b": 2}
    module.other = module.net
    module.net = module._modules.pop("net")
    state.put_back()
    assert [*module._modules] == ["net"]


def test_what_is_only_written_to_goes_on() -> None:
    module = Net()
    module.lines = logging.getLogger("dpbench.tests")
    state = PublicState(plain_training(module))
    module.lines.level = 20
    state.put_back()
    assert module.lines.level == 20


def test_declared_attributes_stay() -> None:
    @dpbench.independent("count")
    class Counts(Net):
        count = 0
        other = 0

    @dpbench.independent("other")
    class Both(Counts):
        pass

    for module, left in ((Counts(), (1, 0)), (Both(), (1, 1))):
        state = PublicState(plain_training(module))
        module.count = module.other = 1
        state.put_back()
        assert (module.count, module.other) == left


def test_a_declaration_without_names_is_refused() -> None:
    for names in ((), (1,)):
        with pytest.raises(ConfigurationError, match="independent takes names of attributes"):
            dpbench.independent(*names)  # type: ignore[arg-type]
