"""What is made of columns of numbers, texts and images: examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.texts import Sequences, bags_of_words, character_sequences, labeled_words, word_sequences
from dpbench.data.users import Rows
from dpbench.errors import ConfigurationError, DataError

Column = NDArray[Any] | list[str]
"""A feature of several examples: an array whose dimension 0 is the examples, or texts."""
Features = Sequence[str] | Mapping[str, Sequence[int] | None] | None
"""Which features, in the order of an example's parts; with the shape of each, where the file has it flat."""


class Columns(Dataset[Any]):
    """Features side by side, some of which are texts.

    Args:
        *columns: All of one length; an item has an entry for each.
    """

    def __init__(self, *columns: Tensor | list[str]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, position: int) -> tuple[Any, ...]:
        return tuple(column[position] for column in self.columns)


@dataclass(frozen=True)
class Reading:
    """What is made of the features of a file.

    Attributes:
        features: Which ones, in which order, of which shape; None: all there are, as they are.
        images: The first feature is images, with the channels in dimension "channels_first" or "channels_last", or
            without that dimension ("gray"): float32 (C, H, W); whole numbers are divided by 255.
        text: The first feature is texts, of which "characters" or "words" make sequences with their targets
            (`dpbench.data.texts`); other features are left out. Words are parted by blanks. With "tags" the last
            feature holds tags that are parted by "|", those before it texts: bags of words. With "labels" the last
            feature is a label, those before it texts as people write them: numbers of words
            (`dpbench.data.texts.labeled_words`).
        sequence_length: Tokens of a sequence; None: 80 characters, 20 words, 100 words with labels.
        vocabulary: Of words, the most frequent first; a bag has as many features. With labels None is possible, too.
        tags: All tags; a bag has as many targets.
    """

    features: Features = None
    images: Literal["channels_first", "channels_last", "gray"] | None = None
    text: Literal["characters", "words", "tags", "labels"] | None = None
    sequence_length: int | None = None
    vocabulary: Sequence[str] | None = None
    tags: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.text == "words" and self.vocabulary is None:
            raise ConfigurationError(
                "text=words needs a vocabulary: words that have a number, the most frequent first."
            )
        if self.text == "tags" and (not self.vocabulary or not self.tags or len(self.features or ()) < 2):
            raise ConfigurationError(
                "text=tags needs a vocabulary, all tags, and features: those that are texts, then the one with tags."
            )
        if self.text == "labels" and len(self.features or ()) < 2:
            raise ConfigurationError("text=labels needs features: those that are texts, then the one with labels.")
        if self.text and self.images:
            raise ConfigurationError("the first feature is either images or text.")
        if isinstance(self.features, str) or (self.features is not None and not len(self.features)):
            raise ConfigurationError(f"features must be the names of features, not {self.features!r}.")


def examples_of(columns: Mapping[str, Column], reading: Reading, where: str) -> Dataset[Any]:
    """Examples of columns side by side.

    Args:
        columns: By name, as many rows each as there are examples.
        reading: What is made of them; all of its features are columns.
        where: The file, for errors.

    Raises:
        DataError: A feature has another shape or kind than is asked for.
    """
    features = _features(columns, reading, where)
    if reading.text == "tags":
        assert reading.vocabulary is not None and reading.tags is not None
        texts = [" ".join(parts).lower().split() for parts in zip(*features[:-1], strict=True)]
        tags = [list(filter(None, str(marks).split("|"))) for marks in features[-1]]
        return bags_of_words(texts, tags, reading.vocabulary, reading.tags)
    if any(isinstance(column, list) for column in features):
        return Columns(*(column if isinstance(column, list) else torch.tensor(column) for column in features))
    tensors = [torch.tensor(column) for column in features]
    return Sequences(tensors[0]) if reading.text in ("characters", "words") else Rows(*tensors)


def _features(columns: Mapping[str, Column], reading: Reading, where: str) -> list[Column]:
    """The features that are read, in their order and form."""
    names = list(columns) if reading.features is None else reading.features
    shapes = names if isinstance(names, Mapping) else dict.fromkeys(names)
    features: list[Column] = []
    subjects: list[str] = []  # of errors
    for name, shape in shapes.items():
        subject = f"{where}: feature {name!r}"
        features.append(_shaped(columns[name], shape, subject))
        subjects.append(subject)
    if reading.images:
        features[0] = _as_images(features[0], reading.images, subjects[0])
    elif reading.text == "tags":
        for column, subject in zip(features, subjects, strict=True):
            _require_texts(column, subject)
    elif reading.text == "labels":
        return _labeled(features, reading, subjects)
    elif reading.text:
        return [_as_sequences(_require_texts(features[0], subjects[0]), reading)]
    return features


