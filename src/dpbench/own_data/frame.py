"""An open table becomes examples by user: the one function under all readers of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.texts import Sequences, character_sequences, word_sequences
from dpbench.data.users import Rows, UserDataset
from dpbench.errors import ConfigurationError, DataError
from dpbench.own_data.texts import bags_of_words, labeled_words

if TYPE_CHECKING:
    import pandas as pd

Column = NDArray[Any] | list[str]
"""A feature of several examples: an array whose dimension 0 is the examples, or texts."""
Features = Sequence[str | Sequence[str]] | Mapping[str, Sequence[int] | None] | None
"""Features in the order of an example's parts: columns, lists of columns, or columns with the shape of a cell."""


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
    """What is made of the features of a table.

    Attributes:
        features: Features that are read, in the order of an example's parts. A list among the names puts columns of
            numbers together: [["age", "height"], "label"] makes inputs (2,), float32, and a target.
        images: The first feature is images, with the channels in dimension "channels_first" or "channels_last", or
            without that dimension ("gray"): float32 (C, H, W); whole numbers are divided by 255.
        text: The first feature is texts, of which "characters" or "words" make sequences with their targets
            (`dpbench.data.texts`); other features are left out. Words are parted by blanks. With "tags" the last
            feature holds tags that are parted by "|", those before it texts: bags of words. With "labels" the last
            feature is a label, those before it texts as people write them: numbers of words
            (`dpbench.own_data.texts.labeled_words`).
        sequence_length: Tokens of a sequence; None: 80 characters, 20 words, 100 words with labels.
        vocabulary: Words, the most frequent first; a bag has as many features. With labels None is possible, too.
        tags: All tags; a bag has as many targets.
    """

    features: Features
    images: Literal["channels_first", "channels_last", "gray"] | None = None
    text: Literal["characters", "words", "tags", "labels"] | None = None
    sequence_length: int | None = None
    vocabulary: Sequence[str] | None = None
    tags: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.features, str) or not self.features:
            raise ConfigurationError(f"features must be the names of features, not {self.features!r}.")
        if self.text == "words" and self.vocabulary is None:
            raise ConfigurationError(
                "text=words needs a vocabulary: words that have a number, the most frequent first."
            )
        if self.text == "tags" and (not self.vocabulary or not self.tags or len(self.features) < 2):
            raise ConfigurationError(
                "text=tags needs a vocabulary, all tags, and features: those that are texts, then the one with tags."
            )
        if self.text == "labels" and len(self.features) < 2:
            raise ConfigurationError("text=labels needs features: those that are texts, then the one with labels.")
        if self.text and self.images:
            raise ConfigurationError("the first feature is either images or text.")


def read_frame(
    frame: pd.DataFrame,
    user: str | None = "user",
    features: Features = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    texts: bool = True,
    classes: Sequence[str] | None = None,
    where: str = "the table",
    names: Sequence[str] | None = None,
    **reading: Any,
) -> UserDataset:
    """Make users of an open table of pandas, of which a row is an example.

    Args:
        frame: The table.
        user: Column with the user of each row; None: each row is that of a user with no other one, who is called by
            what the row holds, so that a row's place in the table decides nothing.
        features: Features that are read, see `Reading`; None: all other columns, in the order of the table.
        ranges: Least and largest value of columns; what lies beyond is clipped, and the range becomes [-1, 1].
        texts: Whether a column may hold texts that `reading` makes nothing of.
        classes: Words of the last feature, in the order of the numbers that it gets.
        where: Name of the table, for errors.
        names: Names of the users of rows without one; None: what each row holds.
        **reading: Further attributes of `Reading`.

    Raises:
        ConfigurationError: A range or a list of columns is empty, or options contradict each other.
        DataError: A row has no user, or another shape than the first; a column is missing, or must be one of numbers
            and has a cell that is none.
    """
    table = _Table(frame.rename(columns=str), where)
    if user is not None and user not in table.frame.columns:
        raise DataError(f"{where} has no column {user!r} for the user; it has {', '.join(table.frame.columns)}.")
    if not len(frame):
        raise DataError(f"{where} contains no rows.")
    if user is not None:
        table.require_values(user, "name their user")
    if features is None:
        features = [name for name in table.frame.columns if name != user]
        if not features:
            raise DataError(f"{where} has no column beside {user!r}.")
    options = Reading(features, **reading)
    owners = (names or names_of_rows(table.frame)) if user is None else table.frame[user].to_numpy()
    for name, (low, high) in (ranges or {}).items():
        table.scale(name, low, high)
    if classes is not None:
        table.number(list(features)[-1], classes)
    columns: dict[str, Column] = {}
    for feature in features:
        if isinstance(feature, str):
            column = table.column(feature)
            if isinstance(column, list) and not texts and options.text is None:
                raise table.not_numeric(feature)
            shape = features[feature] if isinstance(features, Mapping) else None
            columns[feature] = _typed(column, shape, f"{where}: feature {feature!r}")
        else:
            columns["+".join(feature)] = table.side_by_side(feature)
    if len(columns) < len(features):
        raise ConfigurationError(f"features= names a feature twice: {features}.")
    return UserDataset(_examples(columns, options, where), owners)


