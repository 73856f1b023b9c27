"""Life in a notebook: fitting again with the same objects, asking too early, folders that are used."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from dpbench import DPSGD, LotLoader
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for, weights_of


def releases(folder: Path) -> int:
    return len(read_ledger(folder / "ledger.jsonl").releases)


def test_a_new_run_in_another_folder(tmp_path: Path) -> None:
    private = DPSGD(target_epsilon=3.0, delta=1e-3, seed=0)
    noise, ends = [], []
    for name, steps in (("a", 5), ("b", 5), ("c", 9)):
        torch.manual_seed(3)
        module = Classifier()
        trainer_for(tmp_path / name, private, steps).fit(module, loader_of(pictures()))
        assert releases(tmp_path / name) == private.releases == steps
        assert 2.99 < private.epsilon() <= 3.0
        noise.append(private.noise_multiplier)
        ends.append(weights_of(module))
    assert noise[0] == noise[1] < noise[2]  # solved for again
    assert torch.equal(ends[0], ends[1])


def test_without_a_seed_nothing_is_drawn_twice(tmp_path: Path) -> None:
    private, loader = DPSGD(noise_multiplier=1.0, delta=1e-3), LotLoader.poisson(pictures(), 12)
    ends, lots = [], []
    for number, strategy in enumerate((private, private, copy.deepcopy(private))):
        torch.manual_seed(3)
        module = Classifier()
        trainer_for(tmp_path / str(number), strategy, 3).fit(module, loader)
        ends.append(weights_of(module))
        lots.append([loader.lots.lot(step).tolist() for step in range(3)])
    assert lots[0] != lots[1] != lots[2] != lots[0]
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


def test_a_trained_module_elsewhere_is_refused(tmp_path: Path) -> None:
    """Its weights hold releases that the new ledger would not tell."""
    module = Classifier()
    trainer_for(tmp_path / "a", DPSGD(noise_multiplier=1.0, delta=1e-3), 4).fit(module, loader_of(pictures()))
    for strategy in (DPSGD(noise_multiplier=1.0, delta=1e-3), DPSGD(noise_multiplier=9.0, delta=1e-3)):
        with pytest.raises(ConfigurationError, match=r"was trained privately before.*a/ledger.jsonl records"):
            trainer_for(tmp_path / "b", strategy, 4).fit(module, loader_of(pictures()))
    assert not (tmp_path / "b/ledger.jsonl").exists()
    fresh = Classifier()
    fresh.load_state_dict(module.state_dict())  # the way where the data are others
    trainer_for(tmp_path / "b", DPSGD(noise_multiplier=1.0, delta=1e-3), 4).fit(fresh, loader_of(pictures()))


def test_trained_parts_in_another_module_are_refused(tmp_path: Path) -> None:
    """A network in a new wrapper, as in a loop over learning rates; one that stayed frozen holds nothing private."""
    first, second, third = Classifier(), Classifier(), Classifier()
    for parameter in first.net[0].parameters():
        parameter.requires_grad = False
    trainer_for(tmp_path / "a", DPSGD(noise_multiplier=1.0, delta=1e-3), 2).fit(first, loader_of(pictures()))
    second.net[5] = first.net[5]
    with pytest.raises(ConfigurationError, match=r"was trained privately before.*all of its parts"):
        trainer_for(tmp_path / "b", DPSGD(noise_multiplier=1.0, delta=1e-3), 2).fit(second, loader_of(pictures()))
    third.net[0] = first.net[0]
    trainer_for(tmp_path / "b", DPSGD(noise_multiplier=1.0, delta=1e-3), 2).fit(third, loader_of(pictures()))


class LooksAtTrainingData(pl.Callback):
    """Training accuracy by the loader of the lots, which draws them."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for _ in trainer.train_dataloader:
            pass


def test_lots_that_a_callback_took_are_missed_at_once(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3), 8)
    trainer.callbacks.append(LooksAtTrainingData())
    with pytest.raises(ConfigurationError, match=r"this LotLoader was iterated elsewhere.*on another DataLoader"):
        trainer.fit(Classifier(), loader_of(pictures()))
    assert releases(tmp_path) == 5  # an epoch


@pytest.mark.parametrize("same_trainer", [True, False])
def test_going_on_in_one_ledger(tmp_path: Path, same_trainer: bool) -> None:
    private, module, loader = DPSGD(noise_multiplier=1.0, delta=1e-3), Classifier(), loader_of(pictures())
    trainer = trainer_for(tmp_path, private, 4)
    trainer.fit(module, loader)
    before = private.epsilon()
    if same_trainer:
        trainer.fit_loop.epoch_loop.max_steps = 8
    else:
        trainer = trainer_for(tmp_path, private, 4)
    trainer.fit(module, loader)
    assert releases(tmp_path) == private.releases == 8
    assert private.epsilon() > before


def test_no_logger_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"logger": False, "default_root_dir": None}
    trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3), 2, **options).fit(
        Classifier(), loader_of(pictures())
    )
    assert os.listdir() == ["ledger.jsonl"]
    with pytest.raises(LedgerError, match=r"already records a run.*default_root_dir=.*ledger=.*move the file away"):
        trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3), 2, **options).fit(
            Classifier(), loader_of(pictures())
        )


def test_a_trainer_that_trained_without_privacy(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, pl.Callback(), 2)
    data = TensorDataset(*pictures().tensors)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 12))
    trainer.callbacks = [DPSGD(noise_multiplier=1.0, delta=1e-3)]  # type: ignore[attr-defined]
    trainer.fit_loop.epoch_loop.max_steps = 4
    with pytest.raises(ConfigurationError, match="or what this trainer trained before"):
        trainer.fit(Classifier(), loader_of(pictures()))


def test_orders_that_do_not_converge_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    event = Event(PoissonSampling(1000, 0.2031), (SumQuery("all", 1.0, 0.97),))
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert epsilon({event: 10}, 1e-5) < 100
        assert not caplog.records
        logging.getLogger("absl").warning("something else failed to converge")  # of the user's own code
        assert len(caplog.records) == 1
