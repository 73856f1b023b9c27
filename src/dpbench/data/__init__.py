"""Data sets, and the lots that are drawn from them."""

from dpbench.data.images import ImageDataModule, InMemoryImages
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.user_module import UserDataModule
from dpbench.data.users import UserDataset

__all__ = [
    "ImageDataModule",
    "InMemoryImages",
    "LotLoader",
    "Lots",
    "UserDataModule",
    "UserDataset",
    "make_sampling",
]
