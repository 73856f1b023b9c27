"""Life in a notebook: fitting again with the same objects, asking too early, folders that are used."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from dpbench import DPSGD, PrivateDataLoader
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for, weights_of


def releases(folder: Path) -> int:
    return len(read_ledger(folder / "ledger.jsonl").releases)


def trained(folder: Path, steps: int = 2, module: Classifier | None = None, strategy: Any = None) -> Classifier:
    """A module after a private training."""
    module = module or Classifier()
    trainer = trainer_for(folder, strategy or DPSGD(noise_multiplier=1.0, delta=1e-3), steps)
    trainer.fit(module, loader_of(pictures()))
    return module


def test_a_new_run_in_another_folder(tmp_path: Path) -> None:
    private = DPSGD(target_epsilon=3.0, delta=1e-3, seed=0)
    noise, ends = [], []
    for name, steps in (("a", 2), ("b", 2), ("c", 4)):
        torch.manual_seed(3)
        ends.append(weights_of(trained(tmp_path / name, steps, strategy=private)))
        assert releases(tmp_path / name) == private.releases == steps
        assert 2.99 < private.epsilon() <= 3.0
        noise.append(private.noise_multiplier)
    assert noise[0] == noise[1] < noise[2]  # solved for again
    assert torch.equal(ends[0], ends[1])


def test_without_a_seed_nothing_is_drawn_twice(tmp_path: Path) -> None:
    private, loader = DPSGD(noise_multiplier=1.0, delta=1e-3), PrivateDataLoader.poisson(pictures(), 12)
    ends, lots = [], []
    for number, strategy in enumerate((private, private, copy.deepcopy(private))):
        torch.manual_seed(3)
        module = Classifier()
        trainer_for(tmp_path / str(number), strategy, 1).fit(module, loader)
        ends.append(weights_of(module).tolist())
        lots.append(loader.lots.lot(0).tolist())
    assert lots[0] != lots[1] != lots[2] != lots[0]
    assert ends[0] != ends[1] != ends[2]


def test_a_trained_module_elsewhere_is_refused(tmp_path: Path) -> None:
    """Its weights hold releases that the new ledger would not tell."""
    module = trained(tmp_path / "a")
    with pytest.raises(ConfigurationError, match=r"was already trained in a private run recorded in .*a/ledger.jsonl"):
        trained(tmp_path / "b", module=module)
    assert not (tmp_path / "b/ledger.jsonl").exists()
    fresh = Classifier()
    fresh.load_state_dict(module.state_dict())  # the way where the data are others
    trained(tmp_path / "b", module=fresh)


def test_trained_parts_in_another_module_are_refused(tmp_path: Path) -> None:
    """A network in a new wrapper, as in a loop over learning rates; one that stayed frozen holds nothing private."""
    first, second, third = Classifier(), Classifier(), Classifier()
    first.net[0].requires_grad_(False)
    trained(tmp_path / "a", module=first)
    second.net[5] = first.net[5]
    with pytest.raises(ConfigurationError, match=r"was already trained in a private run.*all of its parts"):
        trained(tmp_path / "b", module=second)
    third.net[0] = first.net[0]
    trained(tmp_path / "b", module=third)


class LooksAtTrainingData(pl.Callback):
    """Training accuracy by the loader of the lots, which draws them."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for _ in trainer.train_dataloader:
            pass


def test_lots_that_a_callback_took_are_missed_at_once(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3), 8)
    trainer.callbacks.append(LooksAtTrainingData())
    with pytest.raises(
        ConfigurationError, match=r"this PrivateDataLoader was iterated elsewhere.*on another DataLoader"
    ):
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
    assert releases(tmp_path) == private.releases == loader.lots.position == 8
    assert private.epsilon() > before


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pl.Trainer]:
    """A cell that makes everything anew and trains, without a logger and without a word on where."""
    monkeypatch.chdir(tmp_path)

    def run(module: Any = None, steps: int = 2, strategy: Any = None, start: str | None = None) -> pl.Trainer:
        strategy = strategy or DPSGD(noise_multiplier=1.0, delta=1e-3)
        trainer = trainer_for(tmp_path, strategy, steps, default_root_dir=None)
        trainer.fit(module or Classifier(), loader_of(pictures()), ckpt_path=start, weights_only=False)
        return trainer

    return run


def ledgers(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("ledger.jsonl")}


def test_a_cell_that_is_run_again_has_a_ledger_of_its_own(
    cell: Callable[..., pl.Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    # Where it is said: Lightning's logger is replaced by `import lightning.pytorch`.
    monkeypatch.setattr("dpbench.callback.lightning_training.log_line", lines.append)
    cell()
    before = ledgers(tmp_path)
    assert list(before) == ["ledger.jsonl"] and not any("records another run" in line for line in lines)
    cell()
    (line,) = [line for line in lines if "records another run" in line]
    assert f"{tmp_path}/run-2/ledger.jsonl records this one" in line and "add up" in line
    cell()
    after = ledgers(tmp_path)
    assert set(after) == {"ledger.jsonl", "run-2/ledger.jsonl", "run-3/ledger.jsonl"}
    assert after["ledger.jsonl"] == before["ledger.jsonl"]


def test_a_checkpoint_finds_its_ledger(cell: Callable[..., pl.Trainer], tmp_path: Path) -> None:
    cell()
    cell().save_checkpoint("last.ckpt")
    cell()
    before = ledgers(tmp_path)
    cell(steps=5, start="last.ckpt")
    after = ledgers(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"run-2/ledger.jsonl"}
    assert releases(tmp_path / "run-2") == 5


def test_a_checkpoint_of_one_of_two_runs_that_began_alike_needs_its_ledger(
    cell: Callable[..., pl.Trainer], tmp_path: Path
) -> None:
    """Two runs of one seed: in the ledger of the other one its further releases would be missed."""
    for _ in range(2):
        torch.manual_seed(0)
        cell(strategy=DPSGD(noise_multiplier=1.0, delta=1e-3, seed=0)).save_checkpoint("last.ckpt")
    before = ledgers(tmp_path)
    assert before["ledger.jsonl"] == before["run-2/ledger.jsonl"]
    with pytest.raises(ConfigurationError, match=r"which begin alike: pass the path of its ledger"):
        cell(steps=4, strategy=DPSGD(noise_multiplier=1.0, delta=1e-3, seed=0), start="last.ckpt")
    assert ledgers(tmp_path) == before


def test_a_ledger_that_was_named_is_not_written_again(tmp_path: Path) -> None:
    def train() -> None:
        trained(tmp_path, strategy=DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "mine.jsonl")))

    train()
    with pytest.raises(LedgerError, match=r"already records a run.*default_root_dir=.*ledger=.*move the file away"):
        train()


def test_a_trainer_that_trained_without_privacy(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, pl.Callback(), 2)
    trainer.fit(Classifier(), DataLoader(pictures(), 12))
    trainer.callbacks = [DPSGD(noise_multiplier=1.0, delta=1e-3)]  # type: ignore[attr-defined]
    trainer.fit_loop.epoch_loop.max_steps = 4
    with pytest.raises(ConfigurationError, match="or what this trainer trained before"):
        trainer.fit(Classifier(), loader_of(pictures()))


def test_orders_that_do_not_converge_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    event = Event(PoissonSampling(1000, 0.2031), (SumQuery("all", 1.0, 0.97),))
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert epsilon({event: 10}, 1e-5) < 100
    assert not caplog.records
