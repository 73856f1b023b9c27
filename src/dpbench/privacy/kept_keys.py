"""Random keys of a training, in a file until it ends: where it is resumed, its noise is drawn again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpbench.errors import ConfigurationError
from dpbench.files import replacing

FILE_NAME = "noise_keys.json"
"""Beside the ledger."""


class KeptKeys(NamedTuple):
    """Root keys, as secret as the training records: with them noise can be subtracted.

    Attributes:
        noise: Root key of noise and the model's randomness.
        lots: Root key of batches and the groups of records.
    """

    noise: int
    lots: int


def read_keys(path: Path) -> KeptKeys | None:
    """The keys in a file; None if there is no file.

    Raises:
        ConfigurationError: The file holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return KeptKeys(int(data["noise"], 16), int(data["lots"], 16))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path} does not hold the keys of a run's noise: restore it, or start a new run in another folder."
        ) from None


def write_keys(path: Path, keys: KeptKeys) -> None:
    """Write keys into a file that only its owner can read."""
    write_secret(path, {"noise": f"{keys.noise:x}", "lots": f"{keys.lots:x}"})


def write_secret(path: Path, data: Mapping[Any, Any]) -> None:
    """Write JSON into a file that only its owner can read, whole or not at all.

    Raises:
        ConfigurationError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.touch(mode=0o600, exist_ok=False)
            new.write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}, which is needed to resume the run: {error.strerror}. Free space, or write elsewhere."
        ) from None
