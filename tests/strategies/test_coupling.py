"""Trainings of steps whose records depend on one another, and of healthy ones, which nothing changes."""

from __future__ import annotations

import random
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader
from dpbench.errors import CarriedRecordsError, ConfigurationError, UnsupportedModuleError
from dpbench.guards._number_of_records import NumberOfRecords
from dpbench.privacy.gradients import tf32
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, trainer_for, update, weights_of
from tests.support.one_by_one import used

MIXED = "records are combined in|no single record's are known"
LossOf = Callable[["Net", Tensor, Tensor], Tensor]


class Net(pl.LightningModule):
    """A small network with a loss that a test gives."""

    def __init__(self, loss: LossOf, net: nn.Module | None = None, manual: bool = False) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.loss, self.automatic_optimization = loss, not manual
        self.bank: deque[Tensor] = deque(maxlen=8)
        self.register_buffer("seen", torch.zeros(6))
        self.calls = 0
        self.rng, self.drawn = np.random.default_rng(1), torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return update(self, self.loss(self, *batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def records(size: int = 40, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(size, 6, generator=generator), torch.randint(classes, (size,), generator=generator)
    )


def fit(folder: Path, module: pl.LightningModule, steps: int = 2, data: Any = None, **options: Any) -> DPSGD:
    trainer_options = options.pop("trainer", {})
    strategy = DPSGD(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    trainer = trainer_for(folder, strategy, steps, **trainer_options)
    trainer.fit(module, loader_of(data or records(), 16))
    return strategy


def each(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, reduction="none")


def mean(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).mean()


# ------------------------------------------------------------------------------------------------- coupled losses


def mixup(module: Net, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    out = module.net(0.7 * x + 0.3 * x[order])
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])


def contrastive(module: Net, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(module.net(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(x)))


def variance(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y) + F.relu(1 - module.net(x).var(0)).mean()


def hard_mining(module: Net, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * (losses > losses.detach().median())).mean()


def class_weights(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, weight=torch.tensor([0.2, 1.0, 3.0]))


def ignored(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, ignore_index=0)


def rolled(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x) + 0.5 * module.net(x).roll(1, 0), y)


def softmax_over_records(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return (each(module, x, y) * each(module, x, y).detach().softmax(0)).sum() / 16


def largest(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).max()


def total(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).sum()


def fixed_divisor(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).sum() / 16


def centered(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x - x.mean(0)), y)


def normalized_weights(module: Net, x: Tensor, y: Tensor) -> Tensor:
    weights = x[:, 0].exp()
    return (each(module, x, y) * weights).sum() / weights.sum()


def memory_bank(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """The records of this lot are in it before they are compared with it."""
    z = module.net(x)
    module.bank.extend(z.detach())
    return (z - torch.stack(list(module.bank)).mean(0)).square().sum(1).mean()


def late(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """From lot 4 on."""
    return centered(module, x, y) if module.trainer.global_step >= 3 else mean(module, x, y)


def sometimes(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """In half of the lots, by chance."""
    return mixup(module, x, y) if float(torch.rand(())) < 0.5 else mean(module, x, y)


def random_total(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """A wrong reduction behind noise."""
    return F.cross_entropy(module.net(x + 0.1 * torch.randn_like(x)), y, reduction="sum")


def fresh_mixup(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """With a generator that takes the operating system's entropy."""
    rng = np.random.default_rng()
    weight, order = float(rng.beta(0.4, 0.4)), torch.from_numpy(rng.permutation(len(x)))
    out = module.net(weight * x + (1 - weight) * x[order])
    return weight * F.cross_entropy(out, y) + (1 - weight) * F.cross_entropy(out, y[order])


def triplet(module: Net, x: Tensor, y: Tensor) -> Tensor:
    z = module.net(x)
    return F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))


# ------------------------------------------------------------------------------------------------- coupled lots


def center(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """As in DINO."""
    out = module.net(x)
    loss = (out - module.__dict__.get("center", 0)).square().sum(1).mean()
    module.center = 0.9 * module.__dict__.get("center", 0) + 0.1 * out.detach().mean(0)
    return loss


def queue(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """Negatives of earlier lots only, as in MoCo."""
    z = module.net(x)
    loss = z.square().sum(1).mean()
    if module.bank:
        loss = loss + (z @ torch.stack(list(module.bank)).T).logsumexp(1).mean()
    module.bank.extend(z.detach())
    return loss


def over_running_mean(module: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = mean(module, x, y)
    before = module.__dict__.get("average", 1.0)
    module.average = 0.9 * before + 0.1 * loss.item()
    return loss / before


def threshold(module: Net, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    weights = (losses.detach() + 1 - module.__dict__.get("level", 0.0)).sigmoid()
    module.level = float(losses.detach().median())
    return (losses * weights).mean()


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("gradients", ["engine", "one_by_one"])
@pytest.mark.parametrize("loss", [center, queue])
def test_lots_that_depend_on_earlier_lots_are_refused(
    tmp_path: Path, loss: LossOf, gradients: Any, manual: bool
) -> None:
    with pytest.raises(CarriedRecordsError, match="the loss depends on records of an earlier batch"):
        fit(tmp_path, Net(loss, manual=manual), 5, gradients=gradients)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(("loss", "name"), [(over_running_mean, "average"), (threshold, "level")])
def test_values_that_were_read_are_put_back(tmp_path: Path, loss: LossOf, name: str, manual: bool) -> None:
    """So that no batch knows of those before it."""
    module = Net(loss, manual=manual)
    strategy = fit(tmp_path, module, 5)
    assert name not in vars(module)
    assert module.calls == 5
    assert used(strategy) == "one_by_one"


def test_a_schedule_moves_in_manual_optimization(tmp_path: Path) -> None:
    """Behind the release, whatever the step has read before it."""

    class Scheduled(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = mean(self, *batch)
            self.shown = loss.item()
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module = Scheduled(mean, manual=True)
    fit(tmp_path, module, 3)
    assert module.lr_schedulers().get_last_lr() == [0.1 / 8]


def warm(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """A schedule and an average of losses that is only looked at."""
    module.warmth = min(1.0, module.__dict__.get("warmth", 0.1) + 0.1)
    loss = mean(module, x, y)
    module.shown = 0.9 * module.__dict__.get("shown", 0.0) + 0.1 * loss.item()
    return loss * module.warmth


# ------------------------------------------------------------------------------------------------- coupled networks


class OverRecords(nn.Module):
    """Something over dimension 0."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def spread(x: Tensor) -> Tensor:
    """Minibatch standard deviation, as in StyleGAN."""
    return x + (x - x.mean(0)).square().mean(0).add(1e-8).sqrt()


def sorted_and_back(x: Tensor) -> Tensor:
    """Buckets by length, or routing to experts: rows of one bucket are treated alike."""
    order = x.sum(1).argsort()
    scale = torch.linspace(0.5, 1.5, len(x))[:, None]
    return (x[order] * scale)[order.argsort()]


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


class NormalizedGradient(nn.Module):
    """A hook that divides the gradient of an activation by its norm over the lot."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: grad / grad.norm())
        return x


def with_inside(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), make(), nn.Tanh(), nn.Linear(8, 3))


def over_records(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return with_inside(lambda: OverRecords(function))


COUPLED: dict[str, tuple[LossOf, Callable[[], nn.Module] | None]] = {
    function.__name__: (function, None)
    for function in (
        mixup,
        contrastive,
        variance,
        hard_mining,
        class_weights,
        ignored,
        rolled,
        softmax_over_records,
        largest,
        total,
        fixed_divisor,
        centered,
        normalized_weights,
        memory_bank,
        late,
        sometimes,
        random_total,
        fresh_mixup,
        triplet,
    )
} | {
    "batch_norm": (mean, over_records(batch_norm)),
    "spread": (mean, over_records(spread)),
    "sorted": (mean, over_records(sorted_and_back)),
    "attention": (mean, over_records(attention)),
    "softmax": (mean, over_records(lambda x: x.softmax(0))),
    "hook": (mean, with_inside(NormalizedGradient)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_records_are_refused_by_the_engine(tmp_path: Path, name: str) -> None:
    loss, net = COUPLED[name]
    with pytest.raises(UnsupportedModuleError, match=f"{MIXED}|decide how others are treated|of an earlier batch"):
        fit(tmp_path, Net(loss, net and net()), 10, gradients="engine")


@pytest.mark.parametrize("name", ["mixup", "memory_bank", "batch_norm", "hook"])
def test_so_they_are_in_manual_optimization(tmp_path: Path, name: str) -> None:
    loss, net = COUPLED[name]
    with pytest.raises(UnsupportedModuleError, match=f"{MIXED}|of an earlier batch"):
        fit(tmp_path, Net(loss, net and net(), manual=True), 10, gradients="engine")


def over_the_maximum(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x / x.max(), y)


def hard_examples_late(module: Net, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return losses.mean() if module.trainer.global_step < 2 else losses.topk(min(32, len(x))).values.sum() / len(x)


def large_lots_late(module: Net, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    plain = len(x) < 64 or module.trainer.global_step < 2
    return losses.mean() if plain else (losses / losses.mean().detach()).mean()


@pytest.mark.parametrize("loss", [over_the_maximum, hard_examples_late, large_lots_late])
def test_one_record_and_large_lots_are_seen_in_a_training(tmp_path: Path, loss: LossOf) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-4, gradients="engine")
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        trainer_for(tmp_path, strategy, 10).fit(Net(loss), loader_of(records(400), 100))


def test_a_loop_is_watched_alike(tmp_path: Path) -> None:
    data = records()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] / batch[0].max()), batch[1])

    ledger = str(tmp_path / "ledger.jsonl")
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, gradients="engine", ledger=ledger)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        list(PrivateLoop(model, optimizer, LotLoader.poisson(data, 16), strategy, loss, steps=3))


def test_a_loss_that_combines_records_otherwise_than_declared(tmp_path: Path) -> None:
    message = "in training_step: the loss is a sum over the records, and loss_reduction='mean' is declared"
    with pytest.raises(UnsupportedModuleError, match=message):
        fit(tmp_path, Net(total), gradients="engine")
    with pytest.raises(UnsupportedModuleError, match="a mean over the records, and loss_reduction='sum' is declared"):
        fit(tmp_path / "sum", Net(mean), loss_reduction="sum", gradients="engine")
    fit(tmp_path / "right", Net(total), loss_reduction="sum", gradients="engine")


class Measured(Net):
    """A healthy loss, and a metric that a test gives."""

    record_metrics = {"loss": 1}  # noqa: RUF012  as a user writes it

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {"loss": mean(self, x, y), "record_metrics": {"loss": self.loss(self, x, y)}}


def test_metrics_of_coupled_records_are_refused(tmp_path: Path) -> None:
    """Bounded, each of them would still move the values of all others."""

    def expanded(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return mean(module, x, y).detach().expand(len(x))

    def ranks(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return each(module, x, y).argsort().argsort().float()

    for number, metric in enumerate((expanded, ranks)):
        with pytest.raises(UnsupportedModuleError, match="in record_metrics"):
            fit(tmp_path / str(number), Measured(metric), metrics={"loss": 3.0}, gradients="engine")
    fit(tmp_path / "not asked for", Measured(expanded), gradients="engine")
    fit(tmp_path / "right", Measured(each), metrics={"loss": 3.0}, gradients="engine")


def test_pieces_are_watched_each(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        fit(tmp_path, Net(rolled), max_physical_batch_size=2, gradients="engine")
    fit(tmp_path / "right", Net(mean), max_physical_batch_size=2, gradients="engine")


# ------------------------------------------------------------------------------------------------- healthy


def smoothed(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, label_smoothing=0.1)


def focal(module: Net, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return ((1 - (-losses).exp()).square() * losses).mean()


def reconstruction(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(module.net(x), x[:, :3])


def padded(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """Two tokens, the second of which some records lack; the divisor is fixed."""
    tokens = torch.stack([each(module, x, y), each(module, x.flip(1), y) * (y > 0)], 1)
    return (tokens.sum(1) / 2).mean()


def weighted_by_class(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return (each(module, x, y) * torch.tensor([0.2, 1.0, 3.0])[y]).mean()


def dropped(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(F.dropout(x, 0.3)), y)


def variational(module: Net, x: Tensor, y: Tensor) -> Tensor:
    out = module.net(x)
    mu, log = out[:, :1], out[:, 1:2]
    z = mu + torch.randn_like(mu) * (0.5 * log).exp()
    kl = 0.5 * (mu.square() + log.exp() - log - 1).sum(1)
    return (F.mse_loss(z.expand(-1, 3), x[:, :3], reduction="none").sum(1) + kl).mean()


def tasks(module: Net, x: Tensor, y: Tensor) -> Tensor:
    out = module.net(x)
    return F.cross_entropy(out, y) + 0.5 * F.mse_loss(out[:, 0], x[:, 0]) + 0.1 * out.square().sum(1).mean()


def recomputed(module: Net, x: Tensor, y: Tensor) -> Tensor:
    hidden = module.net[0](x)
    out = module.net[2](checkpoint(torch.tanh, hidden, use_reentrant=False))
    return F.cross_entropy(out, y)


def augmented(module: Net, x: Tensor, y: Tensor) -> Tensor:
    noise = np.random.normal(size=tuple(x.shape)) * random.random()
    return F.cross_entropy(module.net(x + 0.1 * torch.from_numpy(noise).float()), y)


def own_generator(module: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x + 0.1 * torch.from_numpy(module.rng.normal(size=tuple(x.shape))).float()
    return F.cross_entropy(module.net(x + torch.randn(x.shape, generator=module.drawn)), y)


def views_in_a_record(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """Anchor, positive and negative are parts of one record."""
    part = [module.net(torch.cat([x[:, i : i + 2]] * 3, 1)) for i in (0, 2, 4)]
    return F.triplet_margin_loss(*part)


def tiny(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return 1e-12 * mean(module, x, y)


def saturated(module: Net, x: Tensor, y: Tensor) -> Tensor:
    out = module.net(x) + 25.0 * F.one_hot(y, 3)
    return F.cross_entropy(out, y)


def nothing(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return 0 * mean(module, x, y)


def hinge(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(module.net(x), y)


def pseudo_labels(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """With a fixed threshold for each record's own confidence."""
    out = module.net(x)
    sure = out.softmax(1).amax(1).detach() > 0.4
    return (F.cross_entropy(out, out.argmax(1), reduction="none") * sure).mean()


def logs(module: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = mean(module, x, y)
    module.log("nonprivate/loss", loss.detach(), batch_size=len(x))
    return loss


class Metric(nn.Module):
    """Keeps a metric and attributes, which have to be as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean, self.calls, self.sizes = nn.Linear(6, 3), MeanMetric(), 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.mean(x.detach())
        out: Tensor = self.linear(x)
        return out


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 4), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.table((x * 3).long().clamp(-5, 6) + 5).flatten(1))
        return out


HEALTHY: dict[str, tuple[LossOf, Callable[[], nn.Module] | None]] = {
    function.__name__: (function, None)
    for function in (
        mean,
        smoothed,
        focal,
        reconstruction,
        padded,
        weighted_by_class,
        dropped,
        variational,
        tasks,
        recomputed,
        augmented,
        own_generator,
        views_in_a_record,
        tiny,
        saturated,
        nothing,
        hinge,
        pseudo_labels,
        logs,
        warm,
    )
} | {
    "metric": (mean, Metric),
    "embedding": (mean, Embedded),
    "layer norm": (mean, with_inside(lambda: nn.LayerNorm(8))),
    "dropout": (mean, with_inside(nn.Dropout)),
    "relu": (mean, with_inside(nn.ReLU)),
    "frozen": (mean, with_inside(lambda: nn.Linear(8, 8).requires_grad_(False))),
    "convolution": (
        mean,
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
    ),
}


def run(folder: Path, name: str, manual: bool, steps: int = 9, **options: Any) -> tuple[Net, DPSGD]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    loss, net = HEALTHY[name]
    module = Net(loss, net and net(), manual)
    return module, fit(folder, module, steps, **options)


@pytest.mark.parametrize(
    ("name", "manual"),
    [*((name, False) for name in HEALTHY), *((name, True) for name in ("mean", "dropout", "metric", "warm"))],
)
def test_healthy_steps_pass_and_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, manual: bool
) -> None:
    """Weights, attributes and metrics are to the last bit what they are where half batches are not run."""
    asked, _ = run(tmp_path / "asked", name, manual)
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    monkeypatch.setattr(NumberOfRecords, "on_release", lambda self: None)
    plain, _ = run(tmp_path / "plain", name, manual)
    assert torch.equal(weights_of(asked), weights_of(plain))
    assert asked.calls == plain.calls == 9
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state()), random.getstate()) == states[1:]
    if name == "metric":
        assert asked.net.calls == plain.net.calls and asked.net.sizes == plain.net.sizes
        assert asked.net.mean.compute() == plain.net.mean.compute()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("name", ["mean", "layer norm", "relu", "dropout", "tasks"])
def test_precisions(tmp_path: Path, name: str, precision: Any) -> None:
    run(tmp_path, name, False, trainer={"precision": precision})
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        fit(tmp_path / "coupled", Net(centered), trainer={"precision": precision}, gradients="engine")


# ------------------------------------------------------------------------------------------------- where and when


def test_lots_that_are_not_finite(tmp_path: Path) -> None:
    data = records()
    data.tensors[0][::7] = float("nan")
    data.tensors[0][3] = 1e38
    fit(tmp_path, Net(reconstruction), 10, data, gradients="engine")
    data.tensors[0][:] = float("nan")
    with pytest.warns(UserWarning, match="no record of a batch has a finite gradient"):
        fit(tmp_path / "all", Net(reconstruction), 10, data)


def test_steps_that_no_seed_repeats(tmp_path: Path) -> None:
    def unseeded(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            module.net(x + torch.from_numpy(np.random.default_rng(secrets.randbits(64)).normal(size=x.shape)).float()),
            y,
        )

    fit(tmp_path, Net(unseeded), 10)


def test_a_loss_of_the_number_of_records_beside_a_draw(tmp_path: Path) -> None:
    def larger(module: Net, x: Tensor, y: Tensor) -> Tensor:
        flip = torch.rand(1) < 0.5  # as torchvision's transforms draw
        return mean(module, torch.where(flip, x.flip(-1), x), y) * len(x)

    with pytest.raises(UnsupportedModuleError, match="depends on the number of records in its batch"):
        fit(tmp_path, Net(larger), 2)


def test_steps_that_need_a_whole_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(module: Net, x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 10:
            raise ValueError("too few")
        return mean(module, x, y)

    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    fit(tmp_path, Net(whole), 2, gradients="engine")
    assert ["could not be checked: training_step ends in a ValueError" in line for line in lines] == [True]
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        fit(tmp_path / "coupled", Net(lambda m, x, y: whole(m, x - x.mean(0), y)), 2, gradients="engine")


def test_what_is_done_in_every_fifth_lot_is_found(tmp_path: Path) -> None:
    def rarely(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return (contrastive if (module.trainer.global_step + 1) % 5 == 0 else mean)(module, x, y)

    with pytest.raises(UnsupportedModuleError, match=MIXED):
        fit(tmp_path, Net(rarely), 5, gradients="engine")


class WeaklyDropped(nn.Module):
    """A random change of a gradient that is sometimes just above what rounding explains, and sometimes below."""

    def __init__(self, drop: Callable[[Tensor], Tensor], weight: float) -> None:
        super().__init__()
        self.first, self.last, self.drop, self.weight = nn.Linear(6, 8), nn.Linear(8, 3), drop, weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(x + self.weight * self.drop(x))
        return out


def dropped_attention(x: Tensor) -> Tensor:
    x = x[:, :, None]
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).squeeze(-1)


def own_dropout(x: Tensor) -> Tensor:
    return x.relu() * (torch.rand_like(x) > 0.1) / 0.9


def test_dropout_that_a_checkpoint_draws_again(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(lambda z: F.dropout(self.first(z).relu(), 0.5), x, use_reentrant=False)
            return self.last(hidden)

    fit(tmp_path, Net(mean, Checkpointed()), 4, gradients="engine")


@pytest.mark.parametrize("drop", [dropped_attention, own_dropout, lambda x: F.dropout(x.relu(), 0.1)])
def test_little_dropout_is_no_dependence(tmp_path: Path, drop: Callable[[Tensor], Tensor]) -> None:
    for seed in range(3):
        for weight in (0.003, 0.01):
            torch.manual_seed(seed)
            fit(tmp_path / f"{seed} {weight}", Net(mean, WeaklyDropped(drop, weight)), 3, seed=seed)


class Closed:
    """A batch of a kind that nobody can look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_batches_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return Closed(x), y

    def inside(module: Net, x: Any, y: Tensor) -> Tensor:
        return mean(module, x.x, y)

    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, gradients="engine")
    loader = LotLoader(records(), loader_of(records(), 16).lots, collate_fn=collate)
    with pytest.raises(ConfigurationError, match="the batch contains a Closed, .* collate_fn"):
        trainer_for(tmp_path, strategy, 2).fit(Net(inside), loader)


@pytest.mark.parametrize("size", [4, 16])
def test_microbatches_may_be_coupled_inside_only(tmp_path: Path, size: int) -> None:
    run(tmp_path, "dropout", False, microbatch_size=size, steps=5)
    if size == 4:
        with pytest.raises(UnsupportedModuleError, match=MIXED):
            fit(tmp_path / "coupled", Net(centered), microbatch_size=size, gradients="engine")
    else:  # the whole lot is one microbatch
        fit(tmp_path / "coupled", Net(centered), microbatch_size=size)


def test_pieces_of_a_lot(tmp_path: Path) -> None:
    """Nothing is run that is larger than what fits into memory."""
    sizes: list[int] = []

    def watched(module: Net, x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return mean(module, x, y)

    fit(tmp_path, Net(watched), 9, max_physical_batch_size=5)
    assert max(sizes) == 5


def test_attributes_of_a_step_are_not_touched(tmp_path: Path) -> None:
    """A step counts its calls, logs and draws; the run is the same as ever, and it is the last lot that is kept."""

    class Loud(pl.loggers.logger.DummyLogger):
        lines = 0

        def log_metrics(self, *_: Any, **__: Any) -> None:
            type(self).lines += 1

    def told(module: Net, x: Tensor, y: Tensor) -> Tensor:
        module.logger.log_metrics({"a": 1.0})
        module.last = x
        return mean(module, x, y)

    module = Net(told)
    fit(tmp_path, module, 3, trainer={"logger": Loud(), "log_every_n_steps": 1})
    assert module.calls == 3 and Loud.lines == 2 * 3 + 1  # with every epsilon, and the last one again
    assert len(module.last) == len(loader_of(records(), 16).lots.lot(2))


def test_gradients_are_compared_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32, which GPUs use in convolutions, rounding alone would look like coupling; the step itself keeps it."""
    precision: Any = torch.backends.cudnn.conv
    seen: list[str] = []
    note = iter(lambda: seen.append(precision.fp32_precision), 0)  # a list in a closure would be put back

    def told(module: Net, x: Tensor, y: Tensor) -> Tensor:
        next(note)
        return mean(module, x, y)

    monkeypatch.setattr(tf32, "is_allowed", lambda device: True)  # as on a GPU
    before = precision.fp32_precision
    fit(tmp_path, Net(told), 1)
    assert precision.fp32_precision == before == "tf32"
    assert set(seen) == {"tf32", "ieee"} and seen.count("tf32") == 1
