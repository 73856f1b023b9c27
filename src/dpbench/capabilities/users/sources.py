"""Named data sets by users: the data of a source, and the registry of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.held_out import Split
from dpbench.data.inserted import Encoder
from dpbench.errors import ConfigurationError
from dpbench.options import check_options, options_of


@dataclass(frozen=True)
class UserData:
    """Training users and test examples, ready to be trained on.

    Attributes:
        train: Users that cohorts are drawn from.
        test: Test examples.
        model_options: Options that the data set provides to a model and a module: `input_shape` and `num_classes` of
            labeled images; `num_targets` of numbers to be predicted; `vocabulary_size` of sequences; `num_features` and
            `num_tags` of tagged texts.
        val: Examples that the validation loop sees where no training users are held out; None: the test examples.
        test_users: The test examples by user, where they have one: for metrics of each user; None: they have none.
        noise_batch: Function of (size, generator) that makes a batch without private data.
        encode: Encoder of texts, where the examples are `Sequences` of their tokens; None: they are not.
        attribution: Attribution that a license requires; "": none.
        inputs: How an input is prepared, and names of the classes, for users of an exported model: plain data from the
            configuration or public, never from the records.
    """

    train: UserDataset
    test: Dataset[Any]
    model_options: Mapping[str, Any]
    val: Dataset[Any] | None = None
    test_users: UserDataset | None = None
    noise_batch: Callable[[int, torch.Generator], Any] | None = None
    encode: Encoder | None = None
    attribution: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UserSource:
    """How a data set by users is loaded.

    Attributes:
        load: (root, download, **options) → data, or with `options_class` (root, download, options) → data.
        options_class: The dataclass of the options; None: the signature of `load` declares them.
        has_users: True if users may be the records.
    """

    load: Callable[..., UserData]
    options_class: type[Any] | None = None
    has_users: bool = True

    @property
    def declaration(self) -> Callable[..., Any]:
        """Object with the annotations of the options."""
        return self.options_class or self.load

    @property
    def options(self) -> dict[str, Any]:
        """Names of the options that `data.options.<option>` may set, with their defaults."""
        declared = options_of(self.declaration)
        names = list(declared)
        if self.options_class is None:
            names = names[2:]  # behind the folder, and whether to download
        return {name: declared[name].default for name in names if name != "held_out_by"}

    @property
    def lies_anywhere(self) -> bool:
        """Return whether the name identifies the records, in any folder: not so for a user's own files."""
        return self.load.__module__.startswith("dpbench.") and "path" not in self.options

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check options of the data set, and fill in the defaults of those that are absent or None.

        Raises:
            ConfigurationError: It has no such option, or the option does not take the value.
        """
        defaults = self.options
        stated = {option: value for option, value in options.items() if value is not None}
        reserved = options_of(self.declaration).keys() - defaults.keys()
        return {**defaults, **check_options(self.declaration, stated, "data.options", reserved)}

    def read(self, root: Path, download: bool, options: Mapping[str, Any], split: Split = "hash") -> UserData:
        """Load the data set.

        Args:
            root: Folder of the data sets.
            download: True to download an absent data set.
            options: Options of the data set; None takes the default.
            split: How users are held out, where the data set does that.

        Raises:
            ConfigurationError: It has no such option.
            DataError: It is absent or damaged.
        """
        arguments = self.check(options)
        if self.options_class is not None:
            arguments = {"options": self.options_class(**arguments)}
        if "held_out_by" in options_of(self.load):
            arguments["held_out_by"] = split
        return self.load(root, download, **arguments)


USER_SOURCES: dict[str, UserSource] = {}
"""Sources that are imported, by name, as `data.name` gives it."""
_PLUGINS = "dpbench.user_data"
"""Group of entry points: a name, and its function or module, which registers itself by `by_users` when imported."""


def by_users(
    name: str,
    options_class: type[Any] | None = None,
    has_users: bool = True,
) -> Callable[[Callable[..., UserData]], Callable[..., UserData]]:
    """Decorator: make a function `load(root, download, option=default, ...)` the data set of a name.

    Its parameters with defaults are the options of the data set. An annotation `Annotated[int, Field(ge=1), "a whole
    number from 1 on"]` gives the values of an option, and their description in messages. A parameter `held_out_by` is
    no option of the data set: it says how users are held out, and is `data.split` (`dpbench.data.held_out`).

    Args:
        name: Name of the data set.
        options_class: A dataclass of the options, where several data sets have the same; the function is
            `load(root, download, options)` then.
        has_users: True if users may be the records; else `data.unit` must be "example".
    """

    def register(load: Callable[..., UserData]) -> Callable[..., UserData]:
        USER_SOURCES[name] = UserSource(load, options_class, has_users)
        return load

    return register


def user_source(name: str) -> UserSource:
    """Find the data set of a name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in USER_SOURCES:
        for entry in entry_points(group=_PLUGINS, name=name):
            entry.load()
    if name not in USER_SOURCES:
        known = ", ".join(user_source_names())
        raise ConfigurationError(
            f"unknown data set by users {name!r}; known are {known}. To read another one, see "
            "docs/howto/federated_files.md."
        )
    return USER_SOURCES[name]


def user_source_names() -> list[str]:
    """Names of all data sets by users."""
    return sorted({*USER_SOURCES, *entry_points(group=_PLUGINS).names})
