"""Steps whose records depend on one another are refused; healthy ones pass, and are not changed by the probe."""

from __future__ import annotations

import random
import secrets
import tempfile
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

from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._coupling import Coupling, CouplingProbe
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.source import Lot
from dpbench.strategies import DPSGD
from tests.guards.plain_training import plain_training
from tests.strategies.worlds import loader_of, trainer_for, update, weights_of

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
@pytest.mark.parametrize("loss", [center, queue, over_running_mean, threshold])
def test_lots_that_depend_on_earlier_lots_are_refused(tmp_path: Path, loss: LossOf, manual: bool) -> None:
    with pytest.raises(UnsupportedModuleError, match="depends on records of earlier batches, through state"):
        fit(tmp_path, Net(loss, manual=manual), 5)


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
NUMBER = {"total", "fixed_divisor", "random_total"}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_records_are_refused(tmp_path: Path, name: str, manual: bool) -> None:
    loss, net = COUPLED[name]
    words = "the number of the other" if name in NUMBER else "a record's gradient depends on the"
    with pytest.raises(UnsupportedModuleError, match=words):
        fit(tmp_path, Net(loss, net and net(), manual), 10)


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
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-4)
    with pytest.raises(UnsupportedModuleError, match="depends on the contents of the other records"):
        trainer_for(tmp_path, strategy, 10).fit(Net(loss), loader_of(records(400), 100))


def test_a_loop_has_the_same_probe(tmp_path: Path) -> None:
    data = records()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] / batch[0].max()), batch[1])

    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, ledger=str(tmp_path / "ledger.jsonl"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModuleError, match="depends on the contents of the other records"):
        list(PrivateLoop(model, optimizer, LotLoader.poisson(data, 16), strategy, loss, steps=3))


def test_the_message_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModuleError, match="check that the loss is the mean over the records, as loss_reduction='mean'"
    ):
        fit(tmp_path, Net(total))
    with pytest.raises(
        UnsupportedModuleError, match="check that the loss is the sum over the records, as loss_reduction='sum'"
    ):
        fit(tmp_path / "sum", Net(mean), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match="contents of the other .* record_of_row"):
        fit(tmp_path / "pairs", Net(contrastive))
    fit(tmp_path / "right", Net(total), loss_reduction="sum")


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
        with pytest.raises(UnsupportedModuleError, match="a record's metric depends on the contents"):
            fit(tmp_path / str(number), Measured(metric), metrics={"loss": 3.0})
    fit(tmp_path / "not asked for", Measured(expanded))
    fit(tmp_path / "right", Measured(each), metrics={"loss": 3.0})


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_pieces_of_few_records_are_probed_too(tmp_path: Path, limit: int) -> None:
    with pytest.raises(UnsupportedModuleError, match="a record's gradient depends on the"):
        fit(tmp_path, Net(rolled), max_physical_batch_size=limit)
    fit(tmp_path / "right", Net(mean), max_physical_batch_size=limit)


def test_lots_too_small_for_any_probe_are_told(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), 60)
    with pytest.warns(UserWarning, match="could not be checked: 50 batches held fewer than 3 records each"):
        trainer.fit(Net(rolled), LotLoader(records(), Lots(make_sampling("fixed_size", 40, 2), 0)))


def test_small_gradients_that_become_large_are_compared_too(tmp_path: Path) -> None:
    """Of a loss in small units: a hundredth of the bound would hide them, and signs make them as large as any."""

    def small(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return 1e-6 * rolled(module, x.nan_to_num(), y)  # or a record of NaN would make its neighbor NaN

    fit(tmp_path / "hidden", Net(small))  # clipping leaves them small, and harmless
    with pytest.raises(UnsupportedModuleError, match="a record's gradient depends on the"):
        fit(tmp_path / "signs", Net(small), discretization_threshold=1e-8)


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


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_pass_and_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, manual: bool
) -> None:
    """Weights, attributes and metrics are to the last bit what they are without a probe."""
    probed, _ = run(tmp_path / "probed", name, manual)
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    monkeypatch.setattr(CouplingProbe, "check", lambda *_: None)
    plain, _ = run(tmp_path / "plain", name, manual)
    assert torch.equal(weights_of(probed), weights_of(plain))
    assert probed.calls == plain.calls == 9
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state()), random.getstate()) == states[1:]
    if name == "metric":
        assert probed.net.calls == plain.net.calls and probed.net.sizes == plain.net.sizes
        assert probed.net.mean.compute() == plain.net.mean.compute()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("name", ["mean", "layer norm", "relu", "dropout", "tasks"])
def test_precisions(tmp_path: Path, name: str, precision: Any) -> None:
    run(tmp_path, name, False, trainer={"precision": precision})
    with pytest.raises(UnsupportedModuleError, match="depends on the"):
        fit(tmp_path / "coupled", Net(centered), trainer={"precision": precision})


