"""Random records inserted into the training data, by which memorization is measured.

Carlini et al. 2018, "The secret sharer": random records are inserted into the training data, and after the training
their losses are compared with those of references, drawn alike, that were not trained on (`training.exposure`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from dpbench.errors import ConfigurationError
from dpbench.options import check_options

_MOST = 1_000_000
_MOST_COPIES = 10_000_000  # all together, as many as data of noise may have


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


def inserted_of(options: Inserted | Mapping[str, Any] | None) -> Inserted:
    """Read the option `inserted` of a data module: an object, or a mapping from the command line; None inserts nothing.

    Raises:
        ConfigurationError: There is no such option, or its value is out of range.
    """
    if isinstance(options, Inserted):
        return options
    return Inserted(**check_options(Inserted, options or {}, "data.inserted"))
