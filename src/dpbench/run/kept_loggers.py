"""What loggers need to go on with a run that is resumed, such as its id in a log service."""

from __future__ import annotations

from typing import Any

from dpbench.files import write_json
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import read_json


def kept(folder: RunFolder, name: str) -> dict[str, Any]:
    """What a logger has kept; empty if it has kept nothing.

    Args:
        folder: Of the run.
        name: Of the logger.

    Raises:
        ConfigurationError: The file is damaged.
    """
    return _all(folder).get(name, {}) if folder.loggers.is_file() else {}


def keep(folder: RunFolder, name: str, facts: dict[str, Any]) -> None:
    """Keep facts in place of those that the logger has kept before."""
    others = _all(folder) if folder.loggers.is_file() else {}
    write_json(folder.loggers, {**others, name: facts})


def _all(folder: RunFolder) -> dict[str, Any]:
    remedy = "delete {path}, and loggers begin a new run"
    return read_json(folder.loggers, dict[str, dict[str, Any]], remedy)
