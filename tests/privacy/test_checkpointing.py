"""Activation checkpointing: layers run again in the backward pass, where nothing of them may count twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.one_by_one import OneByOne
from tests.privacy.exact import Networks, assert_each_exact, assert_exact_in_its_pass
from tests.support.reference import mean_square

RECORDS = 5
TOKENS = 4
WIDTH = 6


class Places(nn.Module):
    """Embeddings of places, which all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(TOKENS)[None])


class Recurrent(nn.Module):
    """Computed from its parts while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Checkpointed(nn.Module):
    """Runs its body once for the loss, and once more going back."""

    def __init__(self, body: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.body, self.use_reentrant = body, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


def network(*body: nn.Module, use_reentrant: bool = False) -> nn.Module:
    checkpointed = Checkpointed(nn.Sequential(*body), use_reentrant)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), checkpointed, nn.Linear(WIDTH, 3))


def convolutions(use_reentrant: bool = False) -> nn.Module:
    body = nn.Conv1d(TOKENS, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 1)
    return network(*body, use_reentrant=use_reentrant)


NETWORKS: Networks = {
    "convolutions": (convolutions, (TOKENS, WIDTH)),
    "lstm": (lambda: network(Recurrent()), (TOKENS, WIDTH)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_each_record_alone(name: str) -> None:
    assert_each_exact(NETWORKS, name, (RECORDS,))


def test_what_all_records_share() -> None:
    x = torch.randn(RECORDS, TOKENS, WIDTH, dtype=torch.float64)
    assert_exact_in_its_pass(network(Places()).double(), x, tags=True)


def test_nothing_is_kept_of_what_runs_again() -> None:
    model = convolutions()
    inputs: list[StorageWeakRef] = []

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    model[1].body[2].register_forward_pre_hook(note)  # type: ignore[index,union-attr]
    engine = PerRecordEngine(model)
    gradients = engine.backward(mean_square(model, torch.randn(RECORDS, TOKENS, WIDTH)), RECORDS)
    first, again = inputs
    assert not first.expired(), gradients  # gradients are made of it
    assert again.expired()


@pytest.mark.parametrize(("method", "verify"), [(PerRecordEngine, False), (OneByOne, True)])
def test_reentrant_checkpointing_is_refused(method: type[Any], verify: bool) -> None:
    model = convolutions(use_reentrant=True)
    gradients = method(model)
    with pytest.raises(UnsupportedModuleError, match="use_reentrant=False"):
        gradients.backward(mean_square(model, torch.randn(1, TOKENS, WIDTH)), 1, verify)
    assert all(p.grad is None for p in model.parameters())