def names_of_rows(frame: pd.DataFrame) -> list[str]:
    """What each row holds; of equal rows the second, third, ... with its number.

    By these names rows are held out, so no row may change the name of another one.
    """
    names = []
    seen: Counter[str] = Counter()
    for row in frame.itertuples(index=False, name=None):
        text = repr(tuple(map(_as_text, row)))
        seen[text] += 1
        names.append(text if seen[text] == 1 else f"{text} {seen[text]}")
    return names


def _as_text(cell: Any) -> Any:
    """A cell in a form whose `repr` tells all of it, whatever other rows hold."""
    if isinstance(cell, np.ndarray | np.generic):
        cell = cell.tolist()
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell


class _Table:
    """A table whose errors begin with its name.

    Args:
        frame: The table.
        where: Its name.
    """

    def __init__(self, frame: pd.DataFrame, where: str) -> None:
        self.frame = frame
        self.where = where

    def require_values(self, name: str, remedy: str) -> None:
        absent = np.flatnonzero(self.frame[name].isna())
        if len(absent):
            raise DataError(f"{self.where}: row {absent[0]} has no {name!r}: remove such rows, or {remedy}.")

    def scale(self, name: str, low: float, high: float) -> None:
        """Make the range of a column [-1, 1]."""
        if not low < high:
            raise ConfigurationError(f"ranges: the range of {name!r} must go up, not from {low:g} to {high:g}.")
        # Clipped at the public range: a largest value of the data would tell of one row.
        scaled = (np.clip(self.numbers(name), low, high) - low) / (high - low) * 2 - 1
        self.frame = self.frame.assign(**{name: scaled})

    def number(self, name: Any, classes: Sequence[str]) -> None:
        """Put numbers in the place of the words of a column."""
        if not isinstance(name, str) or name not in self.frame.columns:
            raise ConfigurationError(f"classes= are the words of the last feature, which is no column: {name!r}.")
        if len(set(classes)) < len(classes):
            raise ConfigurationError(f"classes= names a class twice: {list(classes)}.")
        self.require_values(name, "fill it in")
        words = self.frame[name].astype(str)
        unknown = np.flatnonzero(~words.isin(classes))
        if len(unknown):
            raise DataError(
                f"{self.where}: row {unknown[0]} has {name} {words.iloc[unknown[0]]!r}, which is not among classes="
                f"{list(classes)}."
            )
        numbers = {word: number for number, word in enumerate(classes)}
        self.frame = self.frame.assign(**{name: words.map(numbers).astype(np.int64)})

    def numbers(self, name: str) -> NDArray[Any]:
        """A column of single numbers."""
        column = self.column(name)
        if isinstance(column, list) or column.ndim != 1:
            raise self.not_numeric(name)
        return column

    def side_by_side(self, names: Sequence[str]) -> NDArray[np.float32]:
        """Columns of single numbers, (rows, columns)."""
        if not names:
            raise ConfigurationError("features hold an empty list of columns: name some, or remove it.")
        return np.stack([self.numbers(name) for name in names], axis=1).astype(np.float32)

    def column(self, name: str) -> Column:
        """A column of numbers, of texts, or of lists of numbers of one shape."""
        if name not in self.frame.columns:
            raise DataError(f"{self.where} has no column {name!r}; it has {', '.join(self.frame.columns)}.")
        self.require_values(name, "fill it in")
        values = self.frame[name].to_numpy()
        if values.dtype.kind in "iufb":
            return np.asarray(values)
        cells = [_plain(value) for value in values]
        if isinstance(cells[0], str | bytes):
            return [_text(cell, f"{self.where}: feature {name!r} of row {row}") for row, cell in enumerate(cells)]
        # All at once where that works: an image has hundreds of numbers.
        with suppress(ValueError, TypeError, OverflowError):
            column = np.asarray(cells)
            if column.dtype.kind in "iufb":
                return column
        # One by one, so that the first cell that does not fit can be named.
        arrays = [_array(cell) for cell in cells]
        for row, array in enumerate(arrays):
            if array.shape != arrays[0].shape or array.dtype.kind not in "iufb":
                raise DataError(
                    f"{self.where}: feature {name!r} of row {row} is {_short(cells[row])}; the first one has shape "
                    f"{arrays[0].shape}, and all examples must have the same, of numbers."
                )
        return np.stack(arrays)

    def not_numeric(self, name: str) -> DataError:
        """The error that says where a column's first cell is that holds no number."""
        import pandas as pd

        cells = self.frame[name]
        row = 0
        remedy = "fix that cell, or remove the column"
        if not isinstance(cells.iloc[0], np.ndarray | list):
            # The first one of all where each reads as a number: a column of users is one of texts, whatever they are.
            is_text = pd.to_numeric(cells, errors="coerce").isna().to_numpy()
            row = int(is_text.argmax())
            if is_text.all():
                remedy = (
                    "number its categories (data.options.classes for the last feature), or remove the column; texts "
                    "are read by data.options.text=labels, each as a feature of its own, outside of a list"
                )
        return DataError(
            f"{self.where}: column {name!r} is not numeric (row {row}: {_short(cells.iloc[row])}): {remedy}."
        )


