"""The accountants, by name: what each computes, and for which sampling it is valid.

The neighbouring relation follows from the sampling: lots drawn by Poisson sampling are accounted for with one record
added or removed, lots of a fixed size with one record replaced (see `privacy.sampling`).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray
from scipy import optimize, special

from dpbench.errors import ConfigurationError
from dpbench.privacy.ledger import Event
from dpbench.privacy.plan import effective_noise_multiplier
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling

Array = NDArray[np.float64]
Events = Mapping[Event, int]
"""How often each release was made; their order does not matter."""

POISSON, FIXED_SIZE = PoissonSampling.kind, FixedSizeSampling.kind
TODAY_ORDERS = tuple(map(float, rdp.DEFAULT_RDP_ORDERS))
CLASSIC_ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *map(float, range(5, 64)), 128.0, 256.0, 512.0)
"""The 72 orders of tf-privacy's early releases, from which the papers' figures come (pyvacy_2019, section 4.2)."""
WHOLE_ORDERS = tuple(map(float, range(2, 513)))

PLD_LIMIT, PLD_MOST_RELEASES = 100.0, 10**7  # beyond which it takes hours and gigabytes
_ROUNDING = 1e-14  # of the logarithm of a moment near one
_RELATIONS = {relation.name.lower(): relation for relation in NeighboringRelation}


def relation_of(sampling: Sampling) -> NeighboringRelation:
    """The neighbouring relation that belongs to a way of drawing lots."""
    if sampling.neighbouring_relation not in _RELATIONS:
        raise ConfigurationError(
            f"no accountant covers {sampling.kind!r} sampling; draw lots with data.sampling=poisson or fixed_size."
        )
    return _RELATIONS[sampling.neighbouring_relation]


def _multiplier(event: Event) -> float:
    """Noise over sensitivity, at most a million: beyond, numbers cancel, and less noise is the costly side."""
    return min(effective_noise_multiplier(event[1]), 1e6)


def dp_event(event: Event) -> dp_accounting.DpEvent:
    """One release as dp_accounting's event; all queries of a release read the same lot."""
    sampling = event[0]
    gaussian = dp_accounting.GaussianDpEvent(_multiplier(event))
    if isinstance(sampling, FixedSizeSampling):
        return dp_accounting.SampledWithoutReplacementDpEvent(sampling.population, sampling.batch_size, gaussian)
    if isinstance(sampling, PoissonSampling) and sampling.sample_rate < 1:
        return dp_accounting.PoissonSampledDpEvent(sampling.sample_rate, gaussian)
    return gaussian


@dataclass(frozen=True)
class Accountant(ABC):
    """Turns counted releases into privacy parameters.

    Attributes:
        title: What it computes, with its source.
        samplings: Kinds of sampling for which it is valid.
        guarantee: False for an approximation, which may lie below the truth.
    """

    title: str
    samplings: tuple[str, ...] = (POISSON, FIXED_SIZE)
    guarantee: bool = True

    @abstractmethod
    def epsilon(self, events: Events, delta: float) -> float:
        """Smallest ε that this accountant shows for the composition at δ; infinite if it shows none."""

    @abstractmethod
    def delta(self, events: Events, epsilon: float) -> float:
        """Smallest δ that this accountant shows for the composition at ε; 1 if it shows none."""


@dataclass(frozen=True)
class Conversion:
    """From Rényi divergences to (ε, δ), order by order.

    Attributes:
        epsilon: (orders, divergences, δ) → ε at each order.
        log_delta: (orders, divergences, ε) → log δ at each order.
    """

    epsilon: Callable[[Array, Array, float], Array]
    log_delta: Callable[[Array, Array, float], Array]


def _today_epsilon(orders: Array, curve: Array, delta: float) -> Array:
    return np.array([rdp.compute_epsilon([a], [r], delta)[0] for a, r in zip(orders, curve, strict=True)])


def _today_log_delta(orders: Array, curve: Array, epsilon: float) -> Array:
    deltas = [rdp.compute_delta([a], [r], epsilon)[0] for a, r in zip(orders, curve, strict=True)]
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(deltas))


TODAY = Conversion(_today_epsilon, _today_log_delta)
"""Canonne, Kamath & Steinke 2020, proposition 12: ε = RDP(α) + log((α−1)/α) − (log δ + log α)/(α−1)."""
CLASSIC = Conversion(
    lambda orders, curve, delta: np.asarray(curve - math.log(delta) / (orders - 1)),
    lambda orders, curve, epsilon: np.asarray(np.minimum((curve - epsilon) * (orders - 1), 0.0)),
)
"""Mironov 2017, proposition 3 (pyvacy_2019, Theorem 4): ε = RDP(α) + log(1/δ)/(α−1)."""


@contextmanager
def _without_unconverged_orders() -> Iterator[None]:
    """Keep dp_accounting from naming each order that it leaves out: others give the bound, and readers take fright."""
    log, here = logging.getLogger("absl"), logging.Filter()
    here.filter = lambda record: "failed to converge" not in str(record.msg)  # type: ignore[method-assign]
    log.addFilter(here)
    try:
        yield
    finally:
        log.removeFilter(here)


