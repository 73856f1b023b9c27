"""What an audited run measures of itself beside its canaries: its records' own path, statistics, and sizes of lots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

LARGEST = 1e6  # of what is kept: a mechanism beyond is broken, however far
RECORD_TOLERANCE = 0.02  # by how much a record's part may exceed its bound, with gradients of half precision
SUM_TOLERANCE = 0.05  # of a bound for each root of a record: by how much a sum may differ from its parts


@dataclass(frozen=True)
class Probes:
    """Measurements of all releases so far.

    What a right mechanism leaves here does not depend on the records: what is within its tolerance is kept as 1 or 0.

    Attributes:
        statistics: Number of noised values beside the gradients, such as counts and metrics.
        statistics_squared: Sum of the squares of their noise, in declared standard deviations.
        lots: Number of lots whose size is declared to have the moments below.
        size_squared: Sum of the squared deviations of their sizes from the declared mean.
        size_variance, size_cumulant: Sums of the declared variances and fourth cumulants of their sizes.
        records: Number of records whose part in a sum was measured alone.
        largest: Largest norm of such a part over its bound; 1 where none is larger.
        difference: Largest distance of a sum of records from their parts, in bounds over the root of their number.
        surplus: Most summands of a lot beyond its records.
    """

    statistics: int = 0
    statistics_squared: float = 0.0
    lots: int = 0
    size_squared: float = 0.0
    size_variance: float = 0.0
    size_cumulant: float = 0.0
    records: int = 0
    largest: float = 1.0
    difference: float = 0.0
    surplus: int = 0

    def with_statistics(self, count: int, squared: float) -> Probes:
        """Add the noise of the statistics of a release."""
        return replace(
            self,
            statistics=self.statistics + count,
            statistics_squared=self.statistics_squared + _cut(squared),
        )

    def with_size(
        self,
        size: int,
        mean: float,
        cumulants: tuple[float, float],
    ) -> Probes:
        """Add the size of a lot, with its declared mean, and second and fourth cumulants."""
        variance, fourth = cumulants
        return replace(
            self,
            lots=self.lots + 1,
            size_squared=self.size_squared + (size - mean) ** 2,
            size_variance=self.size_variance + variance,
            size_cumulant=self.size_cumulant + fourth,
        )

    def with_records(
        self,
        records: int,
        largest: float,
        difference: float,
        surplus: int,
    ) -> Probes:
        """Add what was measured of the records of a lot."""
        # Within tolerance nothing is kept; NaN is beyond any.
        kept_largest = 1.0
        if not largest <= 1 + RECORD_TOLERANCE:
            kept_largest = _cut(largest)
        kept_difference = 0.0
        if not difference <= SUM_TOLERANCE:
            kept_difference = _cut(difference)
        return replace(
            self,
            records=self.records + records,
            largest=max(self.largest, kept_largest),
            difference=max(self.difference, kept_difference),
            surplus=max(self.surplus, surplus),
        )

    def to_json(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Probes:
        """Inverse of `to_json`.

        Raises:
            ValueError: It is something else.
        """
        kinds: dict[str, tuple[type, ...]] = {}
        for field in fields(cls):
            kinds[field.name] = (int, float)
            if field.type == "int":
                kinds[field.name] = (int,)
        if not isinstance(data, Mapping) or set(data) != set(kinds):
            raise ValueError(f"probes should have the keys {', '.join(kinds)}")
        for name, kind in kinds.items():
            if type(data[name]) not in kind or not math.isfinite(data[name]):
                raise ValueError(f"probes.{name} is no finite number of its kind")
        return cls(**data)


def _cut(value: float) -> float:
    """At most `LARGEST`: also of a mechanism whose sums are no numbers."""
    if not math.isfinite(value):
        return LARGEST
    return min(value, LARGEST)
