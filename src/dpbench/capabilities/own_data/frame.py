"""An open table becomes examples by user: the one function under all readers of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.capabilities.own_data.texts import labeled_words
from dpbench.data.texts import Sequences, character_sequences, word_sequences
from dpbench.data.users import Rows, UserDataset
from dpbench.errors import ConfigurationError, DataError

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


def read_frame(
    frame: pd.DataFrame,
    user: str | None = "user",
    features: Features = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    texts: bool = True,
    classes: Sequence[str] | None = None,
    images: Literal["channels_first", "channels_last", "gray"] | None = None,
    text: Literal["characters", "words", "labels"] | None = None,
    sequence_length: int | None = None,
    vocabulary: Sequence[str] | None = None,
    where: str = "the table",
    names: Sequence[str] | None = None,
) -> UserDataset:
    """Make users of an open table of pandas, of which a row is an example.

    Args:
        frame: The table.
        user: Column with the user of each row; None: each row is that of a user with no other one, who is called by
            what the row holds, so that a row's place in the table decides nothing.
        features: Features that are read, in the order of an example's parts; None: all other columns, in the order of
            the table. A list among the names puts columns of numbers together: [["age", "height"], "label"] makes
            inputs (2,), float32, and a target.
        ranges: Least and largest value of columns; what lies beyond is clipped, and the range becomes [-1, 1].
        texts: Whether a column may hold texts where `text` is None.
        classes: Words of the last feature, in the order of the numbers that it gets.
        images: Layout of the first feature, which is images, with the channels in dimension "channels_first" or
            "channels_last", or without that dimension ("gray"): float32 (C, H, W); whole numbers are divided by 255.
        text: What is made of texts. "characters" and "words" make sequences of the first feature, with their targets
            (`dpbench.data.texts`); other features are left out. Words are parted by blanks. With "labels" the last
            feature is a label, those before it texts as people write them: numbers of words
            (`dpbench.capabilities.own_data.texts.labeled_words`).
        sequence_length: Tokens of a sequence; None: 80 characters, 20 words, 100 words with labels.
        vocabulary: Words, the most frequent first. With labels None is possible, too.
        where: Name of the table, for errors.
        names: Names of the users of rows without one; None: what each row holds.

    Raises:
        ConfigurationError: A range or a list of columns is empty, or options contradict each other.
        DataError: A row has no user, or another shape than the first; a column is missing, or must be one of numbers
            and has a cell that is none.
    """
    frame = frame.rename(columns=str)
    if user is not None and user not in frame.columns:
        raise DataError(f"{where} has no column {user!r} for the user; it has {', '.join(frame.columns)}.")
    if not len(frame):
        raise DataError(f"{where} contains no rows.")
    if features is None:
        features = [name for name in frame.columns if name != user]
    _check_options(features, images, text, vocabulary)
    if user is None:
        owners: Any = names or names_of_rows(frame)
    else:
        owners = _values(frame, user, where).to_numpy()
    for name, ends in (ranges or {}).items():
        frame = _scaled(frame, name, ends, where)
    if classes is not None:
        frame = _numbered(frame, list(features)[-1], classes, where)
    columns: dict[str, Column] = {}
    for feature in features:
        if isinstance(feature, str):
            column = _column(frame, feature, where)
            if isinstance(column, list) and not texts and text is None:
                raise _not_numeric(frame, feature, where)
            shape = features[feature] if isinstance(features, Mapping) else None
            columns[feature] = _typed(column, shape, f"{where}: feature {feature!r}")
        else:
            numbers = [_numbers(frame, name, where) for name in feature]
            columns["+".join(feature)] = np.stack(numbers, axis=1).astype(np.float32)
    if len(columns) < len(features):
        raise ConfigurationError(f"features= names a feature twice: {features}.")
    return UserDataset(_examples(columns, where, images, text, sequence_length, vocabulary), owners)


def _examples(
    columns: Mapping[str, Column],
    where: str,
    images: str | None,
    text: str | None,
    length: int | None,
    vocabulary: Sequence[str] | None,
) -> Dataset[Any]:
    """Examples of columns side by side."""
    subjects = [f"{where}: feature {name!r}" for name in columns]
    parts = list(columns.values())
    if text == "labels":
        return _labeled_texts(parts, subjects, vocabulary, length or 100)
    if text is not None:
        return _sequences(parts[0], subjects[0], vocabulary if text == "words" else None, length)
    if images is not None:
        parts[0] = _images(parts[0], images, subjects[0])
    if any(isinstance(part, list) for part in parts):
        return Columns(*(part if isinstance(part, list) else torch.tensor(part) for part in parts))
    return Rows(*map(torch.tensor, parts))


def _check_options(features: Any, images: Any, text: Any, vocabulary: Any) -> None:
    if isinstance(features, str) or not features or not all(features):
        raise ConfigurationError(
            "features must be the names of one feature or more beside the user's, and of one column or more in a "
            f"list, not {features!r}."
        )
    if text == "words" and vocabulary is None:
        raise ConfigurationError("text=words needs a vocabulary: words that have a number, the most frequent first.")
    if text == "labels" and len(features) < 2:
        raise ConfigurationError("text=labels needs features: those that are texts, then the one with labels.")
    if text and images:
        raise ConfigurationError("the first feature is either images or text.")


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


def _values(frame: pd.DataFrame, name: str, where: str) -> pd.Series[Any]:
    """A column that has a value in each row."""
    if name not in frame.columns:
        raise DataError(f"{where} has no column {name!r}; it has {', '.join(frame.columns)}.")
    absent = np.flatnonzero(frame[name].isna())
    if len(absent):
        raise DataError(f"{where}: row {absent[0]} has no {name!r}: remove such rows, or fill it in.")
    return frame[name]


def _scaled(frame: pd.DataFrame, name: str, ends: Sequence[float], where: str) -> pd.DataFrame:
    """The table with a range of a column made [-1, 1]."""
    low, high = ends
    if not low < high:
        raise ConfigurationError(f"ranges: the range of {name!r} must go up, not from {low:g} to {high:g}.")
    # Clipped at the public range: a largest value of the data would tell of one row.
    scaled = (np.clip(_numbers(frame, name, where), low, high) - low) / (high - low) * 2 - 1
    return frame.assign(**{name: scaled})


def _numbered(frame: pd.DataFrame, name: Any, classes: Sequence[str], where: str) -> pd.DataFrame:
    """The table with numbers in the place of the words of a column."""
    if len(set(classes)) < len(classes):
        raise ConfigurationError(f"classes= names a class twice: {list(classes)}.")
    if not isinstance(name, str):
        raise ConfigurationError(f"classes= are the words of the last feature, which is no column: {name!r}.")
    words = _values(frame, name, where).astype(str)
    numbers = words.map({word: number for number, word in enumerate(classes)})
    unknown = np.flatnonzero(numbers.isna())
    if len(unknown):
        row = unknown[0]
        raise DataError(
            f"{where}: row {row} has {name} {words.iloc[row]!r}, which is not among classes={list(classes)}."
        )
    return frame.assign(**{name: numbers.astype(np.int64)})


def _numbers(frame: pd.DataFrame, name: str, where: str) -> NDArray[Any]:
    """A column of single numbers."""
    column = _column(frame, name, where)
    if isinstance(column, list) or column.ndim != 1:
        raise _not_numeric(frame, name, where)
    return column


def _column(frame: pd.DataFrame, name: str, where: str) -> Column:
    """A column of numbers, of texts, or of lists of numbers of one shape."""
    values = _values(frame, name, where).to_numpy()
    if values.dtype.kind in "iufb":
        return np.asarray(values)
    if isinstance(values[0], str | bytes):
        return [_text(cell, f"{where}: feature {name!r} of row {row}") for row, cell in enumerate(values)]
    arrays = [_array(cell) for cell in values]
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape or array.dtype.kind not in "iufb":
            raise DataError(
                f"{where}: feature {name!r} of row {row} is {_short(values[row])}; the first one has shape "
                f"{arrays[0].shape}, and all examples must have the same, of numbers."
            )
    return np.stack(arrays)


def _not_numeric(frame: pd.DataFrame, name: str, where: str) -> DataError:
    """The error about a column of texts, which names the first cell that is no number."""
    import pandas as pd

    cells = frame[name]
    # The first one of all where each reads as a number: a column of users is one of texts, whatever they are.
    row = int(pd.to_numeric(cells.astype(str), errors="coerce").isna().argmax())
    return DataError(
        f"{where}: column {name!r} is not numeric (row {row}: {_short(cells.iloc[row])}): fix that cell, number its "
        "categories (data.options.classes for the last feature), or remove the column; texts are read by "
        "data.options.text=labels, each as a feature of its own, outside of a list."
    )


def _plain(value: Any) -> Any:
    """Lists in lists, which Parquet gives as arrays of arrays, as one list."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(part) for part in value]
    return value


