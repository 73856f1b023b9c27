"""Data sets in memory and the lots that are drawn from them."""

from dpbench.data.images import ImageDataModule, InMemoryImages
from dpbench.data.lots import LotLoader, Lots, make_sampling

__all__ = ["ImageDataModule", "InMemoryImages", "LotLoader", "Lots", "make_sampling"]
