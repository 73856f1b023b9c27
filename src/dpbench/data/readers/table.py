"""Tables: CSV, and Parquet as Hugging Face's data sets are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbench.data.readers.columns import Column, Reading, assemble, column_of
from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError, DataError, brief

if TYPE_CHECKING:
    import pandas as pd

_PARQUET = (".parquet", ".pq")


def read_user_table(path: str | Path, user: str = "user", **reading: Any) -> UserDataset:
    """Read the users of a table, of which a row is an example.

    A Hugging Face data set that is open already needs no reader: `UserDataset(ds, ds["user"])`.

    Args:
        path: A `.csv` or `.parquet` file, or a folder of `.parquet` files.
        user: Column with the user of each row. In a CSV users are texts: 007 is not 7.
        **reading: See `Reading`; without `features` these are all other columns, in the order of the table. A list
            among the names of features puts columns of numbers together: [["age", "height"], "label"] makes inputs
            (2,), float32, and a target.

    Raises:
        ConfigurationError: Parquet without pyarrow, or an empty list of columns.
        DataError: The file is absent, damaged or empty, or has no such column; a row has no user, or another shape than
            the first; see also `assemble`.
    """
    return read_table(path, user, **reading)


def read_table(
    path: str | Path,
    user: str | None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    texts: bool = True,
    **reading: Any,
) -> UserDataset:
    """Read a table of which a row is an example.

    Args:
        path: As for `read_user_table`.
        user: Column with the user of each row; None: each row is that of a user with no other one, who is called by
            what the row holds, so that a row's place in the file decides nothing.
        ranges: Least and largest value of columns; what lies beyond is clipped, and the range becomes [-1, 1].
        texts: Whether a column may hold texts that `reading` makes nothing of.
        **reading: As for `read_user_table`.

    Raises:
        ConfigurationError: As for `read_user_table`, or a range is empty.
        DataError: As for `read_user_table`, or a column that must be one of numbers has a cell that is none.
    """
    where = str(path)
    frame = _frame(Path(path), user)
    if user is not None and user not in frame.columns:
        raise DataError(f"{where} has no column {user!r} for the user; it has {', '.join(map(str, frame.columns))}.")
    if not len(frame):
        raise DataError(f"{where} contains no rows.")
    if user is not None:
        _require_values(frame[user], user, where, "name their user")
    row_owners = _row_names(Path(path)) if user is None else frame[user].to_numpy()
    frame = _scaled(frame, ranges or {}, where)
    features = reading.pop("features", None) or [str(name) for name in frame.columns if name != user]
    by_name = {feature if isinstance(feature, str) else "+".join(feature): feature for feature in features}
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
    if user is None:
        # As of one user without a name, since `assemble` takes users; whose they are is said afterwards.
        examples = assemble([("", columns)], options, where).examples
        return UserDataset(examples, row_owners)
    # Rows of each user together. Stable: a user's rows stay in the order of the file.
    users, numbers = np.unique(row_owners, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
    return assemble(((name, _rows(columns, rows[i])) for i, name in enumerate(users.tolist())), options, where)


def _frame(path: Path, user: str | None) -> pd.DataFrame:
    import pandas as pd

    if not path.exists():
        raise DataError(f"file not found: {path}.")
    try:
        if path.suffix == ".csv":
            return pd.read_csv(path, dtype={user: str} if user else None, keep_default_na=True)
        if path.suffix in _PARQUET or path.is_dir():
            return pd.read_parquet(path)
    except ImportError as error:
        raise ConfigurationError('Parquet needs pyarrow: pip install "dpbench-lightning[parquet]".') from error
    except (OSError, ValueError) as error:  # pandas' and pyarrow's own are kinds of these
        raise DataError(f"{path} cannot be read as a table ({brief(error)}): get an intact copy.") from error
    raise ConfigurationError(f"{path} is neither .csv nor .parquet, nor a folder of .parquet files.")


def _row_names(path: Path) -> list[str]:
    """What each row holds; of equal rows the second, third, ... with its number.

    By these names rows are held out, so no row may change the name of another one. Cells are therefore taken as they
    are written: one blank or one fraction in a column of whole numbers would make floats of them all.
    """
    import pandas as pd

    if path.suffix == ".csv":
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    else:
        frame = pd.read_parquet(path, dtype_backend="numpy_nullable")
    names = []
    seen: Counter[str] = Counter()
    for row in frame.itertuples(index=False, name=None):
        text = repr(row)
        seen[text] += 1
        names.append(text if seen[text] == 1 else f"{text} {seen[text]}")
    return names


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
                "number its categories, or remove the column; texts are read by data.options.text=labels, each as a "
                "feature of its own, outside of a list"
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


def _rows(columns: dict[str, Column], rows: NDArray[np.int64]) -> dict[str, Column]:
    chosen: dict[str, Column] = {}
    for name, column in columns.items():
        chosen[name] = [column[row] for row in rows] if isinstance(column, list) else column[rows]
    return chosen
