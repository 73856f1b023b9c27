"""Additional δ due to the bounded support of the noise.

Gaussian noise has unbounded support; computed noise has not. A coordinate that lies beyond the end of the noise shows
that a record moved it. For every event and with E the end in standard deviations,

    P[M(D) in A] <= P[M(D) in A, no coordinate beyond] + P[some coordinate beyond],

of which the first is at most e^ε P[M(D') in A] + δ, because the ends cut both densities alike. So the second comes on
top of δ. A record moves the sum by 1/z standard deviations in all; spread over k coordinates it puts one of them beyond
with a probability of at most k (Q(E - 1/(z√k)) - Q(E)), where Q is the Gaussian tail. That is largest for one
coordinate where z is small, and for all where it is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from dpbench.privacy.accounting.ledger import Header, Ledger, counted_event
from dpbench.privacy.events import Event, effective_noise_multiplier

OLDEST_END = math.sqrt(48 * math.log(2))
"""5.77 standard deviations: the end of older versions' noise without compiled kernels; with them 7.45."""
STATED_BEFORE = 11.5
"""The end that ledgers state whose noise, without compiled kernels, lost bits of its radius."""
END_BEFORE = math.sqrt(108 * math.log(2))
"""8.65 standard deviations: where that noise ended."""
MOST_COORDINATES = 10**12
"""More than any network has: a bound for as many holds for all."""


def _tail(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def mass_beyond(
    noise_multiplier: float,
    end: float,
    coordinates: int = MOST_COORDINATES,
) -> float:
    """Bound the probability that a record moves a coordinate of one release to where noise alone never is.

    Args:
        noise_multiplier: z of the release, above 0.
        end: E, in standard deviations.
        coordinates: Most that a record can move. One gives a *lower* bound for the record that is best seen.

    >>> f"{mass_beyond(1.1, OLDEST_END, coordinates=1):.2g}"
    '5.9e-07'
    >>> mass_beyond(0.3, 11.5) < 1e-14
    True
    """
    shift = 1 / noise_multiplier
    powers_of_two = [2**power for power in range(coordinates.bit_length())]
    largest = 0.0
    unmoved = _tail(end)
    for k in [*powers_of_two, coordinates]:
        nearer = end - shift / math.sqrt(k)
        mass = k * (_tail(nearer) - unmoved)
        largest = max(largest, mass)
    return min(1.0, largest)


def uncovered_mass(
    events: Mapping[Event, int],
    end: float,
    coordinates: int = MOST_COORDINATES,
) -> float:
    """Delta that no ε covers, of all releases together: that one of them shows a record which was in its batch.

    Args:
        events: How often each release was made.
        end: End of the noise, in standard deviations.
        coordinates: Most that a record can move; see `mass_beyond`.
    """
    log_unseen = 0.0  # of the probability that no release shows a record
    for (sampling, queries), count in events.items():
        if sampling.trials:
            worst = max(uncovered_mass(trial, end, coordinates) for trial in sampling.trials)
            probability = min(1.0, sampling.expected_trials * worst)
        else:
            in_lot = min(1.0, sampling.rate)
            noise_multiplier = effective_noise_multiplier(queries)
            probability = in_lot * mass_beyond(noise_multiplier, end, coordinates)
        log_unseen_once = -math.inf
        if probability < 1:
            log_unseen_once = math.log1p(-probability)
        log_unseen += count * log_unseen_once
    return -math.expm1(log_unseen)


def end_of(header: Header) -> float | None:
    """Return where the noise of a phase ended, in standard deviations; None if its version does not tell."""
    return END_BEFORE if header.noise_end == STATED_BEFORE else header.noise_end


def uncovered_delta(ledger: Ledger) -> float:
    """Delta that no ε of a ledger covers, by the ends of its phases' noise.

    Returns:
        An upper bound for this version's noise. Of an older version the least that the worst record had without
        compiled kernels: how many coordinates it moved no ledger tells.
    """
    phases: dict[int, Counter[Event]] = {}
    for phase, release in ledger.releases:
        events = phases.setdefault(phase, Counter())
        events[counted_event(release)] += 1
    covered = 1.0
    for phase, events in phases.items():
        end = end_of(ledger.headers[phase])
        coordinates = MOST_COORDINATES
        if end is None:  # of an older version, which does not tell how many coordinates a record moved either
            end = OLDEST_END
            coordinates = 1
        covered *= 1 - uncovered_mass(events, end, coordinates)
    return 1 - covered
