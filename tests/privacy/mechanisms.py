"""Every mechanism on a small world, and the checks that it passes and a broken mutant fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.privacy.events import UNITS, Summands, effective_noise_multiplier
from dpbench.privacy.gradients.discretization import Discretization
from dpbench.privacy.gradients.parameter import InstantiatedGradients, ParameterGradients
from dpbench.privacy.mechanism.adaptive import MeanNormBounds, QuantileBounds
from dpbench.privacy.mechanism.clipping import VectorGroup, normalizing
from dpbench.privacy.mechanism.denoising import ErrorCorrection
from dpbench.privacy.mechanism.groups import (
    by_layer,
    dimension_split,
    flat_groups,
    joint_group,
    per_layer_groups,
)
from dpbench.privacy.mechanism.mechanism import Mechanism, Merge
from dpbench.privacy.mechanism.metrics import PrivateMetrics
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling
from tests.support.checks import accepts_scale

NAMES = ["conv.weight", "conv.bias", "fc.weight"]
SHAPES = [(3, 2), (2,), (4, 3)]
SIZES = [math.prod(shape) for shape in SHAPES]
DIMENSION = sum(SIZES)
EXPECTED = 12
METRIC_SIZES = {"accuracy": 1, "loss": 1, "class_counts": 3}
Z = 0.9

POISSON = PoissonSampling(240, EXPECTED / 240)
FIXED = FixedSizeSampling(240, EXPECTED)


@dataclass(frozen=True)
class Case:
    """A mechanism to be tested."""

    groups: tuple[VectorGroup, ...]
    recipe: Recipe = Recipe()  # noqa: RUF009
    sampling: Sampling = POISSON
    summands: Summands = UNITS

    def build(self, sizes: list[tuple[int, ...]] | None = None, z: float = Z, **options: Any) -> Mechanism:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in (sizes or SHAPES)]
        plan = replace(self.plan(Gaussian(z)), sizes=tuple(parameter.numel() for parameter in parameters))
        return Mechanism(plan, parameters, **options)

    def plan(self, noise: Noise = Gaussian(Z), **options: Any) -> TrainingPlan:  # noqa: B008
        return TrainingPlan(
            recipe=self.recipe,
            sampling=self.sampling,
            noise=noise,
            groups=self.groups,
            sizes=tuple(SIZES),
            metric_sizes=METRIC_SIZES,
            summands=self.summands,
            **options,
        )


FLAT = flat_groups(NAMES, SIZES, 0.7)
LAYERS = per_layer_groups(NAMES, SIZES, 0.7)
METRICS = PrivateMetrics({"accuracy": 1.0, "loss": 2.0, "class_counts": 1.0}, share=0.1)
ALL = {"adaptation": QuantileBounds(), "transform": Discretization(0.5), "metrics": METRICS}
MICROBATCHES = Summands("microbatch", 4)

CASES = {
    "dpsgd": Case(FLAT),
    "per_layer": Case(LAYERS),
    "by_dimension": Case(dimension_split(by_layer(NAMES), SIZES, 0.7), Recipe(allocation="dimension")),
    "unequal": Case(dimension_split(by_layer(NAMES), SIZES, 0.7), Recipe(allocation="proportional")),
    "joint": Case(joint_group(by_layer(NAMES), {"conv": 1.0, "fc": 20.0}, 1.2), Recipe(allocation="proportional")),
    "automatic": Case(FLAT, Recipe(clip_factors=normalizing(0.01))),
    "discretized": Case(FLAT, Recipe(transform=Discretization(0.5))),
    "rescaled": Case(flat_groups(NAMES, SIZES, 6.0), Recipe(transform=Discretization(0.5, "rescaled"))),
    "kept": Case(FLAT, Recipe(transform=Discretization(0.8, "kept"))),
    "quantile": Case(FLAT, Recipe(adaptation=QuantileBounds(count_noise_std=2.0))),
    "quantile_layers": Case(LAYERS, Recipe(adaptation=QuantileBounds(count_noise_std=2.0), allocation="proportional")),
    "mean": Case(LAYERS, Recipe(adaptation=MeanNormBounds(norm_noise_multiplier=2.5), allocation="proportional")),
    "metrics": Case(FLAT, Recipe(metrics=METRICS)),
    "microbatches": Case(FLAT, summands=MICROBATCHES),
    "fixed_size": Case(FLAT, Recipe(adaptation=QuantileBounds(count_noise_std=2.0)), FIXED),
    "fixed_size_microbatches": Case(LAYERS, Recipe(), FIXED, MICROBATCHES),
    "everything": Case(
        LAYERS, Recipe(**{**ALL, "adaptation": QuantileBounds(count_noise_std=2.0)}), summands=MICROBATCHES
    ),
}

# What needs no gradient: the correction is post-processing, and tested for itself.
CORRECTED = Case(FLAT, Recipe(transform=Discretization(0.5), denoiser=ErrorCorrection(0.01)))


def gradients_of(rows: Tensor) -> list[ParameterGradients]:
    """Cut (R, D) rows into parameters of SHAPES."""
    parts = rows.split(SIZES, 1)
    return [InstantiatedGradients(lambda p=p, s=s: p.reshape(-1, *s)) for p, s in zip(parts, SHAPES, strict=True)]


def values_of(rows: Tensor) -> dict[str, Tensor]:
    """Private metrics of each row; as extreme as the rows are."""
    labels = (rows[:, 0].nan_to_num().abs() * 7).long() % 3
    counts = nn.functional.one_hot(labels, 3).float()
    return {"accuracy": (rows[:, 1] > 0).float(), "loss": rows[:, 2].abs() * 3, "class_counts": counts}


def sums_of(mechanism: Mechanism, rows: Tensor, microbatch_of: list[int] | None = None) -> Tensor:
    """The sums before noise, flat."""
    mechanism.clear()
    merge: Merge | None = None
    size = mechanism.plan.summands.per_summand
    if size > 1:
        present, record_of = torch.tensor(microbatch_of).unique(return_inverse=True)
        merge = (record_of, len(present), 1 / size)
    mechanism.accumulate(gradients_of(rows), len(rows), merge, values_of(rows))
    return mechanism.total.clone()


def by_query(mechanism: Mechanism, flat: Tensor) -> list[Tensor]:
    """The coordinates of each query of the ledger, in the units of its sensitivity."""
    pieces, start = [], 0
    for size in [*SIZES, *(statistic.size for statistic in mechanism.plan.statistics)]:
        pieces.append(flat[start : start + size])
        start += size
    assert start == len(flat)
    groups = []
    for group in mechanism.plan.groups:
        scales = group.scales or (1.0,) * len(group.parameters)
        groups.append(torch.cat([pieces[p] / a for p, a in zip(group.parameters, scales, strict=True)]))
    return [*groups, *pieces[len(SIZES) :]]


def neighbors(case: Case, generator: torch.Generator, scale: float) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Two lots that differ in one example: added (Poisson) or replaced (fixed size); and their microbatches."""
    rows = torch.randn(7, DIMENSION, generator=generator) * scale
    kind = int(torch.randint(7, (1,), generator=generator))
    other = torch.randn(1, DIMENSION, generator=generator) * scale
    if kind == 0:
        rows[-1] = 1e25 * rows[-1]
    if kind == 1:
        other = -rows[-1:] * 3
    if kind == 2:
        rows[-1] = math.inf
    if kind == 3:
        rows[-1, 3] = math.nan
    if kind == 4:
        rows[-1], rows[:-1] = -5 * rows[:-1].sum(0), rows[:-1] * 0.1
    if kind == 5:  # neighboring rows cancel: whoever changes the order changes everything
        rows = torch.tensor([(-2.0) ** i for i in range(7)])[:, None] * rows[:1]
    without = torch.cat([rows[:-1], other]) if case.sampling is FIXED else rows[:-1]
    microbatch_of = torch.randint(3, (7,), generator=generator).tolist()
    return rows, without, microbatch_of, microbatch_of[: len(without)]


