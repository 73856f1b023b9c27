"""Readers of files that hold examples by user."""

from dpbench.data.readers.leaf import read_leaf_json
from dpbench.data.readers.posts import read_stackexchange
from dpbench.data.readers.table import read_user_table
from dpbench.data.readers.tff_hdf5 import read_tff_hdf5
from dpbench.data.readers.tff_sqlite import read_tff_sqlite

__all__ = ["read_leaf_json", "read_stackexchange", "read_tff_hdf5", "read_tff_sqlite", "read_user_table"]
