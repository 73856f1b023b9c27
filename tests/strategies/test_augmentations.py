"""Augmentation multiplicity: the views of an image are one record, whose mean gradient is clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.views import ImageOfView
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.runs.folder import RunFolder
from dpbench.strategies import DPSGD
from tests.data.test_views import VIEWS, data_of
from tests.strategies.worlds import Known, trainer_for, weights_of

QUIET = 1e-9


class Linear(Known):
    """A linear classifier of small images, with large gradients."""

    def __init__(self) -> None:
        super().__init__(64)
        torch.manual_seed(3)
        self.layer = nn.Linear(64, 10)
        self.batches: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def private(**options: Any) -> DPSGD:
    return DPSGD(**{"noise_multiplier": QUIET, "max_grad_norm": 0.5, "seed": 0, "delta": 1e-3, **options})


@pytest.mark.parametrize("size", [None, 4], ids=["whole", "pieces"])
def test_the_mean_gradient_of_the_views_is_clipped(tmp_path: Path, size: int | None) -> None:
    """Exact: record by record in float64, by the loss that is the mean over a record's views."""
    module = Linear()
    reference = Linear().double()
    loader = data_of().train_dataloader()
    trainer_for(tmp_path, private(max_physical_batch_size=size), 3).fit(module, data_of().train_dataloader())
    norms = []
    for step in range(3):
        loader.lots.position = step
        images, labels = next(iter(loader))
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for start in range(0, len(labels), VIEWS):
            rows = slice(start, start + VIEWS)
            gradient = torch.autograd.grad(
                reference.loss((images[rows].double(), labels[rows])),
                list(reference.parameters()),
            )
            norms.append(float(torch.cat([g.flatten() for g in gradient]).norm()))
            for part, g in zip(total, gradient, strict=True):
                part += g * min(1.0, 0.5 / norms[-1])
        with torch.no_grad():
            for p, part in zip(reference.parameters(), total, strict=True):
                p -= part / 12
    assert min(norms) > 0.5  # all are clipped, and each view alone would be, too
    torch.testing.assert_close(weights_of(module).double(), weights_of(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("left_out", [False, True], ids=["same", "neighbor"])
def test_a_record_moves_the_sum_by_its_bound(tmp_path: Path, left_out: bool) -> None:
    """One record leaves the lot, with all of its views: the sum moves by the bound, and by no multiple of it."""
    lots = Lots(make_sampling("poisson", 40, 12), 0)
    members = np.ones(40, bool)
    members[lots.lot(0)[0]] = not left_out
    augmented = data_of().train_dataloader().dataset
    ends = []
    for present in (np.ones(40, bool), members):
        module = Linear()
        start = weights_of(module)
        loader = LotLoader(augmented, Lots(lots.sampling, 0, members=present), None, ImageOfView(VIEWS))
        trainer_for(tmp_path / str(len(ends)), private(), 1).fit(module, loader)
        ends.append(12 * (start - weights_of(module)).double())
    moved = float((ends[0] - ends[1]).norm())
    assert moved == pytest.approx(0.5 * left_out, abs=1e-4)


def test_a_resumed_training_makes_the_same_views(tmp_path: Path) -> None:
    ends = []
    for run, start, steps in (
        ("whole", None, 6),
        ("parts", None, 4),
        ("parts", RunFolder(tmp_path / "parts").checkpoint, 6),
    ):
        folder = RunFolder(tmp_path / run)
        module = Linear()
        callbacks = [private(noise_multiplier=1.0), LastCheckpoint(folder, every_n_steps=2)]
        trainer = trainer_for(tmp_path / run, private(), steps, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, data_of().train_dataloader(), ckpt_path=start, weights_only=False)
        ends.append((weights_of(module), module.batches))
    whole, _, resumed = ends
    assert torch.equal(whole[0], resumed[0])
    assert all(map(torch.equal, whole[1][-2:], resumed[1][-2:]))
    assert not torch.equal(whole[1][0][:VIEWS], whole[1][1][:VIEWS])


@pytest.mark.slow
@pytest.mark.own_key
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:It is recommended to use")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    ends = []
    for options in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        module = Linear()
        trainer = trainer_for(tmp_path / str(len(ends)), private(), 4, **options)
        trainer.fit(module, data_of().train_dataloader())
        ends.append(weights_of(module))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
