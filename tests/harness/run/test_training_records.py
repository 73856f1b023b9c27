"""Accuracy on training records: it is what it says, of the weights that are tested, and training does not notice."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from hydra import compose, initialize_config_dir

from dpbench.data.images import ImageDataModule
from dpbench.errors import ConfigurationError, Interrupted
from dpbench.harness.run.build import plain
from dpbench.harness.run.search_path import conf_dir
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from tests.support.processes import TINY
from tests.support.signalled import Signals

MODEL = ["model=mlp", "model.hidden=[8]", "data.image_size=8", "data.expected_batch_size=300"]
ALWAYS = [word for word in TINY if not word.startswith(("model", "data", "strategy"))]
ASKED = ["diagnostics=memorization", "diagnostics.training_records=300"]
TRAINED, GAP = "nonprivate/train_accuracy", "nonprivate/accuracy_gap"


def ended(
    path: Path, *words: str, observers: tuple[pl.Callback, ...] = (), model: Sequence[str] = MODEL
) -> dict[str, float]:
    """Final metrics of a run of eight steps."""
    with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        config = plain(compose("config", [*ALWAYS, *model, *words]))
    return dict(train(config, path, observers, show=False)["metrics"])


def state(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(RunFolder(path).checkpoint, weights_only=False)["state_dict"])


def accuracy(weights: Mapping[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> float:
    """Of the multilayer perceptron of these runs, by hand."""
    w1, b1, w2, b2 = (value.detach() for name, value in weights.items() if name.startswith("model."))
    logits = torch.relu(images.flatten(1) @ w1.T + b1) @ w2.T + b2
    return float((logits.argmax(1) == labels).double().mean())


def seen() -> tuple[torch.Tensor, torch.Tensor]:
    train_set = ImageDataModule("digits", image_size=8).train_set
    return train_set.pixels[:300].permute(0, 3, 1, 2), train_set.labels[:300]


class Watches(pl.Callback):
    """Measures by itself, at the beginning of each validation."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.logged: list[float] = []

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began.append(accuracy(pl_module.state_dict(), *seen()))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logged.append(float(trainer.callback_metrics[TRAINED]))


def test_it_is_the_accuracy_of_the_weights_that_are_tested(tmp_path: Path) -> None:
    words, watch = ("ema_decay=0.9", "trainer.max_steps=12"), Watches()
    metrics = ended(tmp_path / "a", *words, *ASKED, observers=(watch,))
    weights = state(tmp_path / "a")
    assert metrics[TRAINED] == pytest.approx(accuracy(weights, *seen()), abs=1e-6)
    assert metrics[GAP] == pytest.approx(metrics[TRAINED] - metrics["test/accuracy"], abs=1e-6)
    assert watch.logged == pytest.approx(watch.began, abs=1e-6) and len(watch.logged) > 1
    ended(tmp_path / "b", *words)
    assert all(torch.equal(value, state(tmp_path / "b")[name]) for name, value in weights.items())


def test_a_resumed_run_measures_what_a_whole_one_does(tmp_path: Path) -> None:
    whole = ended(tmp_path / "whole", *ASKED)
    with pytest.raises(Interrupted):
        ended(tmp_path / "parts", *ASKED, observers=(Signals(signal.SIGTERM, 7),))
    again = ended(tmp_path / "parts", *ASKED, "run.resume=true")
    assert {name: again[name] for name in (TRAINED, GAP)} == {name: whole[name] for name in (TRAINED, GAP)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["diagnostics.training_records=0"], "a whole number of at least 1 or null"),
        (["module=gan", "model=mlp_gan"], "not GAN: remove"),
        (["+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping", f"+callbacks.stop.monitor={TRAINED}"],
         "EarlyStopping watches nonprivate/train_accuracy"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_or_chosen_by_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ended(tmp_path / "a", *ASKED, *words, model=[] if "module=gan" in words else MODEL)
