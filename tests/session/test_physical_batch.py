"""`max_physical_batch_size=auto`, and what is said when memory is over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError, OutOfMemory
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records import examples
from dpbench.strategies import DPSGD
from tests.strategies.worlds import trainer_for, weights_of

SIZE = 200
EXPECTED = 60.0
FITS = 20
"""Rows that fit into memory."""
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Counting(nn.Module):
    """Counts its calls, and draws random numbers: nothing of an attempt may stay in either."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(x, 0.2, self.training)


class Module(pl.LightningModule):
    """A module whose attributes, metric, logs and batch all tell how often a step has run."""

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
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].mul_(2)  # in place
        loss = F.cross_entropy(self.net(x), batch[1])
        self.mean.update(loss.detach(), len(x))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(SIZE, 1, 8, 8, generator=generator), torch.arange(SIZE) % 3)


def loader_of(expected: float = EXPECTED) -> PrivateDataLoader:
    return PrivateDataLoader.poisson(records(), expected, seed=2)


def dpsgd(folder: Path, rows: Any, **options: Any) -> DPSGD:
    return DPSGD(
        noise_multiplier=1.0,
        delta=1e-4,
        seed=4,
        ledger=str(folder / "ledger.jsonl"),
        max_physical_batch_size=rows,
        **options,
    )


def fit(strategy: DPSGD, folder: Path, steps: int = 3, **options: Any) -> Module:
    module = Module()
    checkpoint = options.pop("ckpt_path", None)
    trainer = trainer_for(folder, strategy, steps, **options)
    trainer.fit(module, loader_of(), ckpt_path=checkpoint, weights_only=False)
    return module


@pytest.fixture(autouse=True)
def _on_any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "on_the_cpu" not in request.node.name:
        monkeypatch.setattr(examples, "_RAISES_WHEN_FULL", ("cuda", "cpu"))


def full_in(owner: type, method: str, monkeypatch: pytest.MonkeyPatch, is_over: Callable[[int], bool]) -> None:
    """Memory is over at the end of a method, for numbers of rows at which a function says so."""
    original = getattr(owner, method)

    def over(self: Any, first: Any, rows: Any = None, *others: Any, **options: Any) -> Any:
        result = original(self, first, *([] if rows is None else [rows]), *others, **options)
        if is_over(len(first) if rows is None else rows):
            raise FULL
        return result

    monkeypatch.setattr(owner, method, over)


full_in_forward = partial(full_in, Counting, "forward")
"""In the third layer, when some random numbers are drawn."""
full_in_backward = partial(full_in, PerRecordEngine, "backward")
full_in_sums = partial(full_in, ReleaseEngine, "accumulate")
"""When the sums of the piece were added up."""


@pytest.mark.parametrize(
    ("fill", "options"), [(full_in_forward, {}), (full_in_backward, {"microbatch_size": 3}), (full_in_sums, {})]
)
def test_a_batch_that_begins_again_is_that_of_the_size_from_the_start(
    options: dict[str, Any],
    fill: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        fill(patch, lambda rows: rows > FITS)
        automatic = dpsgd(tmp_path / "auto", "auto", **options)
        one = fit(automatic, tmp_path / "auto")
    file = tmp_path / "auto" / "piece_sizes.json"
    sizes = json.loads(file.read_text())
    assert list(sizes) == ["0"] and FITS / 2 <= sizes["0"] <= FITS
    assert file.stat().st_mode & 0o777 == 0o600
    other = fit(dpsgd(tmp_path / "given", sizes["0"], **options), tmp_path / "given")
    assert torch.equal(weights_of(one), weights_of(other))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("auto", "given")]
    assert ledgers[0] == ledgers[1]
    assert one.net[2].calls == other.net[2].calls > 3  # type: ignore[union-attr, operator]
    assert torch.equal(one.mean.compute(), other.mean.compute())
    # The sizes may depend on records, and are told nowhere else.
    assert automatic.max_physical_batch_size == "auto"
    assert "physical" not in caplog.text and "memory" not in caplog.text
    assert sorted(path.name for path in (tmp_path / "auto").iterdir()) == ["ledger.jsonl", "piece_sizes.json"]


def test_a_run_that_is_resumed_takes_the_sizes_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "whole"
    strategy = dpsgd(folder, "auto")

    class Saves(pl.Callback):
        observes_only = True

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    with monkeypatch.context() as patch:
        full_in_forward(patch, lambda rows: rows > {0: 99, 1: 99, 2: 30, 3: 9}[strategy.releases])
        whole = fit(strategy, folder, steps=4, more=[Saves()])
    assert list(json.loads((folder / "piece_sizes.json").read_text())) == ["2", "3"]
    parts = tmp_path / "parts"
    shutil.copytree(folder, parts)
    start = parts / "1.ckpt"
    callbacks = str(torch.load(start, weights_only=False)["callbacks"])
    assert "piece" not in callbacks and "physical" not in callbacks
    resumed = fit(dpsgd(parts, "auto"), parts, steps=4, ckpt_path=start)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    # What the ledger holds beyond the checkpoint was repeated to the last bit: no release counts twice.
    assert (parts / "ledger.jsonl").read_bytes() == (folder / "ledger.jsonl").read_bytes()
    (parts / "piece_sizes.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"is damaged .*: restore it"):
        fit(dpsgd(parts, "auto"), parts, steps=4, ckpt_path=start)


def test_one_row_that_does_not_fit_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = dpsgd(tmp_path, "auto")
    full_in_forward(monkeypatch, lambda rows: strategy.releases == 1)
    with pytest.raises(OutOfMemory, match="nothing was released: a single row does not fit, so use a smaller") as error:
        fit(strategy, tmp_path)
    assert "\n" not in str(error.value)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 1


def test_other_errors_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def broken(rows: int) -> bool:
        tried.append(rows)
        raise RuntimeError("broken")

    full_in_sums(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="broken"):
        fit(dpsgd(tmp_path, "auto"), tmp_path)
    assert len(tried) == 1


def test_a_number_is_needed_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"auto needs a GPU.*runs on cpu: set it to a number of rows"):
        fit(dpsgd(tmp_path, "auto"), tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "error", "remedy"),
    [
        (40, FULL, r"max_physical_batch_size=20 \(now 40\)"),
        (None, MemoryError(), "to a number of rows that fit, or to auto on a GPU"),
        (1, FULL, "gradients=one_by_one"),
    ],
    ids=["half", "any", "one"],
)
def test_memory_that_is_over_within_a_batch(
    rows: int | None, remedy: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the remedy; nothing of the batch is released."""
    strategy = dpsgd(tmp_path, rows)

    def is_over(rows: int) -> bool:
        if strategy.releases == 2:
            raise error
        return False

    full_in_forward(monkeypatch, is_over)
    with pytest.raises(OutOfMemory, match=f"out of memory on cpu.*nothing was released: .*{remedy}") as raised:
        fit(strategy, tmp_path, steps=4)
    assert "\n" not in str(raised.value)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 2
