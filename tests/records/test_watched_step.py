"""Each batch of the engine is judged by itself, whatever earlier ones were: the first ones are healthy here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.errors import CarriedRecordsError, UnsupportedModuleError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, trainer_for, update, weights_of
from tests.support.one_by_one import data, used
from tests.support.verdicts import verdict_of_step

LATE = 1  # of six batches, the second: the probe looks at the first, the third and the fourth
LATER = 4


class Late(pl.LightningModule):
    """Two layers with a step between them that one batch alone has."""

    def __init__(self, between: Callable[[Late, Tensor], Tensor], manual: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(30, 8)
        self.second = nn.Linear(8, 4)
        self.between = (between,)
        self.number = 0
        self.automatic_optimization = not manual

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        (between,) = self.between
        hidden = between(self, self.first(x.flatten(1)).tanh())
        return update(self, F.cross_entropy(self.second(hidden), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def sorted_between(module: Late, hidden: Tensor) -> Tensor:
    """The second layer sees the records in another order; each record's loss is its own all the same."""
    if module.number != LATE or len(hidden) < 2:
        return hidden
    order = hidden[:, 0].argsort()
    module.second(hidden[order])
    restored = torch.empty_like(hidden)
    restored[order] = hidden[order]
    return restored


def read(module: Late, hidden: Tensor) -> Tensor:
    if module.number == LATE and not bool(hidden.isfinite().all()):
        raise ValueError("not finite")
    return hidden


def remembered(module: Late, hidden: Tensor) -> Tensor:
    """What is kept of one batch is used in a later one."""
    if module.number == LATE:
        module.center = hidden.detach().mean(0)
    if module.number == LATER:
        return hidden - module.center
    return hidden


def trained(
    folder: Path, between: Any, manual: bool = False, start: Path | None = None, more: Any = (), **options: Any
) -> tuple[DPSGD, Tensor]:
    """Weights after six batches."""
    torch.manual_seed(1)
    module = Late(between, manual)
    private = {"noise_multiplier": 1.0, "max_grad_norm": 0.3, "delta": 1e-3, "seed": 1, **options}
    strategy = DPSGD(ledger=str(folder / "ledger.jsonl"), **private)
    trainer = trainer_for(folder, strategy, 6, more=more)
    trainer.fit(module, loader_of(data(80), 10), ckpt_path=start, weights_only=False)
    return strategy, weights_of(module)


@pytest.mark.parametrize(
    ("between", "options"),
    [(read, {"max_physical_batch_size": 4}), (sorted_between, {"manual": True})],
    ids=["read in pieces", "manual"],
)
def test_the_gradients_are_those_of_record_by_record(
    tmp_path: Path, between: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    strategy, weights = trained(tmp_path / "auto", between, **options)
    _, expected = trained(tmp_path / "alone", between, gradients="one_by_one", manual="manual" in options)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert used(strategy) == "one_by_one"
    (line,) = [message for message in caplog.messages if "record by record" in message]
    assert "test_watched_step.py:" in line


def test_the_engine_alone_refuses(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"test_watched_step\.py:\d+"):
        trained(tmp_path, read, gradients="engine")
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == LATE


def test_records_of_an_earlier_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CarriedRecordsError, match=r"earlier batch, in .*test_watched_step\.py:\d+ \(sub\)"):
        trained(tmp_path, remembered)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == LATER


class Saved(pl.Callback):
    """Saves where the batch that was run record by record has just been trained on."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == LATE + 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "late.ckpt")


def test_a_training_that_goes_on_from_there_makes_the_same_sums(tmp_path: Path) -> None:
    """To the last bit, or the releases behind the checkpoint would count twice."""
    _, whole = trained(tmp_path, sorted_between, more=[Saved()])
    strategy, resumed = trained(tmp_path, sorted_between, start=tmp_path / "late.ckpt")
    assert torch.equal(whole, resumed) and used(strategy) == "one_by_one"
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 6


def test_a_single_record_cannot_be_mixed() -> None:
    """Within an LSTM of the engine's own, which writes to parts of memory; sorting and sums included."""
    net = nn.GRU(3, 4, batch_first=True)

    def step(x: Tensor) -> Tensor:
        hidden = net(x)[0]
        return (hidden.sort(0).values - hidden.mean(0)).exp().mean()

    _, verdict = verdict_of_step(step, torch.randn(1, 5, 3), 1, net)
    assert verdict.is_separable
