"""Lots of all sizes, padded and repeated from one recording: the sums of eager lots, and no trace of padding."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD, Adam, RMSprop
from torch.utils.data import TensorDataset

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.strategy import PrivateStrategy
from dpbench.capabilities.graphs.executor import Graphs, fuse
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.modules.reconstruction import Reconstruction
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.sampling.scheme import Positions
from dpbench.session.executor import REFERENCE
from dpbench.strategies import DPSGD, AutomaticClipping, DiscretizedDPSGD
from tests.strategies.worlds import assert_same_training, loader_of, pictures, trainer_for, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

STEPS = 12
Z = 0.5
EXPECTED = 6.0
SIZES = 4  # at least, of the lots of a training


class Recorder(Graphs):
    """Graphs with the keys of the reference, so that the noise is the same."""

    name = REFERENCE
    needs_gpu = False
    lots: Sequence[Positions] = ()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a training says that is no warning."""
    said: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: said.append(text))
    return said


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(4 * 36, 3),
    )


def classifier(kind: type[ImageClassifier] = ImageClassifier, dropout: float = 0.0, **options: Any) -> ImageClassifier:
    optimizer = partial(SGD, lr=0.5, momentum=0.9, fused=True)  # as under graphs, so that updates round alike
    return kind(network(dropout), optimizer, num_classes=3, **options)


def loader(data: TensorDataset | None = None) -> PrivateDataLoader:
    return loader_of(data or pictures(), EXPECTED, seed=5)


def fit(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: Graphs | None,
    make: Callable[..., PrivateStrategy] = DPSGD,
    module: Callable[[], pl.LightningModule] = classifier,
    lots: Callable[[], PrivateDataLoader] = loader,
    steps: int = STEPS,
    start: Path | None = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, pl.Trainer]:
    torch.manual_seed(0)
    trained = module()
    torch.manual_seed(1)
    for parameter in trained.parameters():
        nn.init.normal_(parameter, std=0.3)
    options = {"noise_multiplier": Z, "delta": 1e-3, "seed": 3, "ledger": str(folder / "ledger.jsonl"), **options}
    with monkeypatch.context() as patch:
        if executor is not None:
            patch.setattr("dpbench.session.session.executor_of", lambda name, device: executor)
        strategy = make(**options)
    fitted = trainer_for(folder, strategy, steps, **(trainer or {}))
    fitted.fit(trained, lots(), ckpt_path=start, weights_only=False)
    return weights_of(trained), fitted


def both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lots: Callable[[], PrivateDataLoader] = loader, **options: Any
) -> Recorder:
    """Train eagerly and on padded lots: the same weights but for rounding, and the same ledger but for checksums."""
    recorder = Recorder()
    drawn = lots()
    eager, _ = fit(folder / "eager", monkeypatch, None, lots=lots, **options)
    padded, _ = fit(folder / "graph", monkeypatch, recorder, lots=lambda: drawn, **options)
    assert_same_training(padded, eager, Z, EXPECTED)
    ledgers = [read_ledger(folder / name / "ledger.jsonl") for name in ("eager", "graph")]
    queries = [[(release.sampling, release.queries) for _, release in ledger.releases] for ledger in ledgers]
    assert queries[0] == queries[1] and len(queries[0]) == STEPS
    recorder.lots = [drawn.lots.lot(step) for step in range(STEPS)]
    return recorder


def of_one_size(recorder: Recorder) -> bool:
    """Whether nearly all lots were made by one recording, or two: with a logged loss, and without."""
    return recorder.recordings <= 2 and recorder.repeats > STEPS - 4


@pytest.mark.parametrize(("make", "clipping"), [(AutomaticClipping, "per_layer"), (DiscretizedDPSGD, "flat")])
def test_the_sums_of_eager_lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, clipping: str) -> None:
    recorder = both(tmp_path, monkeypatch, make=make, clipping=clipping)
    assert of_one_size(recorder) and len({len(lot) for lot in recorder.lots}) >= SIZES


def reconstruction() -> pl.LightningModule:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 64))
    return Reconstruction(model, partial(SGD, lr=0.05), loss_reduction="sum")


def test_a_sum_of_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_one_size(both(tmp_path, monkeypatch, module=reconstruction, loss_reduction="sum"))


