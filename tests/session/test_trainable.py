"""Layers that are frozen, unfrozen and replaced between lots: what is trainable is trained, and recorded as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, ClipOnly
from tests.strategies.worlds import clipped_sum, loader_of, trainer_for

RECORDS = 40
BOUND = 0.3


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(RECORDS, 5, generator=generator), torch.arange(RECORDS) % 3)


class Net(pl.LightningModule):
    """A backbone of 48 numbers and a head of 27."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3)
        self.backbone.requires_grad_(not frozen)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.backbone(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


class At(pl.Callback):
    """Calls a function once, before a lot."""

    def __init__(self, step: int, change: Callable[[Any, Any], None]) -> None:
        self._step = step
        self._change = change

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            self._change(trainer, module)


def unfreeze(trainer: Any, module: Any) -> None:
    module.backbone.requires_grad_(True)
    trainer.optimizers[0].add_param_group({"params": list(module.backbone.parameters()), "lr": 0.5})


def freeze_head(trainer: Any, module: Any) -> None:
    module.head.requires_grad_(False)


def fit(
    folder: Path,
    change: pl.Callback,
    make: Any = DPSGD,
    module: pl.LightningModule | None = None,
    loader: PrivateDataLoader | None = None,
    steps: int = 8,
    start: Path | None = None,
    **options: Any,
) -> tuple[Any, Any, pl.Trainer]:
    options = {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 1, "ledger": str(folder / "ledger.jsonl"), **options}
    strategy = make(**options)
    module = module or Net()
    trainer = trainer_for(folder, change, steps, more=[strategy])
    trainer.fit(module, loader or loader_of(records()), ckpt_path=start, weights_only=False)
    return strategy, module, trainer


def book(folder: Path) -> Ledger:
    ledger = read_ledger(folder / "ledger.jsonl")
    assert ledger.damage is None
    return ledger


def expected_update(net: Net, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Mean of the records' clipped gradients over all that is trainable, one record at a time."""
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    losses = (net.loss(record, label) for record, label in zip(x.split(1), y.split(1), strict=True))
    total = clipped_sum(losses, list(named.values()), BOUND)
    return {name: part / len(x) for name, part in zip(named, total, strict=True)}


@pytest.mark.parametrize(("change", "frozen"), [(unfreeze, True), (freeze_head, False)])
def test_the_release_is_of_what_is_trainable(tmp_path: Path, change: Any, frozen: bool) -> None:
    """Without noise, on lots that hold everybody: the update is that of autograd, record by record."""
    x, y = records().tensors
    names: list[set[str]] = []

    class Watching(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.before = {name: p.detach().clone() for name, p in self.named_parameters()}
            self.expected = expected_update(self, x, y)
            names.append(set(self.expected))

        def on_train_batch_end(self, *_: Any) -> None:
            for name, p in self.named_parameters():
                wanted = self.expected.get(name, torch.zeros_like(p))
                torch.testing.assert_close((self.before[name] - p.detach()) / 0.5, wanted, rtol=1e-4, atol=1e-6)

    loader = loader_of(records(), RECORDS, kind="full")
    fit(tmp_path, At(3, change), ClipOnly, Watching(frozen), loader, steps=6, max_grad_norm=BOUND, ledger=None)
    assert len(names) == 6 and names[2] != names[3] and names[3] == names[5]


@pytest.mark.parametrize(
    ("make", "options"),
    [(DPSGD, {"microbatch_size": 2}), (DPSGD, {"noise_schedule": "linear:0.5"})],
)
def test_the_ledger_has_a_phase_for_each(tmp_path: Path, make: Any, options: Any) -> None:
    strategy, module, _ = fit(tmp_path, At(3, unfreeze), make, **options)
    ledger = book(tmp_path)
    assert [phase for phase, _ in ledger.releases] == [0] * 3 + [1] * 5
    assert [release.number for _, release in ledger.releases] == list(range(8))
    assert ledger_epsilon(ledger, 1e-3) == pytest.approx(strategy.epsilon(), rel=1e-12)
    assert not torch.equal(module.backbone.weight, Net().backbone.weight)
    plans = [header.plan.to_dict() for header in ledger.headers if header.plan is not None]
    assert len(plans) == 2 and plans[0] != plans[1]


def test_the_bound_that_has_adapted_goes_on(tmp_path: Path) -> None:
    bounds: list[float] = []

    class Bounds(At):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            bounds.append(trainer.callbacks[1].mechanism.plan.groups[0].max_grad_norm)

    fit(tmp_path, Bounds(3, unfreeze), AdaptiveQuantileClipping, steps=4, count_noise_std=1.0, clip_learning_rate=2.0)
    # One step leads from the first bound of 0.1 to 0.27 at most, a factor of e.
    assert bounds[2] > 0.3 and bounds[3] > 0.3


def test_a_budget_lasts_for_the_planned_steps(tmp_path: Path) -> None:
    strategy, _, trainer = fit(tmp_path, At(3, unfreeze), target_epsilon=3.0, noise_multiplier=None)
    assert trainer.global_step == 8 and strategy.epsilon() == pytest.approx(3.0, rel=1e-4) and strategy.epsilon() <= 3
    assert ledger_epsilon(book(tmp_path), 1e-3) == pytest.approx(strategy.epsilon(), rel=1e-12)


def test_a_resumed_run_goes_on_with_what_is_trainable_by_then(tmp_path: Path) -> None:
    """As somebody who unfreezes by hand goes on: with the groups that the optimizer has by now."""

    class Unfrozen(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": part.parameters()} for part in (self.head, self.backbone)], lr=0.5)

    fit(tmp_path / "whole", At(2, unfreeze), steps=6)
    _, _, half = fit(tmp_path / "half", At(2, unfreeze), steps=4)
    half.save_checkpoint(tmp_path / "half.ckpt")
    module = Unfrozen(frozen=False)
    fit(tmp_path / "half", At(99, unfreeze), module=module, steps=6, start=tmp_path / "half.ckpt")
    ledger = book(tmp_path / "half")
    assert [release.number for _, release in ledger.releases] == list(range(6))
    assert ledger_epsilon(ledger, 1e-3) == ledger_epsilon(book(tmp_path / "whole"), 1e-3)
    assert not torch.equal(module.backbone.weight, half.lightning_module.backbone.weight)


def test_in_the_middle_of_the_first_lot(tmp_path: Path) -> None:
    """The lot is released as it was opened; the frozen layer stays where it is."""

    class Middle(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.head.requires_grad_(False)

    _, module, _ = fit(tmp_path, At(99, unfreeze), module=Middle(frozen=False))
    assert torch.equal(module.head.weight, Net().head.weight)
    assert not torch.equal(module.backbone.weight, Net().backbone.weight)
    assert len(book(tmp_path).releases) == 8


def test_an_unfreezing_callback_stands_behind_the_strategy_too(tmp_path: Path) -> None:
    class Unfreeze(pl.Callback):
        """As docs/module.md shows it."""

        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.global_step == 2:
                unfreeze(trainer, module)

    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3)
    trainer_for(tmp_path, strategy, 5, more=[Unfreeze()]).fit(Net(), loader_of(records()))
    assert [phase for phase, _ in book(tmp_path).releases] == [0] * 3 + [1] * 2


# ------------------------------------------------------------------------------------- refused


def unfreeze_alone(trainer: Any, module: Any) -> None:
    module.backbone.requires_grad_(True)


def replace_head(trainer: Any, module: Any) -> None:
    module.head = nn.Linear(8, 3)
    trainer.optimizers[0].add_param_group({"params": list(module.head.parameters())})


def freeze_all(trainer: Any, module: Any) -> None:
    module.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfreeze_alone, "the optimizer does not update backbone.weight, backbone.bias"),
        (replace_head, "updates trainable parameters without a released gradient"),
        (freeze_all, "no trainable parameters"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, At(3, change))
    assert len(book(tmp_path).releases) == 3
