"""The moving average of the weights: what it is, that training does not notice it, and that it survives a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.functional import to_tensor

from dpbench.errors import ConfigurationError
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.run.evaluation import moving_average
from dpbench.harness.run.samples import SampleGrid, grid
from dpbench.harness.runs.folder import RunFolder
from dpbench.models import ConvGAN
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, weights_of
from tests.support.gan import gan, images


def private() -> DPSGD:
    return DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)


def test_it_is_the_average_of_the_released_weights(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(60, 5))
    averaged, plain = Known(5), Known(5)
    for module in (averaged, plain):
        module.register_buffer("count", torch.zeros((), dtype=torch.long))
    trainer_for(tmp_path, private(), 12, callbacks=[moving_average(0.5), private()]).fit(averaged, loader_of(data))
    trainer_for(tmp_path, private(), 12).fit(plain, loader_of(data))
    steps = plain.history
    assert torch.equal(torch.stack(averaged.history), torch.stack(steps))  # training does not notice
    expected = steps[0]
    for t, weights in enumerate(steps[1:], 1):
        expected = expected.lerp(weights, 1 - min(0.5, (1 + t) / (10 + t)))
    assert torch.allclose(averaged.layer.weight.flatten(), expected, rtol=1e-5)
    assert not torch.allclose(expected, steps[-1], rtol=1e-2)
    assert averaged.count.dtype == torch.long  # type: ignore[union-attr]


def test_a_resumed_run_ends_with_the_same_weights_and_average(tmp_path: Path) -> None:
    """An extended run ends as a whole one, and the module is its average, also where nothing was left to train."""
    ends = []
    for run, length in (("whole", 2), ("parts", 1), ("parts", 2), ("parts", 2)):
        folder = RunFolder(tmp_path / run)
        torch.manual_seed(3)
        module = Classifier()
        callbacks = [moving_average(0.9), private(), LastCheckpoint(folder, every_n_steps=100)]
        options: dict[str, Any] = {
            "callbacks": callbacks,
            "enable_checkpointing": True,
            "max_steps": -1,
            "max_epochs": length,
        }
        start = folder.checkpoint if folder.checkpoint.exists() else None
        trainer = trainer_for(tmp_path / run, private(), 0, **options)
        trainer.fit(module, loader_of(pictures()), ckpt_path=start, weights_only=False)
        state = torch.load(folder.checkpoint, weights_only=False)
        average, current = (parameters_to_vector(state[key].values()) for key in ("state_dict", "current_model_state"))
        assert torch.equal(average, weights_of(module)) and not torch.equal(average, current)
        ends.append(torch.stack([average, current]))
    whole, first, second, third = ends
    assert torch.equal(whole, second) and torch.equal(second, third) and not torch.equal(whole, first)


def test_a_gan_shows_and_saves_its_average(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    callbacks = [moving_average(0.9), private(), SampleGrid(), LastCheckpoint(folder, every_n_steps=100)]
    options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = trainer_for(folder.path, private(), 5, **options)
    trainer.fit(gan(pair=ConvGAN, conditional=True), loader_of(images()), DataLoader(images(), batch_size=10))
    shown = to_tensor(Image.open(folder.samples))
    state = torch.load(folder.checkpoint, weights_only=False)
    for key, is_shown in (("state_dict", True), ("current_model_state", False)):
        module = gan(pair=ConvGAN, conditional=True)
        module.load_state_dict(state[key])
        assert ((shown - grid(module)).abs().max() < 0.01) == is_shown


@pytest.mark.parametrize("decay", [1])
def test_refusals(decay: float) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to below 1"):
        moving_average(decay)
