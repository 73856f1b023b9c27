"""Clipping rules of one's own: which are refused before training, and what any of them does to a record."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.clipping import (
    CappedFactors,
    ClipFactors,
    clip_factors,
    normalize_weights,
    normalizing,
)

CPU = torch.device("cpu")
EVERY_SIZE = torch.cat([(10 ** torch.linspace(-46, 38.5, 20_001, dtype=torch.float64)).float(), torch.zeros(1)])
NOT_FINITE = torch.tensor([math.inf, math.nan])


def smooth(squared_norms: Tensor, bound: float) -> Tensor:
    return bound / (squared_norms.sqrt() + 0.01)


def by_mask(squared_norms: Tensor, bound: float) -> Tensor:
    norms = squared_norms.sqrt()
    factors = torch.ones_like(norms)
    factors[norms > bound] = bound / norms[norms > bound]
    return factors


def number_by_number(squared_norms: Tensor, bound: float) -> Tensor:
    return torch.tensor([min(1.0, bound / max(math.sqrt(square), 1e-30)) for square in squared_norms.tolist()])


def writes_into_its_argument(squared_norms: Tensor, bound: float) -> Tensor:
    return bound / squared_norms.sqrt_().add_(0.01)


def leaves_out_the_large(squared_norms: Tensor, bound: float) -> Tensor:
    return squared_norms <= bound**2


SOUND: list[ClipFactors] = [smooth, by_mask, number_by_number, writes_into_its_argument, leaves_out_the_large]


@pytest.mark.parametrize("bound", [1e-10, 0.3, 1.0, 1e10])
@pytest.mark.parametrize("rule", [clip_factors, normalizing(0.001), normalizing(0.5), *SOUND])
def test_a_rule_that_clips_is_taken_as_it_is(rule: ClipFactors, bound: float) -> None:
    factors = CappedFactors(rule)
    factors.check([bound], CPU)
    squared = EVERY_SIZE[::10]
    before = squared.clone()
    capped = factors(squared, bound)
    assert torch.equal(squared, before)
    if rule is number_by_number:
        torch.testing.assert_close(capped, rule(squared.clone(), bound))
    else:
        assert torch.equal(capped, rule(squared.clone(), bound).to(capped))
    assert factors(NOT_FINITE, bound).tolist() == [0.0, 0.0] and factors(squared[:0], bound).shape == (0,)


class Counting:
    """Its factors fall from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, squared_norms: Tensor, bound: float) -> Tensor:
        self.calls += 1
        return smooth(squared_norms, bound) / self.calls


class AroundOurs:
    """It holds dpbench's own function, and looks at the whole batch."""

    func = staticmethod(normalize_weights)

    def __call__(self, squared_norms: Tensor, bound: float) -> Tensor:
        return smooth(squared_norms, bound) * (squared_norms.mean() < bound)


WRONG: dict[str, tuple[ClipFactors, str]] = {
    "norms taken for squares": (lambda s, c: c / (s + 0.01), r"take squared_norms.sqrt\(\) first"),
    "squares taken twice": (lambda s, c: (c / s).clamp(max=1.0), r"from 0 to max_grad_norm / norm"),
    "no clipping": (lambda s, c: torch.ones_like(s), "returns the factor 1 for"),
    "twice the bound": (lambda s, c: 2 * clip_factors(s, c), "max_grad_norm / norm"),
    "just above the bound": (lambda s, c: (1 + 1e-4) * clip_factors(s, c), "max_grad_norm / norm"),
    "tiny norms": (lambda s, c: torch.where(s < 1e-40, 1e25, smooth(s, c)), "returns the factor 1e\\+25"),
    "huge norms": (lambda s, c: torch.where(s > 1e37, 1.0, smooth(s, c)), "returns the factor 1 for"),
    "no factor for zero": (lambda s, c: c / s.sqrt(), "returns the factor inf for a squared norm of 0,"),
    "not a number": (lambda s, c: torch.where(s > 1e30, math.nan, smooth(s, c)), "returns the factor nan for a"),
    "uphill": (lambda s, c: -smooth(s, c), "returns the factor -"),
    "mean of the batch": (lambda s, c: c / (s.sqrt() + s.sqrt().mean()), "for a record alone than among others"),
    "largest of the batch": (lambda s, c: smooth(s, c) * s / s.max(), "for a record alone than among others"),
    "size of the batch": (lambda s, c: smooth(s, c) / len(s), "for a record alone than among others"),
    "place of the batch": (
        lambda s, c: smooth(s, c) / torch.arange(1, len(s) + 1),
        "for a record alone than among others",
    ),
    "random": (lambda s, c: smooth(s, c) * torch.rand_like(s), "called again with the same squared norms"),
    "another's func": (AroundOurs(), "for a record alone than among others"),
    "stateful": (Counting(), "called again with the same squared norms"),
    "one factor for all": (lambda s, c: smooth(s, c).min(), r"a tensor of their shape, not \(\)"),
    "a column": (lambda s, c: smooth(s, c)[:, None], r"a tensor of their shape, not \(\d+, 1\)"),
    "no tensor": (lambda s, c: smooth(s, c).tolist(), "a tensor of their shape, not list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_does_not_clip_is_refused(name: str) -> None:
    rule, message = WRONG[name]
    with pytest.raises(ConfigurationError, match=message):
        CappedFactors(rule).check([0.5], CPU)


def test_a_rule_is_tried_at_each_bound() -> None:
    factors = CappedFactors(lambda squared_norms, bound: clip_factors(squared_norms, 1.0))
    factors.check([1.0, 2.0], CPU)
    with pytest.raises(ConfigurationError, match="max_grad_norm / norm"):
        factors.check([1.0, 2.0, 0.5], CPU)


@pytest.mark.parametrize("bound", [1e-10, 0.3, 1e10])
@pytest.mark.parametrize(
    "name", ["norms taken for squares", "no clipping", "no factor for zero", "not a number", "uphill"]
)
def test_factors_are_capped_whatever_the_rule_returns(name: str, bound: float) -> None:
    rule, _ = WRONG[name]
    squared = torch.cat([EVERY_SIZE, NOT_FINITE])
    factors = CappedFactors(rule)(squared, bound)
    assert factors.isfinite().all() and factors.min() >= 0 and factors[-2:].tolist() == [0.0, 0.0]
    assert (factors.double() * squared.double().sqrt())[:-2].max() <= bound * (1 + 2e-6)
    # What is small is not made large: float32 leaves rounding errors of a record that is learned.
    assert factors.max() <= max(1.0, bound / 1e-3) * (1 + 2e-6)


@pytest.mark.parametrize(
    "name", ["mean of the batch", "largest of the batch", "size of the batch", "place of the batch"]
)
def test_a_rule_sees_one_record_at_a_time(name: str) -> None:
    """Whatever of other records the trial may have missed."""
    rule, _ = WRONG[name]
    factors = CappedFactors(rule)
    squared = torch.rand(7) + 0.1
    alone = torch.cat([CappedFactors(rule)(row, 0.5) for row in squared.split(1)])
    torch.testing.assert_close(factors(squared, 0.5), alone)
    torch.testing.assert_close(factors(squared[:3], 0.5), alone[:3])
