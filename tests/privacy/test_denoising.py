"""Discretization and error correction: formulas by hand and by numerical integration, priors, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients.discretization import (
    Discretization,
    DiscretizedGradients,
    discretize,
    keep_large,
)
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients
from dpbench.privacy.mechanism.denoising import ErrorCorrection, Hypotheses, check_priors, estimate_priors

SKEWED = (0.1, 0.7, 0.2)
NU, STD, M, BOUND = 0.5, 0.8, 4.0, 1.0
GRID = torch.linspace(-6, 6, 241, dtype=torch.float64)


def test_discretize() -> None:
    x = torch.tensor([-2.0, -0.1, 0.0, 0.1, 0.11, -math.inf])
    assert discretize(x, 0.1).tolist() == [-1, 0, 0, 0, 1, -1]
    assert discretize(x, 0.0).tolist() == [-1, -1, 0, 1, 1, -1]


@pytest.mark.parametrize("cached", [True, False])
def test_blocks_change_nothing(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, inputs = torch.randn(11, 1, 5), torch.randn(11, 1, 7)
    plain = OuterProductGradients(outputs, inputs)
    if not cached:
        monkeypatch.setattr("dpbench.privacy.gradients.discretization._CACHED", 80)  # two records at a time
    ours = DiscretizedGradients(plain, 0.3, 11, 35)
    expected = discretize(plain.per_record(), 0.3)
    weights = torch.rand(11)
    torch.testing.assert_close(ours.squared_norms(), expected.flatten(1).abs().sum(1))
    torch.testing.assert_close(ours.weighted_sum(weights), (weights[:, None, None] * expected).sum(0))
    torch.testing.assert_close(ours.per_record(), expected)
    keep = torch.tensor([3, 1])
    torch.testing.assert_close(ours.select(keep).per_record(), expected[keep])


def test_a_poisoned_record_is_bounded() -> None:
    rows = torch.tensor([[1.0, math.nan], [math.inf, -math.inf]])
    poisoned = DiscretizedGradients(InstantiatedGradients(lambda: rows), 0.1, 2, 2)
    assert poisoned.squared_norms().tolist() == [1, 2]
    assert poisoned.per_record().tolist() == [[1, 0], [1, -1]]


def test_rounding_does_not_decide_what_is_kept() -> None:
    """(a, −a), the bias of two classes, lies at one root mean square: a last bit would make it all or nothing."""
    values = torch.rand(2000, 1)
    rows = torch.cat([values, -values * (1 + 1e-6)], 1)
    assert torch.equal(keep_large(rows, 1.0), rows)
    assert torch.equal(keep_large(values, 1.0), values)  # a parameter of one number is trained, too


def test_signs_of_rounding_errors_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be above 0, such as 1e-6: the sign of a gradient"):
        Discretization(0.0, "signs")


def test_signs_of_the_size_of_the_threshold() -> None:
    """No gradient gains norm by them: ±τ is at most the coordinate that it stands for."""
    gradient = torch.tensor([[3.0, 0.1, -0.6]])
    (part,) = Discretization(0.5, "threshold")([InstantiatedGradients(lambda: gradient)], 1, [3])
    assert part.per_record().tolist() == [[0.5, 0.0, -0.5]] and part.squared_norms().tolist() == [0.5]


def scores_by_integration(y: float, hypotheses: str, priors: tuple[float, float, float], bound: float) -> list[float]:
    def density(x: float) -> float:
        return math.exp(-(((y - x) / STD) ** 2) / 2) / (STD * math.sqrt(2 * math.pi))

    if hypotheses == "points":
        masses = [density(-NU), density(0), density(NU)]
    else:
        edge = bound if hypotheses == "uniform" else 40.0
        intervals = [(-edge, -NU), (-NU, NU), (NU, edge)]
        masses = [integrate.quad(density, a, b, points=[min(max(y, a), b)])[0] for a, b in intervals]
        if hypotheses == "uniform":
            masses = [mass / (b - a) for mass, (a, b) in zip(masses, intervals, strict=True)]
    return [prior * mass for prior, mass in zip(priors, masses, strict=True)]


@pytest.mark.parametrize(
    ("hypotheses", "priors"),
    [("points", (1 / 3, 1 / 3, 1 / 3)), ("points", SKEWED), ("intervals", SKEWED), ("uniform", SKEWED)],
)
def test_mode_and_mean_of_the_posterior(hypotheses: Hypotheses, priors: tuple[float, float, float]) -> None:
    mode = ErrorCorrection(NU, hypotheses, "sum", priors).correct(GRID, STD, M, BOUND)
    mean = ErrorCorrection(NU, hypotheses, "sum", priors, "mean").correct(GRID, STD, M, BOUND)
    for y, likeliest, average in zip(GRID.tolist(), mode.tolist(), mean.tolist(), strict=True):
        down, stop, up = scores_by_integration(y, hypotheses, priors, BOUND * M)
        assert average == pytest.approx(NU * (up - down) / (down + stop + up), abs=1e-6), y
        first, second = sorted((down, stop, up), reverse=True)[:2]
        if first >= second * (1 + 1e-6):  # no tie
            assert likeliest == {down: -NU, stop: 0.0, up: NU}[first], y


def test_scales() -> None:
    """On the mean, ν is compared with y / m; on the sum, with y."""
    y = torch.tensor([1.5])
    assert ErrorCorrection(NU, scale="sum").correct(y, STD, M, BOUND).item() == NU
    assert ErrorCorrection(NU, scale="mean").correct(y, STD, M, BOUND).item() == NU  # 0.375 > 0.25
    assert ErrorCorrection(NU, scale="mean").correct(y / 2, STD, M, BOUND).item() == 0.0


def test_far_tails_and_float32() -> None:
    y = torch.tensor([-1e6, -300.0, 300.0, 1e6])
    corrected = ErrorCorrection(0.01, "intervals", "mean").correct(y, 1.1, 256.0, 1.0)
    assert corrected.tolist() == pytest.approx([-0.01, -0.01, 0.01, 0.01])


def test_estimated_priors() -> None:
    public = torch.tensor([-2.0, -1.0, 0.5, 0.0, 0.6])
    assert estimate_priors(public, 0.5) == pytest.approx((2.5 / 6.5, 2.5 / 6.5, 1.5 / 6.5))
    assert min(estimate_priors(torch.zeros(10), 0.5)) > 0  # none is impossible
    for bad in ([math.nan], []):
        with pytest.raises(ConfigurationError, match="public"):
            estimate_priors(torch.tensor(bad), 0.5)


def test_refusals() -> None:
    for bad in (-0.1, math.nan, math.inf, 0.0):
        with pytest.raises(ConfigurationError, match="correction_threshold"):
            ErrorCorrection(bad)
    with pytest.raises(ConfigurationError, match="known are points, intervals, uniform"):
        ErrorCorrection(0.1, "triangles")  # type: ignore[arg-type]
    for priors in ([0.5, 0.5], [0.5, 0.5, 0.5], [-0.1, 0.6, 0.5], [math.nan, 0.5, 0.5]):
        with pytest.raises(ConfigurationError, match="three probabilities"):
            check_priors(priors)


def test_a_threshold_that_no_gradient_reaches() -> None:
    with pytest.raises(ConfigurationError, match="not below"):
        ErrorCorrection(5.0, "uniform", "mean").check(1.0, 10.0)
    ErrorCorrection(5.0, "uniform", "sum").check(1.0, 10.0)
    late = ErrorCorrection(5.0, "uniform", "mean").correct(torch.tensor([-90.0, 0.0, 90.0]), 1.0, 10.0, 1.0)
    assert not late.any()  # a bound that adapted below ν: nothing can be above
