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


def leaves_out_the_large(squared_norms: Tensor, bound: float) -> Tensor:
    return squared_norms <= bound**2


@pytest.mark.parametrize(
    "rule",
    [clip_factors, normalizing(0.001), smooth, leaves_out_the_large],
)
def test_a_rule_that_clips_is_taken_as_it_is(rule: ClipFactors) -> None:
    factors = CappedFactors(rule)
    squared = EVERY_SIZE[::10]
    for bound in (1e-10, 0.3, 1e10):
        factors.check([bound], CPU)
        before = squared.clone()
        capped = factors(squared, bound)
        assert torch.equal(squared, before)
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
    "no clipping": (lambda s, c: torch.ones_like(s), "returns 1 for"),
    "just above the bound": (lambda s, c: (1 + 1e-4) * clip_factors(s, c), "max_grad_norm / norm"),
    "tiny norms": (lambda s, c: torch.where(s < 1e-40, 1e25, smooth(s, c)), "returns 1e\\+25"),
    "no factor for zero": (lambda s, c: c / s.sqrt(), "returns inf for a squared norm of 0:"),
    "not a number": (lambda s, c: torch.where(s > 1e30, math.nan, smooth(s, c)), "returns nan for a"),
    "uphill": (lambda s, c: -smooth(s, c), "returns -"),
    "mean of the batch": (lambda s, c: c / (s.sqrt() + s.sqrt().mean()), "for a record alone and among others"),
    "another's func": (AroundOurs(), "for a record alone and among others"),
    "stateful": (Counting(), "for the same squared norms when called again"),
    "a column": (lambda s, c: smooth(s, c)[:, None], r"a tensor of their shape, not \(\d+, 1\)"),
    "no tensor": (lambda s, c: smooth(s, c).tolist(), "a tensor of their shape, not list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_does_not_clip_is_refused(name: str) -> None:
    rule, message = WRONG[name]
    with pytest.raises(ConfigurationError, match=message):
        CappedFactors(rule).check([0.5], CPU)


def test_the_root_is_named_only_where_a_factor_is_too_large() -> None:
    for name, is_named in {"norms taken for squares": True, "uphill": False, "no factor for zero": False}.items():
        with pytest.raises(ConfigurationError) as caught:
            CappedFactors(WRONG[name][0]).check([0.5], CPU)
        assert ("squared_norms.sqrt()" in str(caught.value)) is is_named


@pytest.mark.parametrize("name", ["no clipping", "not a number", "uphill"])
def test_factors_are_capped_whatever_the_rule_returns(name: str) -> None:
    rule, _ = WRONG[name]
    squared = torch.cat([EVERY_SIZE[::10], NOT_FINITE])
    for bound in (1e-10, 0.3, 1e10):
        factors = CappedFactors(rule)(squared, bound)
        assert factors.isfinite().all() and factors.min() >= 0 and factors[-2:].tolist() == [0.0, 0.0]
        assert (factors.double() * squared.double().sqrt())[:-2].max() <= bound * (1 + 2e-6)
        # What is small is not made large: float32 leaves rounding errors of a record that is learned.
        assert factors.max() <= max(1.0, bound / 1e-3) * (1 + 2e-6)
