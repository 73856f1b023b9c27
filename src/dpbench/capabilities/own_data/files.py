"""Data sets in files: tables by user (`user_table`) and without (`table`), folders of images (`image_folder`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import Dataset, Subset

from dpbench.capabilities.own_data.frame import DEFAULT_LENGTHS, text_encoder
from dpbench.capabilities.own_data.image_folder import class_folders, read_image_folder
from dpbench.capabilities.own_data.table import read_user_table
from dpbench.capabilities.own_data.texts import BYTES, Tokenizer
from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.sources import UserData, by_users
from dpbench.data.held_out import Split, name_bytes, parted, parted_by_hash
from dpbench.data.records import Rows
from dpbench.data.sources import find_file
from dpbench.data.texts import CHARACTER_TOKENS, WORDS, Sequences, read_vocabulary
from dpbench.errors import ConfigurationError, DataError

HeldOutShare = Annotated[float, Field(gt=0, lt=1), "a share between 0 and 1"]
FilePath = Annotated[str | None, Field(min_length=1), "the path of a file"]
_TableFeatures = Annotated[
    list[str | Annotated[list[str], Field(min_length=1)]] | dict[str, list[int] | None] | None,
    "names of features, or {name: shape} such as {pixels: [1, 28, 28]}, or names with lists of columns that make one "
    "feature together, such as [[age, height], label]",
]
_Ranges = Annotated[
    dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] | None,
    "columns with their least and largest value, such as {age: [0, 100]}",
]
_Layout = Annotated[
    Literal["channels_first", "channels_last", "gray"] | None, "channels_first, channels_last, gray or null"
]
_Text = Annotated[
    Literal["characters", "words", "tokens", "labels"] | None, "characters, words, tokens, labels or null"
]
_Tokenizer = Annotated[
    str | None, Field(min_length=1), "bytes, a folder or name of a tokenizer of transformers, or null"
]
_Length = Annotated[int | None, Field(ge=1, le=10_000), "a whole number of tokens from 1 to 10000, or null"]
_Classes = Annotated[int | None, Field(ge=2), "a whole number from 2 on, or null"]
_ClassNames = Annotated[
    Annotated[list[str], Field(min_length=2)] | None, "names of two or more classes, such as [cat, dog], or null"
]
_NOT_OF_A_FILE = ("path", "test_path", "num_classes", "held_out")
_Side = Annotated[int, Field(ge=4, le=1024), "a side in pixels from 4 to 1024"]


@dataclass(frozen=True)
class TableOptions:
    """Options of a table.

    Attributes:
        path: Path of the training data; a relative one is looked for in the working directory, then in the folder
            of the data sets.
        test_path: Path of the test data; without it, users are held out.
        features: Names, in the order of an example's parts: inputs, then targets; a list among them puts columns
            together. See `dpbench.capabilities.own_data.frame.read_frame`, as for `images`, `text` and
            `sequence_length`.
        ranges: Columns with their least and largest value, which must not come from the data: values beyond are
            clipped, and the range becomes [-1, 1].
        classes: Words of the last feature, in the order of their numbers.
        images: Layout of the first feature.
        text: Form of texts.
        sequence_length: Tokens of a sequence.
        vocabulary: Path of a file of words.
        tokenizer: Tokenizer of tokens (None: bytes) or of texts with labels (None: words).
        num_classes: Number of classes; None: one more than the largest label in the data, which is then public.
        held_out: Share of users that are held out where there are no test data.
    """

    path: FilePath = None
    test_path: FilePath = None
    features: _TableFeatures = None
    ranges: _Ranges = None
    classes: _ClassNames = None
    images: _Layout = None
    text: _Text = None
    sequence_length: _Length = None
    vocabulary: FilePath = None
    tokenizer: _Tokenizer = None
    num_classes: _Classes = None
    held_out: HeldOutShare = 0.1

    def inputs(self) -> dict[str, Any]:
        """How an input is prepared, and names of the classes: only what the options state, nothing of the table."""
        stated: dict[str, Any] = {
            "features": self.features,
            "ranges": self.ranges,
            "images": self.images,
            "text": self.text,
            "vocabulary": Path(self.vocabulary).name if self.vocabulary else None,
            "tokenizer": Path(self._tokenizer).name if self._tokenizer else None,
            "classes": self.classes,
        }
        if self.text is not None:
            stated["sequence_length"] = self.sequence_length or DEFAULT_LENGTHS[self.text]
        stated["preparation"] = " ".join(self._preparation())
        return {name: value for name, value in stated.items() if value is not None}

    @property
    def _tokenizer(self) -> str | None:
        return BYTES if self.text == "tokens" and self.tokenizer is None else self.tokenizer

    def _preparation(self) -> list[str]:
        if self._tokenizer is not None:
            lines = [
                "Encode each text by dpbench.capabilities.own_data.texts.Tokenizer(tokenizer).rows with "
                "length=sequence_length: the tokenizer's numbers plus 1, padded with 0."
            ]
        elif self.text == "labels":
            lines = [
                "Join the texts of a row by blanks and encode them by "
                "dpbench.capabilities.own_data.texts.labeled_words with length=sequence_length: lower-case words, "
                "numbers and signs, each one token, padded with 0."
            ]
            if self.vocabulary is None:
                lines.append("A token is BLAKE2b (8 bytes, big-endian) of the word in UTF-8, modulo 10000, plus 1.")
            else:
                lines.append("A token is the line of the word in the vocabulary, from 1; of others 10001.")
        elif self.text == "words":
            lines = [
                "Split lower-case texts at blanks and encode them by dpbench.data.texts.word_sequences with the "
                "vocabulary and length=sequence_length; inputs are all tokens but the last."
            ]
        elif self.text == "characters":
            lines = [
                "Encode texts by dpbench.data.texts.character_sequences with length=sequence_length; inputs are all "
                "tokens but the last."
            ]
        elif self.images is not None:
            lines = ["float32 (channels, height, width); whole numbers are divided by 255."]
        else:
            lines = [
                "Columns of a list are one input, float32, in the order of the list; the last feature is the target."
            ]
        if self.ranges:
            lines.append("Columns in ranges are clipped, and their range becomes [-1, 1].")
        return lines


@dataclass(frozen=True)
class UserTableOptions(TableOptions):
    """Options of a table with a column that names the user of a row.

    Attributes:
        user: The column.
    """

    user: str = "user"


@by_users("user_table", UserTableOptions)
@by_users("table", TableOptions, has_users=False)
def load_table(
    root: Path,
    download: bool,
    options: TableOptions,
    held_out_by: Split = "hash",
) -> UserData:
    """Rows of a table, `.csv`, `.jsonl` or `.parquet`, each a user's only one, or with a user.

    Args:
        root: Folder of the data sets.
        download: Not used: the files have to be there.
        options: Options of the data set. Without a column of users `held_out` is a share of the rows.
        held_out_by: How users, or rows, are held out, see `UserDataModule`.
    """
    reading = {name: value for name, value in vars(options).items() if name not in _NOT_OF_A_FILE}
    if options.vocabulary:
        reading["vocabulary"] = read_vocabulary(find_file(root, options.vocabulary))
    train, test_users, test = _split(partial(read_user_table, **{"user": None, **reading}), root, options, held_out_by)
    if options.features is None and isinstance(train.examples, Rows) and train.examples.tensors[0].dim() == 1:
        raise ConfigurationError(
            f"{options.path} has only columns of single numbers: name the input columns and the target, such as "
            "data.options.features=[[age, height], label]."
        )
    encode = None
    if isinstance(train.examples, Sequences):
        assert options.text is not None
        encode = text_encoder(options.text, options.sequence_length, reading["vocabulary"], options.tokenizer)
    return UserData(
        train,
        test,
        _model_options(train.examples, test, options),
        test_users=test_users,
        encode=encode,
        inputs=options.inputs(),
    )


@dataclass(frozen=True)
class ImageFolderOptions:
    """Options of a folder of images, `folder/class/image.png`.

    Attributes:
        path: Path of the training images; a relative one is looked for as a table's.
        test_path: Path of the test images; without it, images are held out.
        classes: Names of the folders, in the order of their numbers; None: all that there are, by name, which are then
            public.
        image_size: Side to which images are resized (the shorter one, then cropped in the middle).
        grayscale: True to make them gray.
        held_out: Share of images that are held out where there are no test images.
    """

    path: FilePath = None
    test_path: FilePath = None
    classes: _ClassNames = None
    image_size: _Side = 32
    grayscale: bool = False
    held_out: HeldOutShare = 0.1

    def inputs(self, classes: Sequence[str]) -> dict[str, Any]:
        """How an image is prepared, and names of the classes.

        Args:
            classes: Names of the folders, which are public, in the order of their numbers.
        """
        return {
            "image_size": self.image_size,
            "grayscale": self.grayscale,
            "classes": list(classes),
            "preparation": (
                f"{'One gray channel' if self.grayscale else 'RGB'}; the shorter side is resized to image_size "
                "(bilinear, antialiased), the middle is cropped to a square; float32 (channels, height, width), "
                "divided by 255, not normalized further."
            ),
        }


@by_users("image_folder", ImageFolderOptions, has_users=False)
def load_image_folder(
    root: Path,
    download: bool,
    options: ImageFolderOptions,
    held_out_by: Split = "hash",
) -> UserData:
    """Images in a folder for each class, each a user's only one.

    Args:
        root: Folder of the data sets.
        download: Not used: the files have to be there.
        options: Options of the data set; `held_out` is a share of the images.
        held_out_by: How images are held out, see `UserDataModule`.
    """
    classes = options.classes or class_folders(_training_file(root, options.path))
    read = partial(read_image_folder, classes=classes, image_size=options.image_size, grayscale=options.grayscale)
    train, test_users, test = _split(read, root, options, held_out_by)
    shape = (1 if options.grayscale else 3, options.image_size, options.image_size)
    model_options = {"input_shape": shape, "num_classes": len(classes)}
    return UserData(train, test, model_options, test_users=test_users, inputs=options.inputs(classes))


def _split(
    read: Callable[[Path], UserDataset],
    root: Path,
    options: TableOptions | ImageFolderOptions,
    split: Split,
) -> tuple[UserDataset, UserDataset, Dataset[Any]]:
    """Training users, test users and the examples of these: of the test data, or held out."""
    file = _training_file(root, options.path)
    users = read(file)
    if options.test_path is None:
        return held_out_users(users, options.held_out, split, file)
    test_users = read(find_file(root, options.test_path))
    return users, test_users, test_users.examples


def _training_file(root: Path, path: str | None) -> Path:
    if path is None:
        raise ConfigurationError("data.options.path is missing: set it to the file of the training data.")
    return find_file(root, path)


def held_out_users(
    users: UserDataset,
    share: float,
    split: Split,
    where: Path,
) -> tuple[UserDataset, UserDataset, Dataset[Any]]:
    """Hold out some users.

    Args:
        users: All of them, two or more.
        share: Share of them; with split="hash" the probability of each.
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
        # Another hash than that of `val_users`, which would hold out the same users again.
        chosen, remaining = parted_by_hash((b"test: " + name_bytes(name) for name in users.names), share)
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


