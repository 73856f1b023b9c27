"""Bounds of a run's releases on membership tests: the true positive rate at each false positive rate.

A membership test guesses from everything that was released whether a record was in the training set. The trade-off
function of the releases bounds every such test at all false positive rates (Dong, Roth & Su 2022, definition 2.1). It
is computed from the whole curve δ(ε) of the composed privacy loss distribution, which determines it (Zhu, Dong & Wang
2022): a single pair (ε, δ) allows tests several times as much (Kulynych et al. 2024).

The bounds hold for the unit and between the neighbors of the ledger: where a record is added or removed (Poisson
sampling, full batches) "non-member" means that it was absent, where it is replaced (batches of fixed size), that
another one was in its place. Both directions of the relation are covered, so a curve is symmetric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting.pld import PLDAccountant
from numpy.typing import ArrayLike
from scipy import stats

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import (
    ACCOUNTANTS,
    PLD_MOST_RELEASES,
    Array,
    PldAccountant,
    RenyiAccountant,
)
from dpbench.privacy.accounting.composition import LedgerCost, composable
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.events import Event, effective_noise_multiplier
from dpbench.privacy.sampling import PoissonSampling

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
"""At which records and JSON state the bound."""
_STRIPES = 2000  # of the area below a curve
_TANGENTS = 401  # of a curve, at equal distances of ε
_SMALLEST_DELTA = 1e-12  # at which they end
_LARGEST_EPSILON = 600.0  # whose exponential is a number
_COARSEST = 1e-3  # interval of losses
_CERTAIN = 100.0  # ε above which tests are all but certain, also by rdp
_LARGEST_GROUP = 100  # records that join or leave together
_MOST_OF_A_GROUP = 10  # distinct releases, since each takes seconds for a group
_LARGEST_SHIFT = 20.0  # of a sum by a group, in standard deviations of its noise; beyond it a release takes minutes
_SHARE = 0.2  # interval over the standard deviation of one release's loss; adds less than 1 % to the variance


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A symmetric trade-off curve f: no test with an error of the first kind α has one of the second kind below f(α).

    The largest function below the lines 1 − δ − e^ε·α and their mirror images e^−ε·(1 − δ − α), the tangents that
    (ε, δ)-DP at a grid of ε gives (Dong, Roth & Su 2022, proposition 2.5), so it lies nowhere above the curve that a
    privacy loss distribution has.

    Attributes:
        epsilon: The grid, from 0 on.
        delta: Upper bounds at these ε, of both directions of the neighboring relation.

    >>> full = TradeOff(np.array([0.0]), np.array([0.0]))  # perfect privacy
    >>> full(0.25), full.area
    (0.75, 0.5)
    """

    epsilon: Array
    delta: Array

    def __call__(self, alpha: float) -> float:
        return 1 - float(self.max_true_positive_rate(alpha))

    @property
    def area(self) -> float:
        """∫f, by a sum from below: no score has an area under its ROC curve above 1 − ∫f."""
        middles = (np.arange(_STRIPES) + 0.5) / _STRIPES  # no convex function is below its tangent in the middle
        return 1 - float(self.max_true_positive_rate(middles).mean())

    @property
    def advantage(self) -> float:
        """Largest difference between true and false positive rate of any test, the total variation.

        1 − 2α, where f(α) = α.
        """
        fixed_points = (1 - self.delta) / (1 + np.exp(self.epsilon))
        return 1 - 2 * max(0.0, float(fixed_points.max()))

    def max_true_positive_rate(self, false_positive_rate: ArrayLike, copies: int = 1) -> Array:
        """Largest true positive rate that any membership test reaches, 1 − f.

        min over ε of e^ε·fpr + δ(ε) and of 1 − e^−ε·(1 − fpr − δ(ε)); concave, increasing and never below fpr. Copies
        of a record compose: 1 − f is applied once for each (Dong, Roth & Su 2022, section 2.4, group privacy).

        Args:
            false_positive_rate: Between 0 and 1, of any shape.
            copies: Number of records that are members together.

        Returns:
            Of the same shape.

        Raises:
            ConfigurationError: A rate lies outside [0, 1].

        Gaussian noise of the same size as the sensitivity, without sampling (μ = 1; exactly Φ(Φ⁻¹(fpr) + 1)):

        >>> from dpbench.privacy.events import SumQuery
        >>> from dpbench.privacy.sampling import FullParticipation
        >>> gaussian = Event(FullParticipation(1000), (SumQuery("all", 1.0, 1.0),))
        >>> trade_off({gaussian: 1}).max_true_positive_rate([0.01, 0.1]).round(3)
        array([0.092, 0.389])
        """
        rates = np.asarray(false_positive_rate, dtype=np.float64)
        if not np.all((rates >= 0) & (rates <= 1)):  # not a number fails, too
            raise ConfigurationError(f"a false positive rate must lie between 0 and 1, not {rates}.")
        steep = np.exp(self.epsilon)[:, None]
        delta = self.delta[:, None]
        flat_rates = rates.reshape(-1)
        for _ in range(copies):
            tangents = steep * flat_rates + delta
            mirrored = 1 - (1 - flat_rates - delta) / steep
            least = np.minimum(tangents, mirrored).min(axis=0)
            flat_rates = np.minimum(least, 1.0)
        return np.asarray(flat_rates.reshape(rates.shape))


