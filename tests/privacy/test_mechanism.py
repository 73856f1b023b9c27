"""Each mechanism: reference in float64, neighbors, noise, cost; and its broken mutants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.events import Event
from dpbench.privacy.gradients import discretization
from dpbench.privacy.gradients.discretization import Discretization
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism import mechanism as mechanism_module
from dpbench.privacy.mechanism.adaptive import MeanNormBounds, QuantileBounds
from dpbench.privacy.mechanism.clipping import (
    VectorGroup,
    _made_up_squared_norms,
)
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.plan import ReleasePlan, Statistic
from dpbench.privacy.mechanism.recipe import Recipe
from tests.privacy import mechanisms
from tests.privacy.mechanisms import (
    CASES,
    CORRECTED,
    FIXED,
    FLAT,
    LAYERS,
    SIZES,
    Case,
    audit,
    gradients_of,
    problems_of,
    sums_of,
    values_of,
)
from tests.support.reference import mean_square, reference_gradients, relative_error


@pytest.mark.parametrize("name", CASES)
def test_every_mechanism_passes_the_audit(name: str) -> None:
    assert audit(CASES[name]) == []


# ------------------------------------------------------------------------------------------ against a slow truth


def slow_sums(
    case: Case, rows: list[Tensor], microbatch_of: list[int], groups: tuple[VectorGroup, ...]
) -> list[Tensor]:
    """Record by record, in float64: the clipped sum of each parameter."""
    recipe, size = case.recipe, case.summands.per_summand
    names = microbatch_of if size > 1 else range(len(rows[0]))
    records = [[part[torch.tensor(names) == name].sum(0) / size for part in rows] for name in set(names)]
    if isinstance(recipe.transform, Discretization):
        records = [slowly_discretized(record, recipe.transform) for record in records]
    total = [torch.zeros_like(part[0]) for part in rows]
    for record in records:
        for group in groups:
            scales = group.scales or (1.0,) * len(group.parameters)
            norm = math.hypot(*(float(record[p].norm()) / a for p, a in zip(group.parameters, scales, strict=True)))
            stability = getattr(recipe.clip_factors, "keywords", {}).get("stability")
            weight = min(1.0, group.max_grad_norm / (norm or 1.0))
            if stability is not None:
                weight = group.max_grad_norm / (norm + stability) if norm else 0.0
            for p in group.parameters:
                total[p] += weight * record[p]
    return total


def slowly_discretized(record: list[Tensor], rule: Discretization) -> list[Tensor]:
    """What becomes of one record's gradients by each parameter, from the definition."""
    tau = rule.threshold
    if rule.values == "kept":
        return [torch.where(p.abs() > tau * p.square().mean().sqrt(), p, 0) for p in record]
    signs = [p.sign() * (p.abs() > tau) for p in record]
    if rule.values == "signs":
        return signs
    left = sum(int(p.count_nonzero()) for p in signs)
    norm = math.hypot(*(float(p.norm()) for p in record))
    return [p * (norm / math.sqrt(left) if left else 0.0) for p in signs]


@pytest.mark.parametrize("name", CASES)
def test_sums_of_a_network_against_the_reference(name: str) -> None:
    case = CASES[name]
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4, bias=False)).double()  # shapes that CASES group
    x = 3 * torch.randn(9, 2, dtype=torch.float64)
    engine = PerRecordEngine(model)
    mechanism = Mechanism(replace(case.plan(), sizes=(6, 3, 12)), engine.parameters)
    microbatch_of = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    size = case.summands.per_summand
    merge = (torch.tensor(microbatch_of), 3, 1 / size) if size > 1 else None
    mechanism.clear()
    mechanism.accumulate(engine.backward(mean_square(model, x), 9), 9, merge, values_of(torch.randn(9, 20)))
    reference = list(reference_gradients(model, x).values())
    wanted = slow_sums(case, reference, microbatch_of, mechanism.plan.groups)
    for actual, expected in zip(mechanism.gradients, wanted, strict=True):
        assert relative_error(actual, expected) < 1e-9