def _model_options(train: Dataset[Any], test: Dataset[Any], options: TableOptions) -> Mapping[str, Any]:
    """Options of a model that follow from the examples: vocabulary size, or shape of inputs; classes, targets."""
    if isinstance(train, Sequences):
        if options.text == "tokens":
            return {"vocabulary_size": Tokenizer(options.tokenizer or BYTES).count}
        # Characters are stored as bytes, words in two bytes or more.
        return {"vocabulary_size": CHARACTER_TOKENS if train.tokens.dtype == torch.uint8 else WORDS + 4}
    assert isinstance(train, Rows)
    inputs = train.tensors[0]
    determined: dict[str, Any] = {}
    if options.text == "labels":
        determined["vocabulary_size"] = Tokenizer(options.tokenizer).count if options.tokenizer else WORDS + 4
    elif inputs.dim() > 1:  # networks take no single number
        determined["input_shape"] = tuple(inputs.shape[1:])
    if len(train.tensors) < 2:
        return determined
    targets = train.tensors[1]
    # A table's whole numbers may be classes, or an amount to be predicted: the module decides.
    may_be_amount = inputs.dim() == 2 and options.text is None
    if targets.dim() <= 2 and (may_be_amount or targets.is_floating_point()):
        determined["num_targets"] = targets.shape[1:].numel()
    if targets.dtype != torch.int64 or targets.dim() != 1:
        return determined
    if isinstance(test, Rows) and len(test.tensors) > 1:
        targets = torch.cat([targets, test.tensors[1].flatten().long()])
    low = int(targets.min())
    high = int(targets.max())
    num_classes = len(options.classes) if options.classes else options.num_classes
    if low >= 0 and (num_classes is None or high < num_classes):
        determined["num_classes"] = num_classes or high + 1
    elif num_classes is not None or not may_be_amount:
        raise DataError(f"labels run from {low} to {high}, not from 0 to {(num_classes or high + 1) - 1}.")
    return determined