def audit(case: Case, trials: int = 60) -> list[str]:
    """What is wrong with a mechanism; empty for a correct one."""
    return list(problems_of(case, trials))


def problems_of(case: Case, trials: int = 60) -> Iterator[str]:
    """The same one by one, what is seen soonest first: a mutant has more than one, and needs one."""
    yield from _cost(case)
    yield from _purity(case)
    yield from _sensitivity(case, trials)
    yield from _noise(case)


def _cost(case: Case) -> list[str]:
    mechanism = case.build()
    changes = 2 if case.sampling is FIXED or case.summands.per_summand > 1 else 1
    found = effective_noise_multiplier(mechanism.plan.queries)
    return [] if abs(found * changes / Z - 1) < 1e-9 else [f"the release costs z={found * changes}, not {Z}"]


def _sensitivity(case: Case, trials: int) -> list[str]:
    mechanism, generator = case.build(), torch.Generator().manual_seed(0)
    largest = [0.0] * len(mechanism.plan.queries)
    for trial in range(trials):
        rows, without, own, others = neighbors(case, generator, scale=(0.1, 0.5, 5.0)[trial % 3])
        moved = sums_of(mechanism, rows, own) - sums_of(mechanism, without, others)
        for i, part in enumerate(by_query(mechanism, moved)):
            largest[i] = max(largest[i], float(part.norm()) if part.isfinite().all() else math.inf)
    problems = []
    for query, most in zip(mechanism.plan.queries, largest, strict=True):
        if most > query.sensitivity * (1 + 1e-4):
            problems.append(f"{query.name} moves by {most:.3g}, more than {query.sensitivity:.3g}")
        if most < 0.25 * query.sensitivity:
            problems.append(f"{query.name} declares {query.sensitivity:.3g}, and never moved by more than {most:.3g}")
    return problems


def _noise(case: Case) -> list[str]:
    mechanism, draws = case.build(), []
    for release in range(1200):
        mechanism.clear()
        mechanism.add_noise(lambda step, release=release: (1, release))
        draws.append(mechanism.total.clone())
    problems = []
    by_release = [by_query(mechanism, draw) for draw in draws]
    for i, query in enumerate(mechanism.plan.queries):
        sample = torch.cat([parts[i] for parts in by_release]).double().numpy()
        for factor, fits in ((1.0, True), (2 / 3, False), (1.5, False)):
            if accepts_scale(sample, query.noise_std * factor) != fits:
                problems.append(f"noise of {query.name} {'rejects' if fits else 'accepts'} {factor:.2f} × its scale")
    return problems


def _purity(case: Case) -> list[str]:
    """What is released decides everything that follows; the lot itself nothing."""
    results = []
    for size, scale in ((3, 0.1), (11, 4.0)):
        mechanism = case.build()
        rows = torch.randn(size, DIMENSION, generator=torch.Generator().manual_seed(size)) * scale
        sums_of(mechanism, rows, [0] * size)
        mechanism.total.copy_(torch.linspace(0.1, 3.0, len(mechanism.total)))  # as if noise had made them equal
        update = [part.clone() for part in mechanism.post_process()]
        results.append((mechanism.plan, mechanism.metrics, torch.cat([part.flatten() for part in update])))
    (plan, metrics, update), (other_plan, other_metrics, other_update) = results
    problems = []
    if plan != other_plan or metrics != other_metrics:
        problems.append("the next bounds or metrics depend on more than what was released")
    if not torch.equal(update, other_update):
        problems.append("the update depends on more than what was released")
    return problems
