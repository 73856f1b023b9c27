"""What other rooms do for users, too: checks, guards, random numbers, and figures of training records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpbench
from dpbench import LocalTraining, PrivateLoop, UserDataset, Users
from dpbench.capabilities.users.module import UserDataModule
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD
from tests.capabilities.users.worlds import WIDTH, Toy, linear, loader_of, make_users
from tests.data.test_fetching import SIZE, First
from tests.harness.run.test_training_records import TRAINED, accuracy, ended, state


def mean_loss(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch[0])[:, 0] - batch[1]).square().mean()


def test_a_check_says_that_users_are_trained_one_by_one() -> None:
    checked = dpbench.check(Toy(linear()), None, Users(LocalTraining(lr=0.1)))
    assert (checked.kind, str(checked)) == ("unchecked", "not checked: users are trained one by one")


def test_a_loop_knows_no_local_training(tmp_path: Path) -> None:
    net = nn.Linear(WIDTH, 1)
    strategy = DPSGD(noise_multiplier=1.0, ledger=str(tmp_path / "l.jsonl"), records=Users(LocalTraining(lr=0.1)))
    loop = PrivateLoop(net, torch.optim.SGD(net.parameters(), 0.1), loader_of(make_users()), strategy, mean_loss, 5)
    with pytest.raises(ConfigurationError, match="does not support training by user"):
        list(loop)


def test_examples_of_users_are_watched_in_private_training() -> None:
    users = UserDataset(First(), np.arange(SIZE) % 8)
    users.batch(1, [0, 1, 2, 3, 4])  # as long as nothing is private
    PrivateDataLoader.poisson(users, 4)
    with pytest.raises(ConfigurationError, match="at other indices"):
        [users.batch(user, range(5)) for user in range(8)]


def test_users_train_on_the_examples_that_are_measured(tmp_path: Path) -> None:
    model = ["data=digits_users", "records=users", "data.expected_batch_size=20", "model=mlp", "model.hidden=[8]"]
    metrics = ended(tmp_path / "a", "diagnostics.training_records=200", model=model)
    data: Any = UserDataModule("digits_users")
    images, labels = next(iter(data.seen_dataloader(200)))
    assert len(labels) == 200
    assert metrics[TRAINED] == pytest.approx(accuracy(state(tmp_path / "a"), images, labels), abs=1e-6)
