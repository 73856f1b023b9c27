"""What a sampler says of itself: the part of a release that amplifies privacy.

A sampling description is data, not code: `dpbench.data.lots` draws by it, the ledger records it, the
accountants read it. So the accounting cannot drift from what was drawn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dpbench.errors import ConfigurationError, LedgerError


@dataclass(frozen=True)
class Sampling:
    """How the records of one lot are drawn from the training data.

    Attributes:
        population: Number of records (examples) that can be drawn; treated as public.
    """

    population: int

    kind: ClassVar[str] = "unknown"
    neighbouring_relation: ClassVar[str] = "none"
    record_changes: ClassVar[int] = 0
    """How many summands of the sum change between neighbours: 1 for add/remove, 2 for replace-one."""

    @property
    def expected_batch_size(self) -> float:
        """Expected number of records in a lot: the only lot size a mechanism may divide by."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> int:
        """Lots that draw each record once on average; bookkeeping, without meaning for privacy."""
        return max(1, round(self.population / self.expected_batch_size))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the ledger."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Each record is in a lot with probability `sample_rate`, independently of everything else.

    Neighbours differ in the presence of one record; lot sizes are binomial and may be zero.
    """

    sample_rate: float

    kind: ClassVar[str] = "poisson"
    neighbouring_relation: ClassVar[str] = "add_or_remove_one"
    record_changes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.population < 1:
            raise ConfigurationError(f"Poisson sampling needs at least one record, not {self.population}.")
        if not 0 < self.sample_rate <= 1:
            raise ConfigurationError(
                f"sample_rate must lie in (0, 1], not {self.sample_rate}; "
                "an expected_batch_size between 1 and the number of training records gives that."
            )

    @property
    def expected_batch_size(self) -> float:
        return self.sample_rate * self.population


@dataclass(frozen=True)
class FixedSizeSampling(Sampling):
    """A uniformly random subset of exactly `batch_size` records, drawn afresh for each lot.

    Neighbours differ in the *value* of one record (the size is fixed, so none can be added), hence a clipped
    sum moves by up to twice the clipping bound.
    """

    batch_size: int

    kind: ClassVar[str] = "fixed_size"
    neighbouring_relation: ClassVar[str] = "replace_one"
    record_changes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.population or self.batch_size != int(self.batch_size):
            raise ConfigurationError(
                f"batch_size must lie between 1 and the {self.population} training records, not {self.batch_size}."
            )

    @property
    def expected_batch_size(self) -> float:
        return float(self.batch_size)


@dataclass(frozen=True)
class ShuffledEpochs(Sampling):
    """Every record once per epoch in random order: for non-private runs, no accountant here covers it."""

    batch_size: int

    kind: ClassVar[str] = "shuffled_epochs"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, not {self.batch_size}.")

    @property
    def expected_batch_size(self) -> float:
        return float(min(self.batch_size, self.population))

    @property
    def steps_per_epoch(self) -> int:
        return max(1, -(-self.population // self.batch_size))


_KINDS: dict[str, type[Sampling]] = {cls.kind: cls for cls in (PoissonSampling, FixedSizeSampling, ShuffledEpochs)}


def sampling_from_dict(data: dict[str, Any]) -> Sampling:
    """Inverse of `Sampling.to_dict`.

    Raises:
        LedgerError: The kind is unknown or a field is missing.
    """
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise LedgerError(f"unknown sampling kind {kind!r}; known are {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise LedgerError(f"sampling of kind {kind!r}: {error}") from None
