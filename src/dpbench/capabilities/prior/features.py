"""Features of a trained prior, and a data set of made-up images: entry points of `dpbench.features` and `.images`."""

from __future__ import annotations

from pathlib import Path

import torch

from dpbench.capabilities.prior.extractor import Prior, load
from dpbench.capabilities.prior.processes import SHAPES, labeled_shapes
from dpbench.data.images import Features
from dpbench.data.noise import NOISE_SIZES, Split
from dpbench.data.sources import Images, Source, find_file
from dpbench.errors import ConfigurationError, DataError

_SHAPES_PIECE = 500  # images at once
_SHAPES_KEYS: dict[Split, int] = {"train": 2026, "test": 2027}


def random_prior(root: Path, file: str, sha256: str | None) -> Features:
    """Load the features of a trained prior.

    Args:
        root: Folder of the data sets.
        file: File of the prior; a relative path is looked for in the working directory, and then in `root`.
        sha256: Its SHA-256; any other file is refused, and so is None.

    Raises:
        ConfigurationError: The file is no trained prior, or another one.
        DataError: There is no such file.
    """
    return _prior(root, file, sha256).features


def random_prior_scattering(root: Path, file: str, sha256: str | None) -> Features:
    """Load the features of a trained prior, with scattering coefficients; arguments and errors as `random_prior`."""
    return _prior(root, file, sha256).features_and_scattering


def _prior(root: Path, file: str, sha256: str | None) -> Prior:
    try:
        path = find_file(root, file)
    except DataError as error:
        raise DataError(f"data.prior: {error} Train it: dpbench pretrain --out {file}") from error
    prior = load(path)
    if sha256 is None:
        raise ConfigurationError(
            "data.prior_sha256=null would allow a run to continue with another data.prior: remove it, or set it to the "
            f"file's SHA-256, {prior.sha256}."
        )
    if sha256 != prior.sha256:
        raise ConfigurationError(
            f"data.prior={file} has changed: its SHA-256 is {prior.sha256}, and data.prior_sha256 is {sha256}. "
            "Restore the original file, or train a new run."
        )
    return prior


def _random_shapes(root: Path, split: Split, download: bool) -> Images:
    """Objects of ten shapes before grounds of random processes: 50,000 / 10,000 color images, the same in each run."""
    generator = torch.Generator().manual_seed(_SHAPES_KEYS[split])
    pieces = [labeled_shapes(_SHAPES_PIECE, 32, generator) for _ in range(NOISE_SIZES[split] // _SHAPES_PIECE)]
    pixels = torch.cat([images.mul(255).round().byte().permute(0, 2, 3, 1) for images, _ in pieces])
    return Images(pixels, torch.cat([labels for _, labels in pieces]))


RANDOM_SHAPES = Source(_random_shapes, (0.5,) * 3, (0.25,) * 3, SHAPES, side=32)
"""The data set `random_shapes`."""
