"""Files that are either whole or absent."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_TORN = re.compile(r"\..+\.\d+")  # as `write_atomically` names them


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, then move over it: a crash or a full disk leaves the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_torn(folder: Path) -> None:
    """Remove what killed processes have left of files that they were writing; only while nobody else writes there."""
    for path in folder.rglob(".*"):
        if _TORN.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically; numbers must be finite."""
    write_atomically(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
