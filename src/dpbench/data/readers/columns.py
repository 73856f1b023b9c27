"""What readers of files share: features of one user after the other become a `UserDataset`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from dpbench.data.readers.bags import bags
from dpbench.data.records import Collated
from dpbench.data.sequences import Sequences, character_sequences, word_sequences
from dpbench.data.users import Rows, UserDataset
from dpbench.errors import ConfigurationError, DataError

Column = NDArray[Any] | list[str]
"""A feature of several examples: an array whose dimension 0 is the examples, or texts."""
Block = tuple[str, dict[str, Column]]
"""A user, and features of examples of this user. A user may have several blocks."""
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

    def __getitems__(self, positions: Sequence[int]) -> list[tuple[Any, ...]]:
        return [self[position] for position in positions]


def same(batch: Any) -> Any:
    """Collate as torch does, but for what is a batch already."""
    return batch.batch if isinstance(batch, Collated) else default_collate(batch)


@dataclass(frozen=True)
class Reading:
    """What is made of the features of a file.

    Attributes:
        features: Which ones, in which order, of which shape; None: all there are, as they are.
        images: The first feature is images, with the channels in dimension "channels_first" or "channels_last", or
            without that dimension ("gray"): float32 (C, H, W); whole numbers are divided by 255.
        text: The first feature is texts, of which "characters" or "words" make sequences with their targets
            (`dpbench.data.sequences`); other features are left out. Words are parted by blanks. With "tags" the last
            feature holds tags that are parted by "|", those before it texts: bags of words (`readers.bags`).
        sequence_length: Tokens of a sequence; None: 80 characters, 20 words.
        vocabulary: Of words, the most frequent first; a bag has as many features.
        tags: All tags; a bag has as many targets.
    """

    features: Features = None
    images: Literal["channels_first", "channels_last", "gray"] | None = None
    text: Literal["characters", "words", "tags"] | None = None
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
        if self.text and self.images:
            raise ConfigurationError("the first feature is either images or text.")
        if isinstance(self.features, str) or (self.features is not None and not len(self.features)):
            raise ConfigurationError(f"features must be the names of features, not {self.features!r}.")


def assemble(
    blocks: Iterable[Block],
    reading: Reading,
    where: str,
    names: Iterable[Hashable] | None = None,
) -> UserDataset:
    """Users with the features of their examples.

    Args:
        blocks: Of each user, one or more.
        reading: What is made of them.
        where: The file, for errors.
        names: All users, looked at after the last block; None: those of the blocks, in the order of their first.

    Raises:
        DataError: There is no example; a feature is missing, or its shape is another than that of the first user.
    """
    parts: list[list[Column]] = []
    users: list[str] = []
    counts: list[int] = []
    first: tuple[str, list[Any]] | None = None
    for user, columns in blocks:
        chosen = _chosen(columns, reading, user, where)
        kinds = [_kind(column) for column in chosen]
        if not len(chosen[0]):
            continue  # what it would be, nobody knows
        first = first or (user, kinds)
        if kinds != first[1]:
            raise DataError(
                f"{where}: examples of user {user!r} have the shapes {_said(kinds)}, those of user {first[0]!r} "
                f"{_said(first[1])}: all users' examples must have the same."
            )
        parts.append(chosen)
        users.append(user)
        counts.append(len(chosen[0]))
    if first is None:
        raise DataError(f"{where} holds no example.")
    every = list(dict.fromkeys(users) if names is None else names)
    return _joined(parts, np.repeat(np.asarray(users), counts), every, reading)


def _joined(
    parts: list[list[Column]],
    users: NDArray[Any],
    names: Sequence[Hashable],
    reading: Reading,
) -> UserDataset:
    columns = [_concatenated(own) for own in zip(*parts, strict=True)]
    if reading.text == "tags":
        assert reading.vocabulary is not None and reading.tags is not None
        texts = [" ".join(texts).lower().split() for texts in zip(*columns[:-1], strict=True)]
        tags = [[tag for tag in str(own).split("|") if tag] for own in columns[-1]]
        return UserDataset(bags(texts, tags, reading.vocabulary, reading.tags), users, names)
    if reading.text and isinstance(columns[0], Tensor):
        return UserDataset(Sequences(columns[0]), users, names)
    tensors = [column for column in columns if isinstance(column, Tensor)]
    return UserDataset(
        Rows(*tensors) if len(tensors) == len(columns) else Columns(*columns),
        users,
        names,
    )


def _chosen(
    columns: Mapping[str, Column],
    reading: Reading,
    user: str,
    where: str,
) -> list[Column]:
    """The features that are wanted, as they are wanted."""
    wanted = reading.features if reading.features is not None else sorted(columns)
    shapes = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    if missing := [name for name in shapes if name not in columns]:
        raise DataError(
            f"{where}: examples of user {user!r} have no feature {missing[0]!r}; they have "
            f"{', '.join(sorted(columns)) or 'none'}."
        )
    sizes = {name: len(columns[name]) for name in shapes}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{count} of {name}" for name, count in sizes.items())
        raise DataError(f"{where}: user {user!r} has different numbers of examples by feature: {said}.")
    chosen = [_shaped(columns[name], shape, name, user, where) for name, shape in shapes.items()]
    if reading.images:
        chosen[0] = _as_images(chosen[0], reading.images, next(iter(shapes)), user, where)
    if reading.text == "tags":
        for name, column in zip(shapes, chosen, strict=True):
            _refuse_numbers(column, name, user, where)
    elif reading.text:
        chosen = [_as_sequences(chosen[0], reading, next(iter(shapes)), user, where)]
    return chosen


def _shaped(
    column: Column,
    shape: Sequence[int] | None,
    name: str,
    user: str,
    where: str,
) -> Column:
    """With the shape that is wanted, of a type that torch's layers take: int64, float32, uint8 or bool."""
    if isinstance(column, list):
        return column
    if column.dtype.kind not in "iufb":
        raise DataError(f"{where}: feature {name!r} of user {user!r} holds neither numbers nor texts ({column.dtype}).")
    if column.dtype.kind in "iu" and column.dtype != np.uint8:
        column = column.astype(np.int64, copy=False)
    elif column.dtype.kind == "f":
        column = column.astype(np.float32, copy=False)
    if shape is None:
        return column
    try:
        return column.reshape(len(column), *shape)
    except ValueError as error:
        raise DataError(
            f"{where}: feature {name!r} of user {user!r} has shape {column.shape[1:]}, which is not {tuple(shape)}."
        ) from error


