"""Data sets in files of your own: tables, folders of images, dumps of Stack Exchange sites."""

from dpbench.capabilities.own_data.frame import read_frame
from dpbench.capabilities.own_data.table import read_user_table

__all__ = ["read_frame", "read_user_table"]
