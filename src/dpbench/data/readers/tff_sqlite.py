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

import numpy as np
from numpy.typing import NDArray

from dpbench.data.readers.columns import Block, Column, Reading, assemble, column_of
from dpbench.data.users import UserDataset
from dpbench.errors import DataError, brief

Value = list[bytes] | NDArray[np.float32] | NDArray[np.int64]

# Wire types.
_VARINT = 0
_BYTES = 2
_FIXED_SIZES = {1: 8, 5: 4}  # in bytes
_MORE = 0x80  # the bit of a byte of a varint that says that another follows
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
        raise DataError(f"file not found: {path}.")
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


# --------------------------------------------------------------------------- tf.train.Example, without TensorFlow
#
# Of protocol buffers it needs little: Example{1: Features{1: repeated {1: name, 2: Feature{1: bytes | 2: floats | 3:
# whole numbers}}}}, where each kind of values is {1: repeated}.


def parse_example(message: bytes) -> dict[str, Value]:
    """Features of an Example, by name; a feature that holds nothing is an empty list.

    Raises:
        ValueError: The message is cut short, or none of this kind.
    """
    features: dict[str, Value] = {}
    for example in _parts(message, 1):
        for entry in _parts(example, 1):
            name = b"".join(_parts(entry, 1)).decode("utf-8")
            features[name] = []
            for feature in _parts(entry, 2):
                for kind, _, values in _fields(feature):
                    if isinstance(values, memoryview):
                        features[name] = _values(kind, values)
    return features


def _values(kind: int, message: memoryview) -> Value:
    if kind == 1:
        return [bytes(part) for part in _parts(message, 1)]
    if kind not in (2, 3):
        raise ValueError(f"there is no kind {kind} of features")
    packed = bytearray()  # whether they lie in one field or in one each
    for _, wire, value in _fields(message):
        if kind == 2 and wire == _VARINT:
            raise ValueError("a list of floats holds a whole number")
        packed += value if isinstance(value, memoryview) else _varint_bytes(value)
    if kind == 3:
        return _varints(packed)
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are no list of floats")
    return np.frombuffer(packed, "<f4").astype(np.float32)


def _parts(message: bytes | memoryview, number: int) -> Iterator[memoryview]:
    """Fields of a number that are messages, texts or bytes."""
    for field, _, value in _fields(message):
        if field == number and isinstance(value, memoryview):
            yield value


def _fields(message: bytes | memoryview) -> Iterator[tuple[int, int, memoryview | int]]:
    """Number, wire type and value of each field; of fixed size: their bytes."""
    view = memoryview(message)
    at = 0
    while at < len(view):
        tag, at = _varint(view, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(view, at)
            yield tag >> 3, wire, value
            continue
        if wire == _BYTES:
            size, at = _varint(view, at)
        elif wire in _FIXED_SIZES:
            size = _FIXED_SIZES[wire]
        else:
            raise ValueError(f"there is no wire type {wire}")
        end = at + size
        if end > len(view):
            raise ValueError(f"it ends {end - len(view)} bytes early")
        yield tag >> 3, wire, view[at:end]
        at = end


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A whole number, and the place behind it: seven bits a byte, the lowest first."""
    value = 0
    shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise ValueError("a number is cut short")
        byte = view[at]
        at += 1
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, at
        shift += 7


def _varint_bytes(value: int) -> bytes:
    encoded = bytearray()
    while value >= _MORE:
        encoded.append(value & (_MORE - 1) | _MORE)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varints(packed: bytearray) -> NDArray[np.int64]:
    """All whole numbers of a packed list at once: an image has thousands."""
    data = np.frombuffer(packed, np.uint8)
    if not len(data):
        return np.zeros(0, np.int64)
    if data[-1] >= _MORE:
        raise ValueError("a number is cut short")
    ends = np.flatnonzero(data < _MORE)
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a number has more than 64 bits")
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    bits = (data & (_MORE - 1)).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)
