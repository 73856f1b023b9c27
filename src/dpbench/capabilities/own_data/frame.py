"""An open table becomes examples by user: the one function under all readers of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from dpbench.capabilities.own_data.texts import BYTES, Tokenizer, labeled_words
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.inserted import Encoder
from dpbench.data.records import Rows
from dpbench.data.texts import Sequences, character_sequences, word_sequences
from dpbench.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import pandas as pd

Column = NDArray[Any] | list[str]
"""A feature of several examples: an array with examples in dimension 0, or texts."""
Features = Sequence[str | Sequence[str]] | Mapping[str, Sequence[int] | None] | None
"""Features in the order of an example's parts: columns, lists of columns, or columns with the shape of a cell."""

DEFAULT_LENGTHS = {"characters": 80, "words": 20, "tokens": 128, "labels": 100}
"""Tokens of a sequence, by the kind of the text."""


def read_frame(
    frame: pd.DataFrame,
    user: str | None = "user",
    features: Features = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    classes: Sequence[str] | None = None,
    images: Literal["channels_first", "channels_last", "gray"] | None = None,
    text: Literal["characters", "words", "tokens", "labels"] | None = None,
    sequence_length: int | None = None,
    vocabulary: Sequence[str] | None = None,
    tokenizer: str | None = None,
    where: str = "the table",
    names: Sequence[str] | None = None,
) -> UserDataset:
    """Make users of an open table of pandas, of which a row is an example.

    Args:
        frame: Table.
        user: Column with the user of each row; None: each row is that of a user with no other one, named by the row's
            content, so that a row's place in the table decides nothing.
        features: Features that are read, in the order of an example's parts; None: all other columns, in the order of
            the table. A list among the names puts columns of numbers together: [["age", "height"], "label"] makes
            inputs (2,), float32, and a target.
        ranges: Least and largest value of columns; values beyond are clipped, and the range becomes [-1, 1].
        classes: Words of the last feature, in the order of the numbers that it gets.
        images: Layout of the first feature, which is images, with the channels in dimension "channels_first" or
            "channels_last", or without that dimension ("gray"): float32 (C, H, W); whole numbers are divided by 255.
        text: Kind of the text features. "characters", "words" and "tokens" make sequences of the first feature, with
            their targets (`dpbench.data.texts`); other features are left out. Words are parted by blanks. With "labels"
            the last feature is a label, those before it texts as people write them: numbers of words
            (`dpbench.capabilities.own_data.texts.labeled_words`), or tokens.
        sequence_length: Tokens of a sequence; None: 80 characters, 20 words, 128 tokens, 100 words with labels.
        vocabulary: Words, the most frequent first. With labels None is possible, too.
        tokenizer: Tokenizer of "tokens" (None: bytes), or of texts with labels (None: words), see
            `dpbench.capabilities.own_data.texts.Tokenizer`.
        where: Name of the table, for errors.
        names: Names of the users of rows without one; None: each row's content.

    Raises:
        ConfigurationError: A range or a list of columns is empty, or options contradict each other.
        DataError: A row has no user, or another shape than the first; a column is missing, or must be one of numbers
            and has a cell that is none.
    """
    frame = frame.rename(columns=str)
    if not len(frame):
        raise DataError(f"{where} contains no rows.")
    if features is None:
        features = [name for name in frame.columns if name != user]
    if isinstance(features, str) or not features or not all(features):
        raise ConfigurationError(
            "features must name at least one feature other than the user, and at least one column in each list, "
            f"not {features!r}."
        )
    if user is None:
        owners: Any = names or names_of_rows(frame)
    else:
        owners = _values(frame, user, where).to_numpy()
    for name, ends in (ranges or {}).items():
        frame = _scaled(frame, name, ends, where)
    if classes is not None:
        frame = _numbered(frame, list(features)[-1], classes, where)
    columns = _columns(frame, features, where)
    if text is not None:
        return UserDataset(_texts(columns, where, text, sequence_length, vocabulary, tokenizer), owners)
    arrays: list[Any] = []
    for name, column in columns.items():
        if isinstance(column, list):
            raise _not_numeric(frame, name, where)
        arrays.append(_images(column, images, f"{where}: feature {name!r}") if images and not arrays else column)
    return UserDataset(Rows(*map(torch.tensor, arrays)), owners)


