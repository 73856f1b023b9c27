"""Optimizers that know how much noise is in a private gradient: post-processing, which costs no privacy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpbench.options import Decay, NonNegative, Positive, check_options

NoiseStds = Callable[[], Mapping[Tensor, float]]
"""Gives the standard deviation of the noise on each coordinate of a parameter's present gradient."""


@runtime_checkable
class NoiseAware(Protocol):
    """An optimizer that knows the noise in its gradients: any with this method, called in private training only."""

    def follow_noise(self, noise_stds: NoiseStds | None) -> None:
        """Receive, before the first step of a training, the source of each step's noise.

        Args:
            noise_stds: Asked within `step`, after the closure: standard deviation of the noise on each coordinate of
                `p.grad`, for each parameter with a private gradient. None: the training is over.
        """


class DPAdam(Optimizer):
    """Adam with a second moment corrected for the noise of the private gradients: DP-AdamBC.

    Noise of variance Φ = (noise_multiplier × max_grad_norm / expected_batch_size)² adds Φ to the second moment of each
    coordinate, so that Adam divides all of them by nearly the same number where noise prevails, and steps like SGD with
    momentum. Here a step is

        θ ← θ - lr m̂ / (√max(v̂ - Φ, floor Φ) + eps)

    with Adam's bias-corrected moments m̂ and v̂ (Tang, Shpilevskiy & Lécuyer 2023, arXiv 2312.14334; their γ' is floor Φ
    here). Φ is that of each parameter's own noise, averaged over the steps as v̂ is, so that noise may change from step
    to step and differ among clipping groups. Without noise it is `torch.optim.Adam`, to the last bit.

    Coordinates that are all noise are divided by √(floor Φ), where Adam divides by √Φ: at the same learning rate they
    move further.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the averages of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Added to the gradient, times the parameter, as in Adam.
        floor: Least second moment, in units of Φ. The estimate v̂ of pure noise has the relative standard deviation
            √(2 (1 - β₂) / (1 + β₂)), 0.03 with β₂ = 0.999: a floor below it leaves much to chance.

    Raises:
        ConfigurationError: An option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: NonNegative = 1e-3,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NonNegative = 1e-8,
        weight_decay: NonNegative = 0.0,
        floor: Positive = 0.1,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "floor": floor,
        }
        self._noise_stds: NoiseStds | None = None
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_options(DPAdam, {name: group[name] for name in defaults})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and pickles of an optimizer hold what torch knows of it.
        super().__setstate__(state)
        self._noise_stds = None

    def follow_noise(self, noise_stds: NoiseStds | None) -> None:
        """See `NoiseAware`; None: the gradients have no noise."""
        self._noise_stds = noise_stds

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the gradients in `p.grad`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stds: Mapping[Tensor, float] = {}
        if self._noise_stds is not None:
            stds = self._noise_stds()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, stds.get(parameter, 0.0))
        return loss

    def _update(
        self,
        parameter: Tensor,
        group: Mapping[str, Any],
        noise_std: float,
    ) -> None:
        gradient = parameter.grad
        assert gradient is not None
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["noise_avg_sq"] = 0.0
        state["step"] += 1
        state["noise_avg_sq"] = beta2 * state["noise_avg_sq"] + (1 - beta2) * noise_std**2
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        mean = state["exp_avg"]
        squares = state["exp_avg_sq"]
        noise = state["noise_avg_sq"]
        # The operations of torch.optim.Adam, in its order.
        mean.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if noise:
            squares = (squares - noise).clamp_(min=group["floor"] * noise)
        bias1 = 1 - beta1 ** state["step"]
        bias2 = 1 - beta2 ** state["step"]
        denominator = (squares.sqrt() / bias2**0.5).add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-float(group["lr"]) / bias1)
