"""The path of one lot: per-record gradients → discretize → clip → sum → noise → error correction → new bounds.

Without Lightning and without a model: what comes in are the per-record gradients of a lot (or of a piece of it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpbench.privacy.adaptive import Adaptation, with_bounds
from dpbench.privacy.clipping import VectorGroup, WeightFunction, clip_and_sum, clip_weights
from dpbench.privacy.denoising import ErrorCorrection
from dpbench.privacy.discretization import discretized
from dpbench.privacy.gradients import ParameterGradients, ScaledGradients
from dpbench.privacy.metrics import PrivateMetrics, Value
from dpbench.privacy.plan import NoiseAllocation, ReleasePlan, Statistic
from dpbench.privacy.sampling import Sampling

Merge = tuple[Tensor, int, float | Tensor]
"""(record of each row, number of records, factor): see `ParameterGradients.merge`. Microbatches have one factor;
records that are several rows of a batch have one each, shape (records,)."""

Bounds = tuple[float, ...]


@dataclass(frozen=True)
class Pieces:
    """What a strategy is made of; each can be exchanged alone.

    Attributes:
        weights_of: How a record's norm becomes the factor that clips it.
        allocation: How noise is shared among groups.
        adaptation: How bounds follow the gradients, or None for fixed ones.
        discretization_threshold: τ, or None for gradients as they are.
        denoiser: Post-processing of the noisy sum, or None.
        metrics: Released beside the gradients, or None.
        microbatch_size: μ.
    """

    weights_of: WeightFunction = clip_weights
    allocation: NoiseAllocation = "equal"
    adaptation: Adaptation | None = None
    discretization_threshold: float | None = None
    denoiser: ErrorCorrection | None = None
    metrics: PrivateMetrics | None = None
    microbatch_size: int = 1


class Mechanism:
    """Turns lots into releases, one after the other.

    Guarantee: each release is the Gaussian mechanism that `plan` describes. The bounds of the next plan depend on
    earlier releases only.

    Args:
        pieces: The strategy.
        sampling: How lots are drawn.
        noise_multiplier: z of each whole release.
        parameters: Trainable parameters.
        groups: Partition of the parameters with the first bounds.
        metric_sizes: Number of values of each metric that the module offers.
        memory: The `state_dict` of a run that is resumed.

    Attributes:
        plan: Of the next release.
        first_plan: Of the first release; names the run.
        digest: A number for `first_plan`, part of the key of the noise: the same unit noise scaled in two ways would
            reveal the sum. (Not of the present plan: its bounds differ in the last bit between one process and two,
            and the ledger refuses a replay whose bounds differ.)
        total: Flat sums of all gradients, then the statistics; one all-reduce and one call of the noise for all.
        gradients: A view of `total` for each parameter, in its shape and memory layout.
        metrics: The last released values of the private metrics.
    """

    def __init__(
        self,
        pieces: Pieces,
        sampling: Sampling,
        noise_multiplier: float,
        parameters: Sequence[torch.nn.Parameter],
        groups: tuple[VectorGroup, ...],
        metric_sizes: Mapping[str, int] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self.pieces = pieces
        self.metrics: dict[str, float] = {}
        self._metrics = [dict(values) for values in (memory or {}).get("metrics", ())]
        self._sampling, self._z = sampling, noise_multiplier
        self._sizes = tuple(parameter.numel() for parameter in parameters)
        self._metric_sizes = dict(metric_sizes or {})
        bounds: tuple[Bounds, Bounds] | None = (memory or {}).get("bounds") if pieces.adaptation is not None else None
        first, present = bounds if bounds and len(bounds[0]) == len(groups) else (None, None)
        self.first_plan = self._plan_for(groups if first is None else with_bounds(groups, first))
        self.plan = self.first_plan if present is None else self._plan_for(with_bounds(groups, present))
        self.digest = plan_digest(self.first_plan)
        if pieces.denoiser is not None:
            pieces.denoiser.check(min(self.plan.parameter_bounds), self.plan.expected_records)
        statistics = sum(statistic.size for statistic in self.plan.statistics)
        self.total, self.gradients = _flat_buffer(parameters, statistics)
        self._statistics = self.total[len(self.total) - statistics :]

    def _plan_for(self, groups: tuple[VectorGroup, ...]) -> ReleasePlan:
        pieces, statistics = self.pieces, list[Statistic]()
        if pieces.adaptation is not None:
            expected = self._sampling.expected_batch_size / pieces.microbatch_size
            statistics += pieces.adaptation.statistics(groups, expected, self._z)
        allocation, size = pieces.allocation, pieces.microbatch_size
        if pieces.metrics is not None:
            statistics += pieces.metrics.statistics(self._metric_sizes, self._z, self._sampling, size)
        return ReleasePlan(self._sampling, groups, self._z, self._sizes, tuple(statistics), allocation, size)

    @property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """(first, present) bounds: what a resumed run has to know."""
        first, present = self.first_plan.groups, self.plan.groups
        return tuple(g.max_grad_norm for g in first), tuple(g.max_grad_norm for g in present)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: bounds that have adapted, and metrics that nobody has taken yet."""
        return {"bounds": self.bounds if self.pieces.adaptation is not None else None, "metrics": list(self._metrics)}

    def clear(self) -> None:
        """Begin a lot."""
        self.total.zero_()

    def absorb(
        self,
        gradients: Sequence[ParameterGradients],
        records: int,
        merge: Merge | None = None,
        values: Mapping[str, Value] | None = None,
    ) -> tuple[Sequence[ParameterGradients], Tensor]:
        """Add a piece of a lot to the running sums.

        Args:
            gradients: Per-record gradients of each parameter.
            records: Rows of the piece.
            merge: How rows become records.
            values: Private metrics of each row.

        Returns:
            The records' gradients before discretization, and their squared norms by group as they were clipped, shape
            (groups, R'): private, for diagnostics.
        """
        pieces, rows = self.pieces, records
        exact, gradients = before_clipping(gradients, records, merge, pieces.discretization_threshold, self._sizes)
        _, norms = clip_and_sum(gradients, self.plan.groups, pieces.weights_of, self.gradients)
        parts = [] if pieces.adaptation is None else [pieces.adaptation.measure(norms, self.plan.groups)]
        if pieces.metrics is not None:
            of_rows = merge if merge is not None and isinstance(merge[2], Tensor) else None  # microbatches: of examples
            parts.append(
                pieces.metrics.measure(values or {}, self._metric_sizes, rows, pieces.microbatch_size, of_rows)
            )
        if parts:
            self._statistics.add_(torch.cat([part.to(self.total) for part in parts]))
        return exact, norms

    def add_noise(self, generator: torch.Generator) -> None:
        """Make the sums private, once for all processes."""
        self.plan.privatize(self.total, generator)

    def finish(self) -> list[Tensor]:
        """Post-processing of the noised sums: the update, the next bounds, the private metrics.

        Returns:
            The private gradient of each parameter, in its shape.
        """
        plan, denoiser = self.plan, self.pieces.denoiser
        if denoiser is None:
            plan.average(self.total)
        else:
            for view, std, bound in zip(self.gradients, plan.parameter_stds, plan.parameter_bounds, strict=True):
                view.copy_(denoiser.correct(view, std, plan.expected_records, bound))
            plan.average(self._statistics)
        if plan.statistics:
            self._read(self._statistics.tolist())
        return self.gradients

    def _read(self, released: list[float]) -> None:
        adaptation, groups = self.pieces.adaptation, self.plan.groups
        if adaptation is not None:
            own, released = released[: len(groups)], released[len(groups) :]
            self.plan = self._plan_for(with_bounds(groups, adaptation.next_bounds(groups, own)))
        if self.pieces.metrics is not None:
            self.metrics = self.pieces.metrics.named(released, self._metric_sizes)
            self._metrics.append(self.metrics)

    def take_metrics(self) -> dict[str, float]:
        """Means of the private metrics over the releases since the last call: less noise than each alone."""
        taken, self._metrics = self._metrics, []
        return {name: sum(values[name] for values in taken) / len(taken) for name in (taken[0] if taken else ())}


