"""Data sets by users that have a name: one file a family, each of which registers what it loads."""

from dpbench.data.user_sources import dealt, mnist_writers, noise, shakespeare

__all__ = ["dealt", "mnist_writers", "noise", "shakespeare"]
