"""Arrays in files of audited runs: lists of numbers in JSON."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator


def _floats(values: Any) -> NDArray[np.float64]:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("holds something else than rows of numbers") from None
    if not np.isfinite(array).all():
        raise ValueError("holds numbers that are not finite")
    return array


def _flags(values: Any) -> NDArray[np.bool_]:
    array = np.array(values)
    if array.dtype != np.bool_:
        raise ValueError("holds something else than true and false")
    return array


def _counts(values: Any) -> NDArray[np.int64]:
    array = np.array(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError("holds something else than whole numbers")
    return array.astype(np.int64)


_AS_LISTS = PlainSerializer(lambda array: array.tolist())

FloatArray = Annotated[NDArray[np.float64], PlainValidator(_floats), _AS_LISTS]
"""Finite numbers."""
FlagArray = Annotated[NDArray[np.bool_], PlainValidator(_flags), _AS_LISTS]
"""True or false."""
CountArray = Annotated[NDArray[np.int64], PlainValidator(_counts), _AS_LISTS]
"""Whole numbers."""


class Sums(BaseModel):
    """A base of what an auditor adds up: plain data in files and checkpoints, which come back bit-identical.

    Keys that earlier versions wrote, and none reads today, are ignored.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
