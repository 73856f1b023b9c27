"""A network with layers that do not fit the batches: PyTorch raises an ordinary error on the first one.

Some networks, such as torchvision's vision transformers, assert the shape of their input.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytorch_lightning as pl
import torch

from dpbench.errors import DPBenchError, brief
from dpbench.options import options_of

_PACKAGE = Path(__file__).parents[2]
_NETWORKS = ("models", "modules")
# PyTorch's words on shapes, of a matrix product, a convolution, a normalization, a view, a sum and a loss.
_OF_SHAPES = re.compile(
    "shapes cannot be multiplied|size mismatch|expected input|Expected .* input|input size|normalized_shape|"
    "should contain|number of channels|is invalid for input of size|must match the size|Target .* is out of bounds"
)


def misfit_of(error: Exception, data: pl.LightningDataModule) -> str | None:
    """Say in a line that a network and its batches do not fit, where it failed, and which sizes the data set provides.

    Args:
        error: The error of a training; an AssertionError only of its first step.
        data: The training's data module.

    Returns:
        None of any other error, and of one that comes from our own arithmetic.
    """
    is_of_shapes = isinstance(error, AssertionError) or _OF_SHAPES.search(str(error))
    if isinstance(error, DPBenchError) or not is_of_shapes:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.name in ("forward", "training_step") for frame in frames):
        return None  # of a data set, say
    place = [frame for frame in frames if not _is_of_library(frame)][-1]
    file = Path(place.filename)
    if file.is_relative_to(_PACKAGE) and file.relative_to(_PACKAGE).parts[0] not in _NETWORKS:
        return None
    options = data.model_options() if hasattr(data, "model_options") else {}
    provided = ", ".join(f"{name}={value}" for name, value in options.items())
    remedy = f"what the data set provides: {provided}" if provided else "the batches"
    return (
        f"the network and the batches do not fit: {brief(error).rstrip('.')} ({file.name}, line "
        f"{place.lineno}, in {place.name}). Make the layers fit {remedy}{_of_size(data)}."
    )


def _of_size(data: pl.LightningDataModule) -> str:
    """Name the option that sets the size of images, for the end of a sentence; empty where there is none."""
    if "image_size" in getattr(data, "options", {}):
        return ", or set data.options.image_size"
    return ", or set data.image_size" if "image_size" in options_of(type(data)) else ""


def _is_of_library(frame: traceback.FrameSummary) -> bool:
    file = Path(frame.filename)
    if file.is_relative_to(_PACKAGE) and frame.name == "__torch_function__":
        return True  # it only watches the network's own operators
    return file.is_relative_to(Path(torch.__file__).parent) or file.is_relative_to(_PACKAGE / "privacy/record_axis")
