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


def __getattr__(name: str) -> None:
    if name in ("read_leaf_json", "read_tff_hdf5", "read_tff_sqlite"):
        raise ImportError(f"dpbench.data.{name} is a few lines of your own now: see docs/howto/federated_files.md.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
