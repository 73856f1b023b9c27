"""Arithmetic and checks of sizes, shared by the networks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Size = Annotated[int, Field(ge=1), "a whole number of at least 1"]
"""A width, a depth, or a number of heads."""


def conv_output(
    size: int,
    kernel: int,
    stride: int,
    padding: int,
) -> int:
    """Side of a convolution's or a pooling layer's output."""
    return (size + 2 * padding - kernel) // stride + 1


def require(
    condition: bool,
    model: str,
    input_shape: tuple[int, int, int],
    needs: str,
) -> None:
    """Raise ValueError with the model's name unless the images fit it."""
    if not condition:
        size = "×".join(str(n) for n in input_shape)
        raise ValueError(f"{model} needs {needs}, not {size}: choose another model or set data.image_size.")