@dataclass(frozen=True)
class ReconstructionBound:
    """Bound on the success of an attacker that searches for one record among equally likely candidates.

    Attributes:
        candidates: Their number N, the record among them.
        copies: Number of copies of the record in the data set.
        probability: Largest probability that an attacker names the record.
        exposure: Largest mean exposure in bits, log2 N − log2 of the rank that an attacker gives the record.
    """

    candidates: int
    copies: int
    probability: float
    exposure: float


def reconstruction_bound(curve: TradeOff, candidates: int, copies: int = 1) -> ReconstructionBound:
    """Bound every reconstruction of a record from a uniform prior, by a trade-off curve f.

    The attacker knows all other records, the candidates and everything that was released, and ranks the candidates.
    Without the record the right one is among the first k with probability k/N on average over the candidates, so with
    it the probability is at most 1 − f(k/N): f is convex (Hayes, Mahloujifar & Balle 2023, the blow-up function at the
    prior κ; Kaissis et al. 2023 state it by f). The mean of log2 N − log2 rank is the sum over k < N of
    P(rank ≤ k)·log2((k + 1)/k).

    Args:
        curve: Trade-off curve of everything released, for one record added or removed (or replaced).
        candidates: N.
        copies: Number of copies of the target record in the data set; no other record may depend on it. 1 with a curve
            for all of them together.

    Raises:
        ConfigurationError: There are fewer than two candidates, or no copy.

    With perfect privacy every rank is as likely:

    >>> full = TradeOff(np.array([0.0]), np.array([0.0]))
    >>> bound = reconstruction_bound(full, 4097)
    >>> round(1 / bound.probability), round(bound.exposure, 2)
    (4097, 1.44)
    """
    if candidates < 2 or copies < 1:
        raise ConfigurationError(
            f"a reconstruction needs at least 2 candidates and 1 copy of the record, not candidates={candidates} and "
            f"copies={copies}."
        )
    ranks = np.arange(1, candidates, dtype=np.float64)
    probabilities = curve.max_true_positive_rate(ranks / candidates, copies)
    bits = np.log2(1 + 1 / ranks)
    return ReconstructionBound(candidates, copies, float(probabilities[0]), float(probabilities @ bits))


def trade_off(events: Mapping[Event, int], accountant: str | None = None, copies: int = 1) -> TradeOff:
    """Trade-off curve of the composition of releases.

    pld gives an upper bound on tests that is hardly above the truth, in about a tenth of a second. rdp gives the bound
    that follows from its δ at many ε, which is valid as well and larger.

    Args:
        events: How often each release was made.
        accountant: "pld" or "rdp"; None takes pld where it covers the sampling and takes seconds.
        copies: Number of records added or removed together; above 1 by pld for Poisson sampling only, in seconds.

    Raises:
        ConfigurationError: Neither covers the sampling, or releases of several neighboring relations.
    """
    name = accountant or curve_accountant(events)
    counts = composable(events, name)
    if not counts:
        return TradeOff(np.array([0.0]), np.array([0.0]))
    if name == "pld":
        composed = PldAccountant("a curve", interval=copies * _interval(counts)).composed(counts, copies)
        # Where the grid ends bounds nothing, so that it may lie where rounding hides δ.
        epsilons = _grid(PLDAccountant.get_epsilon(composed, _SMALLEST_DELTA))
        return TradeOff(epsilons, np.asarray(composed.get_delta(epsilons)))
    mathematics = ACCOUNTANTS[name]
    epsilons = _grid(mathematics.epsilon(counts, _SMALLEST_DELTA))
    deltas = [mathematics.delta(counts, epsilon) for epsilon in epsilons]
    return TradeOff(epsilons, np.array(deltas))


def curve_accountant(events: Mapping[Event, int]) -> str:
    """Name of the accountant that gives the curve: pld, or rdp for events without privacy losses and ε above 100."""
    counts = {event: count for event, count in events.items() if count}
    covers = ACCOUNTANTS["pld"].covers
    if not all(covers(sampling) and sampling.privacy_profile is None for sampling, _ in counts):
        return "rdp"
    if counts and sum(counts.values()) <= PLD_MOST_RELEASES:
        composed = composable(counts, "rdp")
        if ACCOUNTANTS["rdp"].epsilon(composed, 1e-5) > _CERTAIN:
            return "rdp"
        return "pld"
    return "rdp"


