"""Files that are either whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, then move over it: a crash or a full disk leaves the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically; numbers must be finite."""
    write_atomically(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
