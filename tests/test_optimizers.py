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
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, weights_of


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
            dp_adam.follow_noise(lambda: dict.fromkeys(ours, 0.0))
        steps_of(adam, theirs, 7, seed)
        steps_of(dp_adam, ours, 7, seed)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_it_is_the_formula_in_float64() -> None:
    """With noise that is another at each step, and for each of two parameters."""
    lr, beta1, beta2, eps, floor = 0.1, 0.8, 0.95, 1e-6, 0.2
    parameters = [nn.Parameter(torch.zeros(50, dtype=torch.float64)) for _ in range(2)]
    optimizer = DPAdam(parameters, lr=lr, betas=(beta1, beta2), eps=eps, floor=floor)
    expected = [torch.zeros(50, dtype=torch.float64) for _ in parameters]
    gradients: list[list[Tensor]] = [[], []]
    stds: list[list[float]] = [[], []]
    generator = torch.Generator().manual_seed(0)
    floored = 0
    optimizer.follow_noise(lambda: {p: stds[i][-1] for i, p in enumerate(parameters)})
    for t in range(1, 30):
        for i, p in enumerate(parameters):
            stds[i].append((1 + i) * (1 + 0.1 * t))
            noise = torch.randn(50, generator=generator, dtype=torch.float64)
            signal = torch.linspace(0, 5, 50, dtype=torch.float64)
            gradients[i].append(signal + stds[i][-1] * noise)
            p.grad = gradients[i][-1].clone()
        optimizer.step()
        for i in range(2):
            first = [(1 - beta1) * beta1 ** (t - 1 - k) for k in range(t)]
            second = [(1 - beta2) * beta2 ** (t - 1 - k) for k in range(t)]
            mean = sum(w * g for w, g in zip(first, gradients[i], strict=True)) / sum(first)
            squares = sum(w * g**2 for w, g in zip(second, gradients[i], strict=True)) / sum(second)
            phi = sum(w * s**2 for w, s in zip(second, stds[i], strict=True)) / sum(second)
            corrected = torch.clamp(squares - phi, min=floor * phi)
            floored += int((squares - phi < floor * phi).sum())
            expected[i] -= lr * mean / (corrected.sqrt() + eps)
    assert 100 < floored < 2000
    for p, q in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-9, atol=1e-9)


def knowing(optimizer: torch.optim.Optimizer, noise_std: float) -> torch.optim.Optimizer:
    """The optimizer, with that noise in all of its gradients where it asks."""
    if isinstance(optimizer, NoiseAware):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.follow_noise(lambda: dict.fromkeys(parameters, noise_std))
    return optimizer


def second_moments(signal: float, noise_std: float) -> tuple[Tensor, Tensor]:
    """Bias-corrected second moments of 4,000 coordinates with the same signal, as Adam has them and as DP-Adam does."""
    moments = []
    steps, beta2 = 800, 0.99
    for optimizer_type in (torch.optim.Adam, DPAdam):
        generator = torch.Generator().manual_seed(5)
        p = nn.Parameter(torch.zeros(4000, dtype=torch.float64))
        optimizer = knowing(optimizer_type([p], lr=1e-3, betas=(0.9, beta2)), noise_std)
        for _ in range(steps):
            p.grad = signal + noise_std * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            optimizer.step()
        state = optimizer.state[p]
        squares = state["exp_avg_sq"] - state.get("noise_avg_sq", 0.0)
        moments.append(squares / (1 - beta2**steps))
    return moments[0], moments[1]


@pytest.mark.parametrize("signal", [0.0, 0.5])
def test_noise_biases_adam_s_second_moment_and_not_this_one(signal: float) -> None:
    noise_std = 2.0
    adam, dp_adam = second_moments(signal, noise_std)
    # Of the mean over 4,000 coordinates of an average over 200 squares.
    error = 5 * math.sqrt(2) * noise_std**2 / math.sqrt(4000 * 199)
    assert abs(adam.mean() - (signal**2 + noise_std**2)) < error
    assert abs(dp_adam.mean() - signal**2) < error
    assert abs(adam.mean() - signal**2) > 100 * error


