"""Tables: CSV, JSON lines, Parquet as Hugging Face's data sets are stored, and open ones of pandas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError, DataError, brief
from dpbench.own_data.columns import Column, Reading, column_of, examples_of

if TYPE_CHECKING:
    import pandas as pd

_PARQUET = (".parquet", ".pq")
_JSON_LINES = (".jsonl", ".ndjson")


def read_user_table(path: str | Path, user: str = "user", **reading: Any) -> UserDataset:
    """Read the users of a table, of which a row is an example.

    A Hugging Face data set that is open already needs no reader: `UserDataset(ds, ds["user"])`.

    Args:
        path: A `.csv`, `.jsonl` or `.parquet` file, or a folder of `.parquet` files.
        user: Column with the user of each row. In a CSV users are texts: 007 is not 7.
        **reading: See `Reading`; without `features` these are all other columns, in the order of the table. A list
            among the names of features puts columns of numbers together: [["age", "height"], "label"] makes inputs
            (2,), float32, and a target.

    Raises:
        ConfigurationError: Parquet without pyarrow, or an empty list of columns.
        DataError: The file is absent, damaged or empty, or has no such column; a row has no user, or another shape than
            the first.
    """
    return read_table(path, user, **reading)


def read_table(path: str | Path, user: str | None, **options: Any) -> UserDataset:
    """Read a table of which a row is an example.

    Args:
        path: As for `read_user_table`.
        user: Column with the user of each row; None: each row is that of a user with no other one, who is called by
            what the row holds, so that a row's place in the file decides nothing.
        **options: As for `read_frame`.

    Raises:
        ConfigurationError: As for `read_user_table`, or a range is empty.
        DataError: As for `read_user_table`, or a column that must be one of numbers has a cell that is none.
    """
    features = options.get("features")
    words = [user] if user is not None else []
    if options.get("classes") is not None and features and isinstance(list(features)[-1], str):
        words.append(list(features)[-1])
    names = _names_of_rows(_frame(Path(path), (), as_written=True)) if user is None else None
    return read_frame(_frame(Path(path), words), user, where=str(path), names=names, **options)


def read_frame(
    frame: pd.DataFrame,
    user: str | None = "user",
    ranges: Mapping[str, Sequence[float]] | None = None,
    texts: bool = True,
    classes: Sequence[str] | None = None,
    where: str = "the table",
    names: Sequence[str] | None = None,
    **reading: Any,
) -> UserDataset:
    """Make users of an open table, of which a row is an example.

    Args:
        frame: The table.
        user: Column with the user of each row; None: each row is that of a user with no other one.
        ranges: Least and largest value of columns; what lies beyond is clipped, and the range becomes [-1, 1].
        texts: Whether a column may hold texts that `reading` makes nothing of.
        classes: Words of the last feature, in the order of the numbers that it gets.
        where: Name of the table, for errors.
        names: Of the users that rows without one get; None: what each row holds.
        **reading: As for `read_user_table`.

    Raises:
        ConfigurationError: A range is empty.
        DataError: See `read_user_table`.
    """
    frame = frame.rename(columns=str)
    if user is not None and user not in frame.columns:
        raise DataError(f"{where} has no column {user!r} for the user; it has {', '.join(map(str, frame.columns))}.")
    if not len(frame):
        raise DataError(f"{where} contains no rows.")
    if user is not None:
        _require_values(frame[user], user, where, "name their user")
    features = reading.pop("features", None)
    if features is None:
        features = [name for name in frame.columns if name != user]
        if not features:
            raise DataError(f"{where} has no column beside {user!r}.")
    row_owners = (names or _names_of_rows(frame)) if user is None else frame[user].to_numpy()
    frame = _numbered(_scaled(frame, ranges or {}, where), classes, (list(features) or [None])[-1], where)
    by_name = {feature if isinstance(feature, str) else "+".join(feature): feature for feature in features}
    if len(by_name) < len(features):
        raise ConfigurationError(f"features= names a feature twice: {features}.")
    # A mapping of features holds shapes, too.
    options = Reading(features=features if isinstance(features, Mapping | str) else list(by_name), **reading)
    columns: dict[str, Column] = {}
    for name, feature in by_name.items():
        if not isinstance(feature, str):
            columns[name] = _side_by_side(frame, feature, where)
            continue
        columns[name] = _column(frame, feature, where)
        if isinstance(columns[name], list) and not texts and options.text is None:
            raise _not_numeric(frame, feature, where)
    return UserDataset(examples_of(columns, options, where), row_owners)


def _frame(path: Path, words: Sequence[str], as_written: bool = False) -> pd.DataFrame:
    """A table in a file.

    Args:
        path: Of the file.
        words: Columns that are of texts: 007 is not 7.
        as_written: Whether cells are taken as they are written: one blank or one fraction in a column of whole numbers
            would make floats of them all.
    """
    import pandas as pd

    if not path.exists():
        raise DataError(f"file not found: {path}.")
    try:
        if path.suffix == ".csv":
            if as_written:
                return pd.read_csv(path, dtype=str, keep_default_na=False)
            frame = pd.read_csv(path, dtype=dict.fromkeys(words, str), keep_default_na=True)
            if not frame.index.equals(pd.RangeIndex(len(frame))):  # it is the first column
                raise DataError(f"{path}: rows have more cells than the first line has names.")
            return frame
        if path.suffix in _JSON_LINES:
            lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
            return pd.DataFrame({"line": lines} if as_written else [_object(line, words) for line in lines])
        if path.suffix in _PARQUET or path.is_dir():
            return pd.read_parquet(path, dtype_backend="numpy_nullable") if as_written else pd.read_parquet(path)
    except ImportError as error:
        raise ConfigurationError('Parquet needs pyarrow: pip install "dpbench-lightning[parquet]".') from error
    except (OSError, ValueError, RecursionError) as error:  # pandas', pyarrow's and json's own are kinds of these
        raise DataError(f"{path} cannot be read as a table ({brief(error)}): get an intact copy.") from error
    raise ConfigurationError(f"{path} is neither .csv, .jsonl nor .parquet, nor a folder of .parquet files.")


def _names_of_rows(frame: pd.DataFrame) -> list[str]:
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


def _object(line: str, words: Sequence[str]) -> dict[str, Any]:
    """The object of a line of JSON, with texts in some columns."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a line is no object: {line[:60]}")
    return {name: str(value) if name in words and value is not None else value for name, value in row.items()}


