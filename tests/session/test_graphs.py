"""Lots of all sizes, padded and repeated from one recording: the sums of eager lots, and no trace of padding."""

from __future__ import annotations

import copy
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
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.strategy import PrivateStrategy
from dpbench.capabilities.graphs.executor import Graphs, fuse
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.modules.reconstruction import Reconstruction
from dpbench.modules.regression import Regression
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.sampling.scheme import Positions
from dpbench.session.executor import REFERENCE
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, AutomaticClipping, DiscretizedDPSGD
from tests.strategies.worlds import assert_same_training, loader_of, pictures, trainer_for, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

STEPS = 16
Z = 0.5
EXPECTED = 6.0
SIZES = 5  # at least, of the lots of a training


class Recorder(Graphs):
    """Graphs with the keys of the reference, so that the noise is the same; and the lots of its training."""

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


def loader(data: TensorDataset | None = None, sampling: str = "poisson") -> LotLoader:
    return loader_of(data or pictures(), EXPECTED, seed=5, kind=sampling)


def fit(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: Graphs | None,
    make: Callable[..., PrivateStrategy] = DPSGD,
    module: pl.LightningModule | None = None,
    lots: LotLoader | None = None,
    steps: int = STEPS,
    start: Path | None = None,
    trainer: dict[str, Any] | None = None,
    z: float = Z,
    **options: Any,
) -> tuple[PrivateStrategy, Tensor, pl.Trainer]:
    torch.manual_seed(0)
    module = module or classifier()
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    with monkeypatch.context() as patch:
        if executor is not None:
            patch.setattr("dpbench.session.session.executor_of", lambda name, device: executor)
        strategy = make(noise_multiplier=z, delta=1e-3, seed=3, ledger=str(folder / "ledger.jsonl"), **options)
    fitted = trainer_for(folder, strategy, steps, **(trainer or {}))
    fitted.fit(module, lots or loader(), ckpt_path=start, weights_only=False)
    return strategy, weights_of(module), fitted


def both(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Callable[[], pl.LightningModule] = classifier,
    lots: Callable[[], LotLoader] = loader,
    **options: Any,
) -> Recorder:
    """Train eagerly and on padded lots: the same weights but for rounding, and the same ledger but for checksums."""
    _, eager, _ = fit(folder / "eager", monkeypatch, None, module=module(), lots=lots(), **options)
    recorder = Recorder()
    drawn = lots()
    _, padded, _ = fit(folder / "graph", monkeypatch, recorder, module=module(), lots=drawn, **options)
    assert_same_training(padded, eager, Z, EXPECTED)
    ledgers = [read_ledger(folder / name / "ledger.jsonl") for name in ("eager", "graph")]
    queries = [[(release.sampling, release.queries) for _, release in ledger.releases] for ledger in ledgers]
    assert queries[0] == queries[1] and len(queries[0]) == STEPS
    recorder.lots = [drawn.lots.lot(step) for step in range(STEPS)]
    return recorder


def of_one_size(recorder: Recorder) -> bool:
    """Whether nearly all lots were made by one recording, or two: with a logged loss, and without."""
    return recorder.recordings <= 2 and recorder.repeats > STEPS - 4


@pytest.mark.parametrize(
    ("make", "clipping"),
    [(DPSGD, "flat"), (AutomaticClipping, "per_layer"), (DiscretizedDPSGD, "flat")],
)
def test_the_sums_of_eager_lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, clipping: str) -> None:
    recorder = both(tmp_path, monkeypatch, make=make, clipping=clipping)
    assert of_one_size(recorder) and len({len(lot) for lot in recorder.lots}) >= SIZES


def test_lots_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_one_size(both(tmp_path, monkeypatch, lots=lambda: loader(sampling="fixed_size")))


def reconstruction() -> pl.LightningModule:
    optimizer = partial(torch.optim.SGD, lr=0.05)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 64))
    return Reconstruction(model, optimizer, loss_reduction="sum")


def test_a_sum_of_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_one_size(both(tmp_path, monkeypatch, reconstruction, loss_reduction="sum"))


