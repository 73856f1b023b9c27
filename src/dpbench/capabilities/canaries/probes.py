"""Measurements of an audited run other than canaries: its records' own path, statistics, and sizes of batches."""

from __future__ import annotations

import math

from dpbench.capabilities.canaries.arrays import Sums

LARGEST = 1e6  # of what is kept: a mechanism beyond is broken, however far
RECORD_TOLERANCE = 0.02  # by how much a record's part may exceed its bound, with gradients of half precision
SUM_TOLERANCE = 0.05  # of a bound for each root of a record: by how much a sum may differ from its parts


class Probes(Sums):
    """Measurements of all releases so far.

    The measurements of a right mechanism do not depend on the records: values within tolerance are kept as 1 or 0.

    Attributes:
        statistics: Number of noised values other than gradients, such as counts and metrics.
        statistics_squared: Sum of the squares of their noise, in declared standard deviations.
        lots: Number of batches with a size that is declared to have the moments below.
        size_squared: Sum of the squared deviations of their sizes from the declared mean.
        size_variance, size_cumulant: Sums of the declared variances and fourth cumulants of their sizes.
        records: Number of records with a part in a sum that was measured alone.
        largest: Largest norm of such a part over its bound; 1 where none is larger.
        difference: Largest distance of a sum of records from their parts, in bounds over the root of their number.
        surplus: Most summands of a batch beyond its records.
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

    def add_statistics(self, count: int, squared: float) -> None:
        """Add the noise of the statistics of a release."""
        self.statistics += count
        self.statistics_squared += _cut(squared)

    def add_size(self, size: int, mean: float, cumulants: tuple[float, float]) -> None:
        """Add the size of a batch, with its declared mean, and second and fourth cumulants."""
        variance, fourth = cumulants
        self.lots += 1
        self.size_squared += (size - mean) ** 2
        self.size_variance += variance
        self.size_cumulant += fourth

    def add_records(self, records: int, largest: float, difference: float, surplus: int) -> None:
        """Add the measurements of a batch's records."""
        self.records += records
        # Within tolerance nothing is kept; NaN is beyond any.
        if not largest <= 1 + RECORD_TOLERANCE:
            self.largest = max(self.largest, _cut(largest))
        if not difference <= SUM_TOLERANCE:
            self.difference = max(self.difference, _cut(difference))
        self.surplus = max(self.surplus, surplus)


def _cut(value: float) -> float:
    """At most `LARGEST`: also for a mechanism with sums that are no numbers."""
    if not math.isfinite(value):
        return LARGEST
    return min(value, LARGEST)
