"""The path of one batch: per-record gradients → discretize → clip → sum → noise → error correction → new bounds.

It knows neither Lightning nor the model: its input is the per-record gradients of a batch, or of a piece of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpbench.privacy.events import Queries
from dpbench.privacy.gradients.parameter import ParameterGradients, ScaledGradients
from dpbench.privacy.mechanism.adaptive import with_bounds
from dpbench.privacy.mechanism.clipping import (
    LARGEST,
    SMALLEST,
    Bounds,
    CappedFactors,
    VectorGroup,
    clip_and_sum,
    group_squared_norms,
)
from dpbench.privacy.mechanism.metrics import Value
from dpbench.privacy.mechanism.noise_process import Keys
from dpbench.privacy.mechanism.recipe import Recipe, Transform
from dpbench.privacy.mechanism.training_plan import TrainingPlan

Merge = tuple[Tensor, int, float | Tensor]
"""(record of each row, number of records, factor): see `ParameterGradients.merge`. Microbatches have one factor;
records that are several rows of a batch have one each, shape (records,)."""

_View = tuple[torch.Size, tuple[int, ...], int]
"""Shape, strides and start: the arguments of `torch.as_strided`."""


class Mechanism:
    """Turns batches into releases, one after the other.

    Guarantee: each release is the Gaussian mechanism that `plan` describes. The bounds of the next plan depend on
    earlier releases only.

    Args:
        plan: Plan of the training.
        parameters: Trainable parameters.
        memory: The `state_dict` of a run that is resumed: its bounds take the place of those of `plan`.
        step: Number of the next release.

    Attributes:
        training_plan: Plan of the training.
        plan: Plan of the next release.
        step: Number of the next release.
        total: Flat sums of all gradients, then the statistics; one all-reduce and one call of the noise for all. New
            memory for each batch, so that stored references to gradients never show the sums of a later batch.
        gradients: A view of `total` for each parameter, in its shape and memory layout.
        metrics: The last released values of the private metrics.
        gradient_stds: Noise on each coordinate of the last released gradient of each parameter, before any error
            correction.
        records_of_lot: (records of this process's part of the batch, those of them with finite gradients): private.

    Raises:
        ConfigurationError: The plan has no solution, the error correction does not fit it, or the clipping rule does
            not clip.
        ValueError: The plan is one of other parameters.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        parameters: Sequence[torch.nn.Parameter],
        memory: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        sizes = tuple(parameter.numel() for parameter in parameters)
        if sizes != plan.sizes:
            raise ValueError(f"the plan is for parameters with {plan.sizes} coordinates, and these have {sizes}")
        remembered = memory or {}
        first_bounds, present_bounds = _remembered_bounds(plan, remembered)
        if first_bounds is not None:
            groups = with_bounds(plan.groups, first_bounds)
            plan = replace(plan, groups=groups)
        self.training_plan = plan
        self.plan = plan.release(step, present_bounds)
        self._check_clipping(parameters[0].device)
        self.step = step
        self.metrics: dict[str, float] = {}
        self.gradient_stds: tuple[float, ...] = (0.0,) * len(sizes)
        self._metrics: list[dict[str, float]] = [dict(values) for values in remembered.get("metrics", ())]
        # Of the next batch where they have adapted, before any schedule; None: the first ones.
        self._bounds = present_bounds
        if self.recipe.denoiser is not None:
            least = min(self.plan.parameter_bounds)
            self.recipe.denoiser.check(least, self.plan.denominator)
        # Statistics lie behind the gradients, so that one all-reduce and one draw of noise are for both.
        self._coordinates = sum(sizes)
        self._size = self._coordinates + sum(statistic.size for statistic in self.plan.statistics)
        self._views = _views_of(parameters)
        # Half precision would lose records in a sum of thousands, and a float64 model asks for float64.
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = torch.float64 if is_double else torch.float32
        self._device = parameters[0].device
        self._noise_state = plan.noise.init(self._size)
        self._all_finite: Tensor | None = None
        self._present: Tensor | None = None
        self.clear()

    def _check_clipping(self, device: torch.device) -> None:
        """Try a clipping rule that is not dpbench's at the bounds of all groups, before it is given records."""
        factors = self.recipe.factors
        if not isinstance(factors, CappedFactors):
            return
        bounds = set(_bounds_of(self.plan.groups))
        if self.recipe.adaptation is not None or self.training_plan.bound_factors:
            bounds |= {SMALLEST, LARGEST}
        factors.check(bounds, device)

    @property
    def recipe(self) -> Recipe:
        """Treatment of the records."""
        return self.training_plan.recipe

    @property
    def metric_sizes(self) -> Mapping[str, int]:
        """Number of values of each metric that the module offers."""
        return self.training_plan.metric_sizes

    @property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """(first, present) bounds, which a resumed run needs."""
        first_plan = self.training_plan.release(0)
        first = _bounds_of(first_plan.groups)
        present = _bounds_of(self.plan.groups)
        return first, present

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint: adapted bounds, and metrics not yet collected."""
        adapts = self.recipe.adaptation is not None
        return {
            "bounds": self.bounds if adapts else None,
            "metrics": list(self._metrics),
        }

    def clear(self, total: Tensor | None = None) -> None:
        """Begin the sums of a batch.

        Args:
            total: Memory for the sums, overwritten; None allocates it.
        """
        self.records_of_lot = (0, 0)
        if total is None:
            total = torch.zeros(self._size, dtype=self._dtype, device=self._device)
        else:
            total.zero_()
        self.total = total
        self.gradients = [torch.as_strided(total, *view) for view in self._views]
        self._statistics = total[self._coordinates :]

    def accumulate(
        self,
        gradients: Sequence[ParameterGradients],
        rows: int,
        merge: Merge | None = None,
        values: Mapping[str, Value] | None = None,
    ) -> tuple[Sequence[ParameterGradients], Tensor]:
        """Add a piece of a batch to the running sums.

        Args:
            gradients: Per-record gradients of each parameter.
            rows: Number of rows of the piece.
            merge: How rows become records.
            values: Private metrics of each row.

        Returns:
            The records' gradients before discretization, and their squared norms by group as they were clipped, shape
            (groups, R'): private, for diagnostics.
        """
        recipe = self.recipe
        per_record, prepared = before_clipping(
            gradients,
            rows,
            merge,
            recipe.transform,
            self.training_plan.sizes,
        )
        _, norms = clip_and_sum(
            prepared,
            self.plan.groups,
            recipe.factors,
            self.gradients,
            self._all_finite,
            self._present,
        )
        records = rows
        merge_of_metrics = None
        if merge is not None:
            _, records, factor = merge
            # Metrics of microbatches are those of their examples, one by one.
            if isinstance(factor, Tensor):
                merge_of_metrics = merge
        records_before, finite_before = self.records_of_lot
        finite = norms.shape[1]
        self.records_of_lot = (records_before + records, finite_before + finite)
        statistics: list[Tensor] = []
        if recipe.bounded_sums is not None:
            if self._present is not None:
                raise ValueError("adaptive bounds count records, and padding would count as some")
            measured = recipe.bounded_sums(norms, self.plan.groups, self.plan.statistics_of_records)
            statistics.append(measured)
        if recipe.metrics is not None:
            measured = recipe.metrics.measure(
                values or {},
                self.metric_sizes,
                rows,
                merge_of_metrics,
                self._present,
            )
            statistics.append(measured)
        if statistics:
            flat = torch.cat([statistic.to(self.total) for statistic in statistics])
            self._statistics.add_(flat)
        return per_record, norms

    @contextmanager
    def sums_apart(
        self,
        total: Tensor | None = None,
        all_finite: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Iterator[None]:
        """Within, sums begin anew elsewhere; after it, those of the batch are as they were.

        Args:
            total: Memory for the sums, overwritten; None allocates it.
            all_finite: See `clip_and_sum`.
            present: Mask of the rows that are records, in the only piece; see `clip_and_sum`.
        """
        total_of_lot = self.total
        gradients_of_lot = self.gradients
        statistics_of_lot = self._statistics
        records_of_lot = self.records_of_lot
        self.clear(total)
        self._all_finite = all_finite
        self._present = present
        try:
            yield
        finally:
            self._all_finite = None
            self._present = None
            self.total = total_of_lot
            self.gradients = gradients_of_lot
            self._statistics = statistics_of_lot
            self.records_of_lot = records_of_lot

    def add_sums(self, total: Tensor, records: tuple[int, int]) -> None:
        """Add sums that were made apart to those of the batch.

        Args:
            total: Flat sums like those of this object.
            records: Like `records_of_lot`.
        """
        self.total.add_(total)
        records_before, finite_before = self.records_of_lot
        records_apart, finite_apart = records
        self.records_of_lot = (records_before + records_apart, finite_before + finite_apart)

    def contribution(
        self,
        gradients: Sequence[ParameterGradients],
        rows: int,
        merge: Merge | None = None,
    ) -> Tensor:
        """Contribution of records to the sums, which are not changed; private metrics count as zero.

        Args:
            gradients: Per-record gradients before discretization.
            rows: Their number.
            merge: How rows become records.

        Returns:
            Flat sums like `total`: private, for diagnostics.
        """
        values = {name: torch.zeros(rows, size) for name, size in self.metric_sizes.items()}
        with self.sums_apart():
            self.accumulate(gradients, rows, merge, values)
            return self.total

    def add_noise(self, keys: Keys) -> None:
        """Make the sums of all processes private, once; the noise is a function of keys, one for each step.

        Args:
            keys: Keys of the random numbers.
        """
        self.training_plan.noise.add_(
            self.total,
            self.plan,
            self.step,
            keys,
            self._noise_state,
        )

    @property
    def queries(self) -> Queries:
        """The release as the ledger records it."""
        return self.plan.queries

    def post_process(self) -> list[Tensor]:
        """Post-processing of the noised sums: the update, the next bounds, the private metrics.

        Returns:
            The private gradient of each parameter, in its shape.
        """
        plan = self.plan
        relative_std = self.training_plan.noise.relative_std(self.step)
        denoiser = self.recipe.denoiser
        if denoiser is None:
            self.total[: self._coordinates].div_(plan.denominator)
        else:
            views = zip(
                self.gradients,
                plan.parameter_stds,
                plan.parameter_bounds,
                strict=True,
            )
            for view, std, bound in views:
                corrected = denoiser.correct(view, relative_std * std, plan.denominator, bound)
                view.copy_(corrected)
        adapts = self.recipe.adaptation is not None
        if plan.statistics or adapts:
            released = plan.divide_statistics_(self._statistics)
            self._adapt(released.tolist())
        if self.recipe.noise:
            self.gradient_stds = tuple(relative_std * std for std in plan.gradient_stds)
        self.step += 1
        # Else the next release has the plan of this one, which need not be computed again at each step.
        if adapts or not self.training_plan.constant:
            self.plan = self.training_plan.release(self.step, self._bounds)
        return self.gradients

    def _adapt(self, released: list[float]) -> None:
        """Derive the next bounds from released statistics, and keep the metrics.

        Args:
            released: Noised statistics over their denominators: first those of the adaptation, then metrics.
        """
        recipe = self.recipe
        groups = self.plan.groups
        if recipe.adaptation is not None:
            # Metrics come behind.
            count = sum(statistic.size for statistic in self.plan.statistics_of_records)
            bounds = recipe.adaptation.next_bounds(groups, released[:count])
            self._bounds = _bounds_of(with_bounds(groups, bounds))
            released = released[count:]
        if recipe.metrics is not None:
            self.metrics = recipe.metrics.named(released, self.metric_sizes)
            self._metrics.append(self.metrics)

    def take_metrics(self) -> dict[str, float]:
        """Means of the private metrics over the releases since the last call: less noise than each alone."""
        releases = self._metrics
        self._metrics = []
        if not releases:
            return {}
        return {name: sum(metrics[name] for metrics in releases) / len(releases) for name in releases[0]}


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
            # A factor for each record comes after the sum over its rows; one for all is part of the sum.
            merged = [parameter.merge(record_of, records, 1.0) for parameter in gradients]
            gradients = [ScaledGradients(parameter, factor) for parameter in merged]
        else:
            gradients = [parameter.merge(record_of, records, factor) for parameter in gradients]
    if transform is None:
        return gradients, gradients
    return gradients, transform(gradients, records, sizes)


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
    squared_norms = group_squared_norms(norms, groups)
    means: list[float] = squared_norms.sqrt().mean(1).tolist()
    return means


def _remembered_bounds(
    plan: TrainingPlan,
    memory: Mapping[str, Any],
) -> tuple[Bounds | None, Bounds | None]:
    """First and present bounds of a run that is resumed; None where it has none, or of other groups."""
    bounds: tuple[Bounds, Bounds] | None = memory.get("bounds")
    adapts = plan.recipe.adaptation is not None
    if not adapts or not bounds:
        return None, None
    first, present = bounds
    if len(first) != len(plan.groups):
        return None, None
    return first, present


def _bounds_of(groups: Sequence[VectorGroup]) -> Bounds:
    return tuple(group.max_grad_norm for group in groups)


def _views_of(parameters: Sequence[torch.nn.Parameter]) -> list[_View]:
    """Places of the sums of parameters in one flat tensor, in which each has the memory layout of its parameter."""
    views = []
    start = 0
    for parameter in parameters:
        strides = parameter.stride()
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, strides, strict=True))
        if last + 1 != parameter.numel():  # its numbers lie with gaps
            strides = torch.empty(parameter.shape, device="meta").stride()
        views.append((parameter.shape, strides, start))
        start += parameter.numel()
    return views