def release_curve(event: Event, orders: tuple[float, ...]) -> Array:
    """Rényi divergence of one release at each order, by dp_accounting (for fixed-size lots: Wang et al., theorem 27).

    With what rounding can hide on top: a moment that rounds to one does not show that nothing was released. At
    fractional orders dp_accounting sums the terms of an alternating series without their signs, an upper bound too.
    """
    machine = rdp.RdpAccountant(orders, relation_of(event[0]))
    with _without_unconverged_orders():
        machine.compose(dp_event(event))
    curve, at = np.asarray(machine.rdp), np.asarray(orders)
    if isinstance(event[0], PoissonSampling):
        second = _second_order(event[0].sample_rate, _multiplier(event))  # divergences grow with the order
        curve = np.where(at >= 2, np.maximum(curve, second), np.where(curve > 0, curve, second))
    return np.asarray(curve + _ROUNDING * (1 + special.gammaln(at + 1)) / (at - 1))


def _second_order(rate: float, noise_multiplier: float) -> float:
    """Rényi divergence of order 2 of a Poisson-sampled Gaussian sum, exact: log(1 + q²(e^{1/z²} − 1))."""
    exponent = noise_multiplier**-2
    return math.log1p(rate**2 * math.expm1(exponent)) if exponent < 500 else 2 * math.log(rate) + exponent


def theorem5_curve(event: Event, orders: tuple[float, ...]) -> Array:
    """Rényi divergence of one release from lots of a fixed size, by the analytical moments accountant.

    (pyvacy_2019, Theorem 5; Wang, Balle & Kasiviswanathan 2019, theorem 9. The paper prints the sum over j outside the
    logarithm; in the original it stands inside, as here.) With Gaussian noise ε(j) = j/(2z²) and ε(∞) = ∞, so both
    inner minima are 2. Everything stays in log space. Never more than without sampling.

    Args:
        event: The release.
        orders: Whole numbers from 2.
    """
    sampling = event[0]
    half = 1 / (2 * _multiplier(event) ** 2)
    alpha = np.asarray(orders)[:, None]
    j = np.arange(2, max(orders) + 1)[None, :]
    choose = special.gammaln(alpha + 1) - special.gammaln(j + 1) - special.gammaln(np.maximum(alpha - j, 0) + 1)
    bound = math.log(2) + (j - 1) * j * half
    with np.errstate(over="ignore"):
        second = 2 * half + min(math.log(4) + math.log(-math.expm1(-2 * half)), math.log(2))
    terms = j * math.log(sampling.expected_batch_size / sampling.population) + choose
    terms += np.where(j == 2, second, bound)
    log_moment = np.logaddexp(0, special.logsumexp(np.where(j <= alpha, terms, -np.inf), axis=1))
    whole = np.asarray(orders) * half
    return np.asarray(np.minimum((log_moment + _ROUNDING) / (alpha[:, 0] - 1), whole))


OneRelease = Callable[[Event, tuple[float, ...]], Array]
"""Rényi divergence of one release at some orders."""


@lru_cache(maxsize=4096)
def _remembered(one_release: OneRelease, event: Event, orders: tuple[float, ...]) -> Array:
    return one_release(event, orders)


@dataclass(frozen=True)
class RenyiAccountant(Accountant):
    """Composition of Rényi divergences over a grid of orders.

    Attributes:
        orders: The grid.
        conversion: To (ε, δ).
        one_release: Divergences of one release at some orders.
    """

    orders: tuple[float, ...] = TODAY_ORDERS
    conversion: Conversion = TODAY
    one_release: OneRelease = field(default=release_curve, repr=False)

    def curve(self, events: Events) -> Array:
        """Divergence of the composition at each order of the grid."""
        curves = [count * _remembered(self.one_release, event, self.orders) for event, count in events.items()]
        return np.asarray(np.sum(curves, axis=0))

    def epsilon_by_order(self, curve: Array, delta: float) -> Array:
        """ε that each order of the grid shows, from a curve over the grid."""
        return self.conversion.epsilon(np.asarray(self.orders), curve, delta)

    def epsilon(self, events: Events, delta: float) -> float:
        return max(0.0, float(self.epsilon_by_order(self.curve(events), delta).min()))

    def delta(self, events: Events, epsilon: float) -> float:
        logs = self.conversion.log_delta(np.asarray(self.orders), self.curve(events), epsilon)
        return math.exp(min(0.0, float(logs.min())))


