"""`max_physical_batch_size=auto`, and what is said where memory is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dpbench.callback.loop import PrivateLoop
from dpbench.data.blank import blank_batch
from dpbench.data.images import ImageDataModule
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError, OutOfMemory
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.session import _memory, _physical_batch
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping
from tests.strategies.worlds import trainer_for, weights_of

SIZE = 200
EXPECTED = 60.0
CPU = torch.device("cpu")
TIGHT = 2**18  # bytes, in which a part of a batch fits


class Counting(nn.Module):
    """Counts its calls, and draws random numbers: nothing of a measurement may stay in either."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(x, 0.2, self.training)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.ReLU(),
            Counting(),
            nn.Flatten(),
            nn.Linear(6 * 36, 3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def records(scale: float = 1.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(scale * torch.randn(SIZE, 1, 8, 8, generator=generator), torch.arange(SIZE) % 3)


def loader_of(data: TensorDataset, expected: float = EXPECTED) -> LotLoader:
    return LotLoader.poisson(data, expected, seed=2)


def dpsgd(folder: Path, rows: Any, **options: Any) -> DPSGD:
    return DPSGD(
        noise_multiplier=1.0,
        delta=1e-4,
        seed=4,
        ledger=str(folder / "ledger.jsonl"),
        max_physical_batch_size=rows,
        **options,
    )


def fit(strategy: DPSGD, folder: Path, steps: int = 3, data: TensorDataset | None = None, **options: Any) -> Module:
    module = Module()
    checkpoint = options.pop("ckpt_path", None)
    trainer = trainer_for(folder, strategy, steps, **options)
    trainer.fit(module, loader_of(data or records()), ckpt_path=checkpoint, weights_only=False)
    return module


def give(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let so many bytes be free."""
    monkeypatch.setattr(_memory, "available", lambda device: size)


def test_nothing_of_the_measurement_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, TIGHT)
    automatic = dpsgd(tmp_path / "auto", "auto")
    measured = fit(automatic, tmp_path / "auto")
    rows = automatic.max_physical_batch_size
    assert isinstance(rows, int) and 1 < rows < EXPECTED / 2
    given = fit(dpsgd(tmp_path / "given", rows), tmp_path / "given")
    assert torch.equal(weights_of(measured), weights_of(given))
    counting: Any = measured.net[2]
    other: Any = given.net[2]
    assert counting.calls == other.calls > 0
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("auto", "given")]
    assert ledgers[0] == ledgers[1]


def test_a_piece_of_the_size_fits_and_one_twice_as_large_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: dict[int, int] = {}
    peak_of = _memory.peak_of

    def noted(device: torch.device, run: Callable[[], object]) -> int:
        peak = peak_of(device, run)
        peaks[run.args[0]] = peak  # type: ignore[attr-defined]
        return peak

    monkeypatch.setattr(_memory, "peak_of", noted)
    budget = TIGHT * _physical_batch._SHARE_OF_HOST
    give(monkeypatch, TIGHT)
    strategy = dpsgd(tmp_path, "auto")
    fit(strategy, tmp_path, steps=1)
    rows = strategy.max_physical_batch_size
    assert isinstance(rows, int) and len(peaks) <= 5
    assert peaks[rows] <= budget
    assert min(size for size, peak in peaks.items() if peak > budget) <= 2 * rows


def test_all_of_a_batch_goes_in_at_once_where_there_is_room(tmp_path: Path) -> None:
    strategy = dpsgd(tmp_path, "auto")
    fit(strategy, tmp_path, steps=1)
    deviations = 4 * math.sqrt(EXPECTED * (1 - EXPECTED / SIZE))
    assert EXPECTED + deviations <= strategy.max_physical_batch_size < EXPECTED + deviations + 8  # type: ignore[operator]


@pytest.mark.parametrize("scale", [0.0, 1e30, math.nan])
def test_the_size_does_not_depend_on_the_records(scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, TIGHT)
    batches = []
    sizes = []
    for name, data in {"others": records(scale), "usual": records()}.items():
        batches.append(blank_batch(loader_of(data), 4))
        strategy = dpsgd(tmp_path / name, "auto")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Module, "training_step", _forgetful(Module.training_step))
            fit(strategy, tmp_path / name, steps=1, data=data)
        sizes.append(strategy.max_physical_batch_size)
    assert sizes[0] == sizes[1]
    for one, other in zip(*batches, strict=True):
        assert len(one) == 4 and torch.equal(one, other)


def _forgetful(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step that no guard can refuse for what the records are: it makes finite ones of them."""

    def forgetful(self: Module, batch: Any, batch_idx: int) -> Tensor:
        return step(self, (batch[0].nan_to_num(0, 0, 0).clamp(-3, 3), batch[1]), batch_idx)

    return forgetful


def test_pieces_that_do_not_fit_are_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def peak_of(device: torch.device, run: Callable[[], object]) -> int:
        rows: int = run.args[0]  # type: ignore[attr-defined]
        tried.append(rows)
        if rows > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        run()
        return rows

    monkeypatch.setattr(_memory, "peak_of", peak_of)
    strategy = dpsgd(tmp_path, "auto")
    fit(strategy, tmp_path, steps=1)
    rows = strategy.max_physical_batch_size
    assert tried[:2] == [2, 6] and rows in tried and max(tried) > 20 and 10 <= rows <= 20  # type: ignore[operator]


def test_a_resumed_run_takes_the_same_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, TIGHT)
    whole = fit(dpsgd(tmp_path / "whole", "auto"), tmp_path / "whole", steps=4)
    first = dpsgd(tmp_path / "parts", "auto")
    module = Module()
    trainer = trainer_for(tmp_path / "parts", first, 2)
    trainer.fit(module, loader_of(records()))
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    give(monkeypatch, 2**30)  # by now
    second = dpsgd(tmp_path / "parts", "auto")
    resumed = fit(second, tmp_path / "parts", steps=4, ckpt_path=tmp_path / "mid.ckpt")
    assert second.max_physical_batch_size == first.max_physical_batch_size
    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_a_second_training_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for number, free in enumerate([TIGHT, 2 * TIGHT]):
        give(monkeypatch, free)
        strategy = dpsgd(tmp_path / str(number), "auto")
        fit(strategy, tmp_path / str(number), steps=1)
        sizes.append(strategy.max_physical_batch_size)
    assert sizes[0] < sizes[1]  # type: ignore[operator]


@pytest.mark.parametrize("options", [{}, {"metrics": {"accuracy": 1.0}}])
def test_a_loop_and_adaptive_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    give(monkeypatch, 3 * TIGHT)
    if options:  # metrics need a Trainer
        strategy = dpsgd(tmp_path, "auto", **options)
        monkeypatch.setattr(Module, "record_metrics", {"accuracy": 1}, raising=False)
        monkeypatch.setattr(Module, "training_step", _with_metrics)
        fit(strategy, tmp_path, steps=2)
    else:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.Linear(100, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        strategy = AdaptiveQuantileClipping(
            noise_multiplier=1.0,
            delta=1e-3,
            ledger=str(tmp_path / "ledger.jsonl"),
            max_physical_batch_size="auto",
        )
        loop = PrivateLoop(net, optimizer, loader_of(records()), strategy, _loss, steps=2)
        assert list(loop) == [1, 2]
    assert isinstance(strategy.max_physical_batch_size, int) and strategy.releases == 2


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _with_metrics(self: Module, batch: Any, batch_idx: int) -> dict[str, Any]:
    logits = self.net(batch[0])
    correct = (logits.argmax(1) == batch[1]).float()
    return {"loss": F.cross_entropy(logits, batch[1]), "record_metrics": {"accuracy": correct}}


@pytest.mark.parametrize(("augmentations", "microbatch"), [(3, 1), (None, 3)])
def test_records_of_several_rows_are_not_cut(
    augmentations: int | None, microbatch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, TIGHT if augmentations else TIGHT // 3)
    data = ImageDataModule("digits", image_size=8, expected_batch_size=EXPECTED, augmentations=augmentations)
    strategy = dpsgd(tmp_path, "auto", microbatch_size=microbatch)
    module = Module()
    module.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    data.setup()
    trainer_for(tmp_path, strategy, 2).fit(module, data.train_dataloader())
    rows = strategy.max_physical_batch_size
    assert isinstance(rows, int) and 3 <= rows < EXPECTED * (augmentations or 1) and rows % 3 == 0


class OfItsOwn(TensorDataset):
    """Might give each record another shape."""


def test_shapes_that_may_be_private_are_refused(tmp_path: Path) -> None:
    data = OfItsOwn(*records().tensors)
    with pytest.raises(ConfigurationError, match="a OfItsOwn may give each record another one.*give a number"):
        trainer_for(tmp_path, dpsgd(tmp_path, "auto"), 1).fit(Module(), loader_of(data))
    collated = LotLoader.poisson(records(), EXPECTED, seed=2, collate_fn=torch.utils.data.default_collate)
    assert collated.collate_fn.is_custom is False  # torch's own
    padded = LotLoader.poisson(records(), EXPECTED, collate_fn=lambda rows: torch.utils.data.default_collate(rows))
    with pytest.raises(ConfigurationError, match="a collate_fn may give"):
        trainer_for(tmp_path, dpsgd(tmp_path, "auto"), 1).fit(Module(), padded)


def test_one_record_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 2**10)
    with pytest.raises(ConfigurationError, match="one record does not fit .* free on cpu: take a smaller network"):
        fit(dpsgd(tmp_path, "auto"), tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_step_that_fails_on_made_up_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Module.training_step

    def picky(self: Module, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[1]) == 2:
            raise RuntimeError("these labels are made up")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Module, "training_step", picky)
    with pytest.raises(ConfigurationError, match=r"made-up rows.*\(these labels are made up\): give a number"):
        fit(dpsgd(tmp_path, "auto"), tmp_path)


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="max_physical_batch_size needs automatic optimization"):
        trainer_for(tmp_path, dpsgd(tmp_path, "auto"), 1).fit(module, loader_of(records()))


def test_a_network_that_is_trained_record_by_record_needs_no_size(tmp_path: Path) -> None:
    module = Module()
    module.net[4] = nn.utils.parametrizations.weight_norm(nn.Linear(6 * 36, 3))
    strategy = dpsgd(tmp_path, "auto")
    trainer_for(tmp_path, strategy, 1).fit(module, loader_of(records(), 4))
    assert strategy.releases == 1 and strategy.max_physical_batch_size == "auto"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (40, r"max_physical_batch_size=20 \(now 40\)"),
        (None, "max_physical_batch_size=auto"),
        (1, "gradients=one_by_one"),
    ],
)
def test_memory_that_is_over_within_a_batch(
    rows: int | None, remedy: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the remedy; nothing of the batch is released."""
    step = Module.training_step
    strategy = dpsgd(tmp_path, rows)

    def over(self: Module, batch: Any, batch_idx: int) -> Tensor:
        if strategy.releases == 2:
            raise error
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Module, "training_step", over)
    with pytest.raises(OutOfMemory, match=f"out of memory on cpu.*nothing was released: .*{remedy}") as raised:
        fit(strategy, tmp_path, steps=4)
    assert "\n" not in str(raised.value)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 2


def test_memory_of_the_host() -> None:
    """A tensor counts for as long as it lives."""

    def run() -> None:
        for _ in range(3):
            torch.zeros(1000).add_(1)
        kept = [torch.ones(500) for _ in range(4)]
        del kept

    assert 8000 <= _memory.peak_of(CPU, run) < 9000
    assert 2**20 < _memory.available(CPU) < 2**50
