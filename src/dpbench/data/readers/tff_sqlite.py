"""TensorFlow Federated's data sets: an SQLite file of serialized examples by client. TensorFlow is not needed."""

from __future__ import annotations

import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dpbench.data.readers.columns import Block, Column, Reading, assemble, column_of, example_of
from dpbench.data.readers.protobuf import parse_example
from dpbench.data.users import UserDataset
from dpbench.errors import DataError, brief

_BLOCK = 1000  # examples that are held as Python objects at a time


def read_tff_sqlite(path: str | Path, split: str = "train", **reading: Any) -> UserDataset:
    """Clients of a split.

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
    made = Reading(**reading)
    where = str(path)
    with _database(Path(path)) as database:
        counts = _counts(database, split, where)
        found = dict.fromkeys(counts, 0)
        blocks = _blocks(database, split, where, found)
        users = assemble(blocks, made, where, counts)
    for client, count in found.items():
        if count != counts[client]:
            raise DataError(
                f"{where}: user {client!r} has {count} examples in split {split!r}, and {counts[client]} by "
                "client_metadata: get an intact copy."
            )
    return users


def splits_of(path: str | Path) -> list[str]:
    """Names of the splits that a file has."""
    with _database(Path(path)) as database:
        return sorted(str(name) for (name,) in database.execute("SELECT DISTINCT split_name FROM client_metadata"))


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, opened for reading; what SQLite says of a damaged one becomes a DataError."""
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    try:
        with tempfile.TemporaryDirectory() as folder:
            if path.suffix == ".lzma":
                path = _unpacked(path, Path(folder))
            with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as database:
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


def _counts(database: sqlite3.Connection, split: str, where: str) -> dict[str, int]:
    """Number of examples of each client of a split, by its metadata."""
    query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ? ORDER BY client_id"
    counts = {str(client): int(count) for client, count in database.execute(query, (split,))}
    if not counts:
        names = [str(name) for (name,) in database.execute("SELECT DISTINCT split_name FROM client_metadata")]
        raise DataError(f"{where} has no split {split!r}; it has {', '.join(sorted(names)) or 'none'}.")
    return counts


def _blocks(
    database: sqlite3.Connection,
    split: str,
    where: str,
    found: dict[str, int],
) -> Iterator[Block]:
    """Examples of one client after the other, as they lie in the file; counts them in `found`."""
    query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
    for client, rows in groupby(database.execute(query, (split,)), key=lambda row: str(row[0])):
        if client not in found:
            raise DataError(f"{where}: user {client!r} has examples in split {split!r}, but no client_metadata.")
        examples: list[dict[str, Any]] = []
        for _, message in rows:
            examples.append(_example(message, client, found[client], where))
            found[client] += 1
            if len(examples) == _BLOCK:
                yield client, _columns(examples, client, found[client] - len(examples), where)
                examples = []
        if examples:
            yield client, _columns(examples, client, found[client] - len(examples), where)


def _example(
    message: Any,
    client: str,
    number: int,
    where: str,
) -> dict[str, Any]:
    """Features of an example; a list of one is the one."""
    try:
        features = parse_example(message)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{where}: example {number} of user {client!r} is no tf.train.Example ({brief(error)}): get an intact copy."
        ) from error
    return {name: value[0] if len(value) == 1 else value for name, value in features.items()}


def _columns(
    examples: list[dict[str, Any]],
    client: str,
    first: int,
    where: str,
) -> dict[str, Column]:
    """Features of examples, of which `first` is the number of the first."""
    who = example_of(client, first)
    for i, example in enumerate(examples):
        if example.keys() != examples[0].keys():
            name = min(example.keys() ^ examples[0].keys())
            lacking = i if name not in example else 0
            raise DataError(f"{where}: {who(lacking)} has no feature {name!r}, which others of the user have.")
    return {name: column_of([example[name] for example in examples], name, who, where) for name in examples[0]}
