"""Accountants by name, with their method and the sampling that they cover.

The neighboring relation follows from the sampling: batches drawn by Poisson sampling are accounted for with one record
added or removed, batches of a fixed size with one record replaced (see `privacy.sampling`).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from numpy.typing import NDArray
from scipy import optimize, special, stats

from dpbench.errors import ConfigurationError
from dpbench.privacy.events import Event, SumQuery, effective_noise_multiplier
from dpbench.privacy.sampling import FixedSizeSampling, Part, PoissonSampling, Sampling, schemes
from dpbench.privacy.sampling.scheme import PrivacyProfile

Array = NDArray[np.float64]
Events = Mapping[Event, int]
"""How often each release was made; their order does not matter."""

DEFAULT_ORDERS = tuple(map(float, rdp.DEFAULT_RDP_ORDERS))
TENSORFLOW_PRIVACY_ORDERS = (
    *(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5),
    *map(float, range(5, 64)),
    *(128.0, 256.0, 512.0),
)
"""The 72 orders of tf-privacy's early releases, from which the papers' figures come (pyvacy_2019, section 4.2)."""
WHOLE_ORDERS = tuple(map(float, range(2, 513)))

# Beyond these, intervals of privacy losses are too wide for their exponentials, or rounding adds up to too much.
PLD_LIMIT = 1e6
PLD_MOST_RELEASES = 10**7
_WIDENING = 2e-5  # of intervals of privacy losses, for each ε above 95: pld takes seconds at any
_ROUNDING = 1e-14  # of the logarithm of a moment near one


def _is_no_order_left_out(record: logging.LogRecord) -> bool:
    """False for a warning of dp_accounting that an order does not converge: others give the bound."""
    return "failed to converge" not in str(record.msg) or "dp_accounting" not in record.pathname


logging.getLogger("absl").addFilter(_is_no_order_left_out)


def _multiplier(event: Event) -> float:
    """Noise over sensitivity, at most a million: beyond, numbers cancel, and less noise is the costly side."""
    return min(effective_noise_multiplier(event.queries), 1e6)


def dp_event(event: Event, copies: int = 1) -> dp_accounting.DpEvent:
    """One release as dp_accounting's event; all queries of a release read the same batch.

    Args:
        event: The release.
        copies: Number of records that neighbors differ by; above 1 for Poisson sampling only. A batch contains a
            binomial number of them, and each moves the sum by its sensitivity at most (Ganesh 2024).

    >>> from dpbench.privacy.events import SumQuery
    >>> dp_event(Event(PoissonSampling(1000, 0.05), (SumQuery("all", 2.0, 3.0),)))
    PoissonSampledDpEvent(sampling_probability=0.05, event=GaussianDpEvent(noise_multiplier=1.5))
    """
    if copies == 1 or event.sampling.rate == 1:
        return event.sampling.dp_event(_multiplier(event) / copies)
    drawn = np.arange(copies + 1)
    probabilities = stats.binom.pmf(drawn, copies, event.sampling.rate)
    possible = probabilities > 0
    return MixtureOfGaussiansDpEvent(_multiplier(event), drawn[possible], probabilities[possible])


@lru_cache(maxsize=1024)
def _composes(accountant: type[dp_accounting.PrivacyAccountant], sampling: Sampling) -> bool:
    """Return whether an accountant of dp_accounting supports the event of a sampling scheme."""
    if sampling.neighboring_relation == "none":
        return False
    composition = accountant(neighboring_relation=sampling.relation)
    event = sampling.dp_event(1.0)
    return bool(composition.supports(event))


@dataclass(frozen=True)
class Accountant(ABC):
    """Turns counted releases into privacy parameters.

    Attributes:
        title: Method, with its source.
        guarantee: False for an approximation, which may lie below the truth.
        nominal: Scheme assumed for batches that the accountant does not cover, if a nominal figure is requested.
        is_slow: Whether an ε takes up to seconds instead of milliseconds.
    """

    title: str
    guarantee: bool = True
    nominal: ClassVar[type[Sampling]] = PoissonSampling
    is_slow: ClassVar[bool] = False

    @abstractmethod
    def covers(self, sampling: Sampling) -> bool:
        """Return whether the accountant is valid for a sampling scheme."""

    @property
    def samplings(self) -> tuple[str, ...]:
        """Kinds of sampling for which it is valid.

        >>> ACCOUNTANTS["rdp-analytical"].samplings
        ('fixed_size',)
        """
        return tuple(scheme.kind for scheme in schemes() if self.covers(scheme.at_rate(4, 0.5)))

    @abstractmethod
    def epsilon(self, events: Events, delta: float) -> float:
        """Smallest ε that this accountant shows for the composition at δ; infinite if it shows none."""

    @abstractmethod
    def delta(self, events: Events, epsilon: float) -> float:
        """Smallest δ that this accountant shows for the composition at ε; 1 if it shows none."""


@dataclass(frozen=True)
class Conversion:
    """Conversion of Rényi divergences to (ε, δ), order by order.

    Attributes:
        epsilon: (orders, divergences, δ) → ε at each order.
        log_delta: (orders, divergences, ε) → log δ at each order.
    """

    epsilon: Callable[[Array, Array, float], Array]
    log_delta: Callable[[Array, Array, float], Array]


def _canonne_epsilon(orders: Array, curve: Array, delta: float) -> Array:
    pairs = zip(orders, curve, strict=True)
    return np.array([rdp.compute_epsilon([order], [divergence], delta)[0] for order, divergence in pairs])


def _canonne_log_delta(orders: Array, curve: Array, epsilon: float) -> Array:
    by_order = (orders - 1) * (curve - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    with np.errstate(divide="ignore"):
        of_any = np.log1p(-np.exp(-curve)) / 2  # δ ≤ √(1 − exp(−KL)), and KL is below every divergence
    return np.asarray(np.minimum(by_order, of_any))


def _mironov_epsilon(orders: Array, curve: Array, delta: float) -> Array:
    surcharge = math.log(delta) / (orders - 1)
    return np.asarray(curve - surcharge)


def _mironov_log_delta(orders: Array, curve: Array, epsilon: float) -> Array:
    excess = curve - epsilon
    log_deltas = excess * (orders - 1)
    return np.asarray(np.minimum(log_deltas, 0.0))


CANONNE_2020 = Conversion(_canonne_epsilon, _canonne_log_delta)
"""Canonne, Kamath & Steinke 2020, proposition 12: ε = RDP(α) + log((α−1)/α) − (log δ + log α)/(α−1)."""
MIRONOV_2017 = Conversion(_mironov_epsilon, _mironov_log_delta)
"""Mironov 2017, proposition 3 (pyvacy_2019, Theorem 4): ε = RDP(α) + log(1/δ)/(α−1)."""


def release_curve(event: Event, orders: tuple[float, ...]) -> Array:
    """Rényi divergence of one release at each order, by dp_accounting (fixed size: Wang et al., theorem 27).

    Includes a bound on rounding errors: a moment that rounds to one does not show that nothing was released. At
    fractional orders dp_accounting sums the terms of an alternating series without their signs, an upper bound too.
    """
    sampling = event.sampling
    own = sampling.renyi_curve(orders)
    if own is not None:
        return own
    z = _multiplier(event)
    parts = sampling.mixture(z)
    if parts:
        return _mixed_curve(parts, orders)
    accountant = rdp.RdpAccountant(orders, sampling.relation)
    accountant.compose(dp_event(event))
    curve = np.asarray(accountant.rdp)
    alpha = np.asarray(orders)
    if sampling.without_replacement:
        # By quasi-convexity never more than without sampling; theorem 27 exceeds it.
        unsampled = alpha / (2 * z**2)
        curve = np.minimum(curve, unsampled)
    # Divergences grow with the order, so from order 2 on that of order 2 is a lower bound; below it stands where
    # rounding left nothing.
    second = sampling.second_order_divergence(z)
    from_second = np.maximum(curve, second)
    below_second = np.where(curve > 0, curve, second)
    curve = np.where(alpha >= 2, from_second, below_second)
    log_factorial = special.gammaln(alpha + 1)
    hidden_by_rounding = _ROUNDING * (1 + log_factorial) / (alpha - 1)
    return np.asarray(curve + hidden_by_rounding)


def _mixed_curve(parts: Sequence[Part], orders: tuple[float, ...]) -> Array:
    """Divergence where a release is one of several: the log of the mean of exp((α−1)·RDP(α)), over α−1."""
    factor = np.asarray(orders) - 1
    logs = []
    for probability, sampling, z in parts:
        release = Event(sampling, (SumQuery("", 1.0, z),))
        logs.append(math.log(probability) + factor * release_curve(release, orders))
    return np.asarray(special.logsumexp(logs, axis=0) / factor)


def theorem5_curve(event: Event, orders: tuple[float, ...]) -> Array:
    """Rényi divergence of one release from batches of a fixed size, by the analytical moments accountant.

    (pyvacy_2019, Theorem 5; Wang, Balle & Kasiviswanathan 2019, theorem 9. The paper prints the sum over j outside the
    logarithm; in the original it stands inside, as here.) With Gaussian noise ε(j) = j/(2z²) and ε(∞) = ∞, so both
    inner minima are 2. Everything stays in log space. Never more than without sampling.

    Args:
        event: The release.
        orders: Whole numbers from 2.

    >>> from dpbench.privacy.events import SumQuery
    >>> theorem5_curve(Event(FixedSizeSampling(1000, 50), (SumQuery("all", 2.0, 8.0),)), (2.0, 8.0)).round(5)
    array([0.00064, 0.00509])
    """
    z = _multiplier(event)
    half = 1 / (2 * z**2)
    order = np.asarray(orders)
    alpha = order[:, None]
    j = np.arange(2, max(orders) + 1)[None, :]
    # Where j > α the binomial coefficient is not needed, but its logarithm must be a number.
    difference = np.maximum(alpha - j, 0)
    log_binomial = special.gammaln(alpha + 1) - special.gammaln(j + 1)
    log_binomial = log_binomial - special.gammaln(difference + 1)
    pairs = (j - 1) * j
    later = math.log(2) + pairs * half
    # For j = 2 the smaller of 4(e^ε(2) − 1) and 2e^ε(2), with e^ε(2) taken out so that nothing overflows.
    with np.errstate(over="ignore"):
        complement = -math.expm1(-2 * half)
        log_four = math.log(4) + math.log(complement)
        log_smaller = min(log_four, math.log(2))
        second = 2 * half + log_smaller
    log_rate = math.log(event.sampling.rate)
    terms = j * log_rate + log_binomial
    terms += np.where(j == 2, second, later)
    is_summed = j <= alpha  # the sum ends at α
    terms = np.where(is_summed, terms, -np.inf)
    log_sum = special.logsumexp(terms, axis=1)
    log_moment = np.logaddexp(0, log_sum)
    sampled = (log_moment + _ROUNDING) / (order - 1)
    unsampled = order * half
    return np.asarray(np.minimum(sampled, unsampled))


@dataclass(frozen=True)
class RenyiAccountant(Accountant):
    """Composition of Rényi divergences over a grid of orders.

    Attributes:
        orders: The grid.
        conversion: Conversion from Rényi divergences to (ε, δ).
    """

    orders: tuple[float, ...] = DEFAULT_ORDERS
    conversion: Conversion = CANONNE_2020

    def covers(self, sampling: Sampling) -> bool:
        parts = [part.sampling for part in sampling.mixture(1.0)] or [sampling]
        return all(_composes(rdp.RdpAccountant, part) for part in parts)

    @staticmethod
    @lru_cache(maxsize=4096)
    def divergences(event: Event, orders: tuple[float, ...]) -> Array:
        """Rényi divergences of one release at some orders."""
        return release_curve(event, orders)

    def curve(self, events: Events) -> Array:
        """Divergence of the composition at each order of the grid."""
        curves = [count * self.divergences(event, self.orders) for event, count in events.items()]
        return np.asarray(np.sum(curves, axis=0))

    def epsilon_by_order(self, curve: Array, delta: float) -> Array:
        """ε that each order of the grid shows, from a curve over the grid."""
        orders = np.asarray(self.orders)
        return self.conversion.epsilon(orders, curve, delta)

    def epsilon(self, events: Events, delta: float) -> float:
        def epsilons(orders: Array, curve: Array) -> Array:
            return self.conversion.epsilon(orders, curve, delta)

        return max(0.0, self._smallest(events, epsilons))

    def delta(self, events: Events, epsilon: float) -> float:
        def log_deltas(orders: Array, curve: Array) -> Array:
            return self.conversion.log_delta(orders, curve, epsilon)

        return math.exp(min(0.0, self._smallest(events, log_deltas)))

    def _smallest(self, events: Events, score: Callable[[Array, Array], Array]) -> float:
        """Smallest score of an order: (orders, divergences) → ε or log δ at each."""
        scores = score(np.asarray(self.orders), self.curve(events))
        return float(scores.min())


@dataclass(frozen=True)
class AnalyticalRenyiAccountant(RenyiAccountant):
    """General bound for batches of a fixed size and any mechanism: see `theorem5_curve`."""

    orders: tuple[float, ...] = WHOLE_ORDERS
    nominal: ClassVar[type[Sampling]] = FixedSizeSampling

    def covers(self, sampling: Sampling) -> bool:
        return sampling.without_replacement

    @staticmethod
    @lru_cache(maxsize=4096)
    def divergences(event: Event, orders: tuple[float, ...]) -> Array:
        return theorem5_curve(event, orders)


@dataclass(frozen=True)
class ContinuousRenyiAccountant(RenyiAccountant):
    """The best real order, by a bounded search between the neighbors of the grid's best (pyvacy_2019, section 4.2).

    Every order gives a valid bound, so a search that stopped early would still be one.
    """

    is_slow: ClassVar[bool] = True

    def _smallest(self, events: Events, score: Callable[[Array, Array], Array]) -> float:
        def score_at(order: float) -> float:
            divergences = [count * release_curve(event, (order,)) for event, count in events.items()]
            scores = score(np.array([order]), np.asarray(sum(divergences)))
            return float(scores[0])

        scores = score(np.asarray(self.orders), self.curve(events))
        best = int(scores.argmin())
        best_score = float(scores[best])
        if not math.isfinite(best_score):
            return best_score
        low = self.orders[max(best - 1, 0)]
        high = self.orders[min(best + 1, len(scores) - 1)]
        result = optimize.minimize_scalar(score_at, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
        return min(best_score, float(result.fun))


class LossDistribution(PLDAccountant):
    """Composed privacy loss distribution that allows for the rounding of its Fourier transforms.

    They leave every probability off by about as much, so that some of those next to zero are negative. δ is known no
    better than if each probability were off by as much as the most negative one.
    """

    _pld: PrivacyLossDistribution

    def get_epsilon(self, target_delta: float) -> float:
        """Smallest ε at δ, infinite where rounding hides δ."""
        known = target_delta - rounding_of(self._pld)
        if known <= 0:
            return math.inf
        return float(super().get_epsilon(known))

    def get_delta(self, target_epsilon: Any) -> Any:
        """Smallest δ at ε; of an array, each."""
        return np.minimum(super().get_delta(target_epsilon) + rounding_of(self._pld), 1.0)


def rounding_of(distribution: PrivacyLossDistribution) -> float:
    """Bound on the error of Fourier transforms in a δ of a privacy loss distribution."""
    errors = []
    for direction in (distribution._pmf_remove, distribution._pmf_add):
        probabilities = direction.to_dense_pmf()._probs
        most_negative = min(0.0, float(probabilities.min()))
        errors.append(-most_negative * len(probabilities))
    return max(errors)


@dataclass(frozen=True)
class PldAccountant(Accountant):
    """Numerical composition of privacy loss distributions, each loss rounded up to a multiple of an interval.

    Over millions of releases at tiny rates the rounding adds up, and RDP can be the tighter of two true bounds.

    Attributes:
        interval: Wider ones are faster, and bounds as well. Above an ε of 100 it grows with ε.
    """

    interval: float = 1e-4
    is_slow: ClassVar[bool] = True

    def covers(self, sampling: Sampling) -> bool:
        if sampling.privacy_profile is not None:
            return True
        # Rdp tells `composed` how wide the intervals may be.
        return _composes(PLDAccountant, sampling) and ACCOUNTANTS["rdp"].covers(sampling)

    def composed(self, events: Events, copies: int = 1) -> PLDAccountant:
        """Composition of all releases, to be reused for several values of ε or δ.

        Args:
            events: The releases.
            copies: Number of records that neighbors differ by, see `dp_event`.

        Raises:
            ConfigurationError: ε or the number of releases is too large.
        """
        estimate = ACCOUNTANTS["rdp"].epsilon(events, 1e-5)
        releases = sum(events.values())
        if estimate > PLD_LIMIT or releases > PLD_MOST_RELEASES:
            raise ConfigurationError(
                f"the pld accountant supports an epsilon of at most {PLD_LIMIT:.0e} and at most "
                f"{PLD_MOST_RELEASES:.0e} releases: use rdp."
            )
        first = next(iter(events))
        interval = max(self.interval, _WIDENING * (estimate - 95))
        accountant = LossDistribution(first.sampling.relation, interval)
        for event, count in events.items():
            accountant.compose(dp_event(event, copies), count)
        return accountant

    def epsilon(self, events: Events, delta: float) -> float:
        profile = _only_profile(events)
        return _pld_epsilon(self, tuple(events.items()), delta) if profile is None else profile.epsilon(delta)

    def delta(self, events: Events, epsilon: float) -> float:
        profile = _only_profile(events)
        if profile is not None:
            return profile.delta(epsilon)
        return float(self.composed(events).get_delta(epsilon))


def _only_profile(events: Events) -> PrivacyProfile | None:
    """Privacy profile of events that are one of which no distribution of losses is known; None: all have one.

    Raises:
        ConfigurationError: Such an event is composed with others, or with itself.
    """
    for event in events:
        profile = event.sampling.privacy_profile
        if profile is None:
            continue
        if sum(events.values()) > 1:
            raise ConfigurationError(
                f"pld does not compose {event.sampling.kind} with other releases: use rdp, which does."
            )
        return profile
    return None


@lru_cache(maxsize=256)
def _pld_epsilon(accountant: PldAccountant, counts: tuple[tuple[Event, int], ...], delta: float) -> float:
    """ε by pld, which logs, reports and searches ask for again."""
    return float(accountant.composed(dict(counts)).get_epsilon(delta))


@dataclass(frozen=True)
class GaussianDpAccountant(Accountant):
    """Central limit theorem: the composition is taken for one Gaussian mechanism with parameter μ.

    μ² is the sum over the releases of `Sampling.squared_mu` of their sampling schemes.
    """

    guarantee: bool = False

    def covers(self, sampling: Sampling) -> bool:
        return sampling.squared_mu(1.0) is not None

    def mu(self, events: Events) -> float:
        """μ of the whole composition."""
        squares = [count * _squared_mu(event) for event, count in events.items()]
        return math.sqrt(sum(squares))

    def epsilon(self, events: Events, delta: float) -> float:
        mu = self.mu(events)
        if not math.isfinite(mu):
            return math.inf
        with np.errstate(divide="ignore"):  # log δ is −∞ where the search begins too far
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))

    def delta(self, events: Events, epsilon: float) -> float:
        mu = self.mu(events)
        if not math.isfinite(mu):
            return 1.0
        # δ = Φ(μ/2 − ε/μ) − exp(ε) Φ(−μ/2 − ε/μ), by the logarithms of the two.
        half = mu / 2
        shift = epsilon / mu
        minuend = special.log_ndtr(half - shift)
        subtrahend = epsilon + special.log_ndtr(-half - shift)
        if subtrahend < minuend:
            remainder = -math.expm1(subtrahend - minuend)
            return float(math.exp(minuend) * remainder)
        return 0.0


def _squared_mu(event: Event) -> float:
    value = event.sampling.squared_mu(_multiplier(event))
    assert value is not None
    return value


ACCOUNTANTS: dict[str, Accountant] = {
    "rdp": RenyiAccountant("Rényi DP (Mironov 2017) with today's conversion (Canonne et al. 2020)"),
    "pld": PldAccountant("privacy loss distributions, numerical, usually the tightest (Doroshenko et al. 2022)"),
    "rdp-classic": RenyiAccountant(
        "Rényi DP with the papers' conversion RDP + log(1/δ)/(α−1) over 72 orders",
        orders=TENSORFLOW_PRIVACY_ORDERS,
        conversion=MIRONOV_2017,
    ),
    "rdp-continuous": ContinuousRenyiAccountant("Rényi DP, today's conversion at the best real order"),
    "rdp-analytical": AnalyticalRenyiAccountant(
        "Rényi DP by the general bound for batches of fixed size (pyvacy_2019, Theorem 5) at orders 2 to 512"
    ),
    "gdp": GaussianDpAccountant("Gaussian DP by the central limit theorem: an approximation, no bound"),
}
"""By name."""