class Outputs(Callback):
    """Keeps what steps have returned."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "record_metrics" in outputs:  # not of an empty lot
            losses = outputs["record_metrics"]["loss"]()
            assert losses.shape == (len(batch[0]),)
            self.losses.append(losses.detach().clone())
            self.means.append(float(outputs["loss"]))


def test_what_is_logged_returned_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    recorder = Recorder()
    for folder, executor in ((tmp_path / "eager", None), (tmp_path / "graph", recorder)):
        outputs = Outputs()
        logger = CSVLogger(folder, name="", version="")
        trainer = {"logger": logger, "log_every_n_steps": 1, "more": [outputs]}
        options: dict[str, Any] = {"metrics": {"loss": 2.0, "accuracy": 1.0}, "trainer": trainer}
        fit(folder, monkeypatch, executor, module=classifier(), lots=loader(), **options)
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
    recorder = both(tmp_path, monkeypatch, lots=lambda: loader(TensorDataset(images, labels)))
    finite = sum(not any(lot % 17 == 0) for lot in recorder.lots)
    assert 0 < recorder.repeats <= finite < STEPS


def test_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first lot on a training pads: a resumed run is the uninterrupted one, to the last bit."""

    def run(folder: Path, **options: Any) -> Any:
        module = classifier(dropout=0.3)
        return fit(folder, monkeypatch, Recorder(), module=module, **options)

    _, whole, _ = run(tmp_path / "whole")
    _, _, half = run(tmp_path / "half", steps=STEPS // 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    # Further releases, which a crash has lost: they are made again.
    run(tmp_path / "half", start=tmp_path / "half.ckpt", steps=STEPS - 3)
    _, resumed, _ = run(tmp_path / "half", start=tmp_path / "half.ckpt")
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


class OwnStep(ImageClassifier):
    """A step of its own, which does not say that it may be repeated."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Careless(ImageClassifier):
    """States what it does not do."""

    masks_padding = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Unstated, "does not state masks_padding"),
        (Gathering, "calls all_gather"),
        (OwnStep, "does not state masks_padding"),
        (Careless, "depends on padding"),
    ],
)
def test_steps_that_are_not_repeated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    kind: type[ImageClassifier],
    reason: str,
) -> None:
    recorder = both(tmp_path, monkeypatch, lambda: classifier(kind))
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
    options = {"max_grad_norm": 100.0, "z": Z / 100}
    with pytest.warns(UserWarning, match="the step depends on padding, which masks_padding denies"):
        assert both(tmp_path, monkeypatch, lambda: classifier(Diluted), **options).repeats == 0


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (AdaptiveQuantileClipping, {"count_noise_std": 3.0}, "the clipping bound moves"),
        (DPSGD, {"max_grad_norm_schedule": "linear:0.5"}, "the clipping bound moves"),
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


def test_lots_in_pieces_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(tmp_path, monkeypatch, max_physical_batch_size=4).repeats == 0


def test_by_its_name(tmp_path: Path, lines: list[str]) -> None:
    strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, executor="graph", ledger=str(tmp_path / "ledger.jsonl"))
    trainer_for(tmp_path, strategy, STEPS).fit(classifier(OwnStep), loader())
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


class Averaged(Repeatable):
    """A teacher whose weights get new memory after each update, as in MoCo's reference code."""

    masks_padding = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for own, averaged in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
            averaged.data = averaged.data * 0.9 + own.data * 0.1

    def weight(self, batch: Any) -> Any:
        return self.teacher.get_parameter("0.weight").detach().square().mean()


class Peeking(Repeatable):
    """Looks at a part of the lot before its step."""

    masks_padding = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if len(batch[0]) > 1:
            self.training_step([x[:1] for x in batch], batch_idx)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("kind", [Cooling, Averaged, Peeking])
def test_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    both(tmp_path, monkeypatch, lambda: classifier(kind))


def test_a_lot_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(ImageClassifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.global_step > STEPS // 2:
                optimizer_closure()
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(ConfigurationError, match="backward was called twice"):
        fit(tmp_path, monkeypatch, Recorder(), module=classifier(Twice))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == STEPS // 2 + 1


def test_sums_that_differ_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some lots are made by Python, too: what the declaration left out shows there, and the lot is right."""

    class Wrong(Recorder):
        def _repeat(self, recording: Any, lot: Any) -> bool:
            is_repeated = super()._repeat(recording, lot)
            if recording.is_recorded:
                self._sums_of_lot.mul_(1.1)
            return is_repeated

    with pytest.warns(UserWarning, match="a replayed batch had different sums from an eager one"):
        fit(tmp_path, monkeypatch, Wrong(), steps=60)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 60


# ------------------------------------------------------------------------------------- padding


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


# ------------------------------------------------------------------------------------- the update


def updated(make: Callable[[Any], Optimizer], is_fused: bool) -> Tensor:
    """Weights after some steps by the same gradients."""
    torch.manual_seed(0)
    net = network()
    optimizer = make(net.parameters())
    for _ in range(3):
        if is_fused:
            fuse(optimizer)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        state = optimizer.state_dict()  # of a checkpoint: a new optimizer takes it up
        optimizer = make(net.parameters())
        optimizer.load_state_dict(state)
    return weights_of(net)


@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(Adam, lr=0.01, amsgrad=True),
        partial(AdamW, lr=0.01, foreach=True),
    ],
)
def test_fused_updates(make: Callable[[Any], Optimizer]) -> None:
    torch.testing.assert_close(updated(make, True), updated(make, False), rtol=1e-4, atol=1e-5)


def test_optimizers_that_are_not_fused() -> None:
    net = network()
    net[0].requires_grad_(False)  # type: ignore[index]
    assert not fuse(RMSprop(net.parameters()))
    assert not fuse(SGD(net.parameters(), momentum=0.9))
    optimizer = SGD(net.parameters(), momentum=0.9)
    net[5].weight.grad = torch.ones_like(net[5].weight)  # type: ignore[union-attr, arg-type]
    optimizer.step()
    net.requires_grad_(True)  # the others have no momentum yet
    assert not fuse(optimizer)
    assert fuse(Adam(net.double().parameters()))


def test_an_optimizer_stays_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule moves momentum and learning rate meanwhile."""

    class Cycled(ImageClassifier):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.3, momentum=0.9)
            schedule = OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    _, eager, _ = fit(tmp_path / "eager", monkeypatch, None, module=classifier(Cycled))
    _, graph, trainer = fit(tmp_path / "graph", monkeypatch, Recorder(), module=classifier(Cycled))
    torch.testing.assert_close(graph, eager, rtol=1e-3, atol=1e-3)
    group = trainer.optimizers[0].param_groups[0]
    assert group["fused"] and not group["foreach"]  # in checkpoints that are saved after the training, too


# ------------------------------------------------------------------------------------- two processes


class Repeating(DPSGD):
    """By recordings without a GPU; each process leaves how many lots it has repeated."""

    def session(self, guards: Any) -> Any:
        session = super().session(guards)
        session._executor_on = lambda device: Recorder()
        return session

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        assert self.ledger_path is not None
        note = self.ledger_path.with_name(f"repeats-{trainer.global_rank}")
        executor: Any = self._session._executor
        note.write_text(str(executor.repeats))


@pytest.mark.long
@pytest.mark.own_key
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:It is recommended to use")
def test_two_processes(tmp_path: Path) -> None:
    weights = []
    for name, devices in (("one", {}), ("two", {"devices": 2, "strategy": "ddp_fork"})):
        torch.manual_seed(3)
        module = classifier()
        ledger = tmp_path / name / "ledger.jsonl"
        ledger.parent.mkdir()
        strategy = Repeating(noise_multiplier=Z, delta=1e-3, seed=3, ledger=str(ledger))
        trainer_for(tmp_path / name, strategy, STEPS, **devices).fit(
            module, loader_of(pictures(), 2 * EXPECTED, seed=5)
        )
        weights.append(weights_of(module))
    assert_same_training(weights[1], weights[0], Z, 2 * EXPECTED)
    for rank in (0, 1):
        assert int((tmp_path / "two" / f"repeats-{rank}").read_text()) > STEPS // 2
