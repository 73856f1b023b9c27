"""From ledgers to epsilons: Google's dp_accounting does the mathematics.

This module reads events, never the training code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray

from dpbench.errors import ConfigurationError
from dpbench.privacy.ledger import Event, Ledger, counted_event
from dpbench.privacy.plan import METRIC, SumQuery, effective_noise_multiplier, equivalent_queries, record_changes
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling

_RELATIONS = {
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}


_PLD_LIMIT = 100.0


class _RdpAccountant(rdp_privacy_accountant.RdpAccountant):
    """Shows the composed curve, so that one release's curve serves for any number of releases."""

    @property
    def curve(self) -> NDArray[np.float64]:
        """Rényi divergence at each of the orders."""
        return np.asarray(self._rdp)

    def epsilon_of(self, curve: NDArray[np.float64], delta: float) -> float:
        """Convert any curve over these orders."""
        return float(rdp_privacy_accountant.compute_epsilon(self._orders, curve, delta)[0])


def _rdp(relation: NeighboringRelation) -> dp_accounting.PrivacyAccountant:
    return _RdpAccountant(neighboring_relation=relation)


def _pld(relation: NeighboringRelation) -> dp_accounting.PrivacyAccountant:
    return PLDAccountant(relation)


ACCOUNTANTS: dict[str, Callable[[NeighboringRelation], dp_accounting.PrivacyAccountant]] = {"rdp": _rdp, "pld": _pld}
"""By name: Rényi DP (Mironov 2017; conversion of Canonne et al. 2020), privacy loss distributions (numerical)."""


def check_accountant(name: str) -> None:
    """Raise ConfigurationError unless there is an accountant of that name."""
    if name not in ACCOUNTANTS:
        raise ConfigurationError(f"unknown accountant {name!r}; known are {', '.join(ACCOUNTANTS)}.")


def check_delta(delta: float) -> None:
    """Raise ConfigurationError unless 0 < δ < 1."""
    if not 0 < delta < 1:
        raise ConfigurationError(f"delta must lie strictly between 0 and 1, not {delta}.")


def dp_event(sampling: Sampling, queries: tuple[SumQuery, ...]) -> dp_accounting.DpEvent:
    """One release as dp_accounting's event; all queries of a release read the same lot."""
    gaussian = dp_accounting.GaussianDpEvent(effective_noise_multiplier(queries))
    if isinstance(sampling, PoissonSampling):
        return (
            gaussian
            if sampling.sample_rate == 1
            else dp_accounting.PoissonSampledDpEvent(sampling.sample_rate, gaussian)
        )
    if isinstance(sampling, FixedSizeSampling):
        return dp_accounting.SampledWithoutReplacementDpEvent(sampling.population, sampling.batch_size, gaussian)
    raise ConfigurationError(
        f"no accountant covers {sampling.kind!r} sampling; draw lots with data.sampling=poisson or fixed_size."
    )


def epsilon(events: Mapping[Event, int], delta: float, accountant: str = "rdp") -> float:
    """Epsilon of the composition of releases.

    Args:
        events: How often each release was made; their order does not matter.
        delta: δ.
        accountant: A name in `ACCOUNTANTS`.

    Returns:
        ε as an upper bound; infinite if no order gives one. With "rdp" a fraction of a millisecond, once the curve
        of each distinct release is known.

    Raises:
        ConfigurationError: Unknown accountant, δ outside (0, 1), or a sampling that the accountant does not cover.
    """
    check_accountant(accountant)
    check_delta(delta)
    counted = {event: count for event, count in events.items() if count}
    if not counted:
        return 0.0
    if accountant == "rdp":
        machines = [_single_release(event) for event in counted]
        curve = sum(count * machine.curve for machine, count in zip(machines, counted.values(), strict=True))
        return machines[0].epsilon_of(np.asarray(curve), delta)
    if accountant == "pld" and epsilon(counted, delta, "rdp") > _PLD_LIMIT:
        raise ConfigurationError(
            f"the pld accountant is not computed above an epsilon of {_PLD_LIMIT:.0f} (its tables would take hours and "
            "gigabytes): use rdp."
        )
    machine = ACCOUNTANTS[accountant](_relation(next(iter(counted))[0]))
    for (sampling, queries), count in counted.items():
        try:
            machine.compose(dp_event(sampling, queries), count)
        except dp_accounting.UnsupportedEventError:
            raise ConfigurationError(
                f"the {accountant} accountant does not cover {sampling.kind!r} sampling; use another accountant."
            ) from None
    return float(machine.get_epsilon(delta))


@lru_cache(maxsize=1024)
def _single_release(event: Event) -> _RdpAccountant:
    machine = _RdpAccountant(neighboring_relation=_relation(event[0]))
    machine.compose(dp_event(*event))
    return machine