def _columns(frame: pd.DataFrame, features: Any, where: str) -> dict[str, Column]:
    """Features by name; a list of columns is one feature."""
    columns: dict[str, Column] = {}
    for feature in features:
        if isinstance(feature, str):
            shape = features[feature] if isinstance(features, Mapping) else None
            columns[feature] = _column(frame, feature, where, shape)
        else:
            numbers = [_numbers(frame, name, where) for name in feature]
            columns["+".join(feature)] = np.stack(numbers, axis=1).astype(np.float32)
    if len(columns) < len(features):
        raise ConfigurationError(f"features= names a feature twice: {features}.")
    return columns


def names_of_rows(frame: pd.DataFrame) -> list[str]:
    """Content of each row; of equal rows the second, third, ... with its number.

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
    """A cell in a form with a complete `repr`, for any content of other rows."""
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
        raise ConfigurationError(
            f"ranges: the first end of {name!r} must be below the second, not [{low:g}, {high:g}]."
        )
    # Clipped at the public range: a largest value of the data would tell of one row.
    scaled = (np.clip(_numbers(frame, name, where), low, high) - low) / (high - low) * 2 - 1
    return frame.assign(**{name: scaled})


def _numbered(frame: pd.DataFrame, name: Any, classes: Sequence[str], where: str) -> pd.DataFrame:
    """The table with numbers in the place of the words of a column."""
    if len(set(classes)) < len(classes):
        raise ConfigurationError(f"classes= names a class twice: {list(classes)}.")
    if not isinstance(name, str):
        raise ConfigurationError(f"classes= requires a single column as the last feature, not {name!r}.")
    words = _values(frame, name, where).astype(str)
    numbers = words.map({word: number for number, word in enumerate(classes)})
    if numbers.isna().any():
        row = int(numbers.isna().argmax())
        raise DataError(
            f"{where}: row {row} has {name} {words.iloc[row]!r}, which is not among classes={list(classes)}."
        )
    return frame.assign(**{name: numbers.astype(np.int64)})


def _numbers(frame: pd.DataFrame, name: str, where: str) -> NDArray[Any]:
    """A column of single numbers, of the type that it has in the table."""
    values = _values(frame, name, where).to_numpy()
    if values.dtype.kind not in "iufb":
        raise _not_numeric(frame, name, where)
    return np.asarray(values)


def _column(frame: pd.DataFrame, name: str, where: str, shape: Sequence[int] | None) -> Column:
    """A column of texts, or of numbers or lists of numbers of one shape, of a type that torch's layers take."""
    values = _values(frame, name, where).to_numpy()
    if all(isinstance(cell, str) for cell in values):
        return list(values)
    column: NDArray[Any] = np.asarray(values)
    if column.dtype.kind not in "iufb":
        column = _stacked(values, f"{where}: feature {name!r}")
    if column.dtype.kind in "iu" and column.dtype != np.uint8:
        column = column.astype(np.int64, copy=False)
    elif column.dtype.kind == "f":
        column = column.astype(np.float32, copy=False)
    try:
        return column if shape is None else column.reshape(len(column), *shape)
    except ValueError as error:
        raise DataError(
            f"{where}: feature {name!r} has shape {column.shape[1:]}, which is not {tuple(shape or ())}."
        ) from error


def _stacked(values: NDArray[Any], subject: str) -> NDArray[Any]:
    """Cells that are lists of numbers as one array."""
    arrays: list[NDArray[Any]] = []
    for row, cell in enumerate(values):
        try:
            array = np.asarray(_plain(cell))
        except ValueError:  # lists in it differ in length
            array = np.empty(0, object)
        if array.dtype.kind not in "iufb" or (arrays and array.shape != arrays[0].shape):
            raise DataError(f"{subject} of row {row} is {cell!r:.60}: all cells must be numbers of one shape.")
        arrays.append(array)
    return np.stack(arrays)


