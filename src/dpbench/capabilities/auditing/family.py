"""The family that a ledger belongs to: its own releases, with all noise scaled by one factor."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, PldAccountant
from dpbench.privacy.accounting.composition import composable, epsilon
from dpbench.privacy.accounting.ledger import Ledger, counted_event
from dpbench.privacy.accounting.tradeoff import TradeOff
from dpbench.privacy.events import Event
from dpbench.privacy.sampling import PoissonSampling

LEAST_SCALE = 1e-3  # of noise; a mechanism beyond is broken, however far
MOST_SCALE = 1e3
_STEP = 0.004  # of the logarithm of the scales that are tried
_STEPS = range(round(math.log(LEAST_SCALE) / _STEP), round(math.log(8) / _STEP) + 1)
_GRID = 60 * np.linspace(0, 1, 161) ** 2  # of ε, at which δ is asked for
_INTERVALS = (5e-3, 2e-3, 5e-4, 1e-4)  # of losses, coarse ones first
_CLOSE = 1e-3  # relative error of ε that a coarse interval may make
_MOST_ROUGH = 90.0  # RDP's ε at δ = 1e-5; beyond, hundreds of scales would take minutes


class Family:
    """Releases of a ledger with all noise scaled by a factor: their cost, and bounds on tests.

    Args:
        events: How often each release was made.
        delta: δ.

    Attributes:
        accountant: Accountant of ε: "pld" or, where that does not cover the batches or ε is above 90, "rdp"; None where
            neither covers them.
        uncovered: None, or why there are no trade-off curves.
    """

    def __init__(self, events: Mapping[Event, int], delta: float) -> None:
        self.events = dict(events)
        self.delta = delta
        self.accountant, self.uncovered = self._choose_accountant()
        self._curves: dict[float, TradeOff] = {}

    def _choose_accountant(self) -> tuple[str | None, str | None]:
        """Name of the accountant, and why there are no trade-off curves."""
        uncovered = self.kinds_not_covered("pld")
        if not uncovered and self._feasible(1.0):
            return "pld", None
        reason = "privacy loss distributions are not computed for so large an ε"
        if uncovered:
            reason = f"privacy loss distributions do not cover {' and '.join(uncovered)} batches"
        return None if self.kinds_not_covered("rdp") else "rdp", reason

    def kinds_not_covered(self, accountant: str) -> list[str]:
        """Kinds of batches that an accountant does not cover."""
        covers = ACCOUNTANTS[accountant].covers
        kinds = {sampling.kind: sampling for sampling, _ in self.events}
        return [kind for kind, sampling in kinds.items() if not covers(sampling)]

    def scaled(self, scale: float) -> dict[Event, int]:
        """The releases with all noise scaled by a factor."""
        events = {}
        for (sampling, queries), count in self.events.items():
            scaled = tuple(query._replace(noise_std=query.noise_std * scale) for query in queries)
            events[Event(sampling, scaled)] = count
        return events

    @cached_property
    def claimed(self) -> float:
        """ε of the ledger itself, infinite where no accountant covers it."""
        if self.accountant is None:
            return math.inf
        return epsilon(self.events, self.delta, self.accountant)

    @property
    def sound(self) -> float | None:
        """The same; None where it is infinite."""
        return self.claimed if math.isfinite(self.claimed) else None

    def epsilon(self, scale: float) -> float:
        """ε of the releases with all noise scaled by a factor, which is cut to [10⁻³, 10³].

        By the accountant of the ledger, but by RDP where that does not compute so large an ε. Infinite where no
        accountant covers the batches.
        """
        scale = min(max(scale, LEAST_SCALE), MOST_SCALE)
        if self.accountant is None:
            return math.inf
        if self.accountant == "pld" and self._feasible(scale):
            return self._pld.epsilon(composable(self.scaled(scale), "pld"), self.delta)
        return epsilon(self.scaled(scale), self.delta, "rdp")

    def curve(self, scale: float) -> TradeOff:
        """Trade-off curve of the releases with all noise scaled by a factor.

        Raises:
            ConfigurationError: Privacy loss distributions do not cover the batches.
        """
        if self.uncovered is not None:
            raise ConfigurationError(f"there is no trade-off curve: {self.uncovered}.")
        if scale not in self._curves:
            composed = self._pld.composed(composable(self.scaled(scale), "pld"))
            self._curves[scale] = TradeOff(_GRID, np.asarray(composed.get_delta(_GRID)))
        return self._curves[scale]

    def smallest_refuted(self, refutes: Callable[[TradeOff], bool]) -> float:
        """Smallest scale of the noise that a test refutes, from a grid of steps of 0.4 %; infinite if not even 8 is.

        Args:
            refutes: Function that returns whether a trade-off curve is refuted; more noise is refuted more easily.
        """

        def refuted(step: int) -> bool:
            scale = math.exp(step * _STEP)
            return self._feasible(scale) and refutes(self.curve(scale))

        first = bisect_left(_STEPS, True, key=refuted)
        return math.exp(_STEPS[first] * _STEP) if first < len(_STEPS) else math.inf

    def _feasible(self, scale: float) -> bool:
        """Return whether privacy loss distributions of so little noise are computed in seconds."""
        return epsilon(self.scaled(scale), 1e-5, "rdp") < _MOST_ROUGH

    @cached_property
    def _pld(self) -> PldAccountant:
        """An accountant with the coarsest interval that gives the ledger's ε."""
        events = composable(self.events, "pld")
        for interval in _INTERVALS:
            accountant = PldAccountant("coarse", interval=interval)
            if accountant.epsilon(events, self.delta) <= self.claimed * (1 + _CLOSE):
                break
        return accountant


def reached(ledger: Ledger, family: Family) -> Family:
    """A family with every ε reached by a pair of neighbors: the run's own or, for batches of a fixed size, Poisson's.

    For batches of a fixed size the accountant, RDP, gives an upper bound only. Where the gradients of all other records
    (or microbatches) are at −C, and one at C is replaced by one at −C, a sum tells whether that one was drawn:
    Poisson's pair at the batches' rate, with the same sensitivity. Statistics released with the gradients, many of
    which no replacement moves by all that is declared, are left out (to ignore them is post-processing).

    Args:
        ledger: Ledger of the run.
        family: Family of its releases.
    """
    if not any(sampling.without_replacement for sampling, _ in family.events):
        return family
    pairs: Counter[Event] = Counter()
    for _, release in ledger.releases:
        gradients = tuple(query for query in release.queries if "/" not in query.name)  # as in count/…, metric/…
        if gradients:
            like = PoissonSampling.at_rate(release.sampling.population, release.sampling.rate)
            pairs[counted_event(replace(release, sampling=like, queries=gradients))] += 1
    return Family(pairs, family.delta)
