"""Optimizers that know the noise: against Adam, against the formula in float64, and what a training tells them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from dpbench import PrivateLoop
from dpbench.errors import ConfigurationError
from dpbench.optimizers import DPAdam, NoiseAware, NoiseStds
from dpbench.strategies import DPSGD, ClipOnly, NonPrivate, PrivateStrategy, VectorGroups
from tests.strategies.worlds import Classifier, crashed, fit, loader_of, pictures, trainer_for, weights_of


def two_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(5, 4, generator=generator)),
        nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64)),
    ]


def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    first, second = parameters
    return [{"params": [first], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": [second], "weight_decay": 0.0, "eps": 1e-3}]


def steps_of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()


@pytest.mark.parametrize("told", [False, True])
def test_without_noise_it_is_adam_to_the_last_bit(told: bool) -> None:
    ours, theirs = two_parameters(), two_parameters()
    adam = torch.optim.Adam(in_groups(theirs), lr=0.02, weight_decay=0.1, foreach=False)
    dp_adam = DPAdam(in_groups(ours), lr=0.02, weight_decay=0.1)
    for seed in range(3):
        if told:
            knowing(dp_adam, 0.0)
        steps_of(adam, theirs, 7, seed)
        steps_of(dp_adam, ours, 7, seed)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_it_is_the_formula_in_float64() -> None:
    """With noise that is another at each step."""
    lr, beta1, beta2, eps, floor = 0.1, 0.8, 0.95, 1e-6, 0.2
    p = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = DPAdam([p], lr=lr, betas=(beta1, beta2), eps=eps, floor=floor)
    generator = torch.Generator().manual_seed(0)
    noise_stds = [1 + 0.1 * t for t in range(30)]
    mean, square, noise = torch.zeros_like(p), torch.zeros_like(p), 0.0
    expected = torch.zeros_like(p)
    for t, noise_std in enumerate(noise_stds, 1):
        p.grad = torch.linspace(0, 5, 50) + noise_std * torch.randn(50, generator=generator, dtype=torch.float64)
        mean = beta1 * mean + (1 - beta1) * p.grad
        square = beta2 * square + (1 - beta2) * p.grad**2
        noise = beta2 * noise + (1 - beta2) * noise_std**2
        phi = noise / (1 - beta2**t)
        corrected = (square / (1 - beta2**t) - phi).clamp(min=floor * phi)
        expected -= lr * mean / (1 - beta1**t) / (corrected.sqrt() + eps)
        knowing(optimizer, noise_std).step()
    torch.testing.assert_close(p.detach(), expected.detach(), rtol=1e-9, atol=1e-9)


def knowing(optimizer: torch.optim.Optimizer, noise_std: float) -> torch.optim.Optimizer:
    """The optimizer, with that noise in all of its gradients where it asks."""
    if isinstance(optimizer, NoiseAware):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.follow_noise(lambda: dict.fromkeys(parameters, noise_std))
    return optimizer


def test_copies_step_like_the_original() -> None:
    parameters = two_parameters()
    optimizer = knowing(DPAdam(parameters, lr=0.1), 0.5)
    steps_of(optimizer, parameters, 1)
    optimizer.follow_noise(None)
    other = pickle.loads(pickle.dumps(optimizer))
    same = [p for group in other.param_groups for p in group["params"]]
    steps_of(optimizer, parameters, 3)
    steps_of(other, same, 3)
    for p, q in zip(parameters, same, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be a number of at least 0, not -1"),
        (
            {"betas": (0.9, 1.0)},
            "betas must be a list of 2: a number from 0 to below 1, a number",
        ),
        ({"floor": 0.0}, "floor must be a positive number, not 0.0"),
        ({"eps": math.nan}, "eps must be a number of at least 0, not nan"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DPAdam(two_parameters(), **options)


# ------------------------------------------------------------------------------------------------- in a training


class Listening(torch.optim.SGD):
    """An optimizer of one's own that knows the noise: it keeps what it is told, and the gradients of each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)
        self.stds: list[list[float]] = []
        self.gradients: list[list[Tensor]] = []
        self.noise_stds: NoiseStds | None = None

    def follow_noise(self, noise_stds: NoiseStds | None) -> None:
        self.noise_stds = noise_stds

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.noise_stds is not None:
            self.stds.append(list(self.noise_stds().values()))
        self.gradients.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        return loss


class Told(Classifier):
    """Keeps its optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.listening = Listening(self.parameters())
        return self.listening


def told_by(folder: Path, strategy: pl.Callback, steps: int = 4) -> Listening:
    module = Told(width=16)
    trainer_for(folder, strategy, steps).fit(module, loader_of(pictures()))
    assert isinstance(module.listening, NoiseAware)
    return module.listening


@pytest.mark.parametrize(
    "make",
    [
        lambda: DPSGD(noise_multiplier=1000.0, max_grad_norm=0.1, delta=1e-3, seed=0),
        lambda: VectorGroups(noise_multiplier=1000.0, split="dimension", delta=1e-3, seed=0),
        lambda: DPSGD(noise_multiplier=1000.0, noise_schedule="linear:0.2", delta=1e-3, seed=0),
        lambda: DPSGD(noise_multiplier=1000.0, discretization_threshold=0.01, delta=1e-3, seed=0),
    ],
    ids=["flat", "groups", "schedule", "discretized"],
)
def test_an_optimizer_is_told_the_noise_of_its_gradients(tmp_path: Path, make: Callable[[], PrivateStrategy]) -> None:
    listening = told_by(tmp_path, make())
    assert len(listening.stds) == 4
    for stds, gradients in zip(listening.stds, listening.gradients, strict=True):
        for std, gradient in zip(stds, gradients, strict=True):
            actual = gradient.square().mean().sqrt().item()
            assert actual == pytest.approx(std, rel=5 / math.sqrt(2 * gradient.numel()))


def test_without_noise_it_is_told_so_and_without_privacy_nothing(tmp_path: Path) -> None:
    assert told_by(tmp_path / "clipped", ClipOnly(seed=0)).stds == [[0.0] * 6] * 4
    assert told_by(tmp_path / "plain", NonPrivate()).stds == []


class WithDPAdam(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return DPAdam(self.parameters(), lr=0.01)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = WithDPAdam()
    ended, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    fit(tmp_path / "whole", whole, 4)
    fit(tmp_path / "parts", resumed, 4, start=crashed(tmp_path / "parts", ended, 4, 2))
    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_a_plain_loop_tells_it_too_and_ends(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    optimizer = DPAdam(model.parameters(), lr=0.01)
    strategy = DPSGD(noise_multiplier=2.0, max_grad_norm=3.0, delta=1e-3, seed=0, ledger=str(tmp_path / "ledger.jsonl"))
    loop = PrivateLoop(
        model,
        optimizer,
        loader_of(pictures()),
        strategy,
        lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        2,
    )
    assert list(loop) == [1, 2]
    for p in model.parameters():
        expected = 0.001 * (1 + 0.999) * (2 * 3 / 12) ** 2
        assert optimizer.state[p]["noise_avg_sq"] == pytest.approx(expected)
    steps_of(optimizer, list(model.parameters()), 1)  # it follows no training any longer
    for p in model.parameters():
        assert optimizer.state[p]["noise_avg_sq"] == pytest.approx(0.999 * expected)
