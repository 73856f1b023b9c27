"""The moving average of the weights: what it is, that training does not notice it, and that it survives a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_tensor

from dpbench.errors import ConfigurationError
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.run.evaluation import moving_average
from dpbench.harness.run.samples import SampleGrid, grid
from dpbench.harness.runs.folder import RunFolder
from dpbench.models import ConvGAN
from dpbench.modules import GAN
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, weights_of
from tests.support.gan import gan, images


def private() -> DPSGD:
    return DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)


def test_it_is_the_average_of_the_released_weights(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(60, 5, generator=torch.Generator().manual_seed(0)))
    ends = {}
    for decay in (0.5, None):
        module = Known(5)
        averaging = [] if decay is None else [moving_average(decay)]
        trainer = trainer_for(tmp_path / str(decay), private(), 12, callbacks=[*averaging, private()])
        trainer.fit(module, loader_of(data))
        ends[decay] = module
    steps = ends[None].history
    assert torch.equal(torch.stack(ends[0.5].history), torch.stack(steps))  # training does not notice
    expected = steps[0]
    for t, weights in enumerate(steps[1:], 1):
        share = min(0.5, (1 + t) / (10 + t))
        expected = share * expected + (1 - share) * weights
    assert torch.allclose(ends[0.5].layer.weight.flatten(), expected, rtol=1e-5)
    assert not torch.allclose(expected, steps[-1], rtol=1e-2)


def test_a_resumed_run_ends_with_the_same_weights_and_average(tmp_path: Path) -> None:
    ends = []
    for run, start, steps in (
        ("whole", None, 8),
        ("parts", None, 6),
        ("parts", RunFolder(tmp_path / "parts").checkpoint, 8),
    ):
        folder = RunFolder(tmp_path / run)
        torch.manual_seed(3)
        module = Classifier()
        callbacks = [moving_average(0.9), private(), LastCheckpoint(folder, every_n_steps=4)]
        trainer = trainer_for(tmp_path / run, private(), steps, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, loader_of(pictures()), ckpt_path=start, weights_only=False)
        state = torch.load(folder.checkpoint, weights_only=False)
        average = torch.cat([value.flatten() for value in state["state_dict"].values()])
        current = torch.cat([value.flatten() for value in state["current_model_state"].values()])
        assert torch.equal(average, weights_of(module)) and not torch.equal(average, current)
        ends.append((average, current))
    assert all(torch.equal(*pair) for pair in zip(ends[0], ends[2], strict=True))
    assert not torch.equal(ends[0][0], ends[1][0])


def test_an_end_by_epochs_keeps_the_weights_that_were_trained(tmp_path: Path) -> None:
    """An extended run ends as a whole one, and the module is its average, also where nothing was left to train."""
    ends = []
    for run, start, epochs in (("whole", None, 2), ("parts", None, 1), ("parts", "parts", 2), ("parts", "parts", 2)):
        folder = RunFolder(tmp_path / run)
        torch.manual_seed(3)
        module = Classifier()
        callbacks = [moving_average(0.9), private(), LastCheckpoint(folder, every_n_steps=100)]
        limits = {"max_epochs": epochs, "enable_checkpointing": True}
        trainer = trainer_for(tmp_path / run, private(), -1, callbacks=callbacks, **limits)
        trainer.fit(module, loader_of(pictures()), ckpt_path=start and folder.checkpoint, weights_only=False)
        state = torch.load(folder.checkpoint, weights_only=False)
        assert torch.equal(torch.cat([value.flatten() for value in state["state_dict"].values()]), weights_of(module))
        ends.append(torch.cat([value.flatten() for value in state["current_model_state"].values()]))
        assert not torch.equal(ends[-1], weights_of(module))
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[2], ends[3]) and not torch.equal(ends[0], ends[1])


def test_counters_are_taken_over(tmp_path: Path) -> None:
    module = Known(5)
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    data = torch.utils.data.TensorDataset(torch.randn(60, 5))
    trainer = trainer_for(tmp_path, private(), 3, callbacks=[moving_average(0.5), private()])
    trainer.fit(module, loader_of(data))
    assert module.count.dtype == torch.long  # type: ignore[union-attr]


class Averages(pl.Callback):
    """Keeps the pictures of the average and of the weights that are trained, whenever these were validated."""

    def __init__(self, averaging: WeightAveraging) -> None:
        self._averaging = averaging
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average = self._averaging._average_model
        assert average is not None and isinstance(average.module, GAN) and isinstance(pl_module, GAN)
        self.seen[trainer.global_step] = grid(average.module), grid(pl_module)


def test_a_gan_shows_and_saves_its_average(tmp_path: Path) -> None:
    averaging, folder = moving_average(0.9), RunFolder(tmp_path)
    averages = Averages(averaging)
    module = gan(pair=ConvGAN, conditional=True)
    callbacks = [averaging, private(), SampleGrid(), averages, LastCheckpoint(folder, every_n_steps=100)]
    trainer = trainer_for(
        tmp_path, private(), 7, callbacks=callbacks, enable_checkpointing=True, num_sanity_val_steps=0
    )
    trainer.fit(module, loader_of(images()), DataLoader(images(), batch_size=10))
    assert list(averages.seen) == [5]
    average, current = averages.seen[5]
    shown = to_tensor(Image.open(folder.samples_by_step / "0000005.png"))
    assert (shown - average).abs().max() < 0.01 < (shown - current).abs().max()
    last = gan(pair=ConvGAN, conditional=True)
    last.load_state_dict(torch.load(folder.checkpoint, weights_only=False)["state_dict"])
    shown = to_tensor(Image.open(folder.samples))
    assert (shown - grid(last)).abs().max() < 0.01
    assert (shown - average).abs().max() > 0.01


@pytest.mark.parametrize("decay", [-0.1, 1, 2.0])
def test_refusals(decay: float) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to below 1"):
        moving_average(decay)
