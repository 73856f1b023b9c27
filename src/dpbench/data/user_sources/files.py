"""Data sets by users in files of people's own: `tff_sqlite` and `user_table`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import Dataset, Subset

from dpbench.data.held_out import Split, name_bytes, parted, parted_by_hash
from dpbench.data.readers.table import read_user_table
from dpbench.data.readers.tff_sqlite import read_tff_sqlite, splits_of
from dpbench.data.texts import CHARACTER_TOKENS, WORDS, BagsOfWords, Sequences, read_vocabulary
from dpbench.data.user_data import UserData, by_users
from dpbench.data.users import Rows, UserDataset
from dpbench.errors import ConfigurationError, DataError

Share = Annotated[float, Field(gt=0, lt=1), "a share between 0 and 1"]
FeatureNames = Annotated[
    list[str] | dict[str, list[int] | None] | None, "names of features, or {name: shape} such as {pixels: [1, 28, 28]}"
]
TableFeatures = Annotated[
    list[str | Annotated[list[str], Field(min_length=1)]] | dict[str, list[int] | None] | None,
    "names of features, or {name: shape} such as {pixels: [1, 28, 28]}, or names with lists of columns that make one "
    "feature together, such as [[age, height], label]",
]
Layout = Annotated[
    Literal["channels_first", "channels_last", "gray"] | None, "channels_first, channels_last, gray or null"
]
Text = Annotated[Literal["characters", "words", "tags"] | None, "characters, words, tags or null"]
Length = Annotated[int | None, Field(ge=1, le=10_000), "a whole number of tokens from 1 to 10000, or null"]
Classes = Annotated[int | None, Field(ge=2), "a whole number from 2 on, or null"]
FilePath = Annotated[str | None, Field(min_length=1), "the path of a file"]


@by_users("tff_sqlite")
def load_tff_sqlite(
    root: Path,
    download: bool,
    path: FilePath = None,
    test_path: FilePath = None,
    features: FeatureNames = None,
    images: Layout = None,
    text: Text = None,
    sequence_length: Length = None,
    vocabulary: FilePath = None,
    tags: FilePath = None,
    num_classes: Classes = None,
    held_out: Share = 0.1,
    held_out_by: Split = "hash",
) -> UserData:
    """Clients of a file of TensorFlow Federated.

    Args:
        root: Folder of the data sets.
        download: Not used: the files have to be there.
        path: `.sqlite` or `.sqlite.lzma`, in the folder of the data sets unless absolute.
        test_path: Of test data; without it, the split "test" of the same file, and without that, users are held out.
        features: See `dpbench.data.readers.columns.Reading`, as `images`, `text` and `sequence_length`.
        images: Layout of the first feature.
        text: What the first feature is split into.
        sequence_length: Tokens of a sequence.
        vocabulary: Of words: the path of a file of words.
        tags: With text=tags: the path of a file of all tags.
        num_classes: Of labels; None: one more than the largest label in the data, which is then public.
        held_out: Share of users that are held out where there are no test data.
        held_out_by: How these are chosen, see `UserDataModule`.
    """
    file = _file(root, path)
    reading = _reading(features, images, text, sequence_length, vocabulary, tags)
    users = read_tff_sqlite(file, **reading)
    test_file = _file(root, test_path) if test_path else file
    test_users = None
    if test_path or "test" in splits_of(test_file):
        test_users = read_tff_sqlite(test_file, "test", **reading)
    return _user_data(users, test_users, held_out, held_out_by, num_classes, file)


@by_users("user_table")
def load_table(
    root: Path,
    download: bool,
    path: FilePath = None,
    test_path: FilePath = None,
    user: str = "user",
    features: TableFeatures = None,
    images: Layout = None,
    text: Text = None,
    sequence_length: Length = None,
    vocabulary: FilePath = None,
    tags: FilePath = None,
    num_classes: Classes = None,
    held_out: Share = 0.1,
    held_out_by: Split = "hash",
) -> UserData:
    """Examples of a table with a column that says whose a row is.

    Args:
        root: Folder of the data sets.
        download: Not used: the files have to be there.
        path: `.csv` or `.parquet`, in the folder of the data sets unless absolute.
        test_path: Of test data; without it, users are held out.
        user: The column.
        features: As for `tff_sqlite`; a list among them puts columns together.
        images: Layout of the first feature.
        text: What the first feature is split into.
        sequence_length: Tokens of a sequence.
        vocabulary: Of words: the path of a file of words.
        tags: With text=tags: the path of a file of all tags.
        num_classes: Of labels; None: one more than the largest label in the data, which is then public.
        held_out: Share of users that are held out where there are no test data.
        held_out_by: How these are chosen, see `UserDataModule`.
    """
    file = _file(root, path)
    reading = _reading(features, images, text, sequence_length, vocabulary, tags)
    test_users = read_user_table(_file(root, test_path), user, **reading) if test_path else None
    users = read_user_table(file, user, **reading)
    data = _user_data(users, test_users, held_out, held_out_by, num_classes, file)
    if features is None and isinstance(users.examples, Rows) and users.examples.tensors[0].dim() == 1:
        raise ConfigurationError(
            f"{file} has columns of single numbers beside {user!r}: say which are the input together, and which is the "
            "target: data.options.features=[[age, height], label]."
        )
    return data


def _file(root: Path, path: str | None) -> Path:
    if path is None:
        raise ConfigurationError("data.options.path must say which file the training users are in.")
    file = root / Path(path).expanduser()
    if not Path(path).expanduser().is_absolute() and not file.exists():
        raise DataError(
            f"there is no file {file}: a relative path is taken from the folder of the data sets (data.root, "
            "$DPBENCH_DATA). Give an absolute one, or put the file there."
        )
    return file


def _reading(
    features: Any,
    images: str | None,
    text: str | None,
    sequence_length: int | None,
    vocabulary: str | None,
    tags: str | None,
) -> dict[str, Any]:
    """Options of `readers.columns.Reading`, with the contents of files in the place of their paths."""
    return {
        "features": features,
        "images": images,
        "text": text,
        "sequence_length": sequence_length,
        "vocabulary": read_vocabulary(Path(vocabulary).expanduser()) if vocabulary else None,
        "tags": read_vocabulary(Path(tags).expanduser()) if tags else None,
    }


def held_out_users(
    users: UserDataset,
    share: float,
    split: Split,
    where: Path,
) -> tuple[UserDataset, UserDataset, Dataset[Any]]:
    """Hold out some users.

    Args:
        users: All of them, two or more.
        share: Of them; with split="hash" the probability of each.
        split: How they are chosen, see `UserDataModule`.
        where: The file, for errors.

    Returns:
        Users that train, users that are held out, and the examples of these.

    Raises:
        DataError: None is held out, or all are.
    """
    if len(users) < 2:
        raise DataError(f"{where} has one user: none can be held out for a test.")
    if split == "hash":
        chosen, remaining = parted_by_hash(map(name_bytes, users.names), share)
    else:
        count = min(len(users) - 1, max(1, round(share * len(users))))
        chosen, remaining = parted(split, lambda: (), len(users), count)
    if not len(chosen) or not len(remaining):
        raise DataError(
            f"held_out={share:g} holds {'all' if len(chosen) else 'none'} of the {len(users)} users of {where} out "
            "for a test, since a hash of each name decides: take another share, or name a file of test data "
            "(data.options.test_path)."
        )
    test = users.subset(chosen)
    # In the order of the file, whatever the order of its users.
    rows = np.sort(test.rows_of(np.arange(len(test))))
    return users.subset(remaining), test, Subset(users.examples, rows.tolist())


def _user_data(
    users: UserDataset,
    test_users: UserDataset | None,
    share: float,
    split: Split,
    num_classes: int | None,
    where: Path,
) -> UserData:
    """Training and test users, of whom some are held out where there are no test users."""
    train = users
    if test_users is None:
        train, test_users, test = held_out_users(users, share, split, where)
    else:
        test = test_users.examples
    return UserData(
        train=train,
        test=test,
        held_out="users" if set(train.names).isdisjoint(test_users.names) else "rows",
        model_options=_model_options(users.examples, test, num_classes),
        test_users=test_users,
    )


def _model_options(train: Dataset[Any], test: Dataset[Any], num_classes: int | None) -> dict[str, Any]:
    """What the examples determine of a model: size of the vocabulary, or shape of inputs and number of classes."""
    if isinstance(train, Sequences):
        # Characters are stored as bytes, words in two bytes or more.
        return {"vocabulary_size": CHARACTER_TOKENS if train.tokens.dtype == torch.uint8 else WORDS + 4}
    if isinstance(train, BagsOfWords):
        return {"num_features": train.features.shape[1], "num_tags": train.targets.shape[1]}
    if not isinstance(train, Rows):
        return {}
    options: dict[str, Any] = {}
    if train.tensors[0].dim() > 1:  # networks take no single number
        options["input_shape"] = tuple(train.tensors[0].shape[1:])
    labels = train.tensors[1] if len(train.tensors) > 1 else None
    if labels is None or labels.dtype != torch.int64 or labels.dim() != 1:
        return options
    if isinstance(test, Rows) and len(test.tensors) > 1:
        labels = torch.cat([labels, test.tensors[1].flatten().long()])
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        raise DataError(f"labels run from {low} to {high}, not from 0 to {(num_classes or high + 1) - 1}.")
    options["num_classes"] = num_classes or high + 1
    return options
