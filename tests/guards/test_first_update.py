"""The first update is compared with the release that it follows: what moved, and what did not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for

OTHERS = "has changed net.0.bias, for which nothing was released"
STILL = "has not changed net.0.weight, .* in its first step, though their released gradients are not zero"


class Decaying(Optimizer):
    """Decays all that it has, frozen or not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        return loss


class OnCopies(SGD):
    """Moves copies that nobody looks at."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        copies = [p.detach().clone() for p in self.param_groups[0]["params"]]
        for p, copy in zip(self.param_groups[0]["params"], copies, strict=True):
            if p.grad is not None:
                copy.sub_(p.grad)
        return loss


class Of(Classifier):
    def __init__(self, make: Any, schedule: Any = None, manual: bool = False) -> None:
        super().__init__(manual)
        self.make = make
        self.schedule = schedule
        self.net[0].bias.requires_grad_(False)
        torch.nn.init.ones_(self.net[0].bias)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


def fit(folder: Path, module: Classifier, steps: int = 3) -> None:
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=0)
    trainer_for(folder, strategy, steps).fit(module, loader_of(pictures()))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(("make", "message"), [(Decaying, OTHERS), (OnCopies, STILL)])
def test_what_is_told(tmp_path: Path, make: Any, message: str, manual: bool) -> None:
    with pytest.warns(UserWarning, match=message) as told:
        fit(tmp_path, Of(make, manual=manual))
    assert len([one for one in told if make.__name__ in str(one.message)]) == 1


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.5, weight_decay=0.1), lambda p: Adam(p, lr=0.1)])
def test_of_torchs_optimizers_nothing(tmp_path: Path, make: Any, manual: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(was released|in its first step)")
        fit(tmp_path, Of(make, manual=manual))


def test_a_learning_rate_of_zero_is_no_update(tmp_path: Path) -> None:
    """Warm-up: the comparison waits for the first step that is one."""

    def warm(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 2) / 2)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(was released|in its first step)")
        fit(tmp_path, Of(lambda p: SGD(p, lr=0.5), warm))
    with pytest.warns(UserWarning, match=STILL):
        fit(tmp_path / "copies", Of(lambda p: OnCopies(p, lr=0.5), warm))
