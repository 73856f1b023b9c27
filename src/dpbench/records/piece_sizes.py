"""Sizes of pieces with `max_physical_batch_size=auto`: halved when a GPU runs out of memory, and kept for resuming."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dpbench.errors import ConfigurationError, DPBenchError
from dpbench.privacy.kept_keys import write_secret
from dpbench.privacy.processes import Processes

FILE_NAME = "piece_sizes.json"
"""Name of the file, in the folder of the ledger."""
_NOT_ALLOCATED = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "STATUS_ALLOC_FAILED",  # of cuBLAS and cuDNN
    "unable to find an engine",  # whose workspace would fit
    "Unable to find a valid cuDNN algorithm",
)


class PieceSizes:
    """The most rows of a piece in each step, which only ever falls.

    Whether memory is sufficient may depend on the records, such as on the size of a batch. So sizes are as secret as
    records: they are written into a file that only its owner can read, and nowhere else.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._path: Path | None = None

    def keep(self, path: Path, processes: Processes, goes_on: bool) -> None:
        """Keep the sizes in a file from now on; the same on all processes.

        Args:
            path: The file's path.
            processes: All processes of the training.
            goes_on: True if the training continues a run; the file may hold its sizes.
        """
        if processes.rank == 0:
            self._path = path
            if goes_on and path.exists():
                self._rows = _read(path)
            else:
                path.unlink(missing_ok=True)
        self._rows = processes.broadcast(self._rows)

    def at(self, step: int) -> int | None:
        """The most rows of a piece in a step; None: any number.

        Args:
            step: Number of releases before it.
        """
        return min((rows for first, rows in self._rows.items() if first <= step), default=None)

    def lower(self, step: int, rows: int) -> None:
        """Run pieces of at most `rows` rows from a step on."""
        self._rows[step] = rows
        if self._path is not None:
            write_secret(self._path, self._rows)


def _read(path: Path) -> dict[int, int]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {int(step): int(rows) for step, rows in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{path} is damaged (it lists the physical batch sizes of a run): restore it, or delete it, and sums are "
            "rounded differently from here on."
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be allocated, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, DPBenchError) or not isinstance(error, RuntimeError):
        return False
    return any(words in str(error) for words in _NOT_ALLOCATED)