def _plain(value: Any) -> Any:
    """Lists in lists, which Parquet gives as arrays of arrays, as one list."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(part) for part in value]
    return value


def _not_numeric(frame: pd.DataFrame, name: str, where: str) -> DataError:
    """The error about a column of texts, which names the first cell that is no number."""
    import pandas as pd

    cells = frame[name]
    # The first one of all where each reads as a number: a column of users is one of texts, whatever they are.
    row = int(pd.to_numeric(cells.astype(str), errors="coerce").isna().argmax())
    return DataError(
        f"{where}: column {name!r} is not numeric (row {row}: {cells.iloc[row]!r:.60}): fix that cell, number its "
        "categories (data.options.classes for the last feature), or remove the column; texts are read by "
        "data.options.text=labels, each as a feature of its own, outside of a list."
    )


def _images(column: NDArray[Any], layout: str, subject: str) -> NDArray[Any]:
    """Images as float32 (N, C, H, W)."""
    if column.ndim != (3 if layout == "gray" else 4):
        raise DataError(
            f"{subject} has shape {column.shape[1:]}, which is not an image ({layout}): give its shape in features."
        )
    if column.dtype.kind != "f":
        column = np.divide(column, 255, dtype=np.float32)  # no detour by float64, of twice the size
    if layout == "channels_last":
        return np.ascontiguousarray(column.transpose(0, 3, 1, 2))
    return column[:, None] if layout == "gray" else column


def _texts(
    columns: Mapping[str, Column],
    where: str,
    text: str,
    length: int | None,
    vocabulary: Sequence[str] | None,
    tokenizer: str | None,
) -> Dataset[Any]:
    """Sequences of the first column, or texts of all columns but the last with that as labels."""
    if text == "labels":
        return _labeled_texts(columns, where, vocabulary, length or DEFAULT_LENGTHS[text], tokenizer)
    name = next(iter(columns))
    texts = _require_texts(columns, name, where)
    return Sequences(torch.tensor(text_encoder(text, length, vocabulary, tokenizer)(texts)))


def text_encoder(
    text: str,
    length: int | None,
    vocabulary: Sequence[str] | None,
    tokenizer: str | None,
) -> Encoder:
    """Make the encoder of sequences of characters, words or tokens; arguments are those of `read_frame`.

    Raises:
        ConfigurationError: Words have no vocabulary.
    """
    length = length or DEFAULT_LENGTHS[text]
    if text == "tokens":
        return partial(Tokenizer(tokenizer or BYTES).rows, length=length + 1)
    if text == "characters":
        return lambda texts: character_sequences(texts, length)[0]
    if vocabulary is None:
        raise ConfigurationError("text=words needs a vocabulary: words that have a number, the most frequent first.")
    return lambda texts: word_sequences([text.lower().split() for text in texts], vocabulary, length)


def _labeled_texts(
    columns: Mapping[str, Column],
    where: str,
    vocabulary: Sequence[str] | None,
    length: int,
    tokenizer: str | None,
) -> Rows:
    *names, last = columns
    if not names:
        raise ConfigurationError("text=labels needs features: those that are texts, then the one with labels.")
    labels = columns[last]
    if isinstance(labels, list) or labels.dtype != np.int64 or labels.ndim != 1:
        raise DataError(
            f"{where}: feature {last!r} is not a label: name the texts before the label, and number the classes from "
            "0, or name them (data.options.classes=[bad,good])."
        )
    texts = [_require_texts(columns, name, where) for name in names]
    joined = map(" ".join, zip(*texts, strict=True))
    if tokenizer is not None:
        return Rows(torch.tensor(Tokenizer(tokenizer).rows(joined, length)).long(), torch.tensor(labels))
    return Rows(torch.tensor(labeled_words(joined, vocabulary, length)), torch.tensor(labels))


def _require_texts(columns: Mapping[str, Column], name: str, where: str) -> list[str]:
    column = columns[name]
    if not isinstance(column, list):
        raise DataError(f"{where}: feature {name!r} is not text.")
    return column
