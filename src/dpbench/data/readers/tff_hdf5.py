"""TensorFlow Federated's older data sets: an HDF5 file with the group examples/<client>/<feature>."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpbench.data.readers.columns import Block, Column, Reading, assemble, column_of, example_of
from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError, DataError, brief


def read_tff_hdf5(path: str | Path, **reading: Any) -> UserDataset:
    """Clients of a file; training and test clients have files of their own.

    Args:
        path: The `.h5` file.
        **reading: See `Reading`: `features`, `images`, `text`, ....

    Raises:
        ConfigurationError: h5py is not installed.
        DataError: The file is absent, damaged or another; see also `assemble`.
    """
    try:
        import h5py
    except ImportError as error:
        raise ConfigurationError('HDF5 needs h5py: pip install "dpbench-lightning[hdf5]".') from error
    path = Path(path)
    made = Reading(**reading)
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    try:
        with h5py.File(path, "r") as file:
            clients = file.get("examples")
            if not isinstance(clients, h5py.Group) or not len(clients):
                raise DataError(f"{path} has no group examples/<client>: it is none of TensorFlow Federated's files.")
            return assemble(_blocks(clients, str(path)), made, str(path), list(clients))
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(f"{path} cannot be read as HDF5 ({brief(error)}): get an intact copy.") from error


def _blocks(clients: Any, where: str) -> Iterator[Block]:
    import h5py

    for client in clients:
        group = clients[client]
        if not isinstance(group, h5py.Group):
            raise DataError(f"{where}: examples/{client} is no group of features.")
        try:
            values = {name: group[name][()] for name in group}
        except (OSError, RuntimeError, KeyError, TypeError) as error:
            raise DataError(f"{where}: user {client!r} cannot be read ({brief(error)}): get an intact copy.") from error
        yield client, {name: _column(value, name, client, where) for name, value in values.items()}


def _column(
    values: Any,
    name: str,
    client: str,
    where: str,
) -> Column:
    return values if values.dtype.kind in "iufb" else column_of(list(values), name, example_of(client), where)
