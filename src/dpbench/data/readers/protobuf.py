"""`tf.train.Example` without TensorFlow: the few parts of protocol buffers that it needs.

The message: Example{1: Features{1: repeated {1: name, 2: Feature{1: bytes | 2: floats | 3: whole numbers}}}}, where
each kind of values is {1: repeated}.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Value = list[bytes] | NDArray[np.float32] | NDArray[np.int64]

_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_MORE = 0x80  # the bit of a byte of a varint that says that another follows


def parse_example(message: bytes) -> dict[str, Value]:
    """Features of an Example, by name; a feature that holds nothing is an empty list.

    Raises:
        ValueError: The message is cut short, or none of this kind.
    """
    features: dict[str, Value] = {}
    for example in _parts(message, 1):
        for entry in _parts(example, 1):
            name = b"".join(_parts(entry, 1)).decode("utf-8")
            found: list[Value] = [
                _values(number, bytes(of_kind))
                for feature in _parts(entry, 2)
                for number, _, of_kind in _fields(feature)
                if isinstance(of_kind, memoryview)
            ]
            features[name] = found[-1] if found else []
    return features


def _values(kind: int, message: bytes) -> Value:
    if kind == 1:
        return [bytes(part) for part in _parts(message, 1)]
    parts: list[bytes] = []
    for _, wire, value in _fields(message):
        parts.append(bytes(value) if isinstance(value, memoryview) else _varint_bytes(value))
        if kind == 2 and wire == _VARINT:
            raise ValueError("a list of floats holds a whole number")
    packed = b"".join(parts)
    if kind == 2:
        if len(packed) % 4:
            raise ValueError(f"{len(packed)} bytes are no list of floats")
        return np.frombuffer(packed, "<f4").astype(np.float32)
    if kind == 3:
        return _varints(packed)
    raise ValueError(f"there is no kind {kind} of features")


def _parts(message: bytes | memoryview, number: int) -> Iterator[memoryview]:
    """Fields of a number that are messages, texts or bytes."""
    return (value for found, _, value in _fields(message) if found == number and isinstance(value, memoryview))


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
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"there is no wire type {wire}")
        if at + size > len(view):
            raise ValueError(f"it ends {at + size - len(view)} bytes early")
        yield tag >> 3, wire, view[at : at + size]
        at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
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
    found = bytearray()
    while value >= _MORE:
        found.append(value & (_MORE - 1) | _MORE)
        value >>= 7
    return bytes([*found, value])


def _varints(packed: bytes) -> NDArray[np.int64]:
    """All whole numbers of a packed list at once: an image has thousands."""
    data = np.frombuffer(packed, np.uint8)
    if not len(data):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(data < _MORE)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a number is cut short")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a number has more than 64 bits")
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    bits = (data & (_MORE - 1)).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)