def _as_text(cell: Any) -> Any:
    """A cell in a form whose `repr` tells all of it, whatever other rows hold."""
    if isinstance(cell, np.ndarray):
        return cell.tolist()
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, float):
        return int(cell) if cell.is_integer() else cell
    return cell


def _numbered(
    frame: pd.DataFrame,
    classes: Sequence[str] | None,
    feature: Any,
    where: str,
) -> pd.DataFrame:
    """The table with numbers in the place of the words of its classes."""
    if classes is None:
        return frame
    if not isinstance(feature, str) or feature not in frame.columns:
        raise ConfigurationError(f"classes= are the words of the last feature, which is no column: {feature!r}.")
    if len(set(classes)) < len(classes):
        raise ConfigurationError(f"classes= names a class twice: {list(classes)}.")
    _require_values(frame[feature], feature, where, "fill it in")
    numbers = {name: number for number, name in enumerate(classes)}
    words = frame[feature].astype(str)
    unknown = np.flatnonzero(~words.isin(list(numbers)))
    if len(unknown):
        raise DataError(
            f"{where}: row {unknown[0]} has {feature} {words.iloc[unknown[0]]!r}, which is not among classes="
            f"{list(classes)}."
        )
    return frame.assign(**{feature: words.map(numbers).astype(np.int64)})


def _scaled(
    frame: pd.DataFrame,
    ranges: Mapping[str, Sequence[float]],
    where: str,
) -> pd.DataFrame:
    """The table with the range of each of some columns made [-1, 1]."""
    scaled = {}
    # Clipped at the public range: a largest value of the data would tell of one row.
    for name, (low, high) in ranges.items():
        if not low < high:
            raise ConfigurationError(f"ranges: the range of {name!r} must go up, not from {low:g} to {high:g}.")
        values = _numbers(frame, name, where)
        scaled[name] = (np.clip(values, low, high) - low) / (high - low) * 2 - 1
    return frame.assign(**scaled)


def _side_by_side(frame: pd.DataFrame, names: Sequence[str], where: str) -> Column:
    """Several columns of numbers beside each other."""
    if not names:
        raise ConfigurationError("features hold an empty list of columns: name some, or remove it.")
    return np.stack([_numbers(frame, name, where) for name in names], axis=1).astype(np.float32)


def _numbers(frame: pd.DataFrame, name: str, where: str) -> NDArray[Any]:
    """A column of single numbers."""
    column = _column(frame, name, where)
    if isinstance(column, list) or column.ndim != 1:
        raise _not_numeric(frame, name, where)
    return column


def _not_numeric(frame: pd.DataFrame, name: str, where: str) -> DataError:
    """The error that says where a column's first cell is that holds no number."""
    import pandas as pd

    cells = frame[name]
    row = 0
    remedy = "fix that cell, or remove the column"
    if not isinstance(cells.iloc[0], np.ndarray | list):
        # The first one of all where each reads as a number: a column of users is one of texts, whatever they are.
        is_text = pd.to_numeric(cells, errors="coerce").isna().to_numpy()
        row = int(is_text.argmax())
        if is_text.all():
            remedy = (
                "number its categories (data.options.classes for the last feature), or remove the column; texts are "
                "read by data.options.text=labels, each as a feature of its own, outside of a list"
            )
    cell = repr(cells.iloc[row])
    shown = cell if len(cell) < 60 else f"{cell[:57]}..."
    return DataError(f"{where}: column {name!r} is not numeric (row {row}: {shown}): {remedy}.")


def _column(frame: pd.DataFrame, name: str, where: str) -> Column:
    """A column of numbers, texts, or lists of numbers."""
    if name not in frame.columns:
        raise DataError(f"{where} has no column {name!r}; it has {', '.join(map(str, frame.columns))}.")
    _require_values(frame[name], name, where, "fill it in")
    values = frame[name].to_numpy()
    if values.dtype.kind in "iufb":
        return np.asarray(values)
    return column_of([_plain(value) for value in values], name, lambda i: f"row {i}", where)


def _require_values(
    series: pd.Series[Any],
    name: str,
    where: str,
    remedy: str,
) -> None:
    absent = np.flatnonzero(series.isna())
    if len(absent):
        raise DataError(f"{where}: row {absent[0]} has no {name!r}: remove such rows, or {remedy}.")


def _plain(value: Any) -> Any:
    """Lists in lists, which Parquet gives as arrays of arrays, as one array."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(part) for part in value]
    return value
