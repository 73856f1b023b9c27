"""Gradients record by record: exact for every function of one record, and nothing else is trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records.grouping import places_of_index
from dpbench.records.physical_batches import cut
from dpbench.strategies import (
    DPSGD,
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClipOnly,
    DiscretizedDPSGD,
)
from tests.strategies.worlds import assert_same_training, loader_of, trainer_for, weights_of
from tests.support.one_by_one import (
    BOUND,
    NETWORKS,
    Largest,
    Listed,
    Module,
    assert_releases_autograd,
    cross_entropy,
    data,
    expected,
    fit,
    loop_of,
    plain,
)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradients_of_autograd(tmp_path: Path, name: str) -> None:
    make, step = NETWORKS[name]
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND, gradients="one_by_one")
    assert_releases_autograd(tmp_path, make(), step, strategy)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DPSGD, {}),
        (DPSGD, {"clipping": "per_layer"}),
        (DPSGD, {"microbatch_size": 2}),
        (DPSGD, {"loss_reduction": "mean", "max_physical_batch_size": 4}),
        (AutomaticClipping, {}),
        (AdaptiveQuantileClipping, {"count_noise_std": 3.0}),
        (AdaptiveMeanClipping, {"initial_max_grad_norm": 0.5}),
        (DiscretizedDPSGD, {}),
    ],
)
@pytest.mark.usefixtures("one_key")
def test_the_releases_of_the_engine(tmp_path: Path, make: Any, options: Any) -> None:
    assert_releases_of_the_engine(tmp_path, make, options)


def assert_releases_of_the_engine(tmp_path: Path, make: Any, options: Any) -> None:
    """Where both can: the same records, sums and noise, up to rounding (noise lies on a grid of 1/256 of itself)."""
    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        folder = tmp_path / gradients
        _, released, _ = fit(folder, plain(), make, gradients=gradients, **options)
        weights.append(released)
    engine, one_by_one = weights
    assert float((engine - one_by_one).norm() / engine.norm()) < 2e-3
    ledgers = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("engine", "one_by_one")]
    assert ledger_epsilon(ledgers[0], 1e-3) == ledger_epsilon(ledgers[1], 1e-3)
    for (_, one), (_, other) in zip(ledgers[0].releases, ledgers[1].releases, strict=True):
        assert one.sampling == other.sampling and len(one.queries) == len(other.queries)


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_the_same_update_without_noise(tmp_path: Path, microbatch_size: int) -> None:
    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        loader = LotLoader(data(), Lots(make_sampling("full", 12, 12), 3))
        options = {"max_grad_norm": BOUND, "loader": loader, "microbatch_size": microbatch_size}
        weights.append(fit(tmp_path / gradients, plain(), ClipOnly, steps=3, gradients=gradients, **options)[1])
    one, two = weights
    assert_same_training(two, one, noise_std=0.5, expected_batch_size=3)


def test_several_rows_of_a_record(tmp_path: Path) -> None:
    """The mean over the rows of a record, clipped as one."""
    records = data()

    def doubled(items: Any) -> dict[str, Tensor]:
        x, y = default_collate(items)
        rows = torch.arange(len(x)).repeat_interleave(2)
        return {"x": torch.stack([x, 2 * x], 1).flatten(0, 1), "y": y[rows], "record": rows}

    def step(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["x"]), batch["y"])

    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        loader = LotLoader(
            records,
            Lots(make_sampling("full", 12, 12), None),
            collate_fn=doubled,
            record_of_row="record",
        )
        options = {"max_grad_norm": BOUND, "loader": loader, "gradients": gradients, "seed": None, "step": step}
        weights.append(fit(tmp_path / gradients, plain(), ClipOnly, steps=3, **options)[1])
    one, two = weights
    assert_same_training(two, one, noise_std=0.5, expected_batch_size=3)


def two_views(items: Any) -> dict[str, Tensor]:
    """Two rows of each record, but none of records of class 3."""
    x, y = default_collate(items)
    rows = torch.arange(len(x))[y != 3].repeat_interleave(2)
    views = torch.arange(1, len(rows) + 1) % 2 + 1
    return {"x": x[rows] * views[:, None, None], "y": y[rows], "record": rows}


def mean_over_records(net: nn.Module, batch: Any) -> Tensor:
    """The mean over records of the mean over their rows; their number is the largest of the index and one."""
    losses = F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
    records = int(batch["record"].max()) + 1
    return losses.new_zeros(records).index_add(0, batch["record"], losses / 2).mean()


def copied(batch: dict[str, Tensor]) -> Tensor:
    return batch["record"].to(torch.int32)


@pytest.mark.parametrize(
    ("index", "options"),
    [
        ("record", {"gradients": "engine"}),
        ("record", {"gradients": "engine", "max_physical_batch_size": 4}),
        ("record", {}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_each_piece_counts_its_records_from_zero(tmp_path: Path, index: Any, options: dict[str, Any]) -> None:
    """A step that makes a number of records of the index is the same for a lot and its pieces."""
    torch.manual_seed(1)
    net = plain()
    records = data()
    with_rows = TensorDataset(*(x[records.tensors[1] != 3] for x in records.tensors))
    before = [p.detach().clone() for p in net.parameters()]
    gradients = []
    for x, y in with_rows:
        loss = mean_over_records(net, two_views([(x, y)]))
        gradients.append(torch.autograd.grad(loss, list(net.parameters())))
    loader = LotLoader(
        records,
        Lots(make_sampling("full", 12, 12), None),
        collate_fn=two_views,
        record_of_row=index,
    )
    options = {"max_grad_norm": 1e6, "seed": None, "loader": loader, "step": mean_over_records, **options}
    fit(tmp_path, net, ClipOnly, steps=1, **options)
    for old, p, parts in zip(before, net.parameters(), zip(*gradients, strict=True), strict=True):
        torch.testing.assert_close(old - p, sum(parts) / 12, rtol=1e-4, atol=1e-6)


def test_numbers_that_equal_the_index_are_none() -> None:
    """Else the labels of one lot would be changed, and those of another not."""
    batch = {"y": torch.tensor([0, 0, 1]), "record": torch.tensor([0, 0, 1]), "x": torch.zeros(3, 2)}
    assert places_of_index(batch, 3, "record") == places_of_index(batch, 3, copied) == [1]
    assert places_of_index(batch, 3, lambda batch: batch["x"][:, 0].long()) == []
    piece, other = cut(batch, 3, 2, np.array([0, 0, 1]), None, copied)
    assert piece["record"].tolist() == [0, 0] and other["record"].tolist() == [0] and other["y"].tolist() == [1]


def test_dropout_and_an_interrupted_run(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(30, 4))

    _, whole, _ = fit(tmp_path / "whole", net(), steps=8)
    _, _, half = fit(tmp_path / "half", net(), steps=4)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, _ = fit(tmp_path / "half", net(), steps=8, start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed)


def test_records_that_are_not_finite_and_empty_lots(tmp_path: Path) -> None:
    x, y = data(40).tensors
    x = x.clone()
    x[3] = float("nan")
    _, weights, _ = fit(tmp_path, plain(), steps=20, loader=loader_of(TensorDataset(x, y), 2))
    assert weights.isfinite().all()
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 20


def test_a_loop(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = Listed()
    strategy = DPSGD(
        noise_multiplier=1.0,
        delta=1e-3,
        gradients="one_by_one",
        ledger=str(tmp_path / "ledger.jsonl"),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = PrivateLoop(net, optimizer, loader_of(data(40), 6), strategy, cross_entropy, steps=4)
    assert list(loop) == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------- what is no function of a record


class Keeping(nn.Module):
    """The last record is kept for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(30, 4)
        self.last = [torch.zeros(1, 30)]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        output = self.out(x + self.last[0])
        self.last[0] = x.detach().mean(0, keepdim=True)
        return output


