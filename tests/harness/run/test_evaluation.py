"""Scores of single records: in order, as in a test, and without a trace in the training around them."""

from __future__ import annotations

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.harness.run.evaluation import evaluating, score_members, score_records


class Scores(pl.LightningModule):
    """A network whose outputs are random while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.dropout = nn.Dropout()
        self.frozen = nn.Dropout().eval()

    def score(self, batch: tuple[Tensor]) -> Tensor:
        assert not torch.is_grad_enabled()
        outputs: Tensor = self.frozen(self.dropout(self.layer(batch[0])))
        return outputs[:, 0]


def batches(records: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(records), batch_size=4)


@pytest.fixture
def module() -> Scores:
    torch.manual_seed(0)
    return Scores().train()


def test_scores_are_those_of_the_weights_in_order(module: Scores) -> None:
    members, others = torch.randn(10, 3), torch.randn(7, 3)
    scores = score_members(module, batches(members), batches(others), module.score)
    for found, records in zip(scores, (members, others), strict=True):
        expected = module.layer(records)[:, 0].detach().double().numpy()
        assert found.dtype == np.float64 and found == pytest.approx(expected, abs=1e-6)
    two = score_records(module, batches(members), lambda batch: module.score(batch)[:, None].expand(-1, 2))
    assert two.shape == (10, 2) and np.array_equal(two[:, 1], scores.members)


def test_a_training_does_not_notice(module: Scores) -> None:
    module.frozen.eval()
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    score_records(module, batches(torch.ones(10, 3)), lambda batch: module.score(batch) + torch.rand(()))
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in module.modules()] == modes and len(set(modes)) == 2
    assert torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), evaluating(module):
        1 / 0  # noqa: B018
    assert [part.training for part in module.modules()] == modes
