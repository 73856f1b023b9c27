"""The path of one lot: per-record gradients → discretize → clip → sum → noise → error correction → new bounds.

Without Lightning and without a model: what comes in are the per-record gradients of a lot (or of a piece of it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.canonical import digest_of
from dpbench.privacy.events import UNITS, Event, Summands, SumQuery, equivalent_queries
from dpbench.privacy.gradients.parameter import ParameterGradients, ScaledGradients
from dpbench.privacy.mechanism.adaptive import with_bounds
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum, group_norms
from dpbench.privacy.mechanism.metrics import Value
from dpbench.privacy.mechanism.noise_process import Keys, Noise
from dpbench.privacy.mechanism.plan import ReleasePlan, Statistic
from dpbench.privacy.mechanism.recipe import Recipe, Transform
from dpbench.privacy.mechanism.schedules import CONSTANT, Factors
from dpbench.privacy.sampling import Sampling

Merge = tuple[Tensor, int, float | Tensor]
"""(record of each row, number of records, factor): see `ParameterGradients.merge`. Microbatches have one factor;
records that are several rows of a batch have one each, shape (records,)."""

Bounds = tuple[float, ...]


class Mechanism:
    """Turns lots into releases, one after the other.

    Guarantee: each release is the Gaussian mechanism that `plan` describes. The bounds of the next plan depend on
    earlier releases only.

    Args:
        recipe: What is done with the records.
        sampling: How lots are drawn.
        noise: Of all releases.
        parameters: Trainable parameters.
        groups: Partition of the parameters with the first bounds.
        metric_sizes: Number of values of each metric that the module offers.
        memory: The `state_dict` of a run that is resumed.
        summands: What the sums are over.
        bound_factors: Of the groups' bounds, by step; not beside an adaptation.
        size_factors: Of the expected lot size, by step.
        step: Number of the next release.

    Attributes:
        plan: Of the next release.
        noise: Of all releases.
        step: Number of the next release.
        first_plan: Of the first release; names the run.
        digest: A number for `first_plan`, part of the key of the noise: the same unit noise scaled in two ways would
            reveal the sum. (Not of the present plan: its bounds differ in the last bit between one process and two,
            and the ledger refuses a replay whose bounds differ.)
        total: Flat sums of all gradients, then the statistics; one all-reduce and one call of the noise for all. New
            memory for each lot, so that gradients that somebody has kept never show the sums of a later lot.
        gradients: A view of `total` for each parameter, in its shape and memory layout.
        metrics: The last released values of the private metrics.
        metric_sizes: Number of values of each metric that the module offers.
        records_of_lot: (records of this process's part of the lot, those of them with finite gradients): private.
    """

    def __init__(
        self,
        recipe: Recipe,
        sampling: Sampling,
        noise: Noise,
        parameters: Sequence[torch.nn.Parameter],
        groups: tuple[VectorGroup, ...],
        metric_sizes: Mapping[str, int] | None = None,
        memory: Mapping[str, Any] | None = None,
        summands: Summands = UNITS,
        bound_factors: Factors = CONSTANT,
        size_factors: Factors = CONSTANT,
        step: int = 0,
    ) -> None:
        self.recipe, self.noise, self.step = recipe, noise, step
        self._summands, self._bound_factors, self._size_factors = summands, bound_factors, size_factors
        self.metrics: dict[str, float] = {}
        self._metrics = [dict(values) for values in (memory or {}).get("metrics", ())]
        self._sampling = sampling
        self._samplings: dict[float, Sampling] = {}
        self._sizes = tuple(parameter.numel() for parameter in parameters)
        self.metric_sizes = dict(metric_sizes or {})
        bounds: tuple[Bounds, Bounds] | None = (memory or {}).get("bounds") if recipe.adaptation is not None else None
        first, present = bounds if bounds and len(bounds[0]) == len(groups) else (None, None)
        self._groups = groups if first is None else with_bounds(groups, first)
        self.first_plan = self.plan_of(0)
        self._groups = self._groups if present is None else with_bounds(groups, present)
        self.plan = self.first_plan if step == 0 and present is None else self.plan_of(step)
        self.digest = self._digest()
        if recipe.denoiser is not None:
            recipe.denoiser.check(min(self.plan.parameter_bounds), self.plan.denominator)
        self._layout = _flat_layout(parameters, sum(statistic.size for statistic in self.plan.statistics))
        self._state = noise.init(self._layout.size)
        self.clear()

    def plan_of(self, step: int) -> ReleasePlan:
        """The plan of a release; where bounds adapt, with those of the next one, which cost the same."""
        recipe, summands, statistics = self.recipe, self._summands, list[Statistic]()
        z, groups, sampling = self.noise.multiplier(step), self._groups, self._sampling_of(step)
        if self._bound_factors:
            factor = self._bound_factors.at(step)
            groups = with_bounds(groups, [factor * group.max_grad_norm for group in groups])
        if recipe.adaptation is not None:
            statistics += recipe.adaptation.statistics(groups, summands.expected(sampling), z)
        if recipe.metrics is not None:
            statistics += recipe.metrics.statistics(self.metric_sizes, z, sampling, summands)
        return ReleasePlan(sampling, groups, z, self._sizes, tuple(statistics), recipe.allocation, summands)

    def _sampling_of(self, step: int) -> Sampling:
        factor = self._size_factors.at(step)
        if factor not in self._samplings:
            self._samplings[factor] = self._sampling.resized(factor)
        return self._samplings[factor]

    def event_of(self, step: int) -> Event:
        """What a release on a lot of its own costs."""
        plan = self.plan_of(step)
        return Event(plan.sampling, equivalent_queries(self.noise.cost(plan.queries, step)))

    @property
    def constant(self) -> bool:
        """Whether the plan of each release is the same, but for bounds that adapt."""
        return self.noise.constant and not self._bound_factors and not self._size_factors

    def _digest(self) -> int:
        if self.constant:
            return plan_digest(self.first_plan)
        return int(digest_of([self.first_plan, self.noise, self._bound_factors, self._size_factors])[:32], 16)

    @property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """(first, present) bounds: what a resumed run has to know."""
        first, present = self.first_plan.groups, self.plan.groups
        return tuple(g.max_grad_norm for g in first), tuple(g.max_grad_norm for g in present)

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint: bounds that have adapted, and metrics that nobody has taken yet."""
        return {"bounds": self.bounds if self.recipe.adaptation is not None else None, "metrics": list(self._metrics)}

    def clear(self) -> None:
        """Begin the sums of a lot."""
        self.records_of_lot = (0, 0)
        layout = self._layout
        self.total = torch.zeros(layout.size, dtype=layout.dtype, device=layout.device)
        self.gradients = [torch.as_strided(self.total, *view) for view in layout.views]
        self._statistics = self.total[layout.parameters :]

    def accumulate(
        self,
        gradients: Sequence[ParameterGradients],
        rows: int,
        merge: Merge | None = None,
        values: Mapping[str, Value] | None = None,
    ) -> tuple[Sequence[ParameterGradients], Tensor]:
        """Add a piece of a lot to the running sums.

        Args:
            gradients: Per-record gradients of each parameter.
            rows: Of the piece.
            merge: How rows become records.
            values: Private metrics of each row.

        Returns:
            The records' gradients before discretization, and their squared norms by group as they were clipped, shape
            (groups, R'): private, for diagnostics.
        """
        recipe = self.recipe
        exact, gradients = before_clipping(gradients, rows, merge, recipe.transform, self._sizes)
        _, norms = clip_and_sum(gradients, self.plan.groups, recipe.weights_of, self.gradients)
        records, finite = self.records_of_lot
        self.records_of_lot = records + (rows if merge is None else merge[1]), finite + norms.shape[1]
        parts = [] if recipe.adaptation is None else [recipe.adaptation.measure(norms, self.plan.groups)]
        if recipe.metrics is not None:
            of_rows = merge if merge is not None and isinstance(merge[2], Tensor) else None  # microbatches: of examples
            parts.append(recipe.metrics.measure(values or {}, self.metric_sizes, rows, of_rows))
        if parts:
            self._statistics.add_(torch.cat([part.to(self.total) for part in parts]))
        return exact, norms

    def contribution(self, gradients: Sequence[ParameterGradients], records: int) -> Tensor:
        """What records would add to the sums, which stay as they are; private metrics count as zero.

        Args:
            gradients: Of the records before discretization.
            records: Their number.

        Returns:
            Flat sums like `total`: private, for diagnostics.
        """
        kept = self.total, self.gradients, self._statistics
        values = {name: torch.zeros(records, size) for name, size in self.metric_sizes.items()}
        try:
            self.clear()
            self.accumulate(gradients, records, None, values)
            return self.total
        finally:
            self.total, self.gradients, self._statistics = kept

    def add_noise(self, keys: Keys) -> None:
        """Make the sums of all processes private, once; the noise is a function of keys, one for each step."""
        self.noise.add_(self.total, self.plan, self.step, keys, self._state)

    @property
    def queries(self) -> tuple[SumQuery, ...]:
        """The release as the ledger records it."""
        return self.noise.cost(self.plan.queries, self.step)

    def post_process(self) -> list[Tensor]:
        """Post-processing of the noised sums: the update, the next bounds, the private metrics.

        Returns:
            The private gradient of each parameter, in its shape.
        """
        plan, denoiser = self.plan, self.recipe.denoiser
        if denoiser is None:
            self.total[: self._layout.parameters].div_(plan.denominator)
        else:
            for view, std, bound in zip(self.gradients, plan.parameter_stds, plan.parameter_bounds, strict=True):
                view.copy_(denoiser.correct(view, std, plan.denominator, bound))
        if plan.statistics or self.recipe.adaptation is not None:
            self._adapt(plan.divide_statistics_(self._statistics).tolist())
        self.step += 1
        if not self.constant or self.recipe.adaptation is not None:
            self.plan = self.plan_of(self.step)
        return self.gradients

    def _adapt(self, released: list[float]) -> None:
        adaptation, groups = self.recipe.adaptation, self.plan.groups
        if adaptation is not None:
            count = sum(statistic.size for statistic in self.plan.statistics if not statistic.of_units)
            own, released = released[:count], released[count:]
            self._groups = with_bounds(groups, adaptation.next_bounds(groups, own))
        if self.recipe.metrics is not None:
            self.metrics = self.recipe.metrics.named(released, self.metric_sizes)
            self._metrics.append(self.metrics)

    def take_metrics(self) -> dict[str, float]:
        """Means of the private metrics over the releases since the last call: less noise than each alone."""
        taken, self._metrics = self._metrics, []
        return {name: sum(values[name] for values in taken) / len(taken) for name in (taken[0] if taken else ())}


def before_clipping(
    gradients: Sequence[ParameterGradients],
    records: int,
    merge: Merge | None,
    transform: Transform | None,
    sizes: Sequence[int],
) -> tuple[Sequence[ParameterGradients], Sequence[ParameterGradients]]:
    """Gradients of the records (examples or microbatches), and the same as clipping sees them."""
    if merge is not None:
        record_of, records, factor = merge
        if isinstance(factor, Tensor):
            gradients = [ScaledGradients(one.merge(record_of, records, 1.0), factor) for one in gradients]
        else:
            gradients = [one.merge(record_of, records, factor) for one in gradients]
    return gradients, gradients if transform is None else transform(gradients, records, sizes)


def mean_norms(
    gradients: Sequence[ParameterGradients],
    rows: int,
    merge: Merge | None,
    transform: Transform | None,
    sizes: Sequence[int],
    groups: Sequence[VectorGroup],
) -> list[float]:
    """Mean over records of the norms that clipping would see, one for each group."""
    _, prepared = before_clipping(gradients, rows, merge, transform, sizes)
    norms = torch.stack([parameter.squared_norms() for parameter in prepared])
    means: list[float] = group_norms(norms, groups).sqrt().mean(1).tolist()
    return means


def plan_digest(plan: ReleasePlan) -> int:
    """A number that names what is released."""
    return int(digest_of(plan)[:32], 16)


class _Layout(NamedTuple):
    """Where the sums of each parameter lie in one flat tensor: (shape, strides, start), as the parameter has them."""

    views: list[tuple[torch.Size, tuple[int, ...], int]]
    parameters: int
    size: int
    dtype: torch.dtype
    device: torch.device


def _flat_layout(parameters: Sequence[torch.nn.Parameter], tail: int) -> _Layout:
    """Layout of one flat sum (float32 at least) of all parameters, and `tail` numbers more."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    views, start = [], 0
    for p in parameters:
        dense = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) + 1 == p.numel()
        views.append((p.shape, p.stride() if dense else torch.empty(p.shape, device="meta").stride(), start))
        start += p.numel()
    return _Layout(views, start, start + tail, dtype, parameters[0].device)