# ------------------------------------------------------------------------------------------------- where and when


def test_what_a_step_holds_is_put_back() -> None:
    from dpbench.guards.step_state import StepState

    class Helper:
        def __init__(self) -> None:
            self.count, self.found = 0, {"a": [1]}

    class Holds(Net):
        def __init__(self) -> None:
            super().__init__(mean, nn.Sequential(nn.Linear(6, 3), Metric()))
            self.helper, self.table, self.names = Helper(), np.zeros(3), {1}
            self.half = torch.zeros(2).expand(2, 2)

    module = Holds()
    gradient = module.net[0].weight.grad = torch.ones(3, 6)
    version = module.seen._version
    training = plain_training(module)
    state = StepState(training)

    def draws() -> list[float]:
        numbers = [float(torch.rand(())), random.random(), np.random.rand(), float(module.rng.random())]
        return [*numbers, float(torch.rand((), generator=module.drawn))]

    first = draws()
    assert module.net[0].weight.grad is None
    module.seen.data.add_(1)
    module.seen = torch.ones(6)
    module.helper.count, module.helper.found["a"], module.helper.found["b"] = 1, [2], 3
    module.table += 1
    module.names.add(2)
    module.bank.append(torch.ones(1))
    module.net[1].sizes.append(7)
    module.net[1].mean(torch.ones(3))
    module.net[1].eval()
    module.net[0].weight.requires_grad_(False).grad = torch.zeros(3, 6)
    module.register_buffer("late", torch.zeros(1))
    module.new = 1
    training.should_stop = True
    drawn = state.drawn()
    state.restore()
    assert state.drawn() != drawn
    assert draws() == first
    assert state.drawn() == drawn
    state.finish()
    assert draws() == first
    assert not module.seen.any() and module.seen._version == version
    assert (module.helper.count, module.helper.found) == (0, {"a": [1]})
    assert not module.table.any() and module.names == {1} and not module.bank
    assert module.net[1].sizes == [0] and module.net[1].mean.update_count == 0 and module.net[1].training
    assert module.net[0].weight.requires_grad and module.net[0].weight.grad is gradient
    assert not hasattr(module, "late") and not hasattr(module, "new") and not training.should_stop


