"""Diagnostics: what they say is true, and they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.harness.reports.plots import plot_diagnostics
from dpbench.harness.run._diagnostics import GradientDiagnostics
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, weights_of


def run(
    folder: Path, strategy: pl.Callback, module: pl.LightningModule, steps: int, data: Any = None, start: Any = None
) -> pl.Trainer:
    """A training with diagnostics at every second step."""
    watcher = GradientDiagnostics(every_n_steps=2, folder=RunFolder(folder))
    logger = MetricsCSV(RunFolder(folder))
    trainer = trainer_for(folder, strategy, steps, more=[watcher], logger=logger, log_every_n_steps=1)
    trainer.fit(module, loader_of(data or pictures()), ckpt_path=start, weights_only=False)
    logger.save()
    return trainer


def test_values_where_everything_is_known(tmp_path: Path) -> None:
    rows = torch.randn(60, 5)
    strategy = DPSGD(max_grad_norm=2.0, noise_multiplier=1.5, seed=0, delta=1e-3, max_physical_batch_size=7)
    run(tmp_path, strategy, Known(5), 5, TensorDataset(rows))
    table = pd.read_csv(tmp_path / "metrics.csv", index_col="step")
    lot = rows[PrivateBatchSampler(make_sampling("poisson", 60, 12), 0).lot(0)]
    norms = lot.norm(dim=1)
    pieces = norms.split(7)
    total = (lot / (norms[:, None] / 2).clamp(min=1)).sum(0)
    expected = {
        "grad_norm/layer.weight": torch.stack([piece.mean() for piece in pieces]).mean(),
        "clip_fraction/all": torch.stack([(piece > 2).double().mean() for piece in pieces]).mean(),
        "bound/all": 2.0,
        "noise_to_signal/layer.weight": 3.0 * 5**0.5 / total.norm(),
    }
    for name, value in expected.items():
        assert table.loc[1, f"nonprivate/{name}"] == pytest.approx(float(value), rel=1e-4)
    assert list(table.dropna(subset="nonprivate/bound/all").index) == [1, 3, 5]


def adaptive() -> pl.Callback:
    return AdaptiveQuantileClipping(noise_multiplier=1.0, seed=0, delta=1e-3, count_noise_std=3.0)


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    torch.manual_seed(3)
    watched = Classifier()
    run(tmp_path, adaptive(), watched, 4)
    torch.manual_seed(3)
    alone = Classifier()
    trainer_for(tmp_path, adaptive(), 4).fit(alone, loader_of(pictures()))
    assert torch.equal(weights_of(watched), weights_of(alone))


@pytest.mark.drawn
def test_checkpoints_hold_nothing_of_it(tmp_path: Path) -> None:
    """A checkpoint is what people publish; the counts lie beside it, and a resumed run goes on counting."""
    folder = RunFolder(tmp_path)
    assert plot_diagnostics(folder, "nothing") is None
    data = TensorDataset(torch.tensor([[0.0, 0.02, 0.02, -5.0]]).repeat(60, 1))
    counts = []
    for steps, start in ((4, None), (8, tmp_path / "4.ckpt")):
        strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
        run(tmp_path, strategy, Known(4), steps, data, start).save_checkpoint(tmp_path / f"{steps}.ckpt")
        table = pd.read_csv(folder.gradient_histogram)
        used = table[table["count"] > 0]
        counts.append(used["count"].sum())
        assert (used["count"] / counts[-1]).tolist() == [0.25, 0.5, 0.25]
        assert (10 ** used["log10_from"] <= [0.0, 0.02, 5.0]).all() and (10 ** used["log10_to"] >= [0.0, 0.02, 5]).all()
    assert list(torch.load(tmp_path / "4.ckpt", weights_only=False)["callbacks"]) == ["dpbench.PrivateStrategy"]
    assert counts[1] > 1.5 * counts[0]
    path = plot_diagnostics(folder, "run")
    assert path is not None and path.name.startswith("nonprivate") and path.stat().st_size > 10_000
