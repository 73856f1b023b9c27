"""Data sets by users that have a name: one file a family, each of which registers what it loads."""

from dpbench.data.user_sources import (
    cifar,
    digits,
    files,
    mnist_writers,
    noise,
    shakespeare_tasks,
    stackexchange,
)

__all__ = [
    "cifar",
    "digits",
    "files",
    "mnist_writers",
    "noise",
    "shakespeare_tasks",
    "stackexchange",
]
