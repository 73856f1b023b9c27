"""Lots of all sizes padded to one: the sums of eager lots up to rounding, one recording, and no trace of padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.modules.image_classifier import ImageClassifier
from dpbench.modules.reconstruction import Reconstruction
from dpbench.modules.regression import Regression
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.sampling.scheme import Positions
from dpbench.strategies import DPSGD, AutomaticClipping, DiscretizedDPSGD
from tests.session.test_graphs import STEPS, Outputs, Recorder, fit, lines, lots
from tests.strategies.worlds import assert_same_training, pictures, trainer_for, weights_of

__all__ = ["lines"]

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Padded(Recorder):
    """With the lots of its training."""

    lots: Sequence[Positions] = ()


Z = 0.5
EXPECTED = 6.0
SIZES = 5  # at least, of the lots of a training


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(4 * 36, 3),
    )


def classifier(kind: type[ImageClassifier] = ImageClassifier, dropout: float = 0.0) -> ImageClassifier:
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9, fused=True)
    return kind(network(dropout), optimizer, num_classes=3)


def loader(data: TensorDataset | None = None) -> Any:
    return lots(data, EXPECTED)


def both(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Callable[[], pl.LightningModule] = classifier,
    make: Any = DPSGD,
    data: TensorDataset | None = None,
    bound: float = 1.0,
    **options: Any,
) -> Padded:
    """Train eagerly and on padded lots: the same weights but for rounding, and the same ledger but for checksums."""
    _, eager, _ = fit(folder / "eager", monkeypatch, None, make, module(), loader(data), z=Z, **options)
    recorder = Padded()
    lots = loader(data)
    _, padded, _ = fit(folder / "graph", monkeypatch, recorder, make, module(), lots, z=Z, **options)
    assert_same_training(padded, eager, Z * bound, EXPECTED)
    ledgers = [read_ledger(folder / name / "ledger.jsonl") for name in ("eager", "graph")]
    queries = [[(release.sampling, release.queries) for _, release in ledger.releases] for ledger in ledgers]
    assert queries[0] == queries[1] and len(queries[0]) == STEPS
    recorder.lots = [lots.lots.lot(step) for step in range(STEPS)]
    return recorder


def of_one_size(recorder: Recorder) -> bool:
    """Whether nearly all lots were made by one recording, or two: with a logged loss, and without."""
    return recorder.recordings <= 2 and recorder.repeats > STEPS - 4


@pytest.mark.parametrize("make", [DPSGD, AutomaticClipping, DiscretizedDPSGD])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_sums_of_eager_lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, clipping: str) -> None:
    recorder = both(tmp_path, monkeypatch, make=make, clipping=clipping)
    assert of_one_size(recorder) and len({len(lot) for lot in recorder.lots}) >= SIZES


def reconstruction() -> pl.LightningModule:
    optimizer = partial(torch.optim.SGD, lr=0.05)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 64))
    return Reconstruction(model, optimizer, loss_reduction="sum")


def test_a_sum_of_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_one_size(both(tmp_path, monkeypatch, reconstruction, loss_reduction="sum"))


def test_what_is_logged_returned_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(Outputs):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if "record_metrics" in outputs:
                losses = outputs["record_metrics"]["loss"]()
                assert losses.shape == (len(batch[0]),)
                self.losses.append(losses.detach().clone())
                self.means.append(float(outputs["loss"]))

    tables = []
    recorder = Recorder()
    for folder, executor in ((tmp_path / "eager", None), (tmp_path / "graph", recorder)):
        outputs = Rows()
        logger = CSVLogger(folder, name="", version="")
        trainer = {"logger": logger, "log_every_n_steps": 1, "more": [outputs]}
        options: dict[str, Any] = {"metrics": {"loss": 2.0, "accuracy": 1.0}, "z": Z, "trainer": trainer}
        fit(folder, monkeypatch, executor, module=classifier(), loader=loader(), **options)
        table = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
        tables.append((table, outputs))
    (eager, eager_outputs), (padded, padded_outputs) = tables
    assert eager[0] == padded[0] and "nonprivate/train_loss" in eager[0] and "private/loss" in eager[0]
    assert len(eager) == len(padded) > STEPS
    for row, other in zip(eager[1:], padded[1:], strict=True):
        for cell, other_cell in zip(row, other, strict=True):
            if cell or other_cell:  # the released values are rounded to a grid of noise
                assert float(other_cell) == pytest.approx(float(cell), rel=1e-2, abs=2e-2)
    for losses, other_losses in zip(eager_outputs.losses, padded_outputs.losses, strict=True):
        torch.testing.assert_close(other_losses, losses, rtol=1e-2, atol=1e-2)
    for loss, losses in zip(padded_outputs.means, padded_outputs.losses, strict=True):
        assert loss == pytest.approx(float(losses.mean()), rel=1e-5)
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
    recorder = both(tmp_path, monkeypatch, data=TensorDataset(images, labels))
    finite = sum(not any(lot % 17 == 0) for lot in recorder.lots)
    assert 0 < recorder.repeats <= finite < STEPS


def test_lots_in_pieces_have_their_own_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = both(tmp_path, monkeypatch, max_physical_batch_size=4)
    assert recorder.recordings > 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    """From its first lot on a training pads: a resumed run is the uninterrupted one, to the last bit."""

    def run(folder: Path, **options: Any) -> Any:
        module = classifier(dropout=dropout)
        return fit(folder, monkeypatch, Recorder(), module=module, loader=loader(), **options)

    _, whole, _ = run(tmp_path / "whole")
    _, _, half = run(tmp_path / "half", steps=STEPS // 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    # Further releases, which a crash has lost: they are made again.
    run(tmp_path / "half", start=tmp_path / "half.ckpt", steps=STEPS - 3)
    _, resumed, _ = run(tmp_path / "half", start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed)
    ledgers = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("whole", "half")]
    assert ledgers[0].releases == ledgers[1].releases


# ------------------------------------------------------------------------------------- other modules


class OwnStep(ImageClassifier):
    """A step of its own, which nobody says to heed padding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Careless(ImageClassifier):
    """States what it does not do."""

    masks_padding = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [OwnStep, Careless])
