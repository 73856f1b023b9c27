"""From ledgers to epsilons.

This module reads events, never the training code; `privacy.accounting.accountants` holds the mathematics by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, Accountant, RenyiAccountant
from dpbench.privacy.accounting.ledger import Ledger, with_units
from dpbench.privacy.events import (
    Event,
    Queries,
    SumQuery,
    effective_noise_multiplier,
    equivalent_queries,
    record_changes,
)
from dpbench.privacy.sampling import Sampling

_MEANINGLESS = 100.0  # ε of one release
_LARGEST_FIRST = 8.0  # of the ε₁ among which a surcharge is the least
_FIRST = 401
MOST_COSTS = 100  # distinct releases that an accountant is asked to compose one by one


def find_accountant(name: str) -> Accountant:
    """The accountant of that name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in ACCOUNTANTS:
        raise ConfigurationError(f"unknown accountant {name!r}; known are {', '.join(ACCOUNTANTS)}.")
    return ACCOUNTANTS[name]


def check_delta(delta: float) -> None:
    """Raise ConfigurationError unless 0 < δ < 1."""
    if not 0 < delta < 1:
        raise ConfigurationError(f"delta must lie strictly between 0 and 1, not {delta}.")


def doubts_about(
    delta: float,
    noise_multiplier: float,
    population: int | None,
    unit: str,
) -> list[str]:
    """Say why a δ is too large to mean anything, and noise too small; nothing of usual ones.

    Args:
        delta: δ.
        noise_multiplier: Noise over sensitivity, the least of any release.
        population: Number of records that can be drawn; None where it is not known.
        unit: Unit of privacy, such as "example".
    """
    doubts = []
    if population is not None and delta >= 1 / population:
        doubts.append(
            f"delta={delta} is not below 1/{population} (the number of {unit}s): with such a delta, publishing one "
            f"{unit} in the clear would count as private; choose a smaller one."
        )
    with np.errstate(divide="ignore"):  # log δ is −∞ where the search begins too far
        of_one_batch = float(dp_accounting.get_epsilon_gaussian(noise_multiplier, delta))
    if of_one_batch > _MEANINGLESS:
        doubts.append(
            f"noise_multiplier={noise_multiplier:.3g} protects no {unit}: a single batch already costs "
            f"epsilon={of_one_batch:.3g}; raise it (0.3 to 3 is usual)."
        )
    return doubts


