"""Recurrent layers, attention and transformers, trained privately: a record moves what is released by its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, trainer_for, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
SIZE, BOUND = 24, 0.5


class LastState(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(x if self.layer.batch_first else x.transpose(0, 1))[1]
        return (states[0] if isinstance(states, tuple) else states)[-1]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0].mean(1)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).mean(0)


NETWORKS = {
    "lstm": lambda: LastState(nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)),
    "gru": lambda: LastState(nn.GRU(4, 4, bidirectional=True)),
    "rnn": lambda: LastState(nn.RNN(4, 4, batch_first=True)),
    "attention": SelfAttention,
    "transformer": SequenceFirst,
}


class Weighted(pl.LightningModule):
    """The loss of a record counts with a weight: one of weight zero might as well not be there."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, weight = batch
        return (weight * self.head(self.net(x)).squeeze(1).square()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def released(folder: Path, network: str, weight: float, scale: float) -> Tensor:
    """Sum of the first lot with its noise, where record 0 has this weight in the loss."""
    torch.manual_seed(1)
    module = Weighted(NETWORKS[network]())
    x, weights = torch.randn(SIZE, 5, 4), torch.ones(SIZE)
    x[0] *= scale
    weights[0] = weight
    before = weights_of(module)
    strategy = DPSGD(noise_multiplier=0.1, max_grad_norm=BOUND, seed=3, ledger=str(folder / f"{weight}.jsonl"))
    trainer_for(folder, strategy, 1).fit(module, loader_of(TensorDataset(x, weights), SIZE, kind="poisson"))
    return (before - weights_of(module)) * SIZE


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_record_moves_the_release_by_at_most_its_bound(network: str, scale: float, tmp_path: Path) -> None:
    present = released(tmp_path, network, 1e6, scale)  # its gradient is far above the bound
    moved = float((present - released(tmp_path, network, 0.0, scale)).norm())
    assert 0.99 * BOUND < moved <= BOUND * (1 + 1e-4)
