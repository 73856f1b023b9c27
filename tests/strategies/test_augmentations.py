"""Augmentation multiplicity: the views of an image are one record, whose mean gradient is clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.data.views import ImageOfView
from tests.data.test_views import VIEWS, data_of
from tests.strategies.worlds import Known, fit, weights_of


class Linear(Known):
    """A linear classifier of small images, with large gradients."""

    def __init__(self) -> None:
        super().__init__(64)
        torch.manual_seed(3)
        self.layer = nn.Linear(64, 10)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_a_record_moves_the_sum_by_its_bound(tmp_path: Path) -> None:
    """One record leaves the lot, with all of its views: the sum moves by the bound, and by no multiple of it."""
    sampling = make_sampling("poisson", 40, 12)
    without = np.ones(40, bool)
    without[PrivateBatchSampler(sampling, 0).lot(0)[0]] = False
    augmented = data_of().train_dataloader().dataset
    ends = []
    for members in (np.ones(40, bool), without):
        module = Linear()
        lots = PrivateBatchSampler(sampling, 0, members=members)
        loader = PrivateDataLoader(augmented, lots, None, ImageOfView(VIEWS))
        fit(tmp_path / str(len(ends)), module, 1, loader=loader, noise_multiplier=1e-9, max_grad_norm=0.5)
        ends.append(12 * weights_of(module))
    assert float((ends[0] - ends[1]).norm()) == pytest.approx(0.5, abs=1e-4)
