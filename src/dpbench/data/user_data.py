"""A data set by users that has a name: what its source gives, and how it is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError


@dataclass(frozen=True)
class UserData:
    """Training users and test examples, ready to be trained on.

    Attributes:
        train: Users that cohorts are drawn from.
        test: Test examples, of `held_out`.
        held_out: Whether these are of other "users", or other "rows" of the training users.
        model_options: What the data say of themselves to a model and a module: `input_shape` and `num_classes` of
            labeled images; `vocabulary_size` of sequences; `num_features` and `num_tags` of tagged texts.
        test_users: The test examples by user, where they have one: for metrics of each user; None: they have none.
        noise_batch: Called with (size, generator): a batch that no private data went into.
        attribution: What a license wants to be said with the data; "": nothing.
    """

    train: UserDataset
    test: Dataset[Any]
    held_out: Literal["users", "rows"]
    model_options: Mapping[str, Any]
    test_users: UserDataset | None = None
    noise_batch: Callable[[int, torch.Generator], Any] | None = None
    attribution: str = ""


@dataclass(frozen=True)
class UserSource:
    """How a data set by users is loaded.

    Attributes:
        load: (root, download, **options) → data; what options it takes its signature says.
        options: Names of the options that `data.<option>` may set, with their defaults.
    """

    load: Callable[..., UserData]
    options: Mapping[str, Any] = field(default_factory=dict)


USER_SOURCES: dict[str, UserSource] = {}
"""By name, as `data.name` gives it."""


def user_source(name: str) -> UserSource:
    """The data set of a name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in USER_SOURCES:
        raise ConfigurationError(f"unknown data set by users {name!r}; known are {', '.join(USER_SOURCES)}.")
    return USER_SOURCES[name]


def load_user_data(name: str, root: Path, download: bool, options: Mapping[str, Any]) -> UserData:
    """Load a data set by its name.

    Args:
        name: Of the data set.
        root: Folder of the data sets.
        download: Whether what is absent may be downloaded.
        options: Of the source; None takes its default.

    Raises:
        ConfigurationError: There is no such data set, or it has no such option.
        DataError: It is absent or damaged.
    """
    source = user_source(name)
    if strange := [option for option in options if option not in source.options]:
        raise ConfigurationError(
            f"data set {name} has no option {strange[0]!r}; it has {', '.join(source.options) or 'none'}."
        )
    given = {option: value for option, value in options.items() if value is not None}
    return source.load(root, download, **{**source.options, **given})
