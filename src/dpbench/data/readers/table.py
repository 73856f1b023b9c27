"""Tables with a column that says whose a row is: CSV, and Parquet as Hugging Face's data sets are stored."""

from __future__ import annotations

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
    frame = _frame(Path(path), user)
    where = str(path)
    if user not in frame.columns:
        raise DataError(f"{where} has no column {user!r} for the user; it has {', '.join(map(str, frame.columns))}.")
    if not len(frame):
        raise DataError(f"{where} holds no row.")
    _require_values(frame[user], user, where, "name their user")
    features = reading.pop("features", None) or [str(name) for name in frame.columns if name != user]
    by_name = {feature if isinstance(feature, str) else "+".join(feature): feature for feature in features}
    # A mapping of features holds shapes, too.
    options = Reading(features=features if isinstance(features, Mapping | str) else list(by_name), **reading)
    columns: dict[str, Column] = {}
    for name, feature in by_name.items():
        if isinstance(feature, str):
            columns[name] = _column(frame, feature, where)
        else:
            columns[name] = _side_by_side(frame, feature, where)
    names, numbers = np.unique(frame[user].to_numpy(), return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
    return assemble(((name, _rows(columns, rows[i])) for i, name in enumerate(names.tolist())), options, where)


def _frame(path: Path, user: str) -> pd.DataFrame:
    import pandas as pd

    if not path.exists():
        raise DataError(f"there is no file {path}.")
    try:
        if path.suffix == ".csv":
            return pd.read_csv(path, dtype={user: str}, keep_default_na=True)
        if path.suffix in _PARQUET or path.is_dir():
            return pd.read_parquet(path)
    except ImportError as error:
        raise ConfigurationError('Parquet needs pyarrow: pip install "dpbench-lightning[parquet]".') from error
    except (OSError, ValueError) as error:  # pandas' and pyarrow's own are kinds of these
        raise DataError(f"{path} cannot be read as a table ({brief(error)}): get an intact copy.") from error
    raise ConfigurationError(f"{path} is neither .csv nor .parquet, nor a folder of .parquet files.")


def _side_by_side(frame: pd.DataFrame, names: Sequence[str], where: str) -> Column:
    """Several columns of numbers beside each other."""
    if not names:
        raise ConfigurationError("features hold an empty list of columns: name some, or leave it out.")
    columns = []
    for name in names:
        column = _column(frame, name, where)
        if isinstance(column, list) or column.ndim != 1:
            raise DataError(f"{where}: column {name!r} holds no single numbers, and cannot be put beside others.")
        columns.append(column)
    return np.stack(columns, axis=1).astype(np.float32)


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
        raise DataError(f"{where}: row {absent[0]} has no {name!r}: leave such rows out, or {remedy}.")


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
