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
        self.layer = nn.Sequential(nn.Linear(3, 1), nn.Dropout(), nn.Dropout().eval())

    def score(self, batch: tuple[Tensor]) -> Tensor:
        assert not torch.is_grad_enabled()
        outputs: Tensor = self.layer(batch[0])
        return outputs[:, 0]


def test_scores_are_those_of_the_weights_in_order_and_a_training_does_not_notice() -> None:
    module = Scores()
    records = torch.randn(10, 3)
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    loader, other = (DataLoader(TensorDataset(part), batch_size=4) for part in (records, records[:7]))
    scores = score_members(module, loader, other, module.score)
    expected = module.layer[0](records)[:, 0].detach().double().numpy()
    assert scores.members.dtype == np.float64
    assert scores.members == pytest.approx(expected, abs=1e-6)
    assert scores.others == pytest.approx(expected[:7], abs=1e-6)
    assert score_records(module, loader, lambda batch: batch[0] + torch.rand(3)).shape == (10, 3)
    with pytest.raises(ZeroDivisionError), evaluating(module):
        1 / 0  # noqa: B018
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert [part.training for part in module.modules()] == modes and len(set(modes)) == 2
