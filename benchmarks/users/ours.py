"""Our round: a Lightning Trainer with the source of users, ledger, noise and all, whatever the task's network."""

from __future__ import annotations

import logging
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.orders import Orders
from benchmarks.users.tasks import CLIP, MOMENTUM, NOISE, Task, loss
from dpbench.capabilities.users.cohorts import Users
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.local_training import LocalTraining
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.strategies import DPSGD

_POPULATION = 4  # times the cohort


class Network(pl.LightningModule):
    """Trains a network, and knows nothing of users."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Loss of rows."""
        return loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server's."""
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=MOMENTUM)


class _Conductor(pl.Callback):
    """Makes the trainer's loop make a round for each that is ordered."""

    def __init__(self, orders: Orders, facts: dict[str, Any]) -> None:
        self._orders = orders
        self._facts = facts

    def on_train_start(self, *_: Any) -> None:
        self._orders.say(**self._facts)
        self._orders.advance()

    def on_train_batch_end(self, *_: Any) -> None:
        self._orders.advance()


def fit(task: Task, users: int, callbacks: list[pl.Callback], max_steps: int = -1) -> pl.Trainer:
    """Train rounds of `users` users, of four times as many; of a fixed number, so that all are equally long."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    population = _POPULATION * users
    rows = Rows(*(x.flatten(0, 1) for x in task.data(population)))
    dataset = UserDataset(rows, torch.arange(population).repeat_interleave(task.rows_of_user))
    lots = PrivateBatchSampler(make_sampling("fixed_size", population, users, unit=UserDataset.unit), seed=1)
    records = Users(LocalTraining(lr=task.lr, batch_size=task.batch))
    strategy = DPSGD(noise_multiplier=NOISE, max_grad_norm=CLIP, delta=1e-5, records=records)
    with TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            callbacks=[strategy, *callbacks],
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(Network(task.model()), PrivateDataLoader(dataset, lots))
    return trainer


def serve(task: Task, users: int, orders: Orders, facts: dict[str, Any]) -> None:
    """Train as long as rounds are ordered, once `facts` were said."""
    fit(task, users, [_Conductor(orders, facts)])
