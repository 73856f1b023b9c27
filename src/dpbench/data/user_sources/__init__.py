"""Data sets by users that have a name: one file a family, each of which registers what it loads."""

from dpbench.data.user_sources import dealt, files, mnist_writers, noise, shakespeare, stackexchange

__all__ = ["dealt", "files", "mnist_writers", "noise", "shakespeare", "stackexchange"]