def epsilon(
    events: Mapping[Event, int],
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Epsilon of the composition of releases.

    Args:
        events: How often each release was made; their order does not matter.
        delta: δ.
        accountant: A name in `ACCOUNTANTS`.

    Returns:
        ε as an upper bound (with "gdp" an approximation); infinite if no order gives one. With "rdp" a fraction of a
        millisecond, once the curve of each distinct release is known.

    Raises:
        ConfigurationError: Unknown accountant, δ outside (0, 1), a sampling that the accountant does not cover, or
            releases of several neighboring relations.

    MNIST with noise multiplier 1.1 and batches of 256, for 8,000 steps:

    >>> from dpbench.privacy.sampling import PoissonSampling
    >>> release = Event(PoissonSampling(60_000, 256 / 60_000), (SumQuery("all", 1.0, 1.1),))
    >>> round(epsilon({release: 8000}, delta=1e-5), 2)
    1.92
    """
    mathematics = find_accountant(accountant)
    check_delta(delta)
    counts = composable(events, accountant)
    if not counts:
        return 0.0
    return mathematics.epsilon(counts, delta)


def delta_of(
    events: Mapping[Event, int],
    epsilon: float,
    accountant: str = "rdp",
) -> float:
    """Delta of the composition of releases at a given ε, between 0 and 1; otherwise as `epsilon`.

    >>> from dpbench.privacy.sampling import PoissonSampling
    >>> gaussian = Event(PoissonSampling(60_000, 1.0), (SumQuery("all", 1.0, 2.0),))
    >>> f"{delta_of({gaussian: 1}, epsilon=1.0, accountant='pld'):.3g}"
    '0.00683'
    """
    mathematics = find_accountant(accountant)
    counts = composable(events, accountant)
    if not counts:
        return 0.0
    return mathematics.delta(counts, epsilon)


def composable(events: Mapping[Event, int], accountant: str) -> dict[Event, int]:
    """Releases that were made, in a form that an accountant composes in good time.

    Where more than a hundred distinct costs would take minutes, noise multipliers are rounded to the costly side, so
    that about a hundred remain: the epsilon stays an upper bound.

    Raises:
        ConfigurationError: The accountant does not cover the sampling, or the neighboring relations differ.
    """
    # A batch that is free has its cost stated by the first batch of its round.
    counts = {event: count for event, count in events.items() if count and not event.sampling.is_free}
    # First: a sampling that no accountant covers raises here, with the remedy.
    relations = {sampling.relation for sampling, _ in counts}
    _require_coverage(counts, accountant)
    if len(relations) > 1:
        raise ConfigurationError(
            "releases with Poisson sampling (add or remove one) and with batches of fixed size (replace one) do not "
            "compose into one epsilon: account for them separately."
        )
    coarser = coarser_costs(counts)
    merged: Counter[Event] = Counter()
    for event, count in counts.items():
        merged[coarser[event]] += count
    return dict(merged)


def _require_coverage(events: Collection[Event], accountant: str) -> None:
    """Raise ConfigurationError unless the accountant covers the sampling of all releases."""
    for sampling, _ in events:
        if not ACCOUNTANTS[accountant].covers(sampling):
            names = [name for name, other in ACCOUNTANTS.items() if other.covers(sampling)]
            raise ConfigurationError(
                f"the {accountant} accountant does not cover {sampling.kind!r} sampling; use another accountant "
                f"({', '.join(names)})."
            )


def coarser_costs(events: Collection[Event]) -> dict[Event, Event]:
    """Map each release to itself or, where there are too many, to one of about a hundred that cost as much or more.

    Noise multipliers are rounded down to values that are evenly spaced in their logarithm: the costly side.
    """
    samplings = {sampling for sampling, _ in events}
    if len(events) <= MOST_COSTS or len(samplings) > MOST_COSTS // 2:
        return {event: event for event in events}
    coarser: dict[Event, Event] = {}
    for sampling in samplings:
        own = [event for event in events if event.sampling == sampling]
        logs = {event: math.log(effective_noise_multiplier(event.queries)) for event in own}
        lowest = min(logs.values())
        span = max(logs.values()) - lowest
        step = max(span / (MOST_COSTS // len(samplings)), 1e-5)
        for event, log in logs.items():
            stair = math.floor((log - lowest) / step)
            rounded = math.exp(lowest + stair * step)
            # The rounding of `exp` must not make a release cheaper than it is.
            multiplier = min(rounded, math.exp(log)) * (1 - 1e-14)
            query = SumQuery("equivalent", 1.0, multiplier)
            coarser[event] = Event(sampling, (query,))
    return coarser


def ledger_epsilon(ledger: Ledger, delta: float, accountant: str = "rdp") -> float:
    """Epsilon of everything that a ledger holds, with an example as the unit; see `epsilon`."""
    return epsilon(ledger.events, delta, accountant)


def microbatch_epsilon(ledger: Ledger, delta: float, accountant: str = "rdp") -> float:
    """Epsilon with a *fixed* microbatch as the unit, as papers with microbatches state it.

    It is nominal: it holds if the examples of a microbatch are always drawn together. One of them alone is
    protected by `ledger_epsilon` only, because it can turn its microbatch's clipped gradient into any other.
    """
    size = ledger.header.microbatch_size
    counts: Counter[Event] = Counter()
    for _, release in ledger.releases:
        event = _microbatch_event(release.sampling, release.queries, size)
        counts[event] += 1
    return epsilon(counts, delta, accountant)


@lru_cache(maxsize=1024)
def _microbatch_event(
    sampling: Sampling,
    queries: Queries,
    size: int,
) -> Event:
    """A release's cost for a fixed microbatch of `size` examples that joins, leaves or is replaced as a whole."""
    # Queries state the sensitivity for one example. A sum over microbatches moves by the bounds of a whole one instead;
    # one over examples, as of a private metric, by all examples of the microbatch.
    whole_over_example = sampling.record_changes / record_changes(sampling, size)
    moved = []
    for query in with_units(queries, size):
        factor = whole_over_example if query.unit else size
        moved.append(query._replace(sensitivity=query.sensitivity * factor))
    return Event(sampling, equivalent_queries(moved))


def nominal_events(
    events: Mapping[Event, int],
    accountant: str,
    microbatch_size: int = 1,
) -> Counter[Event]:
    """Convert releases to sampling that an accountant covers: covered ones unchanged, others taken for covered ones.

    An epsilon from these is *nominal*: it belongs to batches that were not drawn (as where shuffled epochs are
    accounted for as Poisson sampling), with the neighboring relation of those batches and the same rate and noise.

    Args:
        events: Releases as drawn, with their counts.
        accountant: A name in `ACCOUNTANTS`.
        microbatch_size: μ of the run: with microbatches every neighbor moves a sum by two bounds.

    >>> from dpbench.privacy.sampling import ShuffledEpochs
    >>> shuffled = Event(ShuffledEpochs(1000, 50), (SumQuery("all", 1.0, 4.0),))
    >>> ((nominal, count),) = nominal_events({shuffled: 20}, "rdp").items()
    >>> nominal.sampling, count
    (PoissonSampling(population=1000, unit='example', sample_rate=0.05), 20)
    """
    mathematics = find_accountant(accountant)
    nominal: Counter[Event] = Counter()
    for event, count in events.items():
        sampling, queries = event
        if mathematics.covers(sampling):
            nominal[event] += count
            continue
        rate = min(1.0, sampling.rate)
        covered = mathematics.nominal.at_rate(sampling.population, rate, sampling.unit)
        changes = record_changes(covered, microbatch_size)
        drawn_changes = record_changes(sampling, microbatch_size)
        factor = changes / max(1, drawn_changes)
        moved = [query._replace(sensitivity=query.sensitivity * factor) for query in queries]
        nominal[Event(covered, equivalent_queries(moved))] += count
    return nominal


@dataclass(frozen=True)
class Selection:
    """Distribution of the number of runs of which only the best is published; drawn before anything is seen.

    Attributes:
        shape: η of the truncated negative binomial distribution: 1 is geometric, 0 logarithmic; infinite is Poisson.
        mean_trials: Its mean.
    """

    shape: float
    mean_trials: float

    def __post_init__(self) -> None:
        if not (self.shape >= 0 and 1 <= self.mean_trials < math.inf):
            raise ConfigurationError(
                f"a selection needs a mean number of trials of at least 1 and a shape of at least 0, not "
                f"{self.mean_trials} and {self.shape}."
            )

    def curve(self, orders: Sequence[float], trial: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rényi divergences of the best of the trials (Papernot & Steinke 2022, theorems 2 and 6).

        Args:
            orders: Orders; more of them may give a lower bound.
            trial: (orders,) largest divergence of any trial.
        """
        selected = rdp_privacy_accountant._compute_rdp_repeat_and_select(
            np.asarray(orders),
            trial,
            self.mean_trials,
            self.shape,
        )
        return np.asarray(selected)

    @property
    def gamma(self) -> float:
        """γ of the negative binomial distribution with the mean."""
        return float(rdp_privacy_accountant._gamma_truncated_negative_binomial(self.shape, self.mean_trials))

    def surcharge(self, delta_of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> float:
        """ε that choosing adds to that of one trial at δ over the mean number of trials (Koskela et al. 2024).

        If f is the generating function of the number of trials, the density of the best output y is that of one trial
        times f'(F(y)), with F(y) the probability that a trial is no better. Between neighbors f'(F(y)) differs by at
        most the exponential of the surcharge, since F differs by at most a trial's (ε₁, δ(ε₁)), for every ε₁; and
        f' is at most the mean. So the best is (ε̂ + surcharge, mean · δ(ε̂))-private, for every ε̂.

        Args:
            delta_of: δ of a trial at each of some ε.
        """
        if math.isinf(self.shape):
            return float(self.mean_trials * delta_of(np.zeros(1))[0])
        odds = (1 - self.gamma) / self.gamma
        grid = np.linspace(0, _LARGEST_FIRST, _FIRST)
        return float((1 + self.shape) * np.log(np.exp(grid) + odds * delta_of(grid)).min())


def selection_epsilon(
    runs: Sequence[Mapping[Event, int]],
    selection: Selection,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Epsilon of publishing only the best of a random number of runs (Papernot & Steinke 2022).

    Valid if the number of trials was drawn from the distribution independently of the data, each trial's settings
    independently from one fixed distribution, and nothing but the best run's output is published.

    Args:
        runs: Releases of each kind of run that a trial can be; each trial is taken to cost as much as the costliest
            of them at every order.
        selection: The distribution of the number of trials.
        delta: δ.
        accountant: One of the Rényi accountants.

    Raises:
        ConfigurationError: The accountant has no Rényi curve, or as `epsilon`.
    """
    renyi = find_accountant(accountant)
    check_delta(delta)
    if not isinstance(renyi, RenyiAccountant):
        names = [name for name, other in ACCOUNTANTS.items() if isinstance(other, RenyiAccountant)]
        raise ConfigurationError(
            f"the cost of selection is known for Rényi accountants ({', '.join(names)}), not {accountant}."
        )
    kinds = [composable(run, accountant) for run in runs]
    relations = {sampling.relation for counts in kinds for sampling, _ in counts}
    if len(relations) != 1:
        raise ConfigurationError("a selection needs runs with releases, all under the same neighboring relation.")
    curves = [renyi.curve(counts) for counts in kinds if counts]
    selected = selection.curve(renyi.orders, np.max(curves, axis=0))
    by_order = renyi.epsilon_by_order(selected, delta)
    return max(0.0, float(by_order.min()))


@dataclass(frozen=True)
class LedgerCost:
    """Joint cost of runs on the same data, by one accountant.

    Attributes:
        ledgers: Ledgers of the runs.
        accountant: A name in `ACCOUNTANTS`.
        nominal: True to take sampling that the accountant does not cover for one that it covers.
    """

    ledgers: Sequence[Ledger]
    accountant: str
    nominal: bool = False

    @property
    def samplings(self) -> set[Sampling]:
        """How batches were drawn."""
        return {sampling for ledger in self.ledgers for sampling, _ in ledger.events}

    @property
    def covered(self) -> bool:
        """Return whether the accountant covers the sampling of all releases: otherwise its figure is nominal."""
        return all(map(ACCOUNTANTS[self.accountant].covers, self.samplings))

    @property
    def basis(self) -> dict[str, bool | str]:
        """Status of the figure: a guarantee or nominal, and its neighboring relation."""
        mathematics = ACCOUNTANTS[self.accountant]
        covered = self.covered
        headers = [header for ledger in self.ledgers for header in ledger.headers]
        # The cost of a process of a foreign class is that class's word.
        is_stated = all(header.plan is None or header.plan.noise.described is None for header in headers)
        relation = self.ledgers[0].header.neighboring_relation
        if not covered:
            relation = mathematics.nominal.neighboring_relation
        return {
            "guarantee": mathematics.guarantee and covered and is_stated,
            "nominal": not covered,
            "neighbouring_relation": relation,
        }

    def events(self, ledger: Ledger) -> Counter[Event]:
        """Releases of one of the runs, as the accountant takes them."""
        if not self.nominal:
            return ledger.events
        return nominal_events(ledger.events, self.accountant, ledger.header.microbatch_size)

    def epsilon(self, delta: float, selection: Selection | None = None) -> float:
        """ε of all runs together, or of publishing only the best of them.

        Args:
            delta: δ.
            selection: Distribution of the number of runs of which only the best is published.

        Raises:
            ConfigurationError: See `epsilon` and `selection_epsilon`.
        """
        runs = [self.events(ledger) for ledger in self.ledgers]
        if selection is not None:
            return selection_epsilon(runs, selection, delta, self.accountant)
        return epsilon(sum(runs, Counter()), delta, self.accountant)
