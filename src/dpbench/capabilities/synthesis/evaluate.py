"""`dpbench evaluate`: usefulness of a run's synthetic images, and a check for repeated training images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpbench.capabilities.synthesis._fidelity import accuracies, fidelity
from dpbench.capabilities.synthesis.memorization import memorization
from dpbench.capabilities.synthesis.sample import load_gan
from dpbench.data.images import ImageDataModule, InMemoryImages
from dpbench.errors import ConfigurationError
from dpbench.files import write_json
from dpbench.harness.run.samples import sample_images
from dpbench.harness.run.saved_module import SavedModule
from dpbench.harness.runs.folder import RunFolder

_FEWEST = 100  # images
_DATA_OPTIONS = (
    "name",
    "root",
    "download",
    "image_size",
    "val_size",
    "split",
    "train_size",
    "test_size",
    "like",
    "membership",
)
"""Options that determine the training data."""


def evaluate(
    run: Path,
    number: int = 60_000,
    seed: int = 0,
    on: str = "test",
    trust: bool = False,
) -> dict[str, Any]:
    """Judge a run's generator on real data that it did not see, and write evaluation.json into its folder.

    The last checkpoint is judged. The figures come from test data, and for the memorization check from training data:
    the run's epsilon does not cover them, and nothing should be chosen by them. To choose settings, train with
    data.val_size and judge on the records held out.

    Args:
        run: Folder of a trained GAN.
        number: Images to sample.
        seed: Seed of their noise.
        on: "test", or "val" for training records that the run held out.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Returns:
        The content of the file.

    Raises:
        ConfigurationError: There is no generator, its checkpoint holds objects and is not trusted, too few images were
            asked for, no records were held out, or the data are not those of the checkpoint.
    """
    if number < _FEWEST:
        raise ConfigurationError(f"--num-samples must be at least {_FEWEST} for an evaluation, not {number}.")
    folder = RunFolder(run)
    trained = load_gan(folder, trust)
    data, real = _real_data(run, trained, on)
    pixels, labels = sample_images(trained.module, number, seed)
    images = pixels.float() / 255
    train = _unit(data.train_set)[0]
    if data.members is not None:  # of an experiment on membership the others are no training data
        train = train[torch.from_numpy(data.members)]
    unseen = _unit(real)
    figures: dict[str, Any] = {
        "images": number,
        "seed": seed,
        "judged_on": on,
        "steps": int(trained.checkpoint["global_step"]),
    }
    if labels is not None:
        figures |= accuracies((images, labels), unseen, data.num_classes)
    if images.shape[1] == 1:  # the network of the features knows gray images
        figures |= fidelity(images[: len(unseen[0])], unseen[0])
    figures |= memorization(images, train, unseen[0])
    write_json(folder.evaluation, figures)
    return figures


def _real_data(run: Path, trained: SavedModule, on: str) -> tuple[ImageDataModule, InMemoryImages]:
    """Load all data of the run, and those to judge on."""
    options = {key: value for key, value in trained.config["data"].items() if key in _DATA_OPTIONS}
    data = ImageDataModule(**options, seed=trained.config["seed"], scale="symmetric")
    data.setup()
    expected = dict(trained.model_options)
    actual = data.model_options()
    if actual != expected:
        raise ConfigurationError(
            f"{run} was trained on other data than its configuration says: {expected}, not {actual}."
        )
    real = data.test_set if on == "test" else data.val_set
    if real is None or len(real) < _FEWEST:
        raise ConfigurationError(
            f"{run} holds out {len(real or ())} records, not {_FEWEST} or more: train with data.val_size=1000, say."
        )
    return data, real


def _unit(images: InMemoryImages) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) in [0, 1], and labels."""
    pixels = images.pixels.permute(0, 3, 1, 2).contiguous(memory_format=torch.contiguous_format)
    return (pixels + 1) / 2, images.labels


_LABELS = {
    "accuracy_cnn": "accuracy on real images of a CNN trained on synthetic ones",
    "accuracy_cnn_augmented": "the same, its training images rotated, scaled, sheared and shifted",
    "accuracy_logistic_regression": "the same of logistic regression",
    "frechet_distance_digits_cnn": "Fréchet distance (digits_cnn features)",
    "density": "density (1 is as real images)",
    "coverage": "coverage (1 is as real images)",
    "unusually_close": "share unusually close to a training image (0.01 is right)",
}


def summary(figures: dict[str, Any]) -> str:
    """Format an evaluation for the terminal."""
    split = "test data" if figures["judged_on"] == "test" else "training records that were held out"
    rows = {"evaluation split": split}
    if "accuracy_cnn" not in figures:
        rows["accuracy of classifiers"] = "– (the generator knows no classes: conditional=true)"
    for key, label in _LABELS.items():
        if key in figures:
            rows[label] = f"{figures[key]:.4f}"
    suspected = figures["memorization_suspected"]
    rows["memorization"] = "SUSPECTED: look at nearest neighbors" if suspected else "not found"
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
