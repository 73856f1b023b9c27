"""DPSGD inside Lightning: exact updates, lots, budgets, resume, refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.records import Collated
from dpbench.errors import BudgetExhausted, ConfigurationError, DPBenchError, UnsupportedModuleError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, weights_of
from tests.support.reference import reference_gradients

QUIET = 1e-9  # a noise multiplier whose noise is below float32's resolution


def fit(folder: Path, module: pl.LightningModule, steps: int = 6, loader: Any = None, **options: Any) -> DPSGD:
    trainer_options = options.pop("trainer", {})
    strategy = DPSGD(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    trainer = trainer_for(folder, strategy, steps, **trainer_options)
    trainer.fit(module, loader or loader_of(pictures()))
    return strategy


def make_classifier(**options: Any) -> Classifier:
    torch.manual_seed(3)
    return Classifier(**options)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_updates_equal_the_reference(tmp_path: Path, manual: bool, clipping: str) -> None:
    """SGD with momentum on record-by-record clipped gradients, computed in float64 by hand."""
    bound, steps, expected = 0.3, 4, 12
    module = make_classifier(manual=manual)
    module.net[4] = nn.Identity()  # no dropout
    reference = copy.deepcopy(module).double()
    data = pictures()
    lots = Lots(make_sampling("poisson", len(data), expected), 0)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        images, labels = data[torch.from_numpy(lots.lot(step))]
        rows = per_record(reference, images, labels)
        groups = [range(len(rows))] if clipping == "flat" else [(0, 1), (2, 3), (4, 5)]
        limit = bound / len(groups) ** 0.5
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for group in groups:
            for r in range(len(images)):
                norm = sum(float(rows[i][r].square().sum()) for i in group) ** 0.5
                for i in group:
                    total[i] += rows[i][r] * min(1.0, limit / norm)
        for p, t in zip(reference.parameters(), total, strict=True):
            p.grad = t / expected
        optimizer.step()
    fit(tmp_path, module, steps, max_grad_norm=bound, clipping=clipping, noise_multiplier=QUIET)
    torch.testing.assert_close(weights_of(module).double(), weights_of(reference), rtol=1e-5, atol=1e-6)


def per_record(module: Classifier, images: Tensor, labels: Tensor) -> list[Tensor]:
    rows: list[list[Tensor]] = [[] for _ in module.parameters()]
    for x, y in zip(images.double(), labels, strict=True):
        grads = torch.autograd.grad(module.loss((x[None], y[None])), list(module.parameters()))
        for row, grad in zip(rows, grads, strict=True):
            row.append(grad)
    return [torch.stack(row) for row in rows]


@pytest.mark.parametrize("size", [1, 5, 12, 1000])
def test_chunks_change_nothing(tmp_path: Path, size: int) -> None:
    whole, pieces = make_classifier(), make_classifier()
    whole.net[4] = pieces.net[4] = nn.Identity()
    fit(tmp_path / "a", whole)
    fit(tmp_path / "b", pieces, max_physical_batch_size=size)
    torch.testing.assert_close(weights_of(pieces), weights_of(whole), rtol=1e-4, atol=1e-5)
    assert events(tmp_path / "a") == events(tmp_path / "b")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
def test_gradients_inside_a_step_are_those_outside(tmp_path: Path, precision: Any) -> None:
    """In pieces and by hand they are computed where Lightning has made the precision the default of new tensors."""
    ends = []
    for name, manual, size in (("whole", False, None), ("pieces", False, 90), ("manual", True, None)):
        module = make_classifier(manual=manual)
        module.net[4] = nn.Identity()
        private = DPSGD(noise_multiplier=0.1, seed=0, delta=1e-3, max_physical_batch_size=size)
        trainer_for(tmp_path / name, private, 3, precision=precision).fit(module, loader_of(pictures(600), 200))
        ends.append(weights_of(module).float())
    tolerance = (0.05 if precision.startswith("bf16") else 1e-4) * ends[0].norm()
    assert all((end - ends[0]).norm() < tolerance for end in ends[1:])


def events(folder: Path) -> list[Any]:
    return [(r.number, r.sampling, r.queries) for _, r in read_ledger(folder / "ledger.jsonl").releases]


def test_seeds(tmp_path: Path) -> None:
    runs = []
    for i, seed in enumerate([0, 0, 1, None, None]):
        module = make_classifier()
        fit(tmp_path / str(i), module, seed=seed)
        runs.append(weights_of(module))
    assert torch.equal(runs[0], runs[1])
    for i, a in enumerate(runs[1:], 1):
        assert all(not torch.equal(a, b) for b in runs[i + 1 :])


def test_ledger_and_epsilon(tmp_path: Path) -> None:
    strategy = fit(tmp_path, make_classifier(), steps=9, max_grad_norm=2.0, noise_multiplier=1.5)
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert [release.number for _, release in book.releases] == list(range(9))
    (query,) = book.releases[0][1].queries
    assert (query.sensitivity, query.noise_std) == (2.0, 3.0)
    sampling = {"kind": "poisson", "population": 60, "sample_rate": 0.2, "unit": "example"}
    assert book.releases[0][1].sampling.to_dict() == sampling
    assert book.header.neighboring_relation == "add_or_remove_one"
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(book, 1e-3))


def test_fixed_size_lots_declare_twice_the_sensitivity(tmp_path: Path) -> None:
    fit(tmp_path, make_classifier(), loader=loader_of(pictures(), kind="fixed_size"), max_grad_norm=2.0)
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert book.header.neighboring_relation == "replace_one"
    assert book.releases[0][1].queries[0].sensitivity == 4.0


def test_empty_lots_are_released(tmp_path: Path) -> None:
    data = pictures()
    loader = loader_of(data, expected=0.4)
    empty = sum(len(loader.lots.lot(step)) == 0 for step in range(20))
    assert empty > 5
    module = Known(64)
    module.layer = nn.Linear(64, 1, bias=False)
    flat = torch.utils.data.TensorDataset(data.tensors[0].flatten(1))
    fit(tmp_path, module, steps=20, loader=loader_of(flat, expected=0.4))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 20
    steps = torch.stack([b - a for a, b in zip(module.history, module.history[1:], strict=False)])
    assert float(steps.norm(dim=1).min()) > 1.0  # every step moves by noise of std 1 / 0.4 on 64 weights


@pytest.mark.own_key
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_resume_in_mid_epoch_is_bit_identical(tmp_path: Path, manual: bool) -> None:
    class Stop(pl.Callback):
        observes_only = True

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
            if trainer.global_step == 9:  # two releases after the checkpoint: a crash
                raise RuntimeError("crash")

    whole = make_classifier(manual=manual)
    fit(tmp_path / "whole", whole, steps=13, fingerprint="x")
    crashed = make_classifier(manual=manual)
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path / "crashed", crashed, steps=13, fingerprint="x", trainer={"more": [Stop()]})
    assert "backward" not in crashed.__dict__
    resumed = make_classifier(manual=manual)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, fingerprint="x")
    trainer = trainer_for(tmp_path / "crashed", strategy, 13)
    trainer.fit(resumed, loader_of(pictures()), ckpt_path=tmp_path / "mid.ckpt", weights_only=False)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("whole", "crashed")]
    assert ledgers[0] == ledgers[1]
    assert strategy.releases == 13


@pytest.mark.parametrize(("fingerprint", "seed"), [("other", 0), (None, 0), ("x", 1)])
def test_a_changed_run_never_reuses_noise(tmp_path: Path, fingerprint: str | None, seed: int) -> None:
    """Resumed with other settings after a crash: new noise, and the lost releases stay counted."""

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
            trainer.should_stop = trainer.global_step == 5

    fit(tmp_path, make_classifier(), steps=10, fingerprint="x", trainer={"more": [Stop()]})
    strategy = DPSGD(noise_multiplier=1.0, seed=seed, delta=1e-3, fingerprint=fingerprint)
    trainer = trainer_for(tmp_path, strategy, 10)
    loader = loader_of(pictures())
    before = loader.lots.lot(4).tolist()
    trainer.fit(make_classifier(), loader, ckpt_path=tmp_path / "mid.ckpt", weights_only=False)
    assert loader.lots.lot(4).tolist() != before  # a lot that was spent is not drawn again
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert len(book.headers) == 2
    assert len(book.releases) == 5 + 7
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(book, 1e-3))


SYSTEM = torch.Generator()


def test_a_replay_that_differs_goes_on_with_new_noise(tmp_path: Path) -> None:
    """The same noise on another sum would reveal the difference of the two."""

    class Augmented(torch.utils.data.TensorDataset):
        def __getitems__(self, positions: list[int]) -> Any:
            images, labels = self.tensors[0][positions], self.tensors[1][positions]
            return Collated((images + 0.5 * torch.rand(images.shape, generator=SYSTEM), labels))

        def __getitem__(self, i: int) -> Any:
            return self.tensors[0][i], self.tensors[1][i]

    class Crash(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
            if trainer.global_step == 6:
                raise RuntimeError("crash")

    data = Augmented(*pictures().tensors)
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path, make_classifier(), 9, as_is(data), fingerprint="x", trainer={"more": [Crash()]})
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, fingerprint="x")
    trainer = trainer_for(tmp_path, strategy, 9)
    with pytest.warns(UserWarning, match="release 3 differs from its record.*new phase of the ledger, with new noise"):
        trainer.fit(make_classifier(), as_is(data), ckpt_path=tmp_path / "mid.ckpt", weights_only=True)
    ledger = read_ledger(strategy.ledger_path or tmp_path / "ledger.jsonl")
    assert [(phase, one.number) for phase, one in ledger.releases[6:]] == [(1, n) for n in range(3, 9)]
    again = [len(one.queries) for phase, one in ledger.releases if phase == 1]
    assert again == [2, 2, 2, 1, 1, 1]  # on the lots of releases 3 to 5, with what these have shown of them
    assert len({one.checksum for _, one in ledger.releases}) == len(ledger.releases)
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(ledger, 1e-3))


def as_is(data: Any) -> LotLoader:
    return LotLoader(data, Lots(make_sampling("poisson", len(data), 12), 0))


def test_replaced_loaders_are_refused(tmp_path: Path) -> None:
    class Reloading(Classifier):
        def train_dataloader(self) -> Any:
            return loader_of(pictures())

    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer = trainer_for(tmp_path, strategy, 20, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ConfigurationError, match="loader was replaced during the run"):
        trainer.fit(Reloading())


def test_a_second_fit_draws_new_lots(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer_for(tmp_path, strategy, 4).fit(make_classifier(), loader_of(pictures()))
    second = loader_of(pictures())
    trainer_for(tmp_path, strategy, 4).fit(make_classifier(), second)
    assert second.lots.position == 8
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 8


def test_a_used_strategy_can_be_pickled(tmp_path: Path) -> None:
    strategy = fit(tmp_path, make_classifier(), steps=2)
    assert pickle.loads(pickle.dumps(strategy)).epsilon() == strategy.epsilon()


def test_nothing_trained_has_no_epsilon() -> None:
    with pytest.raises(ConfigurationError, match="nothing was trained yet: call trainer.fit first"):
        DPSGD(noise_multiplier=1.0).epsilon()


def test_target_epsilon_alone_finds_the_noise(tmp_path: Path) -> None:
    strategy = fit(tmp_path, make_classifier(), steps=30, noise_multiplier=None, target_epsilon=3.0)
    assert strategy.releases == 30
    assert 2.99 < strategy.epsilon() <= 3.0


def test_training_stops_before_the_step_that_would_exceed_the_budget(tmp_path: Path) -> None:
    strategy = fit(tmp_path, make_classifier(), steps=500, noise_multiplier=1.0, target_epsilon=3.0)
    assert 0 < strategy.releases < 500
    assert strategy.epsilon() <= 3.0
    fit(tmp_path / "more", make_classifier(), steps=strategy.releases + 1)
    assert ledger_epsilon(read_ledger(tmp_path / "more/ledger.jsonl"), 1e-3) > 3.0


def test_budget_below_one_step(tmp_path: Path) -> None:
    with pytest.raises(BudgetExhausted, match="allows no further step"):
        fit(tmp_path, make_classifier(), noise_multiplier=0.3, target_epsilon=0.1)
    assert not read_ledger(tmp_path / "ledger.jsonl").releases


def test_min_steps_cannot_override_the_budget(tmp_path: Path) -> None:
    with pytest.raises(BudgetExhausted, match="is spent"):
        fit(tmp_path, make_classifier(), steps=500, target_epsilon=3.0, trainer={"min_steps": 400})
    assert ledger_epsilon(read_ledger(tmp_path / "ledger.jsonl"), 1e-3) <= 3.0


def test_module_is_given_back_as_it_was(tmp_path: Path) -> None:
    module = make_classifier()
    fit(tmp_path, module)
    assert not {"backward", "training_step"} & set(module.__dict__)
    assert not any(m._forward_hooks for m in module.modules())


def test_bfloat16(tmp_path: Path) -> None:
    strategy = fit(tmp_path, make_classifier(), trainer={"precision": "bf16-mixed"})
    assert strategy.releases == 6


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.AdamW])
def test_any_optimizer_is_post_processing(tmp_path: Path, optimizer: Any) -> None:
    class Recording(Classifier):
        released: list[list[Tensor]]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.released = []
            return optimizer(self.parameters(), lr=0.01)

        def on_before_optimizer_step(self, _: Any) -> None:
            self.released.append([p.grad.clone() for p in self.parameters()])

    torch.manual_seed(3)
    module = Recording()
    plain = copy.deepcopy(module)
    fit(tmp_path, module)
    stepper = optimizer(plain.parameters(), lr=0.01)
    for grads in module.released:
        for p, grad in zip(plain.parameters(), grads, strict=True):
            p.grad = grad
        stepper.step()
    assert torch.equal(weights_of(plain), weights_of(module))


# ------------------------------------------------------------------------------------------------- refusals


class TwoBackwards(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        optimizer.step()


class TwoSteps(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class SkipsLots(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class PartialOptimizer(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class ManyClosures(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Statistics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        self.mean.mul_(0.9).add_(batch[0].mean(), alpha=0.1)
        return super().loss(batch)


class ReassignedBuffer(Statistics):
    def loss(self, batch: Any) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean()
        return Classifier.loss(self, batch)


class DataDependentStart(Classifier):
    started = False

    def loss(self, batch: Any) -> Tensor:
        if not self.started:
            with torch.no_grad():
                self.net[0].bias.copy_(-batch[0].mean().expand(8))
            self.started = True
        return super().loss(batch)


class PastLightning(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.loss(batch).backward()
        optimizer.step()


class SkipsSome(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class Plateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm2d(8)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: TwoBackwards(manual=True), "backward was called twice"),
        (lambda: TwoSteps(manual=True), "the optimizer stepped twice on one batch"),
        (SkipsLots, "returned no loss for a batch that is not empty"),
        (OwnBackward, "overrides backward"),
        (PartialOptimizer, "does not update net.1.weight"),
        (lambda: TwoOptimizers(manual=True), "2 optimizers"),
        (ManyClosures, "LBFGS"),
        (Statistics, "forward pass changes mean"),
        (ReassignedBuffer, "forward pass changes mean"),
        (DataDependentStart, "depends on records of an earlier batch|forward pass changes"),
        (lambda: PastLightning(manual=True), "stepped before the release of the batch"),
        (lambda: SkipsSome(manual=True), "no private update was made for this batch"),
        (Plateau, "ReduceLROnPlateau watches train_loss"),
        (WithBatchNorm, r"net.1 \(BatchNorm2d\) mixes the records.*GroupNorm"),
    ],
    ids=[
        "twice",
        "two steps",
        "skips",
        "backward",
        "partial",
        "two optimizers",
        "lbfgs",
        "buffer",
        "new buffer",
        "start",
        "past",
        "some",
        "plateau",
        "batch norm",
    ],
)
def test_modules_that_break_the_guarantee_are_refused(module: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModuleError), match=message):
        fit(tmp_path, module())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*max_physical_batch_size"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val.*max_grad_norm"),
        ({"limit_train_batches": 2}, "limit_train_batches"),
        ({"limit_train_batches": 1}, "limit_train_batches"),
    ],
)
def test_trainer_settings_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, make_classifier(), trainer=options)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_fp16_is_refused(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0)
    trainer = trainer_for(tmp_path, strategy, 3)
    trainer.strategy.precision_plugin.precision = "16-mixed"  # a GPU's setting, on the CPU
    with pytest.raises(ConfigurationError, match="precision=16-mixed"):
        trainer.fit(make_classifier(), loader_of(pictures()))


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(pictures(), batch_size=12),
        lambda: DataLoader(pictures(), batch_size=12, shuffle=True),
        lambda: [loader_of(pictures()), loader_of(pictures())],
    ],
    ids=["plain", "shuffled", "two"],
)
def test_unknown_sampling_is_refused(loader: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="LotLoader.from_dataloader|train on the LotLoader alone"):
        fit(tmp_path, make_classifier(), loader=loader())
    with pytest.raises(ConfigurationError, match="no accountant covers 'shuffled_epochs'"):
        fit(tmp_path, make_classifier(), loader=loader_of(pictures(), kind="shuffled"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set noise_multiplier, target_epsilon"),
        (
            {"noise_multiplier": 0.0},
            "noise_multiplier must be a positive number from 1e-12 to 1e.12, not 0.0; use strategy=none",
        ),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be a positive number"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be a positive number .* or null, not nan"),
        ({"target_epsilon": 0.0}, "target_epsilon must be a positive number"),
        ({"noise_multiplier": 1.0, "max_grad_norm": 0.0}, "max_grad_norm must be a positive number"),
        ({"noise_multiplier": 1.0, "max_grad_norm": -3.0}, "max_grad_norm must be a positive number"),
        ({"noise_multiplier": 1.0, "delta": 0.0}, "delta must lie strictly between 0 and 1"),
        ({"noise_multiplier": 1.0, "clipping": "soft"}, "clipping must be flat, .* or by_dimension, not 'soft'"),
        ({"noise_multiplier": 1.0, "accountant": "magic"}, "unknown accountant"),
        ({"noise_multiplier": 1.0, "max_physical_batch_size": 0}, "max_physical_batch_size"),
        ({"noise_multiplier": 1.0, "seed": -1}, "seed must be a whole number from 0 on or null, not -1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DPSGD(**options)


def test_large_delta_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not below 1/60"):
        fit(tmp_path, make_classifier(), steps=1, delta=0.1)


def test_target_that_no_noise_reaches(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no noise_multiplier up to"):
        fit(tmp_path, make_classifier(), steps=100, noise_multiplier=None, target_epsilon=1e-9, delta=1e-12)
    with pytest.raises(ConfigurationError, match="set max_steps or max_epochs"):
        fit(tmp_path, make_classifier(), steps=-1, noise_multiplier=None, target_epsilon=1.0)


def test_a_second_run_does_not_overwrite_a_ledger(tmp_path: Path) -> None:
    fit(tmp_path, make_classifier())
    first = next(tmp_path.rglob("ledger.jsonl"))
    before = first.read_bytes()
    fit(tmp_path, make_classifier())
    assert first.read_bytes() == before
    assert [path.parent.name for path in sorted(tmp_path.rglob("ledger.jsonl")) if path != first] == ["run-2"]


class Another(DPSGD):
    """A second strategy."""


def test_manual_chunks_and_two_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs automatic optimization"):
        fit(tmp_path, make_classifier(manual=True), max_physical_batch_size=3)
    with pytest.raises(ConfigurationError, match="two strategies, DPSGD and Another"):
        fit(tmp_path, make_classifier(), trainer={"more": [Another(noise_multiplier=1.0)]})


def test_batches_that_disagree(tmp_path: Path) -> None:
    class Odd(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> Any:
            return torch.zeros(1)

        def __getitems__(self, positions: list[int]) -> Any:
            return Collated((torch.zeros(len(positions), 1, 8, 8), torch.zeros(3)))

    with pytest.raises(DPBenchError, match="dimension 0 of each tensor of a batch must be its records"):
        fit(tmp_path, make_classifier(), loader=LotLoader(Odd(), Lots(make_sampling("poisson", 60, 12), 0)))


def test_reference_is_not_the_engine() -> None:
    """The reference that the other tests trust differs between records (it cannot be constant by mistake)."""
    rows = reference_gradients(nn.Linear(3, 2), torch.randn(4, 3))
    assert not torch.allclose(rows["weight"][0], rows["weight"][1])
