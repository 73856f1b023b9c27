"""Networks that are frozen, compiled, pruned or scripted, trained privately."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.errors import UnsupportedModuleError
from tests.strategies.worlds import fit, loader_of, weights_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Found 4 module.* in eval mode"),  # Lightning's advice; here it is intended
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
SIZE, BOUND = 24, 0.5


class Frozen(pl.LightningModule):
    """A pretrained body with batch normalization in evaluation mode, and a new head."""

    woken = False

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.ReLU()).eval()
        self.head = nn.Linear(16, 1)
        self.modes: list[tuple[bool, bool]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.woken:
            self.train()

    def loss(self, batch: Any) -> Tensor:
        return self.head(self.body(batch[0][:, None]).flatten(1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.modes.append((self.training, self.body.training))
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def vectors() -> TensorDataset:
    return TensorDataset(torch.randn(SIZE, 5))


def test_batch_norm_in_evaluation_mode(tmp_path: Path) -> None:
    """Lightning keeps the mode; who wakes it up is refused."""
    module = Frozen()
    before = copy.deepcopy(module.body[1])
    fit(tmp_path, module, loader=loader_of(vectors()))
    assert set(module.modes) == {(True, False)}
    assert torch.equal(before.running_mean, module.body[1].running_mean)
    assert not torch.equal(before.weight, module.body[1].weight)
    module = Frozen()
    module.woken = True
    with pytest.raises(UnsupportedModuleError, match=r"BatchNorm1d was put into training mode"):
        fit(tmp_path / "woken", module, loader=loader_of(vectors()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("way", ["net", "in place", "module"])
def test_compiled_networks(way: str, tmp_path: Path) -> None:
    ends = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        torch._dynamo.reset()
        trained = module = Frozen()
        if is_compiled and way == "net":
            module.body = torch.compile(module.body, backend="aot_eager")
        elif is_compiled and way == "in place":
            module.body.compile(backend="aot_eager")
        elif is_compiled:
            trained = torch.compile(module, backend="aot_eager")
        data = loader_of(TensorDataset(torch.randn(SIZE, 5)))
        options = {"noise_multiplier": 1e-3, "max_grad_norm": BOUND}
        fit(tmp_path / str(is_compiled), trained, 3, loader=data, **options)
        ends.append(weights_of(module))
    assert torch.allclose(*ends, atol=1e-5)


class Prune(pl.Callback):
    """Changes what the weight is between two epochs."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        torch.nn.utils.prune.l1_unstructured(module.head, "weight", 0.5)


def pruned() -> Frozen:
    module = Frozen()
    torch.nn.utils.prune.l1_unstructured(module.head, "weight", 0.5)
    return module


def scripted() -> Frozen:
    """TorchScript lets no hooks in."""
    module = Frozen()
    module.head = torch.jit.script(nn.Sequential(nn.Linear(16, 1)))
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (pruned, [], r"head \(Linear\) is pruned, .*make it permanent"),
        (Frozen, [Prune()], r"head \(Linear\) is pruned, .*make it permanent"),
        (scripted, [], "is compiled by TorchScript, which allows no hooks"),
    ],
    ids=["before", "during", "scripted"],
)
def test_what_computes_a_weight_is_refused(tmp_path: Path, make: Any, more: list[Any], message: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=message):
        fit(tmp_path, make(), loader=loader_of(vectors()), gradients="engine", trainer={"more": more})