def _array(value: Any) -> NDArray[Any]:
    """A cell as an array; an array of objects where lists in it differ in length."""
    try:
        return np.asarray(_plain(value))
    except ValueError:
        return np.empty(0, object)


def _text(value: Any, subject: str) -> str:
    """A text, of bytes that are UTF-8."""
    try:
        return value if isinstance(value, str) else value.decode("utf-8")
    except (AttributeError, UnicodeDecodeError) as error:
        raise DataError(f"{subject} is no UTF-8 text, but {_short(value)}.") from error


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


def _labeled_texts(
    parts: Sequence[Column],
    subjects: Sequence[str],
    vocabulary: Sequence[str] | None,
    length: int,
) -> Rows:
    labels = parts[-1]
    if isinstance(labels, list) or labels.dtype != np.int64 or labels.ndim != 1:
        raise DataError(
            f"{subjects[-1]} is no label but {_kind(labels)}: number the classes, from 0 on, and name the texts before."
        )
    texts = [_require_texts(part, subject) for part, subject in zip(parts[:-1], subjects, strict=False)]
    joined = map(" ".join, zip(*texts, strict=True))
    return Rows(torch.tensor(labeled_words(joined, vocabulary, length)), torch.tensor(labels))


def _sequences(
    column: Column,
    subject: str,
    vocabulary: Sequence[str] | None,
    length: int | None,
) -> Sequences:
    """Sequences of characters, or of words where there is a vocabulary."""
    texts = _require_texts(column, subject)
    if vocabulary is None:
        return Sequences(torch.tensor(character_sequences(texts, length or 80)[0]))
    return Sequences(torch.tensor(word_sequences([text.lower().split() for text in texts], vocabulary, length or 20)))


def _require_texts(column: Column, subject: str) -> list[str]:
    if not isinstance(column, list):
        raise DataError(f"{subject} is no text, but {_kind(column)}.")
    return column


def _kind(column: Column) -> str:
    return "text" if isinstance(column, list) else f"{column.dtype} {column.shape[1:]}"
