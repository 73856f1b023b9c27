"""Images by user: LEAF's JSON files, and TensorFlow Federated's HDF5 files."""

import json
from pathlib import Path

import numpy as np
import torch

from dpbench.capabilities.users.sources import UserData, by_users
from dpbench.data import UserDataModule, UserDataset  # noqa: F401 (the configuration names UserDataModule here)
from dpbench.data.records import Rows

SHAPE = (1, 28, 28)
NUM_CLASSES = 62


def read_leaf(folder: Path) -> dict:
    """Pixels and labels of each user, from all files of a folder; a user may have parts in several of them."""
    parts = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        for user in content["users"]:
            own = parts.setdefault(user, {"x": [], "y": []})
            own["x"] += content["user_data"][user]["x"]
            own["y"] += content["user_data"][user]["y"]
    return {user: (own["x"], own["y"]) for user, own in parts.items()}


def read_hdf5(path: Path) -> dict:
    """Pixels and labels of each user, from the groups examples/<user>."""
    import h5py

    with h5py.File(path) as file:
        users = file["examples"]
        return {user: (users[user]["pixels"][()], users[user]["label"][()]) for user in users}


def as_users(images: dict) -> UserDataset:
    """Users with their examples, who may have none."""
    pixels = [torch.as_tensor(np.asarray(x, np.float32)).reshape(-1, *SHAPE) for x, _ in images.values()]
    labels = [torch.as_tensor(np.asarray(y, np.int64)) for _, y in images.values()]
    owners = np.repeat(np.asarray(list(images)), [len(own) for own in labels])
    return UserDataset(Rows(torch.cat(pixels), torch.cat(labels)), owners, names=list(images))


def as_user_data(train: dict, test: dict) -> UserData:
    """Training users, and test examples: of other users, or further ones of the same users."""
    users = as_users(train)
    test_users = as_users(test)
    return UserData(
        train=users,
        test=test_users.examples,
        model_options={"input_shape": SHAPE, "num_classes": NUM_CLASSES},
        test_users=test_users,
    )


@by_users("leaf")
def load_leaf(root: Path, download: bool, train: str = "train", test: str = "test") -> UserData:
    """Two folders of LEAF's JSON files."""
    return as_user_data(read_leaf(root / train), read_leaf(root / test))


@by_users("hdf5")
def load_hdf5(root: Path, download: bool, train: str = "train.h5", test: str = "test.h5") -> UserData:
    """Two HDF5 files."""
    return as_user_data(read_hdf5(root / train), read_hdf5(root / test))
