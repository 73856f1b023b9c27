"""Data sets by users that have a name: one file a family, each of which registers what it loads."""

from dpbench.data.user_sources import (
    digits,
    shakespeare_tasks,
)

__all__ = [
    "digits",
    "shakespeare_tasks",
]
