"""TensorFlow Federated's data sets: an SQLite file of serialized examples by client. TensorFlow is not needed."""

from __future__ import annotations

import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dpbench.data.readers.columns import Block, Column, Reading, assemble, column_of
from dpbench.data.readers.protobuf import parse_example
from dpbench.data.users import UserDataset
from dpbench.errors import DataError, brief

_BLOCK = 1000  # examples that are held as Python objects at a time


def read_tff_sqlite(path: str | Path, split: str = "train", **reading: Any) -> UserDataset:
    """Read the clients of a split.

    The tables are `examples(split_name, client_id, serialized_example_proto)` and `client_metadata(client_id,
    split_name, num_examples)`.

    Args:
        path: The file, `.sqlite`, or `.sqlite.lzma` as it is published (then unpacked into the temporary folder).
        split: Such as "train" or "test".
        **reading: See `Reading`: `features`, `images`, `text`, ....

    Raises:
        DataError: The file is absent, damaged or another; it has no such split, or another number of examples than it
            says; see also `assemble`.
    """
    options = Reading(**reading)
    where = str(path)
    with _database(Path(path)) as database:
        stated = _stated_counts(database, split, where)
        counts = dict.fromkeys(stated, 0)
        users = assemble(_blocks(database, split, where, counts), options, where, stated)
    for client, count in counts.items():
        if count != stated[client]:
            raise DataError(
                f"{where}: user {client!r} has {count} examples in split {split!r}, and {stated[client]} by "
                "client_metadata: get an intact copy."
            )
    return users


def splits_of(path: str | Path) -> list[str]:
    """Names of the splits that a file has."""
    with _database(Path(path)) as database:
        return _splits(database)


def _splits(database: sqlite3.Connection) -> list[str]:
    names = database.execute("SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name")
    return [str(name) for (name,) in names]


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, opened for reading; what SQLite says of a damaged one becomes a DataError."""
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = _unpacked(path, Path(folder)) if path.suffix == ".lzma" else path
            # As an address, which alone says that the file is not to be written.
            with closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)) as database:
                yield database
    except (sqlite3.Error, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as an SQLite file of TensorFlow Federated ({brief(error)}): get an intact copy."
        ) from error


def _unpacked(path: Path, folder: Path) -> Path:
    unpacked = folder / path.stem
    with lzma.open(path) as source, unpacked.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return unpacked


def _stated_counts(database: sqlite3.Connection, split: str, where: str) -> dict[str, int]:
    """Number of examples of each client of a split, by its metadata."""
    query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ? ORDER BY client_id"
    counts = {str(client): int(count) for client, count in database.execute(query, (split,))}
    if not counts:
        raise DataError(f"{where} has no split {split!r}; it has {', '.join(_splits(database)) or 'none'}.")
    return counts


def _blocks(
    database: sqlite3.Connection,
    split: str,
    where: str,
    counts: dict[str, int],
) -> Iterator[Block]:
    """Examples of one client after the other, as they lie in the file; adds their numbers to `counts`."""
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
    for client, rows in groupby(database.execute(query, (split,)), key=lambda row: str(row[0])):
        if client not in counts:
            raise DataError(f"{where}: user {client!r} has examples in split {split!r}, but no client_metadata.")
        while block := list(islice(rows, _BLOCK)):
            yield client, _columns([message for _, message in block], client, counts[client], where)
            counts[client] += len(block)


def _columns(
    messages: list[bytes],
    client: str,
    first: int,
    where: str,
) -> dict[str, Column]:
    """Features of some examples of a client, of which `first` is the number of the first one."""

    def name_of(position: int) -> str:
        return f"user {client!r}, example {first + position}"

    examples: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        try:
            features = parse_example(message)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{where}: example {first + i} of user {client!r} is no tf.train.Example ({brief(error)}): get an "
                "intact copy."
            ) from error
        # A list of one number is that number: formats without dimensions cannot tell them apart.
        examples.append({name: value[0] if len(value) == 1 else value for name, value in features.items()})
        if differing := examples[i].keys() ^ examples[0].keys():
            name = min(differing)
            lacking = i if name not in examples[i] else 0
            raise DataError(f"{where}: {name_of(lacking)} has no feature {name!r}, which others of the user have.")
    return {name: column_of([example[name] for example in examples], name, name_of, where) for name in examples[0]}
