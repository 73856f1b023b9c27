"""Data sets, and the batches that are drawn from them."""

from functools import partial

from dpbench.data.images import ImageDataModule, InMemoryImages
from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader, make_sampling
from dpbench.names import from_capability

__all__ = [
    "ImageDataModule",
    "InMemoryImages",
    "PrivateBatchSampler",
    "PrivateDataLoader",
    "make_sampling",
]

__getattr__ = partial(from_capability, __name__)
