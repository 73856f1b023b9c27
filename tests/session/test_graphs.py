"""Lots that are repeated from a recording: the sums of eager lots, and whatever Python does is not lost in silence."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.callback.loop import PrivateLoop
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import LotLoader
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.session.executors import REFERENCE
from dpbench.session.graphs import Graphs
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, AutomaticClipping, DiscretizedDPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for, weights_of

STEPS = 24


class Recorder(Graphs):
    """Graphs with the keys of the reference, so that the noise is the same; counts what it repeats."""

    name = REFERENCE
    repeats = 0

    def _repeat(self, recording: Any, batch: Any) -> bool:
        is_repeated = super()._repeat(recording, batch)
        self.repeats += is_repeated
        return is_repeated


def lots(data: TensorDataset | None = None, expected: float = 3) -> LotLoader:
    return loader_of(data or pictures(), expected, seed=5)


def fit(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: Graphs | None,
    make: Callable[..., PrivateStrategy] = DPSGD,
    module: pl.LightningModule | None = None,
    loader: LotLoader | None = None,
    steps: int = STEPS,
    start: Path | None = None,
    z: float = 0.5,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[PrivateStrategy, Tensor, pl.Trainer]:
    torch.manual_seed(0)
    module = module or Classifier()
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    if executor is not None:
        monkeypatch.setattr("dpbench.callback.strategy.executor_of", lambda name: executor)
    strategy = make(noise_multiplier=z, delta=1e-3, seed=3, ledger=str(folder / "ledger.jsonl"), **options)
    monkeypatch.undo()
    fitted = trainer_for(folder, strategy, steps, **(trainer or {}))
    fitted.fit(module, loader or lots(), ckpt_path=start, weights_only=False)
    return strategy, weights_of(module), fitted


def both(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., PrivateStrategy] = DPSGD,
    module: Callable[[], pl.LightningModule] = Classifier,
    loader: Callable[[], LotLoader] = lots,
    **options: Any,
) -> Recorder:
    """Train eagerly and by recordings: the same weights and ledger, to the last bit."""
    _, eager, _ = fit(folder / "eager", monkeypatch, None, make, module(), loader(), **options)
    recorder = Recorder()
    _, repeated, _ = fit(folder / "graph", monkeypatch, recorder, make, module(), loader(), **options)
    assert torch.equal(eager, repeated)
    ledgers = [read_ledger(folder / name / "ledger.jsonl") for name in ("eager", "graph")]
    assert ledgers[0].releases == ledgers[1].releases and len(ledgers[0].releases) == STEPS
    return recorder


@pytest.mark.parametrize("make", [DPSGD, AutomaticClipping, DiscretizedDPSGD])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_sums_of_eager_lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, clipping: str) -> None:
    assert both(tmp_path, monkeypatch, make, clipping=clipping).repeats > STEPS // 3


def test_lots_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(tmp_path, monkeypatch, max_physical_batch_size=2).repeats > STEPS // 3


class Metered(Classifier):
    record_metrics = MappingProxyType({"loss": 1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("train/loss", losses.mean(), on_step=True, on_epoch=True)
        self.log_dict({"train/largest": losses.max()}, on_step=True)
        return {"loss": losses.mean(), "record_metrics": {"loss": losses}, "losses": losses}


class Outputs(Callback):
    def __init__(self) -> None:
        self.means: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "losses" in outputs:  # not of an empty lot
            self.losses.append(outputs["losses"])
            self.means.append(float(outputs["losses"].detach().mean()))


def test_what_is_logged_and_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    recorder = Recorder()
    for folder, executor in ((tmp_path / "eager", None), (tmp_path / "graph", recorder)):
        outputs = Outputs()
        logger = CSVLogger(folder, name="", version="")
        trainer = {"logger": logger, "log_every_n_steps": 1, "more": [outputs]}
        fit(folder, monkeypatch, executor, module=Metered(), trainer=trainer, metrics={"loss": 2.0}, z=1.0)
        assert [float(losses.detach().mean()) for losses in outputs.losses] == outputs.means  # nobody overwrites them
        rows.append(((folder / "metrics.csv").read_text(), outputs.means))
    assert rows[0] == rows[1] and recorder.repeats > STEPS // 3
    assert "private/loss" in rows[0][0] and "train/largest" in rows[0][0]


@pytest.mark.filterwarnings("ignore:no record of a lot has a finite gradient")
def test_records_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = pictures().tensors
    images = images.clone()
    images[::7] = float("inf")
    recorder = both(tmp_path, monkeypatch, loader=lambda: lots(TensorDataset(images, labels)))
    assert 0 < recorder.repeats < STEPS


class Cooling(Classifier):
    """Its loss depends on a number that a hook moves."""

    temperature = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature = 1.0 + batch_idx // 12

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) / self.temperature, batch[1])


def test_a_number_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(tmp_path, monkeypatch, module=Cooling).repeats > STEPS // 4


def test_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _ = fit(tmp_path / "whole", monkeypatch, Recorder())
    _, _, half = fit(tmp_path / "half", monkeypatch, Recorder(), steps=STEPS // 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    recorder = Recorder()
    _, resumed, _ = fit(tmp_path / "half", monkeypatch, recorder, start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed) and recorder.repeats
    assert len(read_ledger(tmp_path / "half" / "ledger.jsonl").releases) == STEPS


# ------------------------------------------------------------------------------------- what Python does


class BatchNumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if batch_idx % 2 else 2 * loss


class Epoch(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * min(1.0, (self.global_step + 1) / 5)


class Rate(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.trainer.optimizers[0].param_groups[0]["lr"]


class Counter(Classifier):
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.loss(batch)


class Collecting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(1)
        return self.loss(batch)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.kept.clear()


class Measuring(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/accuracy", self.accuracy(self.net(batch[0]), batch[1]))
        return self.loss(batch)


class NumPys(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * float(np.random.uniform(0.5, 1.5))


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.all_gather(torch.zeros(()))
        return loss


@pytest.mark.filterwarnings("ignore:You have already called")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BatchNumber, "uses the number of the batch"),
        (Epoch, "asks the trainer for global_step"),
        (Rate, "asks the trainer for optimizers"),
        (Counter, "leaves something behind in the module"),
        (Collecting, "leaves something behind in the module"),
        (Measuring, "leaves something behind in the module"),
        (NumPys, "draws random numbers on the host"),
        (Gathering, "calls all_gather"),
    ],
)
def test_steps_that_need_python(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO):
        recorder = both(tmp_path, monkeypatch, module=module)
    assert recorder.repeats == 0
    lines = [record.getMessage() for record in caplog.records if "executor=graph" in record.getMessage()]
    assert len([line for line in lines if "eagerly" in line]) == 1 and reason in lines[-1]


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (AdaptiveQuantileClipping, {"count_noise_std": 3.0}, "the clipping bound moves"),
        (DPSGD, {"max_grad_norm_schedule": "linear:0.5"}, "the clipping bound moves"),
        (DPSGD, {"audit": GradientCanaries(20)}, "looked at one by one"),
    ],
)
def test_trainings_that_are_carried_out_eagerly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Any,
    options: Any,
    reason: str,
) -> None:
    recorder = Recorder()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, monkeypatch, recorder, make, **options)
    assert recorder.repeats == 0 and reason in caplog.text


def test_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, executor="graph", ledger=str(tmp_path / "ledger.jsonl"))
    with caplog.at_level(logging.INFO):
        trainer_for(tmp_path, strategy, STEPS).fit(Classifier(), lots())
    assert "there is no GPU" in caplog.text and "eagerly" not in caplog.text
    pickle.dumps(strategy)


def test_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    recorder = Recorder()
    for name, executor in (("eager", None), ("graph", recorder)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3))
        if executor is not None:
            monkeypatch.setattr("dpbench.callback.strategy.executor_of", lambda name: recorder)
        strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, seed=3, ledger=str(tmp_path / name / "ledger.jsonl"))
        loop = PrivateLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lots(),
            strategy,
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            steps=STEPS,
        )
        monkeypatch.undo()
        assert len(list(loop)) == STEPS
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert recorder.repeats > STEPS // 3
    for eager, repeated in zip(*weights, strict=True):
        assert torch.equal(eager, repeated)