def test_without_a_source_of_noise_there_is_none_any_longer() -> None:
    parameters = two_parameters()
    optimizer = knowing(DPAdam(parameters), 3.0)
    steps_of(optimizer, parameters, 1)
    optimizer.follow_noise(None)
    steps_of(optimizer, parameters, 1)
    for p in parameters:
        beta2 = 0.999
        assert optimizer.state[p]["noise_avg_sq"] == pytest.approx(beta2 * (1 - beta2) * 9)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_step_like_the_original(copied: Callable[[Any], Any]) -> None:
    parameters = two_parameters()
    optimizer = knowing(DPAdam(parameters, lr=0.1), 0.5)
    steps_of(optimizer, parameters, 1)
    optimizer.follow_noise(None)
    other = copied(optimizer)
    same = [p for group in other.param_groups for p in group["params"]]
    steps_of(optimizer, parameters, 3)
    steps_of(other, same, 3)
    for p, q in zip(parameters, same, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be a number from 0 on, not -1"),
        (
            {"betas": (0.9, 1.0)},
            "betas must be a list of 2: a number from 0 to below 1, a number",
        ),
        ({"floor": 0.0}, "floor must be a positive number, not 0.0"),
        ({"eps": math.nan}, "eps must be a number from 0 on, not nan"),
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
    assert len(listening.stds) == len(listening.gradients) == 4
    checked = 0
    for stds, gradients in zip(listening.stds, listening.gradients, strict=True):
        assert len(stds) == len(gradients) == 6
        for std, gradient in zip(stds, gradients, strict=True):
            size = gradient.numel()
            if size < 100:
                continue
            checked += 1
            actual = gradient.square().mean().sqrt().item()
            assert actual == pytest.approx(std, rel=5 / math.sqrt(2 * size))
    assert checked == 8


def test_noise_moves_and_differs_by_group(tmp_path: Path) -> None:
    scheduled = DPSGD(noise_multiplier=2.0, max_grad_norm=3.0, noise_schedule="linear:0.5", delta=1e-3, seed=0)
    stds = told_by(tmp_path / "scheduled", scheduled).stds
    assert [row[0] for row in stds] == pytest.approx([2 * 3 / 12 * f for f in (1, 5 / 6, 4 / 6, 0.5)])
    grouped = VectorGroups(noise_multiplier=2.0, split="dimension", delta=1e-3, seed=0)
    assert len(set(told_by(tmp_path / "grouped", grouped).stds[0])) > 1


def test_without_noise_it_is_told_so_and_without_privacy_nothing(tmp_path: Path) -> None:
    assert told_by(tmp_path / "clipped", ClipOnly(seed=0)).stds == [[0.0] * 6] * 4
    assert told_by(tmp_path / "plain", NonPrivate()).stds == []


class WithOptimizer(Classifier):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def trained(
    folder: Path, make: Callable[[Any], torch.optim.Optimizer], strategy: pl.Callback, steps: int = 6, **options: Any
) -> Tensor:
    torch.manual_seed(3)
    module = WithOptimizer(make)
    start = options.pop("ckpt_path", None)
    trainer = trainer_for(folder, strategy, steps, **options)
    trainer.fit(module, loader_of(pictures()), ckpt_path=start, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return weights_of(module)


def private(noise_multiplier: float = 1.0) -> DPSGD:
    return DPSGD(noise_multiplier=noise_multiplier, delta=1e-3, seed=0)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def make(params: Any) -> DPAdam:
        return DPAdam(params, lr=0.01)

    whole = trained(tmp_path / "whole", make, private(), 6)
    trained(tmp_path / "parts", make, private(), 3)
    resumed = trained(tmp_path / "parts", make, private(), 6, ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert torch.equal(resumed, whole)


def test_known_gradients_of_zero_move_by_the_floor(tmp_path: Path) -> None:
    """The whole way once more, by hand: noise alone, of which the optimizer knows all."""

    class World(Known):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.optimizer = DPAdam(self.parameters(), lr=1.0, betas=(0.0, 0.0), eps=0.0, floor=4.0)
            return self.optimizer

    module = World(2000)
    data = torch.utils.data.TensorDataset(torch.zeros(60, 2000))
    trainer_for(tmp_path, DPSGD(noise_multiplier=3.0, max_grad_norm=2.0, delta=1e-3, seed=0), 1).fit(
        module, loader_of(data)
    )
    # One step: lr g / √max(g² - Φ, 4 Φ), with g = √Φ u, is u / 2 for |u| < √5.
    moved = module.layer.weight.detach().flatten()
    std = 3.0 * 2.0 / 12
    assert module.optimizer.state[module.layer.weight]["noise_avg_sq"] == pytest.approx(std**2)
    inner = moved[moved.abs() < 1.0]
    assert len(inner) > 1800
    assert inner.std().item() == pytest.approx(0.44, abs=0.03)  # of u / 2 within ±1


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