def _shaped(column: Column, shape: Sequence[int] | None, subject: str) -> Column:
    """A column of the shape that is asked for, of a type that torch's layers take: int64, float32, uint8 or bool."""
    if isinstance(column, list):
        return column
    if column.dtype.kind not in "iufb":
        raise DataError(f"{subject} holds neither numbers nor texts ({column.dtype}).")
    if column.dtype.kind in "iu" and column.dtype != np.uint8:
        column = column.astype(np.int64, copy=False)
    elif column.dtype.kind == "f":
        column = column.astype(np.float32, copy=False)
    if shape is None:
        return column
    try:
        return column.reshape(len(column), *shape)
    except ValueError as error:
        raise DataError(f"{subject} has shape {column.shape[1:]}, which is not {tuple(shape)}.") from error


def _as_images(column: Column, layout: str, subject: str) -> Column:
    """Images as float32 (N, C, H, W)."""
    if isinstance(column, list) or column.ndim != (3 if layout == "gray" else 4):
        shape = "texts" if isinstance(column, list) else column.shape[1:]
        raise DataError(f"{subject} is no image ({layout}): {shape}; give its shape in features.")
    if column.dtype.kind != "f":
        column = np.divide(column, 255, dtype=np.float32)  # no detour by float64, of twice the size
    if layout == "channels_last":
        return np.ascontiguousarray(column.transpose(0, 3, 1, 2))
    return column[:, None] if layout == "gray" else column


def _require_texts(column: Column, subject: str) -> list[str]:
    if isinstance(column, list):
        return column
    raise DataError(f"{subject} is no text, but {_kind(column)}.")


def _labeled(features: Sequence[Column], reading: Reading, subjects: Sequence[str]) -> list[Column]:
    """Numbers of the words of texts, and their labels."""
    *parts, labels = features
    if isinstance(labels, list) or labels.dtype != np.int64 or labels.ndim != 1:
        raise DataError(
            f"{subjects[-1]} is no label but {_kind(labels)}: number the classes, from 0 on, and name the texts before."
        )
    texts = [_require_texts(column, subject) for column, subject in zip(parts, subjects, strict=False)]
    joined = map(" ".join, zip(*texts, strict=True))
    return [labeled_words(joined, reading.vocabulary, reading.sequence_length or 100), labels]


def _as_sequences(texts: list[str], reading: Reading) -> Column:
    if reading.text == "characters":
        return character_sequences(texts, reading.sequence_length or 80)[0]
    assert reading.vocabulary is not None
    split = [text.lower().split() for text in texts]
    return word_sequences(split, reading.vocabulary, reading.sequence_length or 20)


def _kind(column: Column) -> str:
    return "text" if isinstance(column, list) else f"{column.dtype} {column.shape[1:]}"


def column_of(
    values: Sequence[Any] | NDArray[Any],
    name: str,
    who: Callable[[int], str],
    where: str,
) -> Column:
    """Values of a feature as a column: numbers, texts, or lists of numbers of one shape.

    Args:
        values: One an example.
        name: Of the feature.
        who: Says which example a position is: "row 3", "user 'ann'".
        where: The file.
    """
    if len(values) and isinstance(values[0], str | bytes):
        return [_text(value, f"{where}: feature {name!r} of {who(i)}") for i, value in enumerate(values)]
    # All at once where that works: an image has hundreds of numbers.
    with suppress(ValueError, TypeError, OverflowError):
        column = np.asarray(list(values))
        if column.dtype.kind in "iufb":
            return column
    # One by one, so that the first value that does not fit can be named.
    rows = [np.asarray(value) if _is_even(value) else np.empty(0, object) for value in values]
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape or row.dtype.kind not in "iufb":
            raise DataError(
                f"{where}: feature {name!r} of {who(i)} is {_short(values[i])}; the first one has shape "
                f"{rows[0].shape}, and all examples must have the same, of numbers."
            )
    return np.stack(rows)


def _is_even(value: Any) -> bool:
    """Whether lists in lists have one length."""
    with suppress(ValueError):
        np.asarray(value)
        return True
    return False


def _text(value: Any, subject: str) -> str:
    """A text, of bytes that are UTF-8."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise DataError(f"{subject} is no text, but {_short(value)}.")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{subject} is no UTF-8 text ({error}).") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