def squeezed(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]).squeeze(), batch[1])


def summed(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="sum")


def weighted(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(batch[0]))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(30), nn.Linear(30, 4)), "mixes the records"),
        (Keeping, "depends on records of an earlier batch"),
    ],
)
def test_what_is_kept_of_other_records_is_refused(tmp_path: Path, net: Any, message: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError, match=message):
        fit(tmp_path, net(), loader=loader_of(data(40), 10))
    path = tmp_path / "ledger.jsonl"
    assert not path.exists() or not read_ledger(path).releases


@pytest.mark.parametrize(
    ("net", "step"),
    [(plain, summed), (Largest, cross_entropy), (plain, weighted)],
)
def test_what_mixes_records_is_the_function_of_each_alone(tmp_path: Path, net: Any, step: Any) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND, gradients="one_by_one")
    assert_releases_autograd(tmp_path, net(), step, strategy)


def test_a_step_that_fails_on_a_single_record(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as failure:
        fit(tmp_path, plain(), step=squeezed, loader=loader_of(data(40), 10))
    assert "each record as a batch of one" in failure.value.__notes__[0]  # type: ignore[attr-defined]


class Reversible(torch.autograd.Function):
    """Keeps no graph of its layer, and makes one when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


class ReversibleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(30, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Reversible.apply(self.body(x.flatten(1)).tanh(), self.hidden))


@pytest.mark.parametrize("gradients", ["engine", "one_by_one", "auto"])
def test_a_backward_pass_within_the_backward_pass_is_refused(tmp_path: Path, gradients: str) -> None:
    """Its layers would be trained by nothing."""
    net = ReversibleNet()
    with pytest.raises(UnsupportedModuleError, match="a backward pass within the backward pass"):
        fit(tmp_path, net, ClipOnly, gradients=gradients)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("gradients", ["engine", "one_by_one"])
def test_hooks_of_parameters_see_what_is_released(tmp_path: Path, gradients: str) -> None:
    seen: list[Tensor] = []
    net = plain()
    net[1].weight.register_hook(seen.append)
    net[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    before = net[1].weight.detach().clone()
    fit(tmp_path, net, steps=1, gradients=gradients)
    assert len(seen) == 2
    for gradient in seen:
        torch.testing.assert_close(before - net[1].weight, gradient)


def clears(p: nn.Parameter) -> None:
    p.grad = None


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_hook", lambda gradient: gradient * 0),
        ("register_hook", lambda gradient: gradient.mul_(0)),
        ("register_hook", lambda gradient: [gradient[0].zero_()].clear()),
        ("register_post_accumulate_grad_hook", clears),
    ],
)
def test_hooks_of_parameters_that_change_gradients_are_refused(tmp_path: Path, register: str, hook: Any) -> None:
    net = plain()
    getattr(net[1].weight, register)(hook)
    with pytest.raises(ConfigurationError, match=r"a hook of net\.1\.weight .* changes its gradient"):
        fit(tmp_path, net)


def detached(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net, batch).detach()


def masked(net: nn.Module, batch: Any) -> Tensor:
    """Of class 3 nothing is predicted."""
    losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
    is_predicted = batch[1] != 3
    if not is_predicted.any():
        return torch.zeros(())
    return (losses * is_predicted).mean()


def test_a_loss_without_a_gradient(tmp_path: Path) -> None:
    """The engine refuses it; of a lot of records that are run alone it may be so by chance."""
    with pytest.raises(ConfigurationError, match="the loss has no gradient: return it undetached"):
        fit(tmp_path / "engine", plain(), step=detached, gradients="engine")
    with pytest.warns(UserWarning, match="no record of the first batch has a gradient"):
        fit(tmp_path / "one", plain(), step=detached)
    with pytest.warns(UserWarning, match="no record of the first batch has a gradient"):
        list(loop_of(tmp_path / "loop", plain(), detached))


@pytest.mark.filterwarnings("error:no record of the first batch")
def test_records_without_a_gradient_are_zero(tmp_path: Path) -> None:
    """Also as the last of a lot, in a loop."""
    torch.manual_seed(1)
    net = plain()
    clipped = expected(net, lambda net, batch: masked(net, batch) + 0 * net(batch[0]).sum(), data())
    before = [p.detach().clone() for p in net.parameters()]
    loader = LotLoader(data(), Lots(make_sampling("full", 12, 12), None))
    fit(tmp_path / "one", net, ClipOnly, steps=1, step=masked, loader=loader, max_grad_norm=BOUND, seed=None)
    for old, p, update in zip(before, net.parameters(), clipped, strict=True):
        torch.testing.assert_close((old - p).double(), update, rtol=1e-4, atol=1e-6)
    assert list(loop_of(tmp_path / "loop", plain(), masked)) == [1, 2, 3, 4, 5, 6]


class Returns(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (returned,) = self._step
        return returned


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.5, "training_step returned a float as its loss: return the tensor"),
        ({"loss": 1.5}, "training_step returned a float as its loss: return the tensor"),
        ({"los": torch.zeros(())}, "training_step returned no loss"),
        (None, "training_step returned no loss"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, returned: Any, words: str) -> None:
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, gradients="one_by_one", ledger=str(tmp_path / "ledger.jsonl"))
    with pytest.raises(ConfigurationError, match=words):
        trainer_for(tmp_path, strategy, 1).fit(Returns(plain(), returned), loader_of(data(40), 6))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, dtype=torch.cfloat))
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x.flatten(1)) * self.weight, n=30))


@pytest.mark.parametrize("gradients", ["engine", "one_by_one", "auto"])
def test_complex_parameters_are_refused(tmp_path: Path, gradients: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"net\.weight is complex, and noise is real"):
        fit(tmp_path, Fourier(), gradients=gradients)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("gradients", ["one_by_one", "auto"])
def test_spectral_normalization_is_refused_by_name(tmp_path: Path, norm: Any, gradients: str) -> None:
    """In evaluation mode it is a function of the weights, and trains."""
    net = nn.Sequential(nn.Flatten(), norm(nn.Linear(30, 4)))
    with pytest.raises(UnsupportedModuleError, match=r"spectral normalization, .* writes to buffers .*dpbench\.fix"):
        fit(tmp_path, net, gradients=gradients)
    evaluated = nn.Sequential(nn.Flatten(), norm(nn.Linear(30, 4)))
    evaluated.eval()
    fit(tmp_path / "evaluated", evaluated, gradients=gradients, steps=2)


class Critic(pl.LightningModule):
    """A Wasserstein GAN with gradient penalty: the critic is private, and the generator learns from what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.private_module = "critic"
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.generator = nn.Linear(3, 6)

    def critic_loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.generator(torch.full((len(x), 3), 0.5, dtype=x.dtype))
        middle = (0.3 * x + 0.7 * fake).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.critic(middle).sum(), middle, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(x).mean() + 10 * penalty

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_critic, of_generator = self.optimizers()
        self.toggle_optimizer(of_critic)
        loss = self.critic_loss(batch[0])
        self.log("critic", loss, batch_size=max(1, len(batch[0])))
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        made = self.generator(torch.full((4, 3), 0.5))
        of_generator.zero_grad()
        self.manual_backward(-self.critic(made).mean())
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.critic, self.generator)]


