"""The running hash of a ledger, by which a checkpoint or a result recognizes its ledger."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

STATE_KEY = "dpbench.PrivateStrategy"
"""Key of the strategy's state in a checkpoint, the same for all strategies: readers find the ledger's seal there."""


class Seal(NamedTuple):
    """Length and checksum of a ledger at some moment: it only grows, so that it begins so for ever.

    It protects from mistakes (a file cut short, edited, or of another run), not from a change of both files.

    Attributes:
        lines: Number of lines, headers included.
        sha256: Hash of their bytes, in hexadecimal digits.
    """

    lines: int
    sha256: str

    @classmethod
    def read(cls, data: object) -> Seal | None:
        """Read a seal from JSON or a checkpoint; None if missing (older files) or malformed."""
        if not isinstance(data, Mapping):
            return None
        lines = data.get("lines")
        sha256 = data.get("sha256")
        if type(lines) is int and isinstance(sha256, str):
            return cls(lines, sha256)
        return None


class RunningSeal:
    """The seal of a file that grows line by line; microseconds a line."""

    def __init__(self) -> None:
        self._lines = 0
        self._hash = hashlib.sha256()

    def update(self, data: bytes) -> None:
        """Continue the checksum with whole lines."""
        self._lines += data.count(b"\n")
        self._hash.update(data)

    @property
    def seal(self) -> Seal:
        """Seal of the lines so far."""
        return Seal(self._lines, self._hash.hexdigest())


def seal_of(path: str | os.PathLike[str]) -> Seal:
    """The seal of a file as it is, a line that is cut off at its end left out."""
    data = Path(path).read_bytes()
    end = data.rfind(b"\n") + 1
    running = RunningSeal()
    running.update(data[:end])
    return running.seal


def difference(
    path: str | os.PathLike[str],
    seal: Seal,
    witness: str,
    ended: bool = False,
) -> str | None:
    """Say how a ledger differs from the one that was sealed; None if it begins with it.

    Args:
        path: Path of the ledger.
        seal: Seal of the ledger at an earlier time.
        witness: Holder of the seal, for the message, such as "the checkpoint".
        ended: True if nothing may have been added since.

    Returns:
        None, or a piece of a sentence.
    """
    lines = Path(path).read_bytes().split(b"\n")
    # What follows the last line break: nothing, or a line that is cut off.
    lines.pop()
    if len(lines) < seal.lines:
        return f"{len(lines)} lines, and {witness} at least {seal.lines}: it was cut short, or belongs to another run"
    running = RunningSeal()
    beginning = [line + b"\n" for line in lines[: seal.lines]]
    running.update(b"".join(beginning))
    if running.seal != seal:
        return f"lines that do not match the hash in {witness}: it was edited, or belongs to another run"
    if ended and len(lines) > seal.lines:
        return f"{len(lines)} lines, where {witness} ended with {seal.lines}: it was continued by another run"
    return None
