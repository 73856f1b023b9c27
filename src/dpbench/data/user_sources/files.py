"""Data sets by users in files of people's own: `tff_sqlite`, `tff_hdf5`, `leaf_json` and `user_table`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import Dataset, Subset

from dpbench.data.held_out import Split, name_bytes, parted, parted_by_hash
from dpbench.data.readers.bags import BagsOfWords
from dpbench.data.readers.leaf import read_leaf_json
from dpbench.data.readers.table import read_user_table
from dpbench.data.readers.tff_hdf5 import read_tff_hdf5
from dpbench.data.readers.tff_sqlite import read_tff_sqlite, splits_of
from dpbench.data.sequences import CHARACTER_TOKENS, WORDS, Sequences, read_vocabulary
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
Reader = Callable[..., UserDataset]


def _register(
    name: str,
    train: Reader,
    test: Callable[[Path, Path | None], Reader | None],
) -> None:
    """Make a kind of file a data set of a name.

    Args:
        name: As `data.name` gives it.
        train: (path, **reading) → users.
        test: (path, path of test data) → reader of test users; None: there are none.
    """

    @by_users(name)
    def load(
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
        file, test_file = _paths(root, path, test_path)
        reading = _reading(features, images, text, sequence_length, vocabulary, tags)
        users = train(file, **reading)
        read_test = test(file, test_file)
        test_users = read_test(**reading) if read_test else None
        return _data(users, test_users, held_out, held_out_by, num_classes, str(file))


def _sqlite_test(path: Path, test_path: Path | None) -> Reader | None:
    file = test_path or path
    return partial(read_tff_sqlite, file, "test") if test_path or "test" in splits_of(file) else None


def _other_file(read: Reader) -> Callable[[Path, Path | None], Reader | None]:
    return lambda path, test_path: partial(read, test_path) if test_path else None


_register("tff_sqlite", read_tff_sqlite, _sqlite_test)
_register("tff_hdf5", read_tff_hdf5, _other_file(read_tff_hdf5))
_register("leaf_json", read_leaf_json, _other_file(read_leaf_json))


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
        features: See `dpbench.data.readers.columns.Reading`, as `images`, `text` and `sequence_length`; a list among
            them puts columns together.
        images: Layout of the first feature.
        text: What the first feature is split into.
        sequence_length: Tokens of a sequence.
        vocabulary: Of words: the path of a file of words.
        tags: With text=tags: the path of a file of all tags.
        num_classes: Of labels; None: one more than the largest label in the data, which is then public.
        held_out: Share of users that are held out where there are no test data.
        held_out_by: How these are chosen, see `UserDataModule`.
    """
    file, test_file = _paths(root, path, test_path)
    reading = _reading(features, images, text, sequence_length, vocabulary, tags)
    test = read_user_table(test_file, user, **reading) if test_file else None
    data = _data(
        read_user_table(file, user, **reading),
        test,
        held_out,
        held_out_by,
        num_classes,
        str(file),
    )
    examples = data.train.examples
    if features is None and isinstance(examples, Rows) and examples.tensors[0].dim() == 1:
        raise ConfigurationError(
            f"{file} has columns of single numbers beside {user!r}: say which are the input together, and which is the "
            "target: data.options.features=[[age, height], label]."
        )
    return data


def _paths(
    root: Path,
    path: str | None,
    test_path: str | None,
) -> tuple[Path, Path | None]:
    if path is None:
        raise ConfigurationError("data.options.path must say which file the training users are in.")
    return _file(root, path), _file(root, test_path) if test_path else None


def _file(root: Path, path: str) -> Path:
    own = Path(path).expanduser()
    if not own.is_absolute() and not (root / own).exists():
        raise DataError(
            f"there is no file {root / own}: a relative path is taken from the folder of the data sets (data.root, "
            "$DPBENCH_DATA). Give an absolute one, or put the file there."
        )
    return root / own


def _reading(
    features: Any,
    images: Any,
    text: Any,
    sequence_length: int | None,
    vocabulary: str | None,
    tags: str | None,
) -> dict[str, Any]:
    words, marks = (read_vocabulary(Path(path).expanduser()) if path else None for path in (vocabulary, tags))
    found = {
        "features": features,
        "images": images,
        "text": text,
        "sequence_length": sequence_length,
        "vocabulary": words,
        "tags": marks,
    }
    return {name: value for name, value in found.items() if value is not None}


def held_out_users(
    users: UserDataset,
    share: float,
    split: Split,
    where: str,
) -> tuple[UserDataset, UserDataset, Dataset[Any]]:
    """Some users apart: those that train, those that do not, and the examples of these.

    Args:
        users: All of them, two or more.
        share: Of them; with split="hash" the probability of each.
        split: How they are chosen, see `UserDataModule`.
        where: The file, for errors.

    Raises:
        DataError: None is held out, or all are.
    """
    if len(users) < 2:
        raise DataError(f"{where} has one user: none can be held out for a test.")
    if split == "hash":
        chosen, others = parted_by_hash(map(name_bytes, users.names), share)
    else:
        count = min(len(users) - 1, max(1, round(share * len(users))))
        chosen, others = parted(split, lambda: (), len(users), count)
    if not len(chosen) or not len(others):
        raise DataError(
            f"held_out={share:g} holds {'none' if not len(chosen) else 'all'} of the {len(users)} users of {where} out "
            "for a test, since a hash of each name decides: take another share, or name a file of test data "
            "(data.options.test_path)."
        )
    test = users.subset(chosen)
    rows = np.concatenate([test.rows(user) for user in range(len(test))])
    return users.subset(others), test, Subset(users.examples, np.sort(rows).tolist())


def _data(
    users: UserDataset,
    test: UserDataset | None,
    share: float,
    split: Split,
    num_classes: int | None,
    where: str,
) -> UserData:
    train = users
    test_users = test
    examples = None if test is None else test.examples
    if test_users is None or examples is None:
        train, test_users, examples = held_out_users(users, share, split, where)
    return UserData(
        train=train,
        test=examples,
        held_out="rows" if set(train.names) & set(test_users.names) else "users",
        model_options=_model_options([users.examples, examples], num_classes),
        test_users=test_users,
    )


def _model_options(parts: list[Dataset[Any]], num_classes: int | None) -> dict[str, Any]:
    """What examples say of themselves: the size of the vocabulary, or the shape of inputs and the number of classes."""
    first = parts[0]
    if isinstance(first, Sequences):
        return {"vocabulary_size": CHARACTER_TOKENS if first.tokens.dtype == torch.uint8 else WORDS + 4}
    if isinstance(first, BagsOfWords):
        return {"num_features": first.features.shape[1], "num_tags": first.targets.shape[1]}
    if not isinstance(first, Rows):
        return {}
    shape = tuple(first.tensors[0].shape[1:])
    options: dict[str, Any] = {"input_shape": shape} if shape else {}  # networks take no single number
    labels = [part.tensors[1] for part in parts if isinstance(part, Rows) and len(part.tensors) > 1]
    if labels and labels[0].dtype == torch.int64 and labels[0].dim() == 1:
        low = min(int(own.min()) for own in labels)
        high = max(int(own.max()) for own in labels)
        if low < 0 or (num_classes is not None and high >= num_classes):
            raise DataError(f"labels run from {low} to {high}, not from 0 to {(num_classes or high + 1) - 1}.")
        options["num_classes"] = num_classes or high + 1
    return options
