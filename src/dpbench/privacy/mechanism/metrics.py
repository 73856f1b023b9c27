"""Private metrics: per-record values summed over the same batch as the gradients, with a share of the budget.

(general_approach_2018, section 1: "simultaneous collection of accuracy metrics and training data statistics".)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.events import METRIC, Summands
from dpbench.privacy.mechanism.plan import Statistic
from dpbench.privacy.sampling import Sampling

Value = Tensor | Callable[[], Tensor]


@dataclass(frozen=True)
class PrivateMetrics:
    """The released metrics, the bounds of a record's values, and their share of the budget.

    Each of k metrics gets the noise multiplier z·√(k/share), so that together they cost `share` of z⁻².

    Attributes:
        bounds: Name of a metric → bound B of the l2 norm of one record's value; larger values are scaled down to B.
        share: Share of the budget, in (0, 1).

    Raises:
        ConfigurationError: A bound or the share is out of range.
    """

    bounds: Mapping[str, float]
    share: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.bounds, Mapping) or not self.bounds:
            raise ConfigurationError(
                f"metrics must map names to bounds, such as {{accuracy: 1, loss: 3}}, not {self.bounds!r}; leave it "
                "out (null) to release none."
            )
        for name, bound in self.bounds.items():
            is_number = isinstance(bound, int | float)
            if not is_number or not 0 < bound < math.inf:
                raise ConfigurationError(f"the bound of metric {name} must be a positive number, not {bound}.")
        check_share(self.share)

    def statistics(
        self,
        sizes: Mapping[str, int],
        noise_multiplier: float,
        sampling: Sampling,
        summands: Summands,
    ) -> tuple[Statistic, ...]:
        """Statistics that are summed with the gradients, with bound and noise.

        Args:
            sizes: Number of values of each metric that the module offers.
            noise_multiplier: z of the whole release.
            sampling: How batches are drawn.
            summands: Units over which the gradients are summed. A metric is always a sum over units of the sampling:
                one of them moves it by B if it is added or removed.

        Raises:
            ConfigurationError: The module does not offer a metric.
        """
        unknown = [name for name in self.bounds if name not in sizes]
        if unknown:
            offered = ", ".join(sizes) or "none"
            raise ConfigurationError(
                f"the module offers no metric {', '.join(unknown)}; it offers {offered} "
                "(`record_metrics`: name → number of values)."
            )
        metrics = len(self.bounds)
        multiplier = noise_multiplier * math.sqrt(metrics / self.share)
        # z is in units of the bounds by which a sum of gradients moves; a sum over units may move by fewer.
        relative_changes = sampling.record_changes / summands.changes(sampling)
        statistics = []
        for name, bound in self.bounds.items():
            statistic = Statistic(
                name=METRIC + name,
                size=sizes[name],
                bound=bound,
                noise_std=multiplier * relative_changes * bound,
                denominator=sampling.expected_batch_size,
                of_units=True,
            )
            statistics.append(statistic)
        return tuple(statistics)

    def measure(
        self,
        values: Mapping[str, Value],
        sizes: Mapping[str, int],
        records: int,
        merge: tuple[Tensor, int, Any] | None = None,
        present: Tensor | None = None,
    ) -> Tensor:
        """Sum of the bounded values over the examples of a batch.

        Args:
            values: Name → one row for each example, shape (R,) or (R, size), or a function that gives it.
            sizes: Number of values of each metric, as for `statistics`.
            records: R, the number of examples; without any, nothing is expected of `values`.
            merge: (record of each row, number of records, factor of each record), where a record is several rows:
                its value is the mean over them, and is bounded as one.
            present: Mask of the rows that are records, bool, shape (R,); None: all.

        Returns:
            All metrics one after the other, shape (sum of sizes,). Values that are not finite count as zero.

        Raises:
            ConfigurationError: Values are missing or have another shape.
        """
        sums = []
        for name, bound in self.bounds.items():
            size = sizes[name]
            if not records:
                sums.append(torch.zeros(size, dtype=torch.float32))
                continue
            value = _evaluate(values.get(name))
            rows = _rows(name, value, records, size)
            if present is not None:
                rows = torch.where(present[:, None], rows, 0.0)
            if merge is not None:
                rows = _mean_rows(rows, merge)
            sums.append(_bounded_sum(rows, bound))
        return torch.cat(sums)

    def of_rows(self, values: Mapping[str, Value], rows: int) -> Tensor:
        """Values of each row over their bounds, shape (R, number of values), before they are bounded.

        Values that `measure` would refuse are left out.
        """
        # Where no metric has values, a row has none.
        columns = [torch.zeros(rows, 0)]
        for name, bound in self.bounds.items():
            value = _evaluate(values.get(name))
            if isinstance(value, Tensor) and value.dim() and len(value) == rows:
                column = value.detach().double().reshape(rows, -1)
                column = column.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                columns.append(column / bound)
        device = columns[-1].device
        on_device = [column.to(device) for column in columns]
        return torch.cat(on_device, 1)

    def named(
        self,
        released: list[float],
        sizes: Mapping[str, int],
    ) -> dict[str, float]:
        """Released means by name: `private/<metric>`, with a number behind it where a metric has several values."""
        names = []
        for name in self.bounds:
            size = sizes[name]
            if size == 1:
                names.append(f"private/{name}")
                continue
            for index in range(size):
                names.append(f"private/{name}/{index}")
        return dict(zip(names, released, strict=True))


def _evaluate(value: Value | None) -> Tensor | None:
    if callable(value):
        return value()
    return value


def _rows(
    name: str,
    value: Tensor | None,
    records: int,
    size: int,
) -> Tensor:
    """Values of a metric as one row for each example, shape (R, size), float32.

    Raises:
        ConfigurationError: They are missing or have another shape.
    """
    is_batch = value is not None and value.dim() and len(value) == records
    if value is None or not is_batch or value.numel() != records * size:
        raise ConfigurationError(
            f'training_step must return "record_metrics" with {name!r}, {size} number(s) per record.'
        )
    rows = value.detach().float()
    return rows.reshape(-1, size)


def _mean_rows(rows: Tensor, merge: tuple[Tensor, int, Any]) -> Tensor:
    """Means over the rows of each record, shape (records, size)."""
    record_of, records, factor = merge
    size = rows.shape[1]
    totals = rows.new_zeros(records, size)
    totals.index_add_(0, record_of.to(rows.device), rows)
    factors = factor.to(rows)
    means: Tensor = totals * factors[:, None]
    return means


def _bounded_sum(rows: Tensor, bound: float) -> Tensor:
    """Sum of rows that are scaled down to an l2 norm of `bound`, shape (size,); rows that are not finite count as 0."""
    zeros = torch.zeros_like(rows)
    is_finite = rows.isfinite().all(1, keepdim=True)
    rows = torch.where(is_finite, rows, zeros)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    ratios = bound / norms
    weights = ratios.clamp(max=1.0)
    # The norm of finite numbers may overflow, too.
    has_norm = norms.isfinite()
    bounded = torch.where(has_norm, rows * weights, zeros)
    return bounded.sum(0)


def check_share(share: float) -> None:
    """Raise ConfigurationError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ConfigurationError(f"metrics_share must lie strictly between 0 and 1, not {share}.")
