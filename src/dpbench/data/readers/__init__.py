"""Readers of files that hold examples by user."""

from dpbench.data.readers.posts import read_stackexchange
from dpbench.data.readers.table import read_user_table
from dpbench.data.readers.tff_sqlite import read_tff_sqlite

__all__ = ["read_stackexchange", "read_tff_sqlite", "read_user_table"]
