"""Loaders that hand out batches without a training."""

from __future__ import annotations

from dpbench.data.loader import PrivateDataLoader


def reserved(loader: PrivateDataLoader) -> PrivateDataLoader:
    """Reserve a loader's batches, as the start of a training does."""
    loader.lots.acquire()
    return loader
