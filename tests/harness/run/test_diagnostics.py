"""Diagnostics: what they say is true, and they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch

from dpbench.data.lots import Lots, make_sampling
from dpbench.harness.reports.plots import plot_diagnostics
from dpbench.harness.run._diagnostics import GradientDiagnostics
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, NonPrivate
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, weights_of


def run(folder: Path, strategy: pl.Callback, module: pl.LightningModule, steps: int, data: Any = None) -> pd.DataFrame:
    folder.mkdir()
    watcher = GradientDiagnostics(every_n_steps=2, folder=RunFolder(folder))
    logger = MetricsCSV(RunFolder(folder))
    trainer = trainer_for(folder, strategy, steps, more=[watcher], logger=logger, log_every_n_steps=1)
    trainer.fit(module, loader_of(data or pictures()))
    logger.save()
    return pd.read_csv(folder / "metrics.csv", index_col="step")


def test_values_where_everything_is_known(tmp_path: Path) -> None:
    rows = torch.randn(60, 5)
    data = torch.utils.data.TensorDataset(rows)
    strategy = DPSGD(max_grad_norm=2.0, noise_multiplier=1.5, seed=0, delta=1e-3, max_physical_batch_size=7)
    table = run(tmp_path / "a", strategy, Known(5), 5, data)
    first = table.loc[1]
    lot = rows[Lots(make_sampling("poisson", 60, 12), 0).lot(0)]
    norms = lot.norm(dim=1)
    pieces = [norms[:7], norms[7:]] if len(norms) > 7 else [norms]
    assert first["nonprivate/grad_norm/layer.weight"] == pytest.approx(np.mean([float(p.mean()) for p in pieces]))
    clipped = np.mean([float((p > 2).double().mean()) for p in pieces])
    assert first["nonprivate/clip_fraction/all"] == pytest.approx(clipped)
    assert first["nonprivate/bound/all"] == 2.0
    total = (lot / (norms[:, None] / 2).clamp(min=1)).sum(0)
    assert first["nonprivate/noise_to_signal/layer.weight"] == pytest.approx(
        3.0 * 5**0.5 / float(total.norm()), rel=1e-4
    )
    assert list(table.dropna(subset="nonprivate/bound/all").index) == [1, 3, 5]


def test_the_histogram_counts_gradient_values(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.tensor([[0.0, 0.02, 0.02, -5.0]]).repeat(60, 1))
    run(tmp_path / "a", NonPrivate(), Known(4), 3, data)
    table = pd.read_csv(RunFolder(tmp_path / "a").gradient_histogram)
    used = table[table["count"] > 0]
    assert (used["count"] / used["count"].sum()).tolist() == [0.25, 0.5, 0.25]
    for (_, row), value in zip(used.iterrows(), (0.0, 0.02, 5.0), strict=True):
        log = np.log10(value) if value else -np.inf
        assert row["log10_from"] <= log <= row["log10_to"]


@pytest.mark.parametrize("private", [True, False])
def test_training_is_the_same_with_and_without(tmp_path: Path, private: bool) -> None:
    def strategy() -> pl.Callback:
        options = {"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, "count_noise_std": 3.0}
        return AdaptiveQuantileClipping(**options) if private else NonPrivate()  # type: ignore[arg-type]

    ends = []
    for name in ("with", "without"):
        torch.manual_seed(3)
        module = Classifier()
        if name == "with":
            run(tmp_path / name, strategy(), module, 6)
        else:
            trainer_for(tmp_path / name, strategy(), 6).fit(module, loader_of(pictures()))
        ends.append(weights_of(module))
    assert torch.equal(*ends)


def test_checkpoints_hold_nothing_of_it(tmp_path: Path) -> None:
    """A checkpoint is what people publish; the counts lie beside it, and a resumed run goes on counting."""
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    watcher = GradientDiagnostics(every_n_steps=1, folder=RunFolder(tmp_path))
    trainer = trainer_for(tmp_path, strategy, 4, more=[watcher], log_every_n_steps=1)
    trainer.fit(Classifier(), loader_of(pictures()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert list(state["callbacks"]) == ["dpbench.PrivateStrategy"]
    before = pd.read_csv(RunFolder(tmp_path).gradient_histogram)["count"].sum()
    again = GradientDiagnostics(every_n_steps=1, folder=RunFolder(tmp_path))
    resumed = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer = trainer_for(tmp_path, resumed, 8, more=[again], log_every_n_steps=1)
    trainer.fit(Classifier(), loader_of(pictures()), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert pd.read_csv(RunFolder(tmp_path).gradient_histogram)["count"].sum() > 1.5 * before


@pytest.mark.drawn
def test_picture(tmp_path: Path) -> None:
    assert plot_diagnostics(RunFolder(tmp_path), "nothing") is None
    run(tmp_path / "a", DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), Classifier(), 5)
    path = plot_diagnostics(RunFolder(tmp_path / "a"), "run")
    assert path is not None and path.name.startswith("nonprivate") and path.stat().st_size > 10_000
