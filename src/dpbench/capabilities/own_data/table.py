"""Tables in files: CSV, JSON lines, and Parquet as Hugging Face's data sets are stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.capabilities.own_data.frame import names_of_rows, read_frame
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.errors import ConfigurationError, DataError, brief

if TYPE_CHECKING:
    import pandas as pd

_PARQUET = (".parquet", ".pq")
_JSON_LINES = (".jsonl", ".ndjson")


def read_user_table(path: str | Path, user: str | None = "user", **options: Any) -> UserDataset:
    """Read the users of a table, of which a row is an example.

    A Hugging Face data set that is open already needs no reader: `UserDataset(ds, ds["user"])`.

    Args:
        path: A `.csv`, `.jsonl`, `.txt` (each line a text, in the column text) or `.parquet` file, or a folder of
            `.parquet` files or of a data set that Hugging Face's datasets has saved.
        user: Column with the user of each row; in a CSV users are texts: 007 is not 7. None: each row is that of a user
            with no other one.
        **options: Options of `read_frame`.

    Raises:
        ConfigurationError: Parquet without pyarrow, and as `read_frame`.
        DataError: The file is absent, damaged or empty, and as `read_frame`.
    """
    path = Path(path)
    features = options.get("features")
    words = [] if user is None else [user]
    if options.get("classes") is not None and features:
        words += [name for name in list(features)[-1:] if isinstance(name, str)]
    names = names_of_rows(_frame(path, (), as_written=True)) if user is None else None
    return read_frame(_frame(path, words), user, where=str(path), names=names, **options)


def _frame(path: Path, words: Sequence[str], as_written: bool = False) -> pd.DataFrame:
    """A table in a file.

    Args:
        path: Path of the file.
        words: Columns that are of texts: 007 is not 7.
        as_written: True to take cells as they are written: one blank or one fraction in a column of whole numbers
            would make floats of them all.
    """
    import pandas as pd

    try:
        if path.suffix == ".csv":
            if as_written:
                return pd.read_csv(path, dtype=str, keep_default_na=False)
            frame = pd.read_csv(path, dtype=dict.fromkeys(words, str))
            if not frame.index.equals(pd.RangeIndex(len(frame))):  # it is the first column
                raise DataError(f"{path}: rows have more cells than the first line has names.")
            return frame
        if path.suffix in _JSON_LINES:
            lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
            return pd.DataFrame({"line": lines} if as_written else [_object(line, words) for line in lines])
        if path.suffix == ".txt":
            texts = path.read_text(encoding="utf-8-sig").splitlines()
            return pd.DataFrame({"text": [text for text in texts if text.strip()]})
        if path.is_dir() and (arrow := sorted(path.glob("*.arrow"))):  # of datasets.Dataset.save_to_disk
            return pd.concat([_arrow_frame(file) for file in arrow], ignore_index=True)
        if path.suffix in _PARQUET or path.is_dir():
            return pd.read_parquet(path, dtype_backend="numpy_nullable") if as_written else pd.read_parquet(path)
    except ImportError as error:
        raise ConfigurationError('Parquet needs pyarrow: pip install "dpbench-lightning[parquet]".') from error
    except (OSError, ValueError, RecursionError) as error:  # pandas', pyarrow's and json's own are kinds of these
        raise DataError(f"{path} cannot be read as a table ({brief(error)}): get an intact copy.") from error
    raise ConfigurationError(
        f"{path} is neither .csv, .jsonl, .txt nor .parquet, nor a folder of .parquet files or of a saved data set of "
        "Hugging Face."
    )


def _arrow_frame(path: Path) -> pd.DataFrame:
    from pyarrow import ipc, memory_map

    frame: pd.DataFrame = ipc.open_stream(memory_map(str(path))).read_all().to_pandas()
    return frame


def _object(line: str, words: Sequence[str]) -> dict[str, Any]:
    """The object of a line of JSON, with texts in some columns."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a line is not an object: {line[:60]}")
    return {name: str(value) if name in words and value is not None else value for name, value in row.items()}