def _grid(largest: float) -> Array:
    return np.linspace(0, min(max(largest, 1e-6), _LARGEST_EPSILON), _TANGENTS)


def _interval(events: Mapping[Event, int]) -> float:
    """Interval of losses that is a small share of one release's standard deviation, within usual limits."""
    variance = 0.0
    for event, count in events.items():
        # The divergence of order 2 is about the variance of the loss; of one Gaussian sum it is exactly that.
        variance += count * float(RenyiAccountant.divergences(event, (2.0,))[0])
    deviation = math.sqrt(variance / sum(events.values()))
    return min(max(_SHARE * deviation, PldAccountant.interval), _COARSEST)


@dataclass(frozen=True)
class MembershipTarget:
    """A budget that is stated as the most that any membership test may reach (Kulynych et al. 2024).

    Attributes:
        limit: Largest true positive rate or, without a false positive rate, largest advantage.
        false_positive_rate: False positive rate at which the true positive rate is limited; None limits the advantage.

    Raises:
        ConfigurationError: The limit is reached without the releases, or is no limit.
    """

    limit: float
    false_positive_rate: float | None = None

    def __post_init__(self) -> None:
        rate = self.false_positive_rate
        if rate is None and not 0 < self.limit < 1:
            raise ConfigurationError(f"advantage must lie strictly between 0 and 1, not {self.limit:g}.")
        if rate is not None and not 0 < rate < self.limit < 1:
            raise ConfigurationError(
                "the true positive rate must lie strictly between the false positive rate, which random guessing "
                f"reaches, and 1, not {self.limit:g} at {rate:g}."
            )

    def __str__(self) -> str:
        if self.false_positive_rate is None:
            return f"advantage={self.limit:g}"
        return f"tpr={self.limit:g}@{self.false_positive_rate:g}"

    def risk_of(self, events: Mapping[Event, int]) -> float:
        """Value of the limited quantity for some releases."""
        curve = trade_off(events)
        if self.false_positive_rate is None:
            return curve.advantage
        return float(curve.max_true_positive_rate(self.false_positive_rate))


@dataclass(frozen=True, eq=False)
class MembershipBound:
    """Bound of releases on all membership tests.

    Attributes:
        curve: Trade-off curve; `curve.max_true_positive_rate(fpr)` and `curve.advantage` are the bounds.
        accountant: "pld", or "rdp" where pld does not cover the sampling: a valid bound that is larger.
        nominal: True if the sampling was taken for another one, as for a nominal ε.
        group: Number of records added or removed together that the curve is for.
    """

    curve: TradeOff
    accountant: str
    nominal: bool = False
    group: int = 1

    def facts(self) -> dict[str, Any]:
        """For records and JSON: the advantage, and the true positive rate at some false positive rates."""
        rates = self.curve.max_true_positive_rate(FALSE_POSITIVE_RATES)
        pairs = zip(FALSE_POSITIVE_RATES, rates, strict=True)
        return {
            "accountant": self.accountant,
            "nominal": self.nominal,
            "advantage": self.curve.advantage,
            "true_positive_rates": {f"{false_positive_rate:g}": float(rate) for false_positive_rate, rate in pairs},
        }


def membership_bound(ledgers: Sequence[Ledger], nominal: bool = False, copies: int = 1) -> MembershipBound:
    """Bound of every membership test on the releases of ledgers, of runs on the same data.

    Args:
        ledgers: Ledgers of the runs.
        nominal: True to take sampling that no accountant covers for one that it covers.
        copies: Number of records that are members together. The curve is for all of them where it takes seconds, and
            else for one: see `MembershipBound.group`.

    Raises:
        ConfigurationError: No accountant covers the sampling, or the ledgers do not compose.
    """
    cost = LedgerCost(ledgers, "rdp", nominal)
    events: Counter[Event] = Counter()
    for ledger in ledgers:
        events += cost.events(ledger)
    accountant = curve_accountant(events)
    is_quick = copies <= _LARGEST_GROUP and len(events) <= _MOST_OF_A_GROUP
    is_covered = accountant == "pld" and is_quick and all(_composes_groups(event, copies) for event in events)
    group = copies if is_covered else 1
    return MembershipBound(trade_off(events, accountant, group), accountant, not cost.covered, group)


def _composes_groups(event: Event, copies: int) -> bool:
    """Return whether pld composes a release for a group in seconds: losses grow with the square of a batch's shift."""
    if not isinstance(event.sampling, PoissonSampling):
        return False
    drawn = float(stats.binom.isf(1e-20, copies, event.sampling.rate))
    return drawn <= _LARGEST_SHIFT * effective_noise_multiplier(event.queries)
