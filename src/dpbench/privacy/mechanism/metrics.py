"""Private metrics: per-record values summed over the same lot as the gradients, with a share of the budget.

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
    """Which metrics are released, how large a record's value may be, and what share of the budget they take.

    Each of k metrics gets the noise multiplier z·√(k/share), so that together they cost `share` of z⁻².

    Attributes:
        bounds: Name of a metric → bound B of the l2 norm of one record's value; what is larger is scaled down to B.
        share: In (0, 1).

    Raises:
        ConfigurationError: A bound or the share is out of range.
    """

    bounds: Mapping[str, float]
    share: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.bounds, Mapping) or not self.bounds:
            raise ConfigurationError(
                f"metrics must be names with a bound each, such as {{accuracy: 1, loss: 3}}, not {self.bounds!r}; "
                "leave it out (null) to release none."
            )
        for name, bound in self.bounds.items():
            if not isinstance(bound, int | float) or not 0 < bound < math.inf:
                raise ConfigurationError(f"the bound of metric {name} must be a positive number, not {bound}.")
        check_share(self.share)

    def statistics(
        self, sizes: Mapping[str, int], noise_multiplier: float, sampling: Sampling, summands: Summands
    ) -> tuple[Statistic, ...]:
        """Statistics that are summed beside the gradients, with bound and noise.

        Args:
            sizes: Number of values of each metric that the module offers.
            noise_multiplier: z of the whole release.
            sampling: How lots are drawn.
            summands: What the gradients are summed over. A metric is a sum over units of the sampling in any case:
                one of them moves it by B if it is added or removed.

        Raises:
            ConfigurationError: The module does not offer a metric.
        """
        unknown = [name for name in self.bounds if name not in sizes]
        if unknown:
            raise ConfigurationError(
                f"the module offers no metric {', '.join(unknown)}; it offers {', '.join(sizes) or 'none'} "
                "(`record_metrics`: name → number of values)."
            )
        z = noise_multiplier * math.sqrt(len(self.bounds) / self.share)
        own = sampling.record_changes / summands.changes(sampling)
        size = sampling.expected_batch_size
        return tuple(
            Statistic(METRIC + name, sizes[name], bound, z * own * bound, size, of_units=True)
            for name, bound in self.bounds.items()
        )

    def measure(
        self,
        values: Mapping[str, Value],
        sizes: Mapping[str, int],
        records: int,
        merge: tuple[Tensor, int, Any] | None = None,
    ) -> Tensor:
        """Sum of the bounded values over the examples of a lot.

        Args:
            values: Name → one row for each example, shape (R,) or (R, size), or a function that gives it.
            sizes: As for `statistics`.
            records: R, the number of examples; without any, nothing is expected of `values`.
            merge: (record of each row, number of records, factor of each record), where a record is several rows:
                its value is the mean over them, and is bounded as one.

        Returns:
            All metrics one after the other, shape (sum of sizes,). Values that are not finite count as zero.

        Raises:
            ConfigurationError: Values are missing or have another shape.
        """
        parts = []
        for name, bound in self.bounds.items():
            if not records:
                parts.append(torch.zeros(sizes[name], dtype=torch.float32))
                continue
            value = values.get(name)
            given = value() if callable(value) else value
            if given is None or not given.dim() or len(given) != records or given.numel() != records * sizes[name]:
                raise ConfigurationError(
                    f'training_step must return "record_metrics" with {name!r}, {sizes[name]} number(s) per record.'
                )
            rows = given.detach().float().reshape(-1, sizes[name])
            if merge is not None:
                total = rows.new_zeros(merge[1], sizes[name]).index_add_(0, merge[0].to(rows.device), rows)
                rows = total * merge[2].to(rows)[:, None]
            rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, torch.zeros_like(rows))
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            weights = (bound / norms).clamp(max=1.0)
            parts.append(torch.where(norms.isfinite(), rows * weights, torch.zeros_like(rows)).sum(0))
        return torch.cat(parts)

    def of_rows(self, values: Mapping[str, Value], rows: int) -> Tensor:
        """Values of each row over their bounds, shape (R, number of values), before they are bounded.

        Those that are not as `measure` wants them are left out.
        """
        columns = [torch.zeros(rows, 0)]
        for name, bound in self.bounds.items():
            value = values.get(name)
            value = value() if callable(value) else value
            if isinstance(value, Tensor) and value.dim() and len(value) == rows:
                columns.append(value.detach().double().reshape(rows, -1).nan_to_num(0.0, 0.0, 0.0) / bound)
        return torch.cat([column.to(columns[-1].device) for column in columns], 1)

    def named(self, released: list[float], sizes: Mapping[str, int]) -> dict[str, float]:
        """Released means by name: `private/<metric>`, with a number behind it where a metric has several values."""
        names = [
            f"private/{name}" + (f"/{i}" if sizes[name] > 1 else "") for name in self.bounds for i in range(sizes[name])
        ]
        return dict(zip(names, released, strict=True))


def check_share(share: float) -> None:
    """Raise ConfigurationError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ConfigurationError(f"metrics_share must lie strictly between 0 and 1, not {share}.")