def _as_images(
    column: Column,
    layout: str,
    name: str,
    user: str,
    where: str,
) -> Column:
    dims = 3 if layout == "gray" else 4
    if isinstance(column, list) or column.ndim != dims:
        shape = "texts" if isinstance(column, list) else column.shape[1:]
        raise DataError(
            f"{where}: feature {name!r} of user {user!r} is no image ({layout}): {shape}; give its shape in features."
        )
    if column.dtype.kind != "f":
        column = np.divide(column, 255, dtype=np.float32)
    if layout == "channels_last":
        return np.ascontiguousarray(column.transpose(0, 3, 1, 2))
    return column[:, None] if layout == "gray" else column


def _refuse_numbers(
    column: Column,
    name: str,
    user: str,
    where: str,
) -> list[str]:
    if isinstance(column, list):
        return column
    raise DataError(f"{where}: feature {name!r} of user {user!r} is no text, but {_said([_kind(column)])}.")


def _as_sequences(
    column: Column,
    reading: Reading,
    name: str,
    user: str,
    where: str,
) -> Column:
    texts = _refuse_numbers(column, name, user, where)
    if reading.text == "characters":
        return character_sequences(texts, reading.sequence_length or 80)[0]
    assert reading.vocabulary is not None
    return word_sequences(
        [text.lower().split() for text in texts],
        reading.vocabulary,
        reading.sequence_length or 20,
    )


def _kind(column: Column) -> Any:
    return "text" if isinstance(column, list) else (str(column.dtype), column.shape[1:])


def _said(kinds: list[Any]) -> str:
    return ", ".join(kind if isinstance(kind, str) else f"{kind[0]} {kind[1]}" for kind in kinds)


def _concatenated(own: Sequence[Column]) -> Tensor | list[str]:
    if isinstance(own[0], list):
        return [text for texts in own for text in texts]
    return torch.from_numpy(np.concatenate(own))


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
        return [text_of(value, f"{where}: feature {name!r} of {who(i)}") for i, value in enumerate(values)]
    try:
        column = np.asarray(list(values))
        if column.dtype.kind in "iufb":
            return column
    except (ValueError, TypeError, OverflowError):
        pass
    rows = [np.asarray(value) for value in values]
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape or row.dtype.kind not in "iufb":
            raise DataError(
                f"{where}: feature {name!r} of {who(i)} is {_short(values[i])}; the first one has shape "
                f"{rows[0].shape}, and all examples must have the same, of numbers."
            )
    return np.stack(rows)


def example_of(user: str, first: int = 0) -> Callable[[int], str]:
    """What examples of a user are called in errors; `first` is the number of the first one."""
    return lambda position: f"user {user!r}, example {first + position}"


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) < 60 else f"{said[:57]}..."


def text_of(value: Any, what: str) -> str:
    """A text, of bytes that are UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{what} is no UTF-8 text ({error}).") from error
    if not isinstance(value, str):
        raise DataError(f"{what} is no text, but {_short(value)}.")
    return value
