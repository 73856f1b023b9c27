"""Lots that are repeated from a recording: the sums of eager lots, and whatever Python does is not lost in silence."""

from __future__ import annotations

import copy
import itertools
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

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.loop import PrivateLoop
from dpbench.callback.strategy import PrivateStrategy
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.session.executor import REFERENCE
from dpbench.session.graphs import Graphs
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, AutomaticClipping, DiscretizedDPSGD
from tests.strategies.worlds import Classifier as World
from tests.strategies.worlds import loader_of, pictures, trainer_for, weights_of

STEPS = 16


class Classifier(World):
    """Updated by the kernel that graphs take."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, fused=True)


class Recorder(Graphs):
    """Graphs with the keys of the reference, so that the noise is the same."""

    name = REFERENCE
    needs_gpu = False


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a training says that is no warning."""
    said: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: said.append(text))
    return said


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
    with monkeypatch.context() as patch:
        if executor is not None:
            patch.setattr("dpbench.callback.strategy.executor_of", lambda name, size: executor)
        strategy = make(noise_multiplier=z, delta=1e-3, seed=3, ledger=str(folder / "ledger.jsonl"), **options)
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


@pytest.mark.filterwarnings("ignore:no record of a batch has a finite gradient")
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


class Deep(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"seen": [0]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts["seen"][0] += 1
        return self.loss(batch)


class Swallowing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            step = self.global_step
        except Exception:
            step = 0
        return self.loss(batch) / (1 + step)


class Indexing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * torch.arange(1.0, 100.0)[batch_idx]


class FreshNumbers(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + 1e-9 * float(np.random.default_rng().uniform()))


class Iterating(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) / (1 + next(self.numbers))


@pytest.mark.filterwarnings("ignore:You have already called")
@pytest.mark.filterwarnings("ignore:whether records are handled independently could not be checked")
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
        (Deep, "leaves something behind in the module"),
        (Swallowing, "asks the trainer for global_step"),
        (Indexing, "could not be recorded"),
        (FreshNumbers, "draws random numbers on the host"),
        (Iterating, "holds an iterator"),
    ],
)
def test_steps_that_need_python(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    module: Any,
    reason: str,
) -> None:
    recorder = both(tmp_path, monkeypatch, module=module)
    assert recorder.repeats == 0
    (line,) = [line for line in lines if "executor=graph" in line]
    assert "eagerly" in line and reason in line


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
    lines: list[str],
    make: Any,
    options: Any,
    reason: str,
) -> None:
    recorder = Recorder()
    fit(tmp_path, monkeypatch, recorder, make, **options)
    assert recorder.repeats == 0 and any(reason in line for line in lines)


def test_by_its_name(tmp_path: Path, lines: list[str]) -> None:
    strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, executor="graph", ledger=str(tmp_path / "ledger.jsonl"))
    trainer_for(tmp_path, strategy, STEPS).fit(Classifier(), lots())
    assert any("eagerly, because there is no GPU" in line for line in lines)
    pickle.dumps(strategy)


def test_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    recorder = Recorder()
    for name, executor in (("eager", None), ("graph", recorder)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3))
        if executor is not None:
            monkeypatch.setattr("dpbench.callback.strategy.executor_of", lambda name, size: recorder)
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


# ------------------------------------------------------------------------------------- what moves outside of the step


class Averaged(Classifier):
    """A teacher whose weights get new memory after each update, as in MoCo's reference code."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for own, averaged in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            averaged.data = averaged.data * 0.9 + own.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), self.teacher(batch[0]).detach().softmax(1))


class Nested(Classifier):
    """A number deep in a dictionary, a tensor and a criterion, which hooks exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"loss": {"weight": 1.0}}
        self.scale = torch.ones(())
        self.criterion: nn.Module = nn.CrossEntropyLoss()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.settings["loss"]["weight"] = 1.0 + batch_idx // 10
        if batch_idx == 12:
            self.scale = torch.full((), 3.0)
            self.criterion = nn.MultiMarginLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1]) * self.settings["loss"]["weight"] * self.scale


class Peeking(Classifier):
    """Looks at a part of the lot before its step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > 1:
            self.training_step([x[:1] for x in batch], batch_idx)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("module", [Averaged, Nested, Peeking])
def test_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    both(tmp_path, monkeypatch, module=module)


def test_a_lot_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.global_step > STEPS // 2:
                optimizer_closure()
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(ConfigurationError, match="backward was called twice"):
        fit(tmp_path, monkeypatch, Recorder(), module=Twice())
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == STEPS // 2 + 1


def test_sums_that_differ_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some lots are made eagerly, too: what nobody has looked for shows there, and the lot is right."""

    class Wrong(Recorder):
        def _repeat(self, recording: Any, batch: Any) -> bool:
            is_repeated = super()._repeat(recording, batch)
            self._sums_of_lot.total.mul_(1.1)
            return is_repeated

    with pytest.warns(UserWarning, match="a replayed batch had different sums from an eager one"):
        fit(tmp_path, monkeypatch, Wrong(), steps=60)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 60
