"""Augmentation multiplicity: the views of an image are one record, whose mean gradient is clipped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader, make_sampling
from dpbench.data.views import ImageOfView
from tests.data.test_views import VIEWS, data_of
from tests.strategies.worlds import Known, fit, weights_of

QUIET = 1e-9


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


private = partial(fit, noise_multiplier=QUIET, max_grad_norm=0.5)


@pytest.mark.parametrize("left_out", [False, True], ids=["same", "neighbor"])
def test_a_record_moves_the_sum_by_its_bound(tmp_path: Path, left_out: bool) -> None:
    """One record leaves the lot, with all of its views: the sum moves by the bound, and by no multiple of it."""
    lots = PrivateBatchSampler(make_sampling("poisson", 40, 12), 0)
    members = np.ones(40, bool)
    members[lots.lot(0)[0]] = not left_out
    augmented = data_of().train_dataloader().dataset
    ends = []
    for present in (np.ones(40, bool), members):
        module = Linear()
        start = weights_of(module)
        loader = PrivateDataLoader(
            augmented, PrivateBatchSampler(lots.sampling, 0, members=present), None, ImageOfView(VIEWS)
        )
        private(tmp_path / str(len(ends)), module, 1, loader=loader)
        ends.append(12 * (start - weights_of(module)).double())
    moved = float((ends[0] - ends[1]).norm())
    assert moved == pytest.approx(0.5 * left_out, abs=1e-4)