def _plain(value: Any) -> Any:
    """Lists in lists, which Parquet gives as arrays of arrays, as one list."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(part) for part in value]
    return value


def _array(value: Any) -> NDArray[Any]:
    """A cell as an array; an array of objects where lists in it differ in length."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.empty(0, object)


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


def _typed(column: Column, shape: Sequence[int] | None, subject: str) -> Column:
    """A column of a shape and of a type that torch's layers take: int64, float32, uint8 or bool."""
    if isinstance(column, list):
        return column
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


def _examples(columns: Mapping[str, Column], reading: Reading, where: str) -> Dataset[Any]:
    """Examples of columns side by side."""
    subjects = [f"{where}: feature {name!r}" for name in columns]
    parts = list(columns.values())
    if reading.text:
        return _examples_of_texts(parts, subjects, reading)
    if reading.images:
        parts[0] = _images(parts[0], reading.images, subjects[0])
    if any(isinstance(part, list) for part in parts):
        return Columns(*(part if isinstance(part, list) else torch.tensor(part) for part in parts))
    return Rows(*(torch.tensor(part) for part in parts))


def _images(column: Column, layout: str, subject: str) -> Column:
    """Images as float32 (N, C, H, W)."""
    if isinstance(column, list) or column.ndim != (3 if layout == "gray" else 4):
        shape = "texts" if isinstance(column, list) else column.shape[1:]
        raise DataError(f"{subject} is no image ({layout}): {shape}; give its shape in features.")
    if column.dtype.kind != "f":
        column = np.divide(column, 255, dtype=np.float32)  # no detour by float64, of twice the size
    if layout == "channels_last":
        return np.ascontiguousarray(column.transpose(0, 3, 1, 2))
    return column[:, None] if layout == "gray" else column


def _examples_of_texts(parts: list[Column], subjects: list[str], reading: Reading) -> Dataset[Any]:
    length = reading.sequence_length
    vocabulary = reading.vocabulary
    last = parts[-1]
    if reading.text == "labels":
        if isinstance(last, list) or last.dtype != np.int64 or last.ndim != 1:
            raise DataError(
                f"{subjects[-1]} is no label but {_kind(last)}: number the classes, from 0 on, and name the texts "
                "before."
            )
        texts = map(" ".join, zip(*_texts(parts[:-1], subjects), strict=True))
        return Rows(torch.tensor(labeled_words(texts, vocabulary, length or 100)), torch.tensor(last))
    if reading.text == "tags":
        *of_words, tags = _texts(parts, subjects)
        assert vocabulary is not None
        assert reading.tags is not None
        words = [" ".join(texts).lower().split() for texts in zip(*of_words, strict=True)]
        return bags_of_words(words, [list(filter(None, marks.split("|"))) for marks in tags], vocabulary, reading.tags)
    (first,) = _texts(parts[:1], subjects)
    if reading.text == "characters":
        return Sequences(torch.tensor(character_sequences(first, length or 80)[0]))
    assert vocabulary is not None
    return Sequences(torch.tensor(word_sequences([text.lower().split() for text in first], vocabulary, length or 20)))


def _texts(parts: Sequence[Column], subjects: Sequence[str]) -> list[list[str]]:
    for part, subject in zip(parts, subjects, strict=False):
        if not isinstance(part, list):
            raise DataError(f"{subject} is no text, but {_kind(part)}.")
    return parts  # type: ignore[return-value]


def _kind(column: Column) -> str:
    return "text" if isinstance(column, list) else f"{column.dtype} {column.shape[1:]}"
