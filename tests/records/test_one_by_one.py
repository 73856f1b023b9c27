"""Gradients record by record: exact for every function of one record, and nothing else is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records.grouping import places_of_index
from dpbench.records.physical_batches import cut
from dpbench.strategies import (
    DPSGD,
    AdaptiveQuantileClipping,
    ClipOnly,
)
from tests.strategies.worlds import assert_same_training, loader_of, trainer_for, weights_of
from tests.support.one_by_one import (
    BOUND,
    NETWORKS,
    Largest,
    Module,
    assert_releases_autograd,
    cross_entropy,
    data,
    fit,
    loop_of,
    plain,
)


def weighted(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(batch[0]))


@pytest.mark.parametrize(
    ("net", "step"),
    [(Largest, cross_entropy), (plain, weighted)],
    ids=["max", "weights"],
)
def test_the_gradients_of_autograd(tmp_path: Path, net: Any, step: Any) -> None:
    """Of what mixes records, too: it is the function of each alone."""
    strategy = ClipOnly(max_grad_norm=BOUND, gradients="one_by_one")
    assert_releases_autograd(tmp_path, net(), step, strategy)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DPSGD, {"clipping": "per_layer", "loss_reduction": "mean", "max_physical_batch_size": 4}),
        (DPSGD, {"microbatch_size": 2}),
        (AdaptiveQuantileClipping, {"count_noise_std": 3.0}),
    ],
    ids=["pieces", "microbatches", "quantile"],
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
        weights.append(fit(folder, plain(), make, steps=3, gradients=gradients, **options)[1])
    engine, one_by_one = weights
    assert float((engine - one_by_one).norm() / engine.norm()) < 2e-3
    ledgers = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("engine", "one_by_one")]
    assert ledger_epsilon(ledgers[0], 1e-3) == ledger_epsilon(ledgers[1], 1e-3)
    for (_, one), (_, other) in zip(ledgers[0].releases, ledgers[1].releases, strict=True):
        assert one.sampling == other.sampling and len(one.queries) == len(other.queries)


def test_numbers_that_equal_the_index_are_none() -> None:
    """Else the labels of one lot would be changed, and those of another not."""
    batch = {"y": torch.tensor([0, 0, 1]), "record": torch.tensor([0, 0, 1]), "x": torch.zeros(3, 2)}
    copied = lambda batch: batch["record"].to(torch.int32)  # noqa: E731
    assert places_of_index(batch, 3, "record") == places_of_index(batch, 3, copied) == [1]
    assert places_of_index(batch, 3, lambda batch: batch["x"][:, 0].long()) == []
    piece, other = cut(batch, 3, 2, np.array([0, 0, 1]), None, copied)
    assert piece["record"].tolist() == [0, 0] and other["record"].tolist() == [0] and other["y"].tolist() == [1]


def test_arrays_are_cut() -> None:
    """Labels that the collate_fn leaves in NumPy: each record sees its own."""
    pieces = cut((torch.arange(3), np.arange(3)), 3, 1, None, None)
    assert [(x.tolist(), y.tolist()) for x, y in pieces] == [([0], [0]), ([1], [1]), ([2], [2])]


def test_records_that_are_not_finite_and_empty_lots(tmp_path: Path) -> None:
    x, y = data(40).tensors
    x[::8] = float("nan")
    _, weights, _ = fit(tmp_path, plain(), steps=6, loader=loader_of(TensorDataset(x, y), 2))
    assert weights.isfinite().all()
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 6


# ------------------------------------------------------------------------------------- what is no function of a record


def squeezed(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]).sort(0).values.squeeze(), batch[1])


def test_a_step_that_fails_on_a_single_record(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as failure:
        fit(tmp_path, plain(), step=squeezed, loader=loader_of(data(40), 10), gradients="auto")
    alone, first_reason = failure.value.__notes__  # type: ignore[attr-defined]
    assert "each record as a batch of one" in alone and "the engine cannot be used: " in first_reason


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
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(self.body(x.flatten(1)).tanh(), self.out)


def test_a_backward_pass_within_the_backward_pass_is_refused(tmp_path: Path) -> None:
    """Its layers would be trained by nothing."""
    with pytest.raises(UnsupportedModuleError, match="a backward pass within the backward pass"):
        fit(tmp_path, ReversibleNet(), ClipOnly, gradients="auto")


def test_hooks_of_parameters_see_what_is_released(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    net = plain()
    net[1].weight.register_hook(seen.append)
    net[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    before = net[1].weight.detach().clone()
    fit(tmp_path, net, steps=1)
    assert len(seen) == 2
    for gradient in seen:
        torch.testing.assert_close(before - net[1].weight, gradient)


def clears(p: nn.Parameter) -> None:
    p.grad = None


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_hook", lambda gradient: gradient * 0),
        ("register_post_accumulate_grad_hook", clears),
    ],
    ids=["another", "cleared"],
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
    if not is_predicted.any() and losses.dtype == torch.float32:  # the reference takes a gradient of zero
        return torch.zeros(())
    return (losses * is_predicted).mean()


def test_a_loss_without_a_gradient(tmp_path: Path) -> None:
    """The engine refuses it; of a lot of records that are run alone it may be so by chance."""
    with pytest.raises(ConfigurationError, match="the loss has no gradient: return it undetached"):
        fit(tmp_path / "engine", plain(), step=detached, gradients="engine")
    with pytest.warns(UserWarning, match="no record of the first batch has a gradient"):
        list(loop_of(tmp_path / "loop", plain(), detached))


@pytest.mark.filterwarnings("error:no record of the first batch")
def test_records_without_a_gradient_are_zero(tmp_path: Path) -> None:
    """Also as the last of a lot, in a loop."""
    torch.manual_seed(1)
    net = plain()
    assert_releases_autograd(tmp_path, net, masked, ClipOnly(max_grad_norm=BOUND, gradients="one_by_one"))
    assert list(loop_of(tmp_path / "loop", plain(), masked)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"loss": 1.5}, "training_step returned a float as its loss: return the loss tensor"),
        (None, "training_step returned no loss"),
    ],
    ids=["float", "none"],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, returned: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, plain(), step=lambda net, batch: returned)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.flatten(1)) * self.weight, n=4)


def test_complex_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"net\.weight is complex, but noise is real"):
        fit(tmp_path, Fourier(), gradients="auto")


@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_spectral_normalization_is_refused_by_name(tmp_path: Path) -> None:
    """In evaluation mode it is a function of the weights, and trains."""
    net = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(30, 4)))
    with pytest.raises(UnsupportedModuleError, match=r"spectral normalization, .* writes to buffers .*dpbench\.fix"):
        fit(tmp_path, net, gradients="auto")
    fit(tmp_path / "evaluated", net.eval(), gradients="auto", steps=1)


class Manual(Module):
    automatic_optimization = False
    times = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(self.times):
            self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


@pytest.mark.usefixtures("one_key")
def test_manual_optimization_is_the_same(tmp_path: Path) -> None:
    """The releases of the engine, also with lots that are empty; twice backward is refused."""
    weights = []
    for gradients in ("engine", "one_by_one"):
        torch.manual_seed(1)
        net = plain()
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, gradients=gradients)
        trainer_for(tmp_path / gradients, strategy, 4).fit(Manual(net, cross_entropy), loader_of(data(40), 2))
        assert strategy.releases == 4
        weights.append(weights_of(net))
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
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Also where one of them has fewer records, or none, and all have to find the same method."""
    weights = []
    for two in (False, True):
        torch.manual_seed(1)
        net = NETWORKS["routing"][0]()
        folder = tmp_path / str(two)
        strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, seed=1, ledger=str(folder / "ledger.jsonl"))
        options = {"devices": 2, "strategy": "ddp_fork"} if two else {}
        trainer = trainer_for(folder, strategy, 8, **options)
        trainer.fit(Module(net, cross_entropy), loader_of(data(40), 3))
        weights.append(weights_of(net))
    one, two = weights
    assert_same_training(two, one, noise_std=0.5, expected_batch_size=3)