class SeesNoPadding(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "record_metrics" in outputs:  # not of an empty lot
            losses = outputs["record_metrics"]["loss"]().detach()
            assert len(losses) == len(batch[0])
            assert float(outputs["loss"]) == pytest.approx(float(losses.mean()), 1e-5)


def test_what_is_logged_returned_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    tables = []
    for folder, executor in ((tmp_path / "eager", None), (tmp_path / "graph", recorder)):
        logger = CSVLogger(folder, name="", version="")
        trainer = {"logger": logger, "log_every_n_steps": 1, "more": [SeesNoPadding()]}
        fit(folder, monkeypatch, executor, metrics={"loss": 2.0, "accuracy": 1.0}, trainer=trainer)
        tables.append([line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()])
    eager, padded = tables
    assert eager[0] == padded[0] and "nonprivate/train_loss" in eager[0] and "private/loss" in eager[0]
    for row, other in zip(eager[1:], padded[1:], strict=True):
        # the released values are rounded to a grid of noise
        assert [float(cell or 0) for cell in other] == pytest.approx([float(cell or 0) for cell in row], 1e-2, 2e-2)
    assert recorder.repeats > STEPS - 4


def test_a_lot_that_is_larger_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpbench.records.examples._DEVIATIONS", 0.1)
    monkeypatch.setattr("dpbench.records.examples._MULTIPLE", 1)
    recorder = both(tmp_path, monkeypatch)
    smaller = sum(len(lot) <= math.ceil(EXPECTED + 0.1) for lot in recorder.lots)
    assert 0 < recorder.repeats <= smaller < STEPS


@pytest.mark.filterwarnings("ignore:no record of a batch has a finite gradient")
def test_records_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = pictures().tensors
    images = images.clone()
    images[::17] = float("inf")
    recorder = both(tmp_path, monkeypatch, lots=lambda: loader(TensorDataset(images, labels)))
    finite = sum(not any(lot % 17 == 0) for lot in recorder.lots)
    assert 0 < recorder.repeats <= finite < STEPS


def test_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first lot on a training pads: a resumed run is the uninterrupted one, to the last bit."""

    run = partial(fit, monkeypatch=monkeypatch, executor=Recorder(), module=partial(classifier, dropout=0.3))
    whole, _ = run(tmp_path / "whole")
    _, half = run(tmp_path / "half", steps=STEPS // 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    # Further releases, which a crash has lost: they are made again.
    run(tmp_path / "half", start=tmp_path / "half.ckpt", steps=STEPS - 3)
    resumed, _ = run(tmp_path / "half", start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed)
    ledgers = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("whole", "half")]
    assert ledgers[0].releases == ledgers[1].releases


# ------------------------------------------------------------------------------------- what Python does


class Repeatable(ImageClassifier):
    """States that its step may be repeated, whatever its weight is."""

    masks_padding = True

    def weight(self, batch: Any) -> Any:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {**result, "loss": result["loss"] * self.weight(batch)}


class Gathering(Repeatable):
    masks_padding = True

    def weight(self, batch: Any) -> Any:
        self.all_gather(torch.zeros(()))
        return 1.0


class Unstated(Repeatable):
    """Changes what its step does, and states nothing of it."""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Unstated, "does not state masks_padding"),
        (Gathering, "calls all_gather"),
    ],
)
def test_steps_that_are_not_repeated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    kind: type[ImageClassifier],
    reason: str,
) -> None:
    recorder = both(tmp_path, monkeypatch, module=partial(classifier, kind))
    assert recorder.repeats == 0
    (line,) = [line for line in lines if "executor=graph" in line]
    assert "eagerly" in line and reason in line


class Diluted(ImageClassifier):
    """Masks padding, and divides by all rows."""

    masks_padding = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return losses.mean() if self.rows_present is None else torch.where(self.rows_present, losses, 0).mean()


def test_a_loss_that_is_divided_by_padding_too_is_seen_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So large a bound that no gradient is clipped, after which a factor of all of them would not show.
    options = {"max_grad_norm": 100.0, "noise_multiplier": Z / 100}
    with pytest.warns(UserWarning, match="the step depends on padding, although the module states"):
        assert both(tmp_path, monkeypatch, module=partial(classifier, Diluted), **options).repeats == 0


def test_a_bound_that_moves_is_no_part_of_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    recorder = Recorder()
    fit(tmp_path, monkeypatch, recorder, max_grad_norm_schedule="linear:0.5", steps=2)
    assert recorder.repeats == 0 and any("the clipping bound changes" in line for line in lines)


def test_lots_in_pieces_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(tmp_path, monkeypatch, max_physical_batch_size=4).repeats == 0


def test_by_its_name(tmp_path: Path, lines: list[str]) -> None:
    strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, executor="graph", ledger=str(tmp_path / "ledger.jsonl"))
    trainer_for(tmp_path, strategy, STEPS).fit(classifier(), loader())
    assert any("eagerly, because there is no GPU" in line for line in lines)
    pickle.dumps(strategy)


# ------------------------------------------------------------------------------------- what moves outside of the step


class Cooling(Repeatable):
    """Its loss depends on a number that a hook moves."""

    masks_padding = True
    temperature = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.temperature = 1.0 + batch_idx // 8

    def weight(self, batch: Any) -> Any:
        return self.temperature


def test_what_a_hook_moves_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(tmp_path, monkeypatch, module=partial(classifier, Cooling))


def test_a_lot_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(ImageClassifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.global_step > STEPS // 2:
                optimizer_closure()
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(ConfigurationError, match="backward was called twice"):
        fit(tmp_path, monkeypatch, Recorder(), module=partial(classifier, Twice))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == STEPS // 2 + 1


def test_sums_that_differ_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some lots are made by Python, too: what the declaration left out shows there, and the lot is right."""

    class Wrong(Recorder):
        def _repeat(self, recording: Any, lot: Any) -> bool:
            is_repeated = super()._repeat(recording, lot)
            if recording.is_recorded:
                self._sums_of_lot.mul_(1.1)
            return is_repeated

    with pytest.warns(UserWarning, match="a replayed batch had other sums than an eager one"):
        fit(tmp_path, monkeypatch, Wrong(), steps=60)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 60


# ------------------------------------------------------------------------------------- the update


def test_optimizers_that_are_fused() -> None:
    net = network()
    assert fuse(Adam(net.parameters()))
    assert not fuse(RMSprop(net.parameters()))
    net[0].requires_grad_(False)  # type: ignore[index]
    assert not fuse(SGD(net.parameters(), momentum=0.9))
