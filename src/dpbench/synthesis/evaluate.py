"""`dpbench evaluate`: what synthetic images of a run are good for, and whether they repeat training images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dpbench.data.images import ImageDataModule, InMemoryImages
from dpbench.errors import ConfigurationError
from dpbench.files import write_json
from dpbench.run.saved_module import SavedModule
from dpbench.runs.folder import RunFolder
from dpbench.synthesis.checkpoint import load_gan, make
from dpbench.synthesis.downstream import accuracies
from dpbench.synthesis.fidelity import feature_network, fidelity
from dpbench.synthesis.memorization import memorization

_LEAST = 100  # images
_OF_DATA = (
    "name",
    "root",
    "download",
    "image_size",
    "val_size",
    "split",
    "train_size",
    "test_size",
    "like",
)  # what was trained on


def evaluate(
    run: Path,
    number: int = 60_000,
    seed: int = 0,
    features: str = "digits",
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
        seed: Of their noise.
        features: Network of the Fréchet distance, "digits" or "inception".
        on: "test", or "val" for training records that the run held out.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Returns:
        What was written.

    Raises:
        ConfigurationError: There is no generator, its checkpoint holds objects and is not trusted, too few images were
            asked for, no records were held out, or the data are not those of the checkpoint.
    """
    if number < _LEAST:
        raise ConfigurationError(f"--num-samples must be at least {_LEAST} for an evaluation, not {number}.")
    folder = RunFolder(run)
    trained = load_gan(folder, trust)
    data, real = _real_data(run, trained, on)
    network = feature_network(data.input_shape, features)  # a wrong name is refused now, not after a minute
    pixels, labels = make(trained.module, number, seed)
    images = pixels.float() / 255
    found: dict[str, Any] = {"images": number, "seed": seed, "judged_on": on}
    found["steps"] = int(trained.checkpoint["global_step"])
    bar = tqdm(total=3, disable=None, desc="classifiers")
    train, unseen = _unit(data.train_set), _unit(real)
    if labels is not None:
        found |= accuracies((images, labels), unseen, data.num_classes)
    bar.update()
    bar.set_description("Fréchet distance")
    found |= fidelity(images[: len(unseen[0])], unseen[0], network)
    bar.update()
    bar.set_description("memorization")
    found |= memorization(images, train[0], unseen[0])
    bar.update()
    bar.close()
    write_json(folder.evaluation, found)
    return found


def _real_data(run: Path, trained: SavedModule, on: str) -> tuple[ImageDataModule, InMemoryImages]:
    """Load all data of the run, and those to judge on."""
    options = {key: trained.config["data"][key] for key in _OF_DATA if key in trained.config["data"]}
    data = ImageDataModule(**options, scale="symmetric")
    data.setup()
    made, own = dict(trained.model_options), {"input_shape": data.input_shape, "num_classes": data.num_classes}
    if made != own:
        raise ConfigurationError(f"{run} was trained on other data than its configuration says: {made}, not {own}.")
    real = data.test_set if on == "test" else data.val_set
    if real is None or len(real) < _LEAST:
        kept = "no" if real is None else str(len(real))
        raise ConfigurationError(f"{run} held {kept} records out to judge on: train with data.val_size=1000, say.")
    return data, real


def _unit(images: InMemoryImages) -> tuple[Tensor, Tensor]:
    return (images.pixels.permute(0, 3, 1, 2).contiguous(memory_format=torch.contiguous_format) + 1) / 2, images.labels


_LABELS = {
    "accuracy_cnn": "accuracy on real images of a CNN trained on synthetic ones",
    "accuracy_logistic_regression": "the same of logistic regression",
    "density": "density (1 is as real images)",
    "coverage": "coverage (1 is as real images)",
    "unusually_close": "unusually close to a training image (1 % is right)",
}


def summary(found: dict[str, Any]) -> str:
    """Format an evaluation for the terminal."""
    split = "test data" if found["judged_on"] == "test" else "training records that were held out"
    rows = [("evaluation split", split)]
    if "accuracy_cnn" not in found:
        rows.append(("accuracy of classifiers", "– (the generator knows no classes: conditional=true)"))
    for key, value in found.items():
        if key.startswith("frechet_distance_"):
            rows.append((f"Fréchet distance ({key.removeprefix('frechet_distance_')} features)", f"{value:.3f}"))
        elif key in _LABELS:
            percent = key.startswith(("accuracy", "unusually"))
            rows.append((_LABELS[key], f"{100 * value:.2f} %" if percent else f"{value:.3f}"))
    suspected = found["memorization_suspected"]
    rows.append(("memorization", "SUSPECTED: look at nearest neighbors" if suspected else "not found"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