def _relation(sampling: Sampling) -> NeighboringRelation:
    if sampling.neighbouring_relation not in _RELATIONS:
        raise ConfigurationError(
            f"no accountant covers {sampling.kind!r} sampling; draw lots with data.sampling=poisson or fixed_size."
        )
    return _RELATIONS[sampling.neighbouring_relation]


def ledger_events(ledger: Ledger) -> Counter[Event]:
    """All releases of a ledger, those of equal cost counted together (their order does not matter)."""
    return Counter(counted_event(release) for _, release in ledger.releases)


def ledger_epsilon(ledger: Ledger, delta: float, accountant: str = "rdp") -> float:
    """Epsilon of everything that a ledger holds, with an example as the unit; see `epsilon`."""
    return epsilon(ledger_events(ledger), delta, accountant)


def microbatch_epsilon(ledger: Ledger, delta: float, accountant: str = "rdp") -> float:
    """Epsilon with a *fixed* microbatch as the unit, as papers with microbatches state it.

    It is nominal: what holds if the examples of a microbatch always are drawn together. One of them alone is
    protected by `ledger_epsilon` only, because it can turn its microbatch's clipped gradient into any other.
    """
    size = ledger.header.microbatch_size
    counted = Counter(_of_a_microbatch(release.sampling, release.queries, size) for _, release in ledger.releases)
    return epsilon(counted, delta, accountant)


@lru_cache(maxsize=1024)
def _of_a_microbatch(sampling: Sampling, queries: tuple[SumQuery, ...], size: int) -> Event:
    """A release's cost for a fixed microbatch of `size` examples that joins, leaves or is replaced as a whole."""
    own = sampling.record_changes / record_changes(sampling, size)
    whole = [
        SumQuery(query.name, query.sensitivity * (size if query.name.startswith(METRIC) else own), query.noise_std)
        for query in queries
    ]
    return sampling, equivalent_queries(whole)


def remaining_releases(
    spent: Mapping[Event, int], event: Event, target_epsilon: float, delta: float, accountant: str, most: int
) -> int:
    """How many more releases like `event`, at most `most`, keep the whole within `target_epsilon`."""

    def fits(count: int) -> bool:
        return epsilon(Counter(spent) + Counter({event: count}), delta, accountant) <= target_epsilon

    if not fits(0):
        return 0
    low, high = 0, 1
    while fits(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrate_noise_multiplier(
    event_for: Callable[[float], Event], steps: int, target_epsilon: float, delta: float, accountant: str = "rdp"
) -> float:
    """Smallest noise multiplier (to 1e-6) for which `steps` releases stay within `target_epsilon`.

    Args:
        event_for: The release that a noise multiplier gives.
        steps: Number of releases.
        target_epsilon: ε.
        delta: δ.
        accountant: A name in `ACCOUNTANTS`.

    Raises:
        ConfigurationError: No noise reaches the target.
    """
    check_accountant(accountant)
    check_delta(delta)
    if not target_epsilon > 0 or not math.isfinite(target_epsilon):
        raise ConfigurationError(f"target_epsilon must be a positive number, not {target_epsilon}.")
    smallest, largest = 1e-2, 1e4
    epsilon({event_for(largest): 1}, delta, accountant)  # refuses what the accountant does not cover

    def within(noise_multiplier: float, name: str) -> bool:
        return epsilon({event_for(noise_multiplier): steps}, delta, name) <= target_epsilon

    if not within(largest, "rdp"):
        raise ConfigurationError(
            f"no noise_multiplier up to {largest:.0f} reaches target_epsilon={target_epsilon} in {steps} steps at "
            f"delta={delta}: raise target_epsilon or delta, or train for fewer steps."
        )
    if within(smallest, "rdp"):
        return smallest
    found = _calibrate(event_for, steps, target_epsilon, delta, "rdp", (smallest, largest))
    if accountant != "rdp":  # tighter accountants need less noise, and are too slow to search the whole range
        found = _calibrate(event_for, steps, target_epsilon, delta, accountant, (0.5 * found, found))
    while not within(found, accountant):
        found *= 1 + 1e-6
    return found


def _calibrate(
    event_for: Callable[[float], Event],
    steps: int,
    target_epsilon: float,
    delta: float,
    accountant: str,
    bracket: tuple[float, float],
) -> float:
    relation = _relation(event_for(1.0)[0])
    found = dp_accounting.calibrate_dp_mechanism(
        lambda: ACCOUNTANTS[accountant](relation),
        lambda z: dp_accounting.SelfComposedDpEvent(dp_event(*event_for(z)), steps),
        target_epsilon,
        delta,
        dp_accounting.ExplicitBracketInterval(*bracket),
        tol=1e-6,
    )
    return float(found)