def test_steps_that_do_not_heed_padding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    kind: type[ImageClassifier],
) -> None:
    _, eager, _ = fit(tmp_path / "eager", monkeypatch, None, module=classifier(kind), loader=loader())
    recorder = Recorder()
    _, graph, _ = fit(tmp_path / "graph", monkeypatch, recorder, module=classifier(kind), loader=loader())
    assert torch.equal(eager, graph)
    said = [line for line in lines if "depends on padding" in line]
    assert len(said) == (kind is Careless)


def test_noise_of_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the reference, and a graph that gives the noise of another key is not used."""
    recorder = both(tmp_path / "right", monkeypatch)
    assert recorder.noise.uses >= STEPS - 1
    monkeypatch.setattr(
        "dpbench.session._noise_graph.NoiseGraphs._recorded",
        lambda self, buffer, plan: lambda key: add_gaussian_noise(buffer, plan, (1,)),
    )
    recorder = both(tmp_path / "wrong", monkeypatch)
    assert recorder.noise.uses == 0


def test_padding_with_a_gradient() -> None:
    """It is in no sum, and it is seen."""
    torch.manual_seed(0)
    rows = torch.randn(5, 3)
    present = torch.tensor([True, True, True, False, False])
    group = VectorGroup("all", (0,), 1.0)
    for rows_of_padding, is_valid in ((torch.zeros(2, 3), True), (torch.ones(2, 3), False)):
        padded = torch.cat([rows[:3], rows_of_padding])
        flag = torch.ones((), dtype=torch.bool)
        (total,), _ = clip_and_sum(
            [InstantiatedGradients(lambda padded=padded: padded)],
            (group,),
            all_finite=flag,
            present=present,
        )
        (expected,), _ = clip_and_sum([InstantiatedGradients(lambda: rows[:3])], (group,))
        torch.testing.assert_close(total, expected)
        assert bool(flag) is is_valid


def test_regression_masks_its_logged_loss() -> None:
    module = Regression(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1), num_targets=1)
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    whole = module.training_step((x[:3], y[:3]), 0)["loss"]
    module.rows_present = torch.tensor([True, True, True, False])
    padded: Tensor = module.training_step((x, y), 0)["loss"]
    torch.testing.assert_close(padded, whole)


class Repeating(DPSGD):
    """By recordings without a GPU; each process leaves how many lots it has repeated."""

    def session(self, guards: Any) -> Any:
        session = super().session(guards)
        session._executor = Recorder()
        return session

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        assert self.ledger_path is not None
        note = self.ledger_path.with_name(f"repeats-{trainer.global_rank}")
        executor: Any = self._session._executor
        note.write_text(str(executor.repeats))


@pytest.mark.slow
@pytest.mark.own_key
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:It is recommended to use")
def test_two_processes(tmp_path: Path) -> None:
    weights = []
    for name, devices in (("one", {}), ("two", {"devices": 2, "strategy": "ddp_spawn"})):
        torch.manual_seed(3)
        module = classifier()
        ledger = tmp_path / name / "ledger.jsonl"
        ledger.parent.mkdir()
        strategy = Repeating(noise_multiplier=Z, delta=1e-3, seed=3, ledger=str(ledger))
        trainer_for(tmp_path / name, strategy, STEPS, **devices).fit(module, lots(None, 2 * EXPECTED))
        weights.append(weights_of(module))
    assert_same_training(weights[1], weights[0], Z, 2 * EXPECTED)
    for rank in (0, 1):
        assert int((tmp_path / "two" / f"repeats-{rank}").read_text()) > STEPS // 2
