"""Noise that is correlated over a few steps, in a Trainer, in a plain loop and in two processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from dpbench import DPSGD, PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Ledger, check_own_randomness, read_ledger
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.strategies import AdaptiveMeanClipping
from tests.session.test_session import assert_the_seed_alone_is_no_key
from tests.strategies.worlds import Classifier, Crash, assert_same_training, pictures, trainer_for, weights_of

BANDS = 4
BANDED: dict[str, Any] = {"noise": "banded", "bands": BANDS}


def loader(cycle_length: int | None = None) -> PrivateDataLoader:
    return PrivateDataLoader.cyclic_poisson(pictures(), 12, seed=0, cycle_length=cycle_length)


def strategy_of(kind: type[Any] = DPSGD, **options: Any) -> Any:
    if "target_epsilon" not in options:
        options.setdefault("noise_multiplier", 1.0)
    return kind(**{"seed": 0, "delta": 1e-3, "fingerprint": "x", **options})


def fit(
    folder: Path, strategy: Any, steps: int = 9, lots: PrivateDataLoader | None = None, **options: Any
) -> Classifier:
    torch.manual_seed(3)
    module = Classifier()
    module.net[4] = torch.nn.Identity()  # dropout masks belong to a position in a process
    trainer = trainer_for(folder, strategy, steps, **options.pop("trainer", {}))
    trainer.fit(module, loader() if lots is None else lots, **options)
    return module


@pytest.mark.own_key
def test_killed_and_resumed_inside_a_band(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", strategy_of(**BANDED), steps=11)
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path / "parts", strategy_of(**BANDED), steps=11, trainer={"more": [Crash(tmp_path / "mid.ckpt", 6)]})
    resume: dict[str, Any] = {"ckpt_path": tmp_path / "mid.ckpt", "weights_only": False}
    resumed = fit(tmp_path / "parts", strategy_of(**BANDED), steps=11, **resume)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("whole", "parts")]
    assert ledgers[0] == ledgers[1]
    with pytest.raises(ConfigurationError, match="can only be continued with the seed"):
        fit(tmp_path / "parts", strategy_of(noise="banded", bands=2), steps=11, **resume)


@pytest.mark.own_key
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    def options(name: str) -> dict[str, Any]:
        return {"ledger": str(tmp_path / name / "ledger.jsonl"), **BANDED}

    one = fit(tmp_path / "1", strategy_of(**options("1")))
    two = fit(tmp_path / "2", strategy_of(**options("2")), trainer={"devices": 2, "strategy": "ddp_fork"})
    assert_same_training(weights_of(two), weights_of(one), noise_std=1.0, expected_batch_size=12)
    books = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("1", "2")]
    events = [[(r.number, r.sampling, r.queries) for _, r in book.releases] for book in books]
    assert events[0] == events[1] and len(events[0]) == 9


class Save(pl.Callback):
    """Saves a checkpoint, and stops."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(str(trainer.default_root_dir) + "/mid.ckpt")
            trainer.should_stop = True


def test_groups_without_a_seed_are_not_drawn_again_within_a_round(tmp_path: Path) -> None:
    """With independent noise too: the rest of a round is free only where its groups are those of its beginning."""

    def lots() -> PrivateDataLoader:
        return PrivateDataLoader.cyclic_poisson(pictures(), 12, cycle_length=4)

    fit(tmp_path, strategy_of(seed=1), steps=6, lots=lots(), trainer={"more": [Save()]})
    resume: dict[str, Any] = {"ckpt_path": tmp_path / "mid.ckpt", "weights_only": False}
    with pytest.raises(ConfigurationError, match="only at a multiple of 4"):
        fit(tmp_path, strategy_of(seed=1), steps=8, lots=lots(), **resume)


def other_label() -> torch.utils.data.TensorDataset:
    images, labels = pictures().tensors
    return torch.utils.data.TensorDataset(images, torch.cat([(labels[:1] + 1) % 3, labels[1:]]))


@pytest.mark.own_key
@pytest.mark.filterwarnings("ignore:the training ended before its last step")
def test_in_a_copied_folder_a_kept_key_is_good_for_the_same_training_only(tmp_path: Path) -> None:
    def go(folder: str, data: Any = None, resume: bool = True, **strategy: Any) -> tuple[Classifier, Ledger]:
        torch.manual_seed(3)
        module = Classifier()
        own = strategy_of(seed=None, fingerprint=None, **{**BANDED, **strategy})
        more = [] if resume else [Save()]
        lots = PrivateDataLoader.cyclic_poisson(pictures() if data is None else data, 12)
        start = tmp_path / folder / "mid.ckpt" if resume else None
        trainer_for(tmp_path / folder, own, 9, more=more).fit(module, lots, ckpt_path=start, weights_only=False)
        return module, read_ledger(tmp_path / folder / "ledger.jsonl")

    go("first", resume=False)
    for name in ("second", "label", "bound"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    (one, here), (two, there) = go("first"), go("second")
    assert torch.equal(weights_of(one), weights_of(two))
    assert len(here.releases) == 9 and len(here.headers) == 1 and here.secure
    assert (here.header.noise_source, here.header.lot_source) == (there.header.noise_source, there.header.lot_source)
    assert str(here.header.lot_source).startswith("kept:")
    check_own_randomness({"first": here, "second": there})
    refused = pytest.raises(ConfigurationError, match="can only be continued with the seed and settings")
    with refused:
        go("label", data=other_label())
    with refused:
        go("bound", max_grad_norm=0.5)


class Own(DPSGD):
    def noise_process(self, noise_multiplier: float, factors: Factors) -> Noise:
        return Gaussian(noise_multiplier)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DPSGD, {"bands": 4}, "needs correlated noise: also set noise=banded"),
        (DPSGD, {"noise": "pink"}, "unknown noise 'pink'; known are gaussian, .*banded"),
        (Own, {"noise": "banded", "bands": 4}, "Own has its own noise process: leave out noise"),
    ],
    ids=["bands alone", "unknown", "own process"],
)
def test_options_that_do_not_go_together(kind: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategy_of(kind, **options)


def test_what_would_void_it_is_refused_before_a_ledger_is_there(tmp_path: Path) -> None:
    strategy = strategy_of(AdaptiveMeanClipping, initial_max_grad_norm=1.0, **BANDED)
    with pytest.raises(ConfigurationError, match="bounds adapt"):
        fit(tmp_path, strategy)
    with pytest.raises(ConfigurationError, match="microbatch_size=1"):
        fit(tmp_path, strategy_of(microbatch_size=2, **BANDED))
    assert not (tmp_path / "ledger.jsonl").exists()


def test_other_lots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="data.sampling=cyclic_poisson"):
        fit(tmp_path, strategy_of(**BANDED), lots=PrivateDataLoader.poisson(pictures(), 12, seed=0))
    with pytest.raises(ConfigurationError, match="cycle_length=3 is below the 4 bands"):
        fit(tmp_path, strategy_of(**BANDED), lots=loader(3))


def test_the_seed_alone_is_no_key(tmp_path: Path) -> None:
    assert_the_seed_alone_is_no_key(tmp_path, **BANDED)
