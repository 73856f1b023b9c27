"""Readers of files that hold examples by user."""

from dpbench.data.readers.posts import read_stackexchange
from dpbench.data.readers.table import read_user_table

__all__ = ["read_stackexchange", "read_user_table"]