def before_clipping(
    gradients: Sequence[ParameterGradients],
    records: int,
    merge: Merge | None,
    discretization_threshold: float | None,
    sizes: Sequence[int],
) -> tuple[Sequence[ParameterGradients], Sequence[ParameterGradients]]:
    """Gradients of the records (examples or microbatches), and the same as clipping sees them (discretized or not)."""
    if merge is not None:
        record_of, records, factor = merge
        if isinstance(factor, Tensor):
            gradients = [ScaledGradients(one.merge(record_of, records, 1.0), factor) for one in gradients]
        else:
            gradients = [one.merge(record_of, records, factor) for one in gradients]
    if discretization_threshold is None:
        return gradients, gradients
    return gradients, discretized(gradients, discretization_threshold, records, sizes)


def plan_digest(plan: ReleasePlan) -> int:
    """A number that names what is released."""
    return int(hashlib.sha256(repr(plan).encode()).hexdigest()[:32], 16)


def _flat_buffer(parameters: Sequence[torch.nn.Parameter], tail: int) -> tuple[Tensor, list[Tensor]]:
    """One flat sum (float32 at least) and a view of it for each parameter, in the parameter's memory layout."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    total = torch.zeros(sum(p.numel() for p in parameters) + tail, dtype=dtype, device=parameters[0].device)
    views, start = [], 0
    for p in parameters:
        dense = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) + 1 == p.numel()
        piece = total[start : start + p.numel()]
        views.append(torch.as_strided(total, p.shape, p.stride(), start) if dense else piece.view(p.shape))
        start += p.numel()
    return total, views
