"""Arrays in files of audited runs: lists of numbers in JSON."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator


def _array(values: Any, dtype: type, kinds: str, words: str) -> NDArray[Any]:
    """An array of its own.

    Args:
        values: An array, or lists of a file.
        dtype: Type of the array.
        kinds: Letters by which numpy knows the kinds of values that are taken.
        words: Name of the kind, for the error.

    Raises:
        ValueError: Values are of another kind, or not finite.
    """
    array = np.array(values)
    if array.dtype.kind not in kinds or not np.isfinite(array).all():
        raise ValueError(f"must contain only {words}")
    return array.astype(dtype)


_AS_LISTS = PlainSerializer(lambda array: array.tolist())

_FLOATS = PlainValidator(partial(_array, dtype=np.float64, kinds="if", words="rows of finite numbers"))
_FLAGS = PlainValidator(partial(_array, dtype=np.bool_, kinds="b", words="true and false"))
_COUNTS = PlainValidator(partial(_array, dtype=np.int64, kinds="i", words="whole numbers"))
FloatArray = Annotated[NDArray[np.float64], _FLOATS, _AS_LISTS]
"""Finite numbers."""
FlagArray = Annotated[NDArray[np.bool_], _FLAGS, _AS_LISTS]
"""True or false."""
CountArray = Annotated[NDArray[np.int64], _COUNTS, _AS_LISTS]
"""Whole numbers."""


class Sums(BaseModel):
    """Base of an auditor's sums: plain data in files and checkpoints, which come back bit-identical.

    Keys that earlier versions wrote, and none reads today, are ignored.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