def test_statistics_against_the_definition() -> None:
    rows = torch.randn(9, sum(SIZES))
    counts = sums_of(CASES["quantile_layers"].build(), rows)[-2:]
    norms = torch.stack([rows[:, :8].norm(dim=1), rows[:, 8:].norm(dim=1)])
    bound = CASES["quantile_layers"].groups[0].max_grad_norm
    torch.testing.assert_close(counts, (norms <= bound).float().sum(1) - 4.5)
    means = sums_of(CASES["mean"].build(), rows)[-2:]
    torch.testing.assert_close(means, norms.clamp(max=2 * bound).sum(1))
    metrics = sums_of(CASES["metrics"].build(), rows)[-5:]
    values = values_of(rows)
    wanted = [values["accuracy"].sum(), values["loss"].clamp(max=2).sum(), *values["class_counts"].sum(0)]
    torch.testing.assert_close(metrics, torch.stack(wanted))


@pytest.mark.parametrize("name", ["unequal", "joint", "mean", "fixed_size_microbatches", "everything"])
def test_an_independent_accountant_agrees(name: str) -> None:
    """The queries of one release, composed as separate Gaussian mechanisms on one lot, by dp_accounting alone."""
    case = CASES[name]
    plan = case.build().plan
    composed = dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(query.noise_std / query.sensitivity) for query in plan.queries]
    )
    fixed = case.sampling is FIXED
    relation = dp_accounting.NeighboringRelation
    accountant = RdpAccountant(neighboring_relation=relation.REPLACE_ONE if fixed else relation.ADD_OR_REMOVE_ONE)
    # Several Gaussians on one lot are one Gaussian; its multiplier from their Rényi divergences, which add up.
    alone = RdpAccountant(orders=[2.0], neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    alone.compose(composed)
    z = math.sqrt(1 / float(alone._rdp[0]))  # RDP(2) = 2 / (2 z²)
    gaussian = dp_accounting.GaussianDpEvent(z)
    event = (
        dp_accounting.SampledWithoutReplacementDpEvent(240, 12, gaussian)
        if fixed
        else dp_accounting.PoissonSampledDpEvent(12 / 240, gaussian)
    )
    accountant.compose(event, 500)
    ours = epsilon({Event(case.sampling, plan.queries): 500}, 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


# ------------------------------------------------------------------------------------------ mutants


def wrong_side_of_theorem_1(patch: pytest.MonkeyPatch) -> None:
    def multiplier(self: ReleasePlan) -> float:
        return 1 / math.sqrt(self.noise_multiplier**-2 + sum((s.bound / s.noise_std) ** 2 for s in self.statistics))

    patch.setattr(ReleasePlan, "gradient_multiplier", property(multiplier))


def bound_from_the_norms_themselves(patch: pytest.MonkeyPatch) -> None:
    def measure(self: Any, squared: Tensor, groups: Any) -> Tensor:
        object.__setattr__(self, "seen", squared.sqrt().mean(1).tolist())
        return squared.sqrt().clamp(max=self.beta * groups[0].max_grad_norm).sum(1)

    patch.setattr(MeanNormBounds, "measure", measure)
    patch.setattr(
        MeanNormBounds, "next_bounds", lambda self, groups, released: tuple(self.alpha * x for x in self.seen)
    )


def values_above_those_of_the_lot(patch: pytest.MonkeyPatch) -> None:
    def keep_large(gradients: Tensor, threshold: float) -> Tensor:
        return torch.where(gradients.abs() > threshold * gradients.square().mean().sqrt(), gradients, 0)

    patch.setattr(discretization, "keep_large", keep_large)


def example_sensitivity_for_microbatches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dpbench.privacy.events.record_changes", lambda sampling, size: sampling.record_changes)


def dependent_microbatches(patch: pytest.MonkeyPatch) -> None:
    """By position in the lot: an example that leaves moves all that follow."""
    before_clipping = mechanism_module.before_clipping

    def by_position(gradients: Any, records: int, merge: Any, *others: Any) -> Any:
        if merge is not None:
            merge = (torch.arange(records).flip(0) // 2, -(-records // 2), merge[2])
        return before_clipping(gradients, records, merge, *others)

    patch.setattr(mechanism_module, "before_clipping", by_position)


def metrics_unbounded(patch: pytest.MonkeyPatch) -> None:
    def measure(self: Any, values: Any, sizes: Any, records: int, *_: Any) -> Tensor:
        return torch.cat([values[name].reshape(-1, sizes[name]).sum(0) for name in self.bounds])

    patch.setattr("dpbench.privacy.mechanism.metrics.PrivateMetrics.measure", measure)


def noise_of_one_group_on_all(patch: pytest.MonkeyPatch) -> None:
    def stds(self: ReleasePlan) -> tuple[float, ...]:
        return (min(self.noise_stds),) * len(self.sizes)

    patch.setattr(ReleasePlan, "parameter_stds", property(stds))


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (wrong_side_of_theorem_1, "quantile"),
    (bound_from_the_norms_themselves, "mean"),
    (values_above_those_of_the_lot, "kept"),
    (example_sensitivity_for_microbatches, "microbatches"),
    (dependent_microbatches, "microbatches"),
    (metrics_unbounded, "metrics"),
    (noise_of_one_group_on_all, "joint"),
]


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_mutants_are_caught(mutant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: Any) -> None:
    mutant(monkeypatch)
    assert next(problems_of(CASES[name]), None) is not None


def test_the_correction_changes_no_query() -> None:
    plain = Case(CORRECTED.groups, CASES["discretized"].recipe).build()
    corrected = CORRECTED.build()
    assert corrected.plan == plain.plan
    corrected.clear()
    corrected.accumulate(gradients_of(torch.randn(5, sum(SIZES))), 5)
    corrected.add_noise(lambda step: (0,))
    update = torch.cat([part.flatten() for part in corrected.post_process()])
    assert set(update.abs().double().mul(1e6).round().tolist()) <= {0.0, 1e4}


# ------------------------------------------------------------------------------------------ rules of one's own


def smooth(squared_norms: Tensor, bound: float) -> Tensor:
    return bound / (squared_norms.sqrt() + 0.01)


def test_neighbors_by_a_rule_that_is_sound_where_it_is_tried() -> None:
    def rule(squared_norms: Tensor, bound: float) -> Tensor:
        is_tried = torch.isin(squared_norms, _made_up_squared_norms(bound))
        return torch.where(is_tried, smooth(squared_norms, bound), 1e6)

    assert list(mechanisms._sensitivity(Case(LAYERS, Recipe(clip_factors=rule)), 60)) == []


def test_a_rule_is_refused_before_it_sees_records() -> None:
    def squares(squared_norms: Tensor, bound: float) -> Tensor:
        return bound / (squared_norms + 0.01)

    def at_one(squared_norms: Tensor, bound: float) -> Tensor:
        return smooth(squared_norms, 1.0)

    with pytest.raises(ConfigurationError, match=r"<locals>\.squares returns"):
        Case(FLAT, Recipe(clip_factors=squares)).build()
    wide, narrow = (tuple(replace(group, max_grad_norm=bound) for group in LAYERS) for bound in (2.0, 0.5))
    one = Recipe(clip_factors=at_one)
    Case(wide, one).build()
    for case in (
        Case((wide[0], narrow[1]), one),
        Case(wide, replace(one, adaptation=QuantileBounds(count_noise_std=2.0))),
    ):
        with pytest.raises(ConfigurationError, match=r"at_one returns \d"):
            case.build()


@dataclass(frozen=True)
class Norms(QuantileBounds):
    """Measures something else than what the statistics that it inherits are about."""

    def measure(self, squared_norms: Tensor, groups: Any) -> Tensor:
        return squared_norms.sqrt().sum(1)


@dataclass(frozen=True)
class Share(MeanNormBounds):
    """States a statistic that is smaller than what it measures."""

    def statistics(self, groups: Any, expected_records: float, noise_multiplier: float) -> tuple[Statistic, ...]:
        wide = super().statistics(groups, expected_records, noise_multiplier)
        return tuple(replace(statistic, bound=statistic.bound / 8) for statistic in wide)


@pytest.mark.parametrize(
    "adaptation",
    [Norms(count_noise_std=2.0), Share(norm_noise_multiplier=2.5)],
    ids=lambda x: type(x).__name__,
)
def test_a_record_moves_statistics_of_ones_own_by_their_bound(adaptation: Any) -> None:
    case = Case(LAYERS, Recipe(adaptation=adaptation))
    assert list(mechanisms._sensitivity(case, 60)) == []
    assert len(sums_of(case.build(), torch.zeros(0, sum(SIZES)))) == sum(SIZES) + 2


@dataclass(frozen=True)
class Several(QuantileBounds):
    """A statistic of two numbers in the place of one for each group."""

    def statistics(self, groups: Any, expected_records: float, noise_multiplier: float) -> tuple[Statistic, ...]:
        return (Statistic("both", 2, 0.5, 2.0, expected_records),)


def test_statistics_are_numbers_of_each_group() -> None:
    mechanism = Case(LAYERS, Recipe(adaptation=Several())).build()
    with pytest.raises(ConfigurationError, match=r"one statistic of size 1 for each of 2 groups, not 1 of sizes \[2\]"):
        sums_of(mechanism, torch.randn(3, sum(SIZES)))