class Counting(DPSGD):
    """Keeps its probe and the rows that it trained on."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.lots: list[int] = []
        self.probed: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self.lots.append(len(batch[0]))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        (coupling,) = (guard for guard in self._session.guards if isinstance(guard, Coupling))
        self.probed.append(coupling.rows)


def counting(folder: Path, module: pl.LightningModule, steps: int, size: float, records_: int = 400) -> Counting:
    strategy = Counting(noise_multiplier=1.0, seed=0, delta=1e-4)
    trainer_for(folder, strategy, steps).fit(module, loader_of(records(records_), size))
    return strategy


def test_lots_that_are_probed_and_what_it_costs(tmp_path: Path) -> None:
    """One lot of each octave: the lot, a quarter of it (at most 32) alone, others with it, and one of NaN with it."""
    counts = counting(tmp_path, Net(mean), 70, 100)
    before = [0, *counts.probed[:-1]]
    grown = [i for i, (rows, old) in enumerate(zip(counts.probed, before, strict=True)) if rows > old]
    assert [i + 1 for i in grown] == [1, 3, 4, 9, 21, 60]
    assert [counts.probed[i] - before[i] for i in grown] == [
        3 * counts.lots[i] + min(32, counts.lots[i] // 4) for i in grown
    ]


class Shown(Net):
    """Keeps a running mean of its loss, to look at, and draws random numbers: all that a probe has to run."""

    def __init__(self) -> None:
        super().__init__(mean)
        self.average = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self, batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1])
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss


def cost(module: pl.LightningModule, lots: int, size: int) -> float:
    """Rows of all probes of a run, over those that it trains on."""
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-4)
    data = records(size * 2)
    rows = 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(Path(folder), strategy, 1)
        trainer.fit(module, LotLoader(data, Lots(make_sampling("fixed_size", len(data), size), 0)))
        probe = CouplingProbe(plain_training(module), PerRecordEngine(module), "mean")
        lot = Lot(0, None, None, None, strategy.recipe, 1.0)
        batch = tuple(x[:size] for x in data.tensors)
        release = 0
        while release < lots:
            probe.check(lambda one: module.training_step(one, 0), batch, lot._replace(release=release))
            release = probe._next
        rows = probe.rows
    return rows / (lots * size)


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize(("lots", "share"), [(500, 0.1), (4000, 0.02)])
def test_probes_are_a_small_part_of_a_run(size: int, lots: int, share: float) -> None:
    assert cost(Net(mean), lots, size) < 0.75 * share
    assert cost(Shown(), lots, size) < share


def test_small_lots_are_passed_over(tmp_path: Path) -> None:
    counts = counting(tmp_path, Net(mean), 40, 1.2)
    first = next(i for i, size in enumerate(counts.lots) if size > 2)
    assert first > 0 and not any(counts.probed[:first]) and counts.probed[first] > 0
    with pytest.raises(UnsupportedModuleError, match="contents"):
        counting(tmp_path / "coupled", Net(centered), 40, 1.2)


def test_lots_that_are_not_finite_give_no_verdict(tmp_path: Path) -> None:
    data = records()
    data.tensors[0][::7] = float("nan")
    data.tensors[0][3] = 1e38
    fit(tmp_path, Net(reconstruction), 10, data)
    with pytest.raises(UnsupportedModuleError, match="contents"):
        fit(tmp_path / "coupled", Net(hard_mining), 10, data)
    data.tensors[0][:] = float("nan")
    with pytest.warns(UserWarning, match="no record of a batch has a finite gradient"):
        fit(tmp_path / "all", Net(reconstruction), 10, data)


def test_steps_that_no_seed_repeats_are_said_to_be_unchecked(tmp_path: Path) -> None:
    def unseeded(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            module.net(x + torch.from_numpy(np.random.default_rng(secrets.randbits(64)).normal(size=x.shape)).float()),
            y,
        )

    with pytest.warns(UserWarning, match="could not be checked: training_step is random beyond the seeds"):
        fit(tmp_path, Net(unseeded), 10)


def test_steps_that_need_a_whole_lot_are_said_to_be_unchecked(tmp_path: Path) -> None:
    def whole(module: Net, x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 10:
            raise ValueError("too few")
        return mean(module, x, y)

    with pytest.warns(UserWarning, match="could not be checked: training_step fails on a part of a batch"):
        fit(tmp_path, Net(whole), 2)
    with pytest.raises(UnsupportedModuleError, match="contents"):
        fit(tmp_path / "coupled", Net(lambda m, x, y: whole(m, x - x.mean(0), y)), 2)


@pytest.mark.parametrize("every", [3, 5, 7])
def test_what_is_done_in_every_nth_lot_is_found(tmp_path: Path, every: int) -> None:
    def rarely(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return (contrastive if (module.trainer.global_step + 1) % every == 0 else mean)(module, x, y)

    with pytest.raises(UnsupportedModuleError, match="a record's gradient depends on the"):
        fit(tmp_path, Net(rarely), 200)


def test_healthy_noise_of_fresh_generators_gives_a_verdict(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def fresh(module: Net, x: Tensor, y: Tensor) -> Tensor:
        noise = np.random.default_rng().normal(size=tuple(x.shape))
        return mean(module, x + 0.1 * torch.from_numpy(noise).float(), y)

    numpys = np.random.default_rng
    fit(tmp_path, Net(fresh), 10)
    assert np.random.default_rng is numpys
    assert not [x for x in recwarn if "could not be checked" in str(x.message)]


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


@pytest.mark.parametrize("drop", [dropped_attention, own_dropout, lambda x: F.dropout(x.relu(), 0.1)])
def test_little_dropout_is_no_dependence(tmp_path: Path, drop: Callable[[Tensor], Tensor]) -> None:
    for seed in range(8):
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
    with pytest.raises(UnsupportedModuleError, match="the batch contains a Closed, .* collate_fn"):
        trainer_for(tmp_path, strategy, 2).fit(Net(inside), loader)


@pytest.mark.parametrize("size", [4, 16])
def test_microbatches_may_be_coupled_inside_only(tmp_path: Path, size: int) -> None:
    run(tmp_path, "dropout", False, microbatch_size=size, steps=5)
    if size == 4:
        with pytest.raises(UnsupportedModuleError, match="depends on the contents"):
            fit(tmp_path / "coupled", Net(centered), microbatch_size=size)
    else:  # the whole lot is one microbatch
        fit(tmp_path / "coupled", Net(centered), microbatch_size=size)


def test_pieces_of_a_lot(tmp_path: Path) -> None:
    """No probe is larger than what fits into memory."""
    sizes: list[int] = []

    def watched(module: Net, x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return mean(module, x, y)

    fit(tmp_path, Net(watched), 9, max_physical_batch_size=5)
    assert max(sizes) == 5
    with pytest.raises(UnsupportedModuleError, match="contents"):
        fit(tmp_path / "coupled", Net(centered), max_physical_batch_size=5)


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

    def told(module: Net, x: Tensor, y: Tensor) -> Tensor:
        seen.append(precision.fp32_precision)
        return mean(module, x, y)

    monkeypatch.setattr(tf32, "is_allowed", lambda device: True)  # as on a GPU
    before = precision.fp32_precision
    fit(tmp_path, Net(told), 1)
    assert seen[-1] == precision.fp32_precision == before == "tf32"
    assert seen[:-1] and set(seen[:-1]) == {"ieee"}