@dataclass(frozen=True)
class ContinuousRenyiAccountant(RenyiAccountant):
    """The best real order, by a bounded search between the neighbours of the grid's best (pyvacy_2019, section 4.2).

    Every order gives a valid bound, so a search that stopped early would still be one.
    """

    def epsilon(self, events: Events, delta: float) -> float:
        return max(0.0, self._best(events, lambda orders, curve: self.conversion.epsilon(orders, curve, delta)))

    def delta(self, events: Events, epsilon: float) -> float:
        best = self._best(events, lambda orders, curve: self.conversion.log_delta(orders, curve, epsilon))
        return math.exp(min(0.0, best))

    def _best(self, events: Events, score: Callable[[Array, Array], Array]) -> float:
        def at(order: float) -> float:
            curve = sum(count * self.one_release(event, (order,)) for event, count in events.items())
            return float(score(np.array([order]), np.asarray(curve))[0])

        grid = score(np.asarray(self.orders), self.curve(events))
        best = int(grid.argmin())
        if not math.isfinite(grid[best]):
            return float(grid[best])
        bounds = self.orders[max(best - 1, 0)], self.orders[min(best + 1, len(grid) - 1)]
        found = optimize.minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-4})
        return min(float(grid[best]), float(found.fun))


@dataclass(frozen=True)
class PldAccountant(Accountant):
    """Numerical composition of privacy loss distributions, each loss rounded up to a multiple of 1e-4.

    Over millions of releases at tiny rates the rounding adds up, and RDP can be the tighter of two true bounds.
    """

    def _composed(self, events: Events) -> PLDAccountant:
        rough = ACCOUNTANTS["rdp"].epsilon(events, 1e-5)
        if rough > PLD_LIMIT or sum(events.values()) > PLD_MOST_RELEASES:
            raise ConfigurationError(
                f"the pld accountant is not computed above an epsilon of {PLD_LIMIT:.0f} or for more than "
                f"{PLD_MOST_RELEASES:.0e} releases (its tables would take hours and gigabytes): use rdp."
            )
        machine = PLDAccountant(relation_of(next(iter(events))[0]))
        for event, count in events.items():
            machine.compose(dp_event(event), count)
        return machine

    def epsilon(self, events: Events, delta: float) -> float:
        return float(self._composed(events).get_epsilon(delta))

    def delta(self, events: Events, epsilon: float) -> float:
        return float(self._composed(events).get_delta(epsilon))


@dataclass(frozen=True)
class GaussianDpAccountant(Accountant):
    """Central limit theorem: the composition is taken for one Gaussian mechanism with parameter μ.

    Poisson: μ² = Σ q²(e^{1/z²} − 1) (Bu, Dong, Long & Su 2020, theorem 5); exact for q = 1, where μ² = Σ 1/z². Fixed
    size: μ² = Σ 2q²(e^{1/z²}Φ(3/(2z)) + 3Φ(−1/(2z)) − 2) (Dong, Roth & Su 2022, corollary 5.4).
    """

    guarantee: bool = False

    def mu(self, events: Events) -> float:
        """μ of the whole composition."""
        return math.sqrt(sum(count * _squared_mu(event) for event, count in events.items()))

    def epsilon(self, events: Events, delta: float) -> float:
        mu = self.mu(events)
        with np.errstate(divide="ignore"):  # log δ is −∞ where the search begins too far
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if math.isfinite(mu) else math.inf

    def delta(self, events: Events, epsilon: float) -> float:
        mu = self.mu(events)
        if not math.isfinite(mu):
            return 1.0
        above = special.log_ndtr(mu / 2 - epsilon / mu)
        below = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
        return float(math.exp(above) * -math.expm1(below - above)) if below < above else 0.0


def _squared_mu(event: Event) -> float:
    sampling, inverse = event[0], 1 / _multiplier(event)
    rate = sampling.expected_batch_size / sampling.population
    if rate == 1:
        return inverse**2
    with np.errstate(over="ignore"):
        if isinstance(sampling, PoissonSampling):
            return rate**2 * float(np.expm1(inverse**2))
        if inverse < 1e-4:  # the terms below cancel to x²/2 + O(x³)
            return (rate * inverse) ** 2
        tails = special.ndtr(1.5 * inverse) * np.exp(inverse**2) + 3 * special.ndtr(-0.5 * inverse) - 2
    return 2 * rate**2 * float(tails)


ACCOUNTANTS: dict[str, Accountant] = {
    "rdp": RenyiAccountant("Rényi DP (Mironov 2017) with today's conversion (Canonne et al. 2020)"),
    "pld": PldAccountant(
        "privacy loss distributions, numerical, usually the tightest (Doroshenko et al. 2022)", (POISSON,)
    ),
    "rdp-classic": RenyiAccountant(
        "Rényi DP with the papers' conversion RDP + log(1/δ)/(α−1) over 72 orders",
        orders=CLASSIC_ORDERS,
        conversion=CLASSIC,
    ),
    "rdp-continuous": ContinuousRenyiAccountant("Rényi DP, today's conversion at the best real order"),
    "rdp-analytical": RenyiAccountant(
        "Rényi DP by the general bound for lots of a fixed size (pyvacy_2019, Theorem 5) at orders 2 to 512",
        (FIXED_SIZE,),
        orders=WHOLE_ORDERS,
        one_release=theorem5_curve,
    ),
    "gdp": GaussianDpAccountant(
        "Gaussian DP by the central limit theorem: an approximation, no bound", guarantee=False
    ),
}
"""By name."""