@pytest.mark.parametrize("gradients", ["one_by_one", "auto"])
def test_a_gradient_penalty_in_manual_optimization(tmp_path: Path, gradients: str) -> None:
    x = data().tensors[0].flatten(1)[:, :6].contiguous()
    torch.manual_seed(1)
    module = Critic()
    exact = copy.deepcopy(module).double()
    total = [torch.zeros_like(p) for p in exact.critic.parameters()]
    for one in x.double():
        gradient = torch.autograd.grad(exact.critic_loss(one[None]), list(exact.critic.parameters()))
        norm = torch.stack([part.square().sum() for part in gradient]).sum().sqrt()
        for part, own in zip(total, gradient, strict=True):
            part += own * min(1.0, BOUND / float(norm))
    before = [p.detach().clone() for p in module.critic.parameters()]
    of_generator = [p.detach().clone() for p in module.generator.parameters()]
    loader = LotLoader(TensorDataset(x), Lots(make_sampling("full", 12, 12), None))
    trainer = trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND, gradients=gradients), 1)
    trainer.fit(module, loader)
    for old, p, part in zip(before, module.critic.parameters(), total, strict=True):
        torch.testing.assert_close((old - p).double(), part / 12, rtol=1e-4, atol=1e-6)
    moved = [not torch.equal(old, p) for old, p in zip(of_generator, module.generator.parameters(), strict=True)]
    assert all(moved) and all(p.requires_grad for p in module.parameters())
    loss = exact.critic_loss(x.double()).detach().float()
    torch.testing.assert_close(trainer.logged_metrics["critic"], loss, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_key")
def test_manual_optimization_is_the_same(tmp_path: Path) -> None:
    """The releases of the engine, also with lots that are empty; twice backward is refused."""

    class Manual(Module):
        automatic_optimization = False
        times = 1

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(self.times):
                self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    weights = []
    for gradients in ("engine", "one_by_one", "auto"):
        torch.manual_seed(1)
        net = plain()
        ledger = tmp_path / gradients / "ledger.jsonl"
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, gradients=gradients, ledger=str(ledger))
        trainer_for(tmp_path / gradients, strategy, 12).fit(Manual(net, cross_entropy), loader_of(data(40), 2))
        assert strategy.releases == 12
        weights.append(weights_of(net))
    assert torch.equal(weights[0], weights[2])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0.02)
    twice = Manual(plain(), cross_entropy)
    twice.times = 2
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, gradients="one_by_one")
    with pytest.raises(ConfigurationError, match="backward was called twice for one batch"):
        trainer_for(tmp_path / "twice", strategy, 2).fit(twice, loader_of(data(40), 6))


@pytest.mark.slow
@pytest.mark.own_key  # other processes take the keys that users get
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("gradients", ["one_by_one", "auto"])
def test_two_processes_agree_with_one(tmp_path: Path, gradients: str) -> None:
    """Also where one of them has fewer records, or none, and all have to find the same method."""
    weights = []
    for two in (False, True):
        torch.manual_seed(1)
        net = Listed()
        folder = tmp_path / str(two)
        strategy = DPSGD(
            noise_multiplier=0.5,
            delta=1e-3,
            seed=1,
            gradients=gradients,
            ledger=str(folder / "ledger.jsonl"),
        )
        options = {"devices": 2, "strategy": "ddp_fork"} if two else {}
        trainer = trainer_for(folder, strategy, 8, **options)
        trainer.fit(Module(net, cross_entropy), loader_of(data(40), 3))
        weights.append(weights_of(net))
    one, two = weights
    assert_same_training(two, one, noise_std=0.5, expected_batch_size=3)
