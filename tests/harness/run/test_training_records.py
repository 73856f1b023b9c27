"""Accuracy on training records: it is what it says, of the weights that are tested, and training does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hydra import compose, initialize_config_dir

from dpbench.data.images import ImageDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.run.build import plain
from dpbench.harness.run.search_path import conf_dir
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from tests.support.processes import TINY, TWO

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


def accuracy(weights: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> float:
    """Of the multilayer perceptron of these runs, by hand."""
    (w1, b1), (w2, b2) = ([v for k, v in weights.items() if f".{layer}." in k] for layer in layers(weights))
    logits = torch.relu(images.flatten(1) @ w1.T + b1) @ w2.T + b2
    return float((logits.argmax(1) == labels).double().mean())


def layers(weights: dict[str, torch.Tensor]) -> list[str]:
    return sorted({name.split(".")[1] for name in weights if name.startswith("model.")})


def seen(most: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    train_set = ImageDataModule("digits", image_size=8).train_set
    return train_set.pixels[:most].permute(0, 3, 1, 2), train_set.labels[:most]


class Breaks(pl.Callback):
    """Ends a run after its last checkpoint but one."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("the power is gone")


def _sum_of(module: pl.LightningModule) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in module.parameters())


class Watches(pl.Callback):
    """Measures by itself, at the beginning of each validation and at its end."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.logged: list[float] = []
        self.sums: list[tuple[float, float]] = []  # of all weights: two accuracies may be equal by chance

    def _value(self, module: pl.LightningModule) -> float:
        return accuracy({name: value.detach().clone() for name, value in module.state_dict().items()}, *seen())

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began.append(self._value(pl_module))
        self._sum = _sum_of(pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sums.append((self._sum, _sum_of(pl_module)))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logged.append(float(trainer.callback_metrics[TRAINED]))


@pytest.mark.parametrize("strategy", ["none", "dpsgd"])
def test_it_is_the_accuracy_of_the_weights_that_are_tested(strategy: str, tmp_path: Path) -> None:
    words, watch = (f"strategy={strategy}", "ema_decay=0.9", "trainer.max_steps=12"), Watches()
    metrics = ended(tmp_path / "a", *words, *ASKED, observers=(watch,))
    weights = state(tmp_path / "a")
    assert metrics[TRAINED] == pytest.approx(accuracy(weights, *seen()), abs=1e-6)
    assert metrics[GAP] == pytest.approx(metrics[TRAINED] - metrics["test/accuracy"], abs=1e-6)
    assert watch.logged == pytest.approx(watch.began, abs=1e-6) and len(watch.logged) > 1
    assert all(began != over for began, over in watch.sums)  # the average was measured
    ended(tmp_path / "b", *words)
    assert all(torch.equal(value, state(tmp_path / "b")[name]) for name, value in weights.items())


def test_several_processes_measure_what_one_does(tmp_path: Path) -> None:
    one, two = (ended(tmp_path / str(len(words)), *ASKED, *words) for words in ([], TWO))
    assert one[TRAINED] == pytest.approx(two[TRAINED], abs=0.01)
    assert two[TRAINED] == pytest.approx(accuracy(state(tmp_path / "2"), *seen()), abs=1e-6)


def test_a_resumed_run_measures_what_a_whole_one_does(tmp_path: Path) -> None:
    whole = ended(tmp_path / "whole", *ASKED)
    with pytest.raises(RuntimeError, match="the power is gone"):
        ended(tmp_path / "parts", *ASKED, observers=(Breaks(),))
    again = ended(tmp_path / "parts", *ASKED, "run.resume=true")
    assert {name: again[name] for name in (TRAINED, GAP)} == {name: whole[name] for name in (TRAINED, GAP)}


def test_records_held_out_are_no_training_records(tmp_path: Path) -> None:
    words = ("data.val_size=400", "diagnostics.training_records=100000")
    metrics = ended(tmp_path / "a", *words)
    train_set = ImageDataModule("digits", image_size=8, val_size=400).train_set
    expected = accuracy(state(tmp_path / "a"), train_set.pixels.permute(0, 3, 1, 2), train_set.labels)
    assert metrics[TRAINED] == pytest.approx(expected, abs=1e-6)
    assert metrics[GAP] == pytest.approx(metrics[TRAINED] - metrics["test/accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["diagnostics.training_records=0"], "a whole number from 1 on or null"),
        (["module=gan", "model=mlp_gan"], "GAN has no measure"),
        (["+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping", f"+callbacks.stop.monitor={TRAINED}"],
         "EarlyStopping watches nonprivate/train_accuracy"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_or_chosen_by_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ended(tmp_path / "a", *ASKED, *words, model=[] if "module=gan" in words else MODEL)
