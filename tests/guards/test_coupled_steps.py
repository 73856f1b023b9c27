"""Steps by which one record changes the gradients of others: the record axis calls none of them separable.

Those that differ by an operator or a kind of memory are in `tests/privacy/record_axis`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.errors import UnsupportedModuleError
from dpbench.strategies import DPSGD
from tests.guards.coupling_worlds import Step, Steps, lots_of, vectors, verdicts
from tests.strategies.worlds import loader_of, trainer_for

OfTensor = Callable[[Tensor], Tensor]


def each(module: Steps, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1], reduction="none")


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


INPUTS: dict[str, OfTensor] = {
    "over_the_maximum": lambda x: x / x.max(),
    "centered": lambda x: x - x.mean(0),
    "fake_quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, float(x.abs().max()), 0, -8, 7),
    "group_norm_over_folded_batch": lambda x: F.group_norm(x.t()[None], 3)[0].t(),
    "ghost_batch_norm": lambda x: torch.cat([F.layer_norm(part.t(), [len(part)]).t() for part in x.split(4)]),
    "mixup": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
}
"""Of the records that the network is given."""

WEIGHTS: dict[str, OfTensor] = {
    "by_the_median": lambda losses: losses > losses.median(),
    "ranks": lambda losses: losses.argsort().argsort(),
    "experts_with_capacity": lambda losses: F.one_hot((losses > 1).long(), 2).cumsum(0)[:, 0] <= len(losses) // 4,
}
"""Of losses, by what all losses are."""

LOSSES: dict[str, OfTensor] = {
    "clamped_mean": lambda losses: losses.mean().clamp(max=20.0),
    "skipped_when_large": lambda losses: losses.mean() if float(losses.detach().mean()) < 50 else losses.mean() * 0,
    "hard_examples": lambda losses: losses.topk(len(losses) // 2).values.mean(),
    "sampled_by_losses": lambda losses: losses[torch.multinomial(losses.detach(), len(losses), True)].mean(),
    "total": lambda losses: losses.sum(),
    "number_behind_random_numbers_of_half": lambda losses: (losses + torch.randn(len(losses) // 2, 1)[0]).sum(),
}
"""Of the step, by the losses of its records."""

COUPLED: dict[str, Step] = {
    **{name: lambda module, b, of=of: each(module, (of(b[0]), b[1])).mean() for name, of in INPUTS.items()},
    **{name: lambda m, b, of=of: (each(m, b) * of(each(m, b).detach())).mean() for name, of in WEIGHTS.items()},
    **{name: lambda module, b, of=of: of(each(module, b)) for name, of in LOSSES.items()},
    "class_weights_in_a_mean": lambda module, b: F.cross_entropy(
        module.net(b[0]), b[1], weight=torch.tensor([0.2, 1.0, 3.0])
    ),
}
BY_NUMBER: dict[str, Step] = {
    "scaled_by_the_number": lambda module, b: each(module, b).mean() * math.sqrt(len(b[0])),
    "temperature_of_the_number": lambda module, b: each(module, (F.dropout(b[0], 0.3) / len(b[0]), b[1])).mean(),
}
"""No number of a record is in `len(x)`, so that half a batch has to show it."""

EARLIER: dict[str, Step] = {}


def coupled(step: Step) -> Step:
    COUPLED[step.__name__] = step
    return step


def earlier(step: Step) -> Step:
    EARLIER[step.__name__] = step
    return step


@coupled
def global_gradient_penalty(module: Steps, batch: Any) -> Tensor:
    x = batch[0].detach().requires_grad_()
    losses = each(module, (x, batch[1]))
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses.mean() + 0.1 * (gradient.norm() - 1).square()


@earlier
def center_of_outputs(module: Steps, batch: Any) -> Tensor:
    out = module.net(batch[0])
    loss = (out - module.__dict__.get("center", 0)).square().sum(1).mean()
    module.center = out.detach().mean(0)
    return loss


@earlier
def queue_of_negatives(module: Steps, batch: Any) -> Tensor:
    z = module.net(batch[0])
    bank = module.__dict__.setdefault("bank", deque([torch.ones(3)], maxlen=64))
    loss = (z @ torch.stack(list(bank)).T).logsumexp(1).mean()
    bank.extend(z.detach())
    return loss


@earlier
def over_the_running_mean(module: Steps, batch: Any) -> Tensor:
    loss = each(module, batch).mean()
    before = module.__dict__.get("average", 1.0)
    module.average = 0.9 * before + 0.1 * loss.item()
    return loss / before


@earlier
def few_entries_of_a_large_memory(module: Steps, batch: Any) -> Tensor:
    out = module.net(batch[0])
    before = module.__dict__.setdefault("memory", torch.ones(2000, 3))
    module.memory = before.clone()
    module.memory[module.lots * 20 + torch.arange(len(out)) % 20] = out.detach()
    return (out * before[torch.randint(2000, (len(out),))]).logsumexp(1).mean()


def kinds(step: Step, lots: int) -> set[str]:
    """Kinds of the verdicts on some batches."""
    torch.manual_seed(0)
    np.random.seed(0)
    sizes = range(20, 20 + lots)
    return {verdict.kind for verdict in verdicts(Steps(small_net(), step), lots_of(vectors, sizes, 0), sizes)}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_steps_are_not_separable(name: str) -> None:
    assert kinds(COUPLED[name], 1) <= {"mixed", "reads"}


@pytest.mark.parametrize("name", EARLIER)
def test_records_of_earlier_lots_are_seen(name: str) -> None:
    assert kinds(EARLIER[name], 4) & {"kept", "reads"}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_the_number_of_records_is_asked_for(tmp_path: Path, name: str) -> None:
    class Trained(Steps):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert kinds(BY_NUMBER[name], 1) == {"separable"}
    x, y = vectors(torch.Generator().manual_seed(0), 100)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    with pytest.raises(UnsupportedModuleError, match="depends on the number of records"):
        trainer_for(tmp_path, strategy, 2).fit(
            Trained(small_net(), BY_NUMBER[name]), loader_of(TensorDataset(x, y), 40)
        )
