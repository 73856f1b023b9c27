"""Random records inserted into the training data, by which memorization is measured.

Carlini et al. 2018, "The secret sharer": random records are inserted into the training data, and after the training
their losses are compared with those of references, drawn alike, that were not trained on (`training.exposure`). Of
texts, each has a secret that a language model may complete.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.options import check_options

_MOST = 1_000_000
_MOST_COPIES = 10_000_000  # all together, as many as data of noise may have
_LETTERS = 6  # of a name


@dataclass(frozen=True)
class Inserted:
    """Options of made-up records that are inserted into the training data.

    To privacy they are records like any others: they are drawn like them, and count in the population of the ledger.
    Each copy is a record, so that an epsilon for one record does not cover all copies of one that was inserted.

    Attributes:
        records: Number of different records; 0: none.
        copies: Number of copies of each.
        references: Records drawn alike that are not inserted.
        seed: Seed of the draws.

    Raises:
        ConfigurationError: A number is out of range.
    """

    records: Annotated[int, Field(ge=0, le=_MOST), "a whole number of at least 0"] = 0
    copies: Annotated[int, Field(ge=1, le=_MOST), "a whole number of at least 1"] = 1
    references: Annotated[int, Field(ge=1, le=_MOST), "a whole number of at least 1"] = 4096
    seed: Annotated[int, Field(ge=0, lt=2**32), "a whole number of at least 0 (below 2^32)"] = 0

    def __post_init__(self) -> None:
        check_options(type(self), vars(self), "data.inserted")
        if self.records * self.copies > _MOST_COPIES:
            raise ConfigurationError(
                f"data.inserted asks for {self.records:,} records, {self.copies:,} times each: take at most "
                f"{_MOST_COPIES:,} copies in all."
            )


@dataclass(frozen=True)
class InsertedTexts(Inserted):
    """Options of made-up texts with secrets, such as "The code of kxwqne is 4 9 2 1 7 7 3 5".

    Names and digits are drawn uniformly. An attacker knows all but the digits; those stand apart, so that tokenizers
    give each a token. References of a text have its name, and other digits.

    Attributes:
        prefix: Beginning of a text, with {} in the place of its name.
        digits: Digits of a secret.
        samples: Continuations of each beginning that are drawn after the training, besides the most likely one.
    """

    prefix: Annotated[str, Field(pattern=r"\{\}"), "a text with {} for the name"] = "The code of {} is"
    digits: Annotated[int, Field(ge=4, le=16), "a whole number from 4 to 16"] = 8
    samples: Annotated[int, Field(ge=1, le=_MOST), "a whole number of at least 1"] = 100


OptionsT = TypeVar("OptionsT", bound=Inserted)


def inserted_of(options: Inserted | Mapping[str, Any] | None, cls: type[OptionsT]) -> OptionsT:
    """Read the option `inserted` of a data module: an object, or a mapping from the command line; None inserts nothing.

    Args:
        options: The option.
        cls: Class of the object.

    Raises:
        ConfigurationError: There is no such option, or its value is out of range.
    """
    if isinstance(options, Inserted):
        options = vars(options)
    return cls(**check_options(cls, options or {}, "data.inserted"))


def refuse_membership_of_inserted(membership: str | None, inserted: Inserted) -> None:
    """Refuse an experiment on membership with inserted records.

    Raises:
        ConfigurationError: There are both.
    """
    if membership is not None and inserted.records:
        raise ConfigurationError(
            "data.inserted adds records to every run, and data.membership chooses among a run's records: "
            "remove one of the two."
        )


Encoder = Callable[[Sequence[str]], NDArray[Any]]
"""Function from texts to rows of token numbers, (N, T + 1)."""


@dataclass(frozen=True, eq=False)
class Secret:
    """A text with a secret, and its references.

    Attributes:
        places: Positions of the secret's tokens in a row, (D,).
        text: The text, (1, T + 1).
        references: Texts with the same name and other digits, drawn alike, (R, T + 1).
    """

    places: list[int]
    text: Tensor
    references: Tensor


def secret_of(options: InsertedTexts, record: int, encode: Encoder) -> Secret:
    """Draw one of the texts that are inserted; it does not depend on the number of references.

    Args:
        options: Form of the texts, and seed.
        record: Its number.
        encode: Encoder of the data set's texts.

    Raises:
        ConfigurationError: The text does not become one row, or its digits are not one token each.
    """
    rng = np.random.default_rng([2018, options.seed, record])
    name = "".join(rng.choice(list(string.ascii_lowercase), _LETTERS))
    digits = rng.integers(len(string.digits), size=(1 + options.references, options.digits))
    prefix = options.prefix.replace("{}", name)
    # Of each digit, the text with that digit alone: they differ in the places of the secret.
    texts = [f"{prefix}{f' {digit}' * options.digits}" for digit in string.digits]
    rows = encode(texts)
    places = [place for place, tokens in enumerate(rows.T) if len(set(tokens.tolist())) == len(texts)]
    if len(rows) != len(texts) or len(places) != options.digits:
        raise ConfigurationError(
            f"data.inserted: {texts[0]!r} is not one sequence in which each digit is a token: raise "
            "data.options.sequence_length, or take a shorter prefix, fewer digits or another tokenizer."
        )
    drawn = np.repeat(rows[:1], len(digits), axis=0)
    drawn[:, places] = rows[digits, places]
    return Secret(places, torch.from_numpy(drawn[:1]), torch.from_numpy(drawn[1:]))
