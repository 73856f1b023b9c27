"""Adaptive bounds: worked examples of the papers, tracking, bounds that stay positive, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.mechanism.adaptive import Adaptation, MeanNormBounds, QuantileBounds, with_bounds
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.groups import flat_groups
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.noise_process import Gaussian
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import FixedSizeSampling


def mechanism(adaptation: Adaptation, expected: int = 100, z: float = 1.0, bound: float = 0.1) -> Mechanism:
    """One parameter of two coordinates."""
    sampling = FixedSizeSampling(10**6, expected)
    groups = flat_groups(["w"], [2], bound)
    plan = TrainingPlan(Recipe(adaptation=adaptation), sampling, Gaussian(z), groups, (2,))
    return Mechanism(plan, [nn.Parameter(torch.zeros(2))])


def release(machine: Mechanism, norms: torch.Tensor, key: int) -> float:
    """One round on records of known norms; the bound of the next."""
    machine.clear()
    machine.accumulate([InstantiatedGradients(lambda: torch.stack([norms, torch.zeros_like(norms)], 1))], len(norms))
    machine.add_noise(lambda step: (key,))
    machine.post_process()
    return machine.plan.groups[0].max_grad_norm


def test_theorem_1_without_a_solution() -> None:
    with pytest.raises(ConfigurationError, match=r"count/all\) alone cost more than noise_multiplier=1 allows"):
        mechanism(QuantileBounds(count_noise_std=0.5))
    mechanism(QuantileBounds(count_noise_std=0.501))


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_tracking_of_log_normal_norms(quantile: float) -> None:
    """adaptive_quantile_clipping_2021, Fig. 2: rounds from C0 = 0.1 with the paper's defaults."""
    machine, rng = mechanism(QuantileBounds(quantile)), np.random.default_rng(3)
    bounds = [release(machine, torch.from_numpy(rng.lognormal(size=100)).float(), number) for number in range(250)]
    late = np.array(bounds[200:])
    # Noise of the counts (0.05) and of the lot (up to 0.05) moves the bound by a few per cent of a standard deviation.
    assert abs(stats.norm.cdf(np.log(late)).mean() - quantile) < 0.03
    assert abs(late.mean() / math.exp(stats.norm.ppf(quantile)) - 1) < 0.2


def test_updates_by_hand() -> None:
    groups = (VectorGroup("a", (0,), 2.0), VectorGroup("b", (1,), 4.0))
    geometric = QuantileBounds(0.6, 0.3).next_bounds(groups, [0.3, -0.2])
    assert geometric == pytest.approx((2 * math.exp(-0.3 * 0.2), 4 * math.exp(-0.3 * -0.3)))
    linear = QuantileBounds(0.6, 0.3, "linear").next_bounds(groups, [0.3, -0.2])
    assert linear == pytest.approx((2 - 0.3 * 0.2, 4 + 0.3 * 0.3))
    mean = MeanNormBounds(1.5, 3.0).next_bounds(groups, [0.9, -7.0])
    assert mean == pytest.approx((1.35, 4 / 3))


@pytest.mark.parametrize("rule", [QuantileBounds(), QuantileBounds(update="linear"), MeanNormBounds()])
def test_bounds_stay_positive_and_finite(rule: Adaptation) -> None:
    for noise in (-1e9, 1e9):
        groups = (VectorGroup("a", (0,), 1e-3),)
        for _ in range(20):
            groups = with_bounds(groups, rule.next_bounds(groups, [noise]))  # VectorGroup refuses other bounds


def test_mean_norm_noise_belongs_to_the_sum() -> None:
    plan = mechanism(MeanNormBounds(norm_noise_multiplier=2.5), bound=0.7).plan
    (statistic,) = plan.statistics
    assert (statistic.bound, statistic.noise_std) == (pytest.approx(1.4), pytest.approx(2.5 * 1.4))
    assert plan.gradient_multiplier == pytest.approx((1 - 2.5**-2) ** -0.5)
    assert plan.segments[-1] == (1, pytest.approx(3.5))
    automatic = mechanism(MeanNormBounds(), z=0.725).plan
    assert automatic.statistics[0].noise_std == pytest.approx(2.5 * 2 * 0.1)  # the paper's pair
    assert automatic.gradient_multiplier == pytest.approx(0.725 * 1.045, rel=1e-3)


def test_mean_norms_are_followed_from_far_away() -> None:
    rng = np.random.default_rng(0)
    for bound in (1e-3, 1e3):
        machine = mechanism(MeanNormBounds(alpha=1.1), bound=bound)
        bounds = [release(machine, torch.from_numpy(rng.uniform(2, 4, 100)).float(), i) for i in range(60)]
        assert np.mean(bounds[-20:]) == pytest.approx(1.1 * 3, rel=0.05)


def test_refusals() -> None:
    for rule, options, words in (
        (QuantileBounds, {"quantile": 1.0}, "quantile must lie strictly between 0 and 1"),
        (QuantileBounds, {"quantile": math.nan}, "quantile must lie strictly between 0 and 1"),
        (QuantileBounds, {"learning_rate": 0}, "clip_learning_rate"),
        (QuantileBounds, {"count_noise_std": -1}, "count_noise_std"),
        (MeanNormBounds, {"alpha": 0}, "alpha"),
        (MeanNormBounds, {"beta": 1}, "beta must be larger than 1"),
        (MeanNormBounds, {"norm_noise_multiplier": 0}, "norm_noise_multiplier"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            rule(**options)  # type: ignore[arg-type]
