"""LEAF's data sets (Caldas et al. 2018): JSON with the users, and of each the inputs and the targets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpbench.data.readers.columns import Block, Reading, assemble, column_of, example_of
from dpbench.data.users import UserDataset
from dpbench.errors import DataError, brief


def read_leaf_json(path: str | Path, **reading: Any) -> UserDataset:
    """Users of a file, or of all `.json` files of a folder.

    A file is {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}. A user with
    parts in several files is one user.

    Args:
        path: File or folder.
        **reading: See `Reading`; the features are x and y, and by default in this order.

    Raises:
        DataError: A file is absent, damaged or another; a user's number of samples is another than it says; see also
            `assemble`.
    """
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"the folder {path} holds no .json file.")
    names: dict[str, None] = {}
    made = Reading(**{"features": ("x", "y"), **reading})
    blocks = (block for file in files for block in _blocks(file, names))
    return assemble(blocks, made, str(path), names)


def _blocks(file: Path, names: dict[str, None]) -> Iterator[Block]:
    content = _content(file)
    users = content["users"]
    data = content["user_data"]
    counts = content.get("num_samples", [None] * len(users))
    if len(counts) != len(users):
        raise DataError(f"{file} has {len(users)} users and {len(counts)} num_samples.")
    for user, count in zip(users, counts, strict=True):
        if not isinstance(data.get(user), dict):
            raise DataError(f"{file}: user {user!r} has no user_data.")
        features = {name: values for name, values in data[user].items() if isinstance(values, list)}
        sizes = {name: len(values) for name, values in features.items()}
        if count is not None and set(sizes.values()) - {count}:
            said = ", ".join(f"{size} of {name}" for name, size in sizes.items())
            raise DataError(f"{file}: user {user!r} has {count} num_samples, but {said}.")
        names[str(user)] = None
        who = example_of(str(user))
        yield str(user), {name: column_of(values, name, who, str(file)) for name, values in features.items()}


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"there is no file {file} ({error.strerror}).") from error
    except ValueError as error:  # also of bytes that are no text
        raise DataError(f"{file} is no JSON ({brief(error)}): get an intact copy.") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
        raise DataError(f"{file} is none of LEAF's: it needs the entries users, num_samples and user_data.")
    return content
