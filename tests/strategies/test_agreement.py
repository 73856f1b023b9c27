"""Processes that have other records are refused; those whose sums differ have noise of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.guards.agreement import are_alike, refuse_other_records
from dpbench.privacy.randomness import noise_key

X, Y = torch.randn(200, 3, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 4


def compare(first: Dataset[Any], other: Dataset[Any]) -> list[str | None]:
    """What the first process says of its records, which the other one is told."""
    said: list[Any] = []

    def broadcast(own: Any) -> Any:
        said.append(own)
        return said[0]

    strategy = SimpleNamespace(broadcast=broadcast, reduce_boolean_decision=lambda decision, all=True: decision)
    for dataset in (first, other):
        refuse_other_records(
            SimpleNamespace(world_size=2, strategy=strategy), PrivateDataLoader.poisson(dataset, 20, seed=0)
        )
    return said[0]


class Augmented(TensorDataset):
    """Records that are others each time."""

    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        return X[position] + torch.randn(3), Y[position]


def test_the_same_records_pass() -> None:
    compare(TensorDataset(X, Y), TensorDataset(X.clone(), Y.clone()))
    refuse_other_records(SimpleNamespace(world_size=1), None)  # type: ignore[arg-type]  # one process is not asked


def test_random_records_cannot_be_compared_and_nothing_is_drawn() -> None:
    state = torch.get_rng_state()
    assert compare(Augmented(X, Y), Augmented(X, Y))[1:] == [None] * 64
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "other",
    [TensorDataset(X.flip(0), Y.flip(0)), TensorDataset(X[1:], Y[1:]), TensorDataset(X + 1e-6, Y.int())],
    ids=["order", "number", "values"],
)
def test_other_records_are_refused(other: Dataset[Any]) -> None:
    with pytest.raises(ConfigurationError, match="different training records, or a different order"):
        compare(TensorDataset(X, Y), other)


def test_sums_of_a_share_are_alike_without_dropout_only() -> None:
    assert are_alike(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)))
    for one in (nn.Dropout(0.1), nn.AlphaDropout(), nn.LSTM(2, 2, 2, dropout=0.1), nn.MultiheadAttention(2, 1, 0.2)):
        assert not are_alike(nn.Sequential(nn.Linear(2, 2), one))


def test_keys_of_noise_differ() -> None:
    keys = {noise_key(1, 2, 0, 3, processes) for processes in (1, 2, 4)}
    assert len(keys) == 3 and noise_key(1, 2, 0, 3) in keys
