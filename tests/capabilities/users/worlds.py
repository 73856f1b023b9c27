"""Small worlds of users: their examples, modules of every kind, and the slow truth about their local training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpbench.callback.strategy import PrivateStrategy
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.privacy.randomness import Stream, keyed_generator
from dpbench.records import LocalTraining, Users
from dpbench.strategies import DPSGD
from tests.strategies.worlds import trainer_for

SEED, WIDTH = 0, 4
SIZES = (3, 1, 0, 7, 4, 5, 2, 6, 3, 4, 1, 5)


class Toy(pl.LightningModule):
    """Any network on batches (inputs, targets); SGD with lr 1 at the server, so that an update is what was released."""

    def __init__(self, net: nn.Module, momentum: float = 0.0) -> None:
        super().__init__()
        self.net, self.momentum = net, momentum
        self.history: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = list(batch.values() if isinstance(batch, dict) else batch)[:2]
        outputs = self.net(inputs)
        return (outputs.flatten(1).mean(1) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0, momentum=self.momentum)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1))


def owners(sizes: Sequence[int] = SIZES) -> np.ndarray[Any, Any]:
    """The user of each example, in mixed order."""
    return np.random.default_rng(4).permutation(np.repeat(np.arange(len(sizes)), sizes))


def make_users(
    sizes: Sequence[int] = SIZES, inputs: Tensor | None = None, targets: Tensor | None = None, **options: Any
) -> UserDataset:
    count, generator = sum(sizes), torch.Generator().manual_seed(9)
    if inputs is None:
        inputs = torch.randn(count, WIDTH, generator=generator)
    if targets is None:
        targets = torch.randn(count, generator=generator)
    return UserDataset(Rows(inputs, targets), owners(sizes), names=range(len(sizes)), **options)


def loader_of(users: UserDataset, expected: float = 4, kind: str = "poisson", seed: int = SEED) -> PrivateDataLoader:
    return PrivateDataLoader(users, PrivateBatchSampler(make_sampling(kind, len(users), expected, "user"), seed))


def fit(
    folder: Path,
    module: pl.LightningModule,
    users: UserDataset | None = None,
    steps: int = 2,
    local: LocalTraining | None = None,
    make: Callable[..., PrivateStrategy] = DPSGD,
    loader: PrivateDataLoader | None = None,
    trainer: dict[str, Any] | None = None,
    start: Path | None = None,
    **options: Any,
) -> PrivateStrategy:
    """Train by user."""
    records = Users(local or LocalTraining(lr=0.1, batch_size=2))
    options = {"noise_multiplier": 1.0, "seed": SEED, "delta": 1e-3, "records": records, **options}
    strategy = make(**options)
    loader = loader or loader_of(users if users is not None else make_users())
    trainer_for(folder, strategy, steps, **(trainer or {})).fit(module, loader, ckpt_path=start, weights_only=False)
    return strategy


# ----------------------------------------------------------------------------------------- the slow truth


def batches_of(users: UserDataset, user: int, local: LocalTraining, release: int) -> Iterator[Any]:
    """What a user trains on in a round: the order of its examples, and the model's own numbers, have a key each."""
    generator = keyed_generator((SEED, Stream.LOCAL_TRAINING, release, user))
    torch.set_rng_state(keyed_generator((SEED, Stream.MODEL, release, 0, user)).get_state())
    for positions in local.steps(len(users.rows(user)), generator):
        yield users.batch(user, positions)


def naive_update(server: Toy, users: UserDataset, user: int, local: LocalTraining, release: int) -> list[Tensor]:
    """Server − client by a copy of the module and torch's SGD, in float64; the proximal term is in the loss."""
    client = copy.deepcopy(server).double().train()
    start = [p.detach().clone() for p in client.parameters()]
    trained = [p for p in client.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=local.lr)
    for batch in batches_of(users, user, local, release):
        optimizer.zero_grad()
        batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
        loss = client.loss(batch)
        distance = sum((p - q).square().sum() for p, q in zip(client.parameters(), start, strict=True))
        (loss + local.prox_mu / 2 * distance).backward()
        for p in trained:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        optimizer.step()
    return [q - p.detach() for p, q in zip(client.parameters(), start, strict=True) if p.requires_grad]


def naive_round(
    server: Toy, loader: PrivateDataLoader, local: LocalTraining, release: int, bound: float = 1.0
) -> tuple[list[Tensor], list[float]]:
    """The mean of the clipped updates of a cohort over its expected size; and their norms."""
    users: Any = loader.dataset
    total = [torch.zeros_like(p, dtype=torch.float64) for p in server.parameters() if p.requires_grad]
    norms = []
    for user in loader.lots.lot(release).tolist():
        update = naive_update(server, users, user, local, release)
        norms.append(float(torch.cat([one.flatten() for one in update]).norm()))
        factor = min(1.0, bound / norms[-1]) if norms[-1] else 0.0
        total = [t + factor * u for t, u in zip(total, update, strict=True)]
    return [t / loader.lots.sampling.expected_batch_size for t in total], norms


def naive_training(
    module: Toy, loader: PrivateDataLoader, local: LocalTraining, rounds: int, bound: float = 1.0
) -> Toy:
    """Rounds of plain server steps with lr 1."""
    server = copy.deepcopy(module).double()
    for release in range(rounds):
        step, norms = naive_round(server, loader, local, release, bound)
        assert any(norms)
        with torch.no_grad():
            for p, s in zip([p for p in server.parameters() if p.requires_grad], step, strict=True):
                p.sub_(s)
    return server
