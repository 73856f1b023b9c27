"""`tf.train.Example` without TensorFlow: the few parts of protocol buffers that it needs.

The message: Example{1: Features{1: repeated {1: name, 2: Feature{1: bytes | 2: floats | 3: whole numbers}}}}, where
each kind of values is {1: repeated}.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Value = list[bytes] | NDArray[np.float32] | NDArray[np.int64]

# Wire types.
_VARINT = 0
_BYTES = 2
_FIXED_SIZES = {1: 8, 5: 4}  # in bytes
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
