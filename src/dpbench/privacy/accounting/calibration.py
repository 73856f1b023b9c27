"""Budgets solved backwards: the noise, rate, number of steps or δ that a target ε leaves."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from scipy import optimize

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, PLD_LIMIT, PLD_MOST_RELEASES, RenyiAccountant
from dpbench.privacy.accounting.composition import check_delta, delta_of, epsilon, find_accountant
from dpbench.privacy.accounting.tradeoff import MembershipTarget
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling, Sampling, find_scheme

SMALLEST_NOISE = 1e-2
_LEAST_NOISE = 1e-6
"""Least noise that is tried for targets that the smallest usual noise does not spend."""
LARGEST_NOISE = 1e4
_SMALLEST_RATE = 1e-12
_SMALLEST_EPSILON = 1e-10
MOST_STEPS = 10**9
_FEW = 3  # distinct costs, whose epsilon takes milliseconds
_QUICK = RenyiAccountant("a first guess", orders=(*map(float, range(2, 65)), *(80.0, 96.0, 128.0, 192.0, 256.0)))
"""Takes milliseconds also where there are many costs: whole orders do, others do not."""
_FAR = 50.0  # logarithm of a ratio of costs beyond which it does not matter how far
_FINE = 1e-8  # relative error of a solution
_COARSE = 3e-6  # relative error of a solution whose cost takes seconds
_MARGINS = (1.15, 2.0)  # of a bracket, on both sides of a guess

Cost = Callable[[float], float]
"""Cost, monotone in a value."""


def check_target(target_epsilon: float) -> None:
    """Raise ConfigurationError unless ε is positive and finite."""
    if not 0 < target_epsilon < math.inf:
        raise ConfigurationError(
            f"target_epsilon must be a positive number, not {target_epsilon} (without privacy: strategy=none)."
        )


def _bounded_epsilon(
    events: Mapping[Event, int],
    delta: float,
    accountant: str,
    target: float,
) -> float:
    """Epsilon, or infinity where it is far above the target and pld would take seconds to say so, or cannot."""
    if accountant == "pld":
        limit = min(max(4 * target, 20), PLD_LIMIT)
        if sum(events.values()) > PLD_MOST_RELEASES or epsilon(events, delta, "rdp") > limit:
            return math.inf
    return epsilon(events, delta, accountant)


def _meeting(
    cost_at: Cost,
    limit: float,
    low: float,
    high: float,
    guess_at: Cost | None = None,
) -> float:
    """Solve for the value between two others at which a monotone cost meets its limit, never above the limit.

    Args:
        cost_at: The cost of a value.
        limit: The largest cost.
        low: Smallest value; one of both ends is within the limit.
        high: Largest value.
        guess_at: A cost that takes milliseconds, where `cost_at` takes seconds: the search begins where it ends.

    Raises:
        ConfigurationError: Both ends are within the limit, or none.
    """
    tolerance = _FINE
    if guess_at is not None:
        tolerance = _COARSE
        low, high = _near_guess(cost_at, limit, low, high, guess_at)

    @cache
    def gap(log: float) -> float:
        cost = cost_at(math.exp(log))
        if cost > 0:
            return max(-_FAR, min(_FAR, math.log(cost / limit)))
        return -_FAR

    first = math.log(low)
    last = math.log(high)
    if gap(first) * gap(last) > 0:
        raise ConfigurationError(f"no value from {low:g} to {high:g} meets {limit:g}: use the rdp accountant.")
    solution = math.exp(optimize.brentq(gap, first, last, xtol=tolerance))
    away = 1 if gap(last) < gap(first) else -1
    step = tolerance
    while cost_at(solution) > limit:  # its monotony holds only up to rounding
        solution *= 1 + away * step
        step *= 2
    return min(max(solution, low), high)


def _near_guess(
    cost_at: Cost,
    limit: float,
    low: float,
    high: float,
    guess_at: Cost,
) -> tuple[float, float]:
    """Narrow the bracket around the solution by a guess; the given bracket if the guess does not help."""
    if (guess_at(low) > limit) == (guess_at(high) > limit):
        return low, high
    guess = _meeting(guess_at, limit, low, high)
    for margin in _MARGINS:
        near_low = max(low, guess / margin)
        near_high = min(high, guess * margin)
        if (cost_at(near_low) > limit) != (cost_at(near_high) > limit):
            return near_low, near_high
    return low, high


def _least_noise(cost_at: Cost, limit: float, guess_at: Cost | None) -> float:
    """Solve for the smallest noise that keeps the cost within a limit; the largest noise must."""
    if cost_at(SMALLEST_NOISE) > limit:
        return _meeting(cost_at, limit, SMALLEST_NOISE, LARGEST_NOISE, guess_at)
    if cost_at(_LEAST_NOISE) > limit:
        return _meeting(cost_at, limit, _LEAST_NOISE, SMALLEST_NOISE, guess_at)
    return _LEAST_NOISE


def calibrate_scale(
    events_for: Callable[[float], Counter[Event]],
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    spent: Mapping[Event, int] | None = None,
) -> float:
    """Smallest scale of the noise for which releases stay within `target_epsilon`.

    To 1e-7 of its value; by slow accountants, and where releases have several costs, to 1e-5 of the target.

    Args:
        events_for: Function from a scale of the noise to the releases of the training.
        target_epsilon: ε.
        delta: δ.
        accountant: A name in `ACCOUNTANTS`.
        spent: Releases made before, part of the composition.

    Raises:
        ConfigurationError: No noise reaches the target.

    >>> from dpbench.privacy.sampling import PoissonSampling
    >>> def training(noise_multiplier: float) -> Counter[Event]:
    ...     release = Event(PoissonSampling(60_000, 256 / 60_000), (SumQuery("all", 1.0, noise_multiplier),))
    ...     return Counter({release: 8000})
    >>> round(calibrate_scale(training, target_epsilon=3.0, delta=1e-5), 3)
    0.879
    """
    check_delta(delta)
    check_target(target_epsilon)
    earlier = Counter(spent or {})
    example = events_for(1.0)
    has_few = len(example) <= _FEW
    quick = ACCOUNTANTS["rdp"] if has_few else _QUICK

    @cache
    def epsilon_at(scale: float) -> float:
        return _bounded_epsilon(earlier + events_for(scale), delta, accountant, target_epsilon)

    def guess_at(scale: float) -> float:
        return quick.epsilon(earlier + events_for(scale), delta)

    least_epsilon = epsilon_at(LARGEST_NOISE)
    if least_epsilon > target_epsilon:
        raise ConfigurationError(
            f"no noise_multiplier up to {LARGEST_NOISE:.0f} reaches target_epsilon={target_epsilon} in "
            f"{example.total()} steps at delta={delta} (the {accountant} accountant shows {least_epsilon:.4g} there): "
            "raise target_epsilon or delta, or train for fewer steps."
        )
    is_quick = has_few and not find_accountant(accountant).is_slow
    return _least_noise(epsilon_at, target_epsilon, None if is_quick else guess_at)


def affordable_releases(
    spent: Mapping[Event, int],
    ahead: Callable[[int], Counter[Event]],
    most: int,
    target_epsilon: float,
    delta: float,
    accountant: str,
) -> int:
    """Count how many further releases keep the whole within `target_epsilon`.

    Args:
        spent: Releases made before.
        ahead: The next releases, for a number of them.
        most: Largest number that is tried.
        target_epsilon: ε.
        delta: δ.
        accountant: A name in `ACCOUNTANTS`.
    """

    def epsilon_after(count: int) -> float:
        return _bounded_epsilon(Counter(spent) + ahead(count), delta, accountant, target_epsilon)

    return largest_count(epsilon_after, target_epsilon, most)


def largest_count(cost_at: Callable[[int], float], limit: float, most: int) -> int:
    """Largest integer up to `most` with a cost within a limit; 0 if there is none.

    Args:
        cost_at: Increasing function from a number to its cost.
        limit: The largest cost.
        most: Largest number.

    >>> largest_count(lambda number: number**2, limit=2000, most=1000)
    44
    """
    if most < 1 or cost_at(most) <= limit:
        return max(most, 0)
    high = 1
    while high < most and cost_at(high) <= limit:  # small numbers cost less time
        high *= 2
    return bisect_right(range(1, min(high, most)), limit, lo=high // 2, key=cost_at)


@dataclass(frozen=True)
class TrainingSetting:
    """Setting of a training for the accountants; the value to solve for (noise, rate, duration, ε or δ) is None.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the *sensitivity* of the sum: that is max_grad_norm for
            Poisson batches (one record added or removed), and twice that for batches of a fixed size (one replaced).
        sample_rate: Probability (Poisson) or share (fixed size) of a record in a batch.
        steps: Number of batches; None where `epochs` is given or sought.
        epochs: The number of steps in epochs, as a training counts them; see `Sampling.steps_of`.
        epsilon: ε.
        delta: δ.
        sampling: "poisson" or "fixed_size", or the kind of another scheme.
        population: Number of records; needed for batches of a fixed size.
        spent: Releases of an earlier run on the same data, part of ε.
        bands: Steps over which noise is correlated, with as many groups of records that take turns: this many steps
            are a round, which costs as much as one Poisson batch at `bands` times the rate. 1: independent noise.
    """

    noise_multiplier: float | None = None
    sample_rate: float | None = None
    steps: int | None = None
    epochs: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    sampling: str = "poisson"
    population: int | None = None
    spent: Mapping[Event, int] = field(default_factory=dict)
    bands: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "noise_multiplier": (self.noise_multiplier, 1e-12, 1e12),
            "steps": (self.steps, 1, MOST_STEPS),
            "epochs": (self.epochs, 1e-10, MOST_STEPS),
            "epsilon": (self.epsilon, _SMALLEST_EPSILON, 1e30),
            "population": (self.population, 1, 10**15),
            "bands": (self.bands, 1, 10**6),
            "sample_rate": (self.sample_rate, _SMALLEST_RATE, 1),
        }
        for name, (value, low, high) in ranges.items():
            if value is not None and not low <= value <= high:
                raise ConfigurationError(f"{name} must be a number from {low:g} to {high:g}, not {value:g}.")
        if self.steps is not None and self.epochs is not None:
            raise ConfigurationError("give steps or epochs, not both.")
        if self.delta is not None:
            check_delta(self.delta)
        if self.bands > 1:
            self._check_bands()
        elif not self.scheme.known_by_rate:
            raise ConfigurationError(
                f"cannot calibrate {self.sampling} batches, which a rate alone does not describe: use poisson or fixed."
            )
        if self.scheme.whole_lots:
            self._check_lot_size()

    def _check_bands(self) -> None:
        if self.sampling not in ("poisson", "cyclic_poisson"):
            raise ConfigurationError(f"banded noise needs cyclic_poisson batches, not {self.sampling}.")
        # A rate of 1 may have been computed as a quotient.
        if self.sample_rate is not None and self.bands * self.sample_rate > 1 + 1e-9:
            raise ConfigurationError(
                f"sample_rate must be at most {1 / self.bands:.4g} for {self.bands} bands (each draws from its own "
                f"group of records), not {self.sample_rate:.4g}."
            )
        if self.steps is not None and self.bands > self.steps:
            raise ConfigurationError(f"{self.bands} bands need at least as many steps, not {self.steps}.")

    def _check_lot_size(self) -> None:
        if self.population is None:
            raise ConfigurationError("batches of fixed size need the population, the number of records.")
        if self.sample_rate is not None:
            size = self.sample_rate * self.population
            rounded = round(size)
            if rounded < 1 or abs(size - rounded) > 1e-6 * size:
                raise ConfigurationError(f"batches of fixed size need a whole number of records, not {size:g}.")

    @property
    def scheme(self) -> type[Sampling]:
        """How batches are drawn."""
        return find_scheme(self.sampling)

    @property
    def drawn(self) -> Sampling:
        """How batches are drawn at the sample rate, whatever the number of bands."""
        assert self.sample_rate is not None
        return self.scheme.at_rate(self.population or 1, self.sample_rate)

    @property
    def event(self) -> Event:
        """One release, or with banded noise a round of them."""
        assert self.noise_multiplier is not None
        assert self.sample_rate is not None
        sampling = self.drawn
        if self.bands > 1:
            rate = min(1.0, self.bands * self.sample_rate)
            sampling = PoissonSampling(sampling.population, rate)
        query = SumQuery("all", 1.0, self.noise_multiplier)
        return Event(sampling, (query,))

    @property
    def number_of_steps(self) -> int:
        """Steps, from epochs where these are given."""
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        return self.drawn.steps_of(self.epochs)

    @property
    def number_of_rounds(self) -> int:
        """How often `event` happens; steps that begin a round cost a whole one."""
        return math.ceil(self.number_of_steps / self.bands)

    @property
    def events(self) -> Counter[Event]:
        """The whole composition."""
        training = Counter({self.event: self.number_of_rounds})
        return Counter(self.spent) + training

    def epsilon_by(self, accountant: str) -> float:
        """ε of the whole composition."""
        assert self.delta is not None
        return epsilon(self.events, self.delta, accountant)


def missing_in(setting: TrainingSetting) -> list[str]:
    """Which of noise, rate, duration, ε and δ are None, by the names of the attributes ("steps" for the duration)."""
    missing = [name for name in _UNKNOWNS if getattr(setting, name) is None]
    if setting.epochs is not None:
        missing.remove("steps")
    return missing


def unknown_of(
    setting: TrainingSetting,
    target: MembershipTarget | None = None,
    spelled: Callable[[str], str] = str,
) -> str:
    """Name the value to solve for.

    Args:
        setting: Lacks exactly one value; with a target ε and one of noise, rate, duration.
        target: The most that membership tests may reach, in place of ε.
        spelled: Spelling of a name in messages.

    Raises:
        ConfigurationError: Not exactly one is missing.
    """
    missing = missing_in(setting)
    given = ""
    if target is not None:
        if setting.epsilon is not None:
            raise ConfigurationError(f"give epsilon={setting.epsilon:g} or {target}, not both.")
        missing.remove("epsilon")
        given = f", given {target}"
    if len(missing) != 1 or (target is not None and missing == ["delta"]):
        problem = f"missing: {', '.join(map(spelled, missing))}" if missing else "none is missing"
        noise, rate, steps, epsilon, delta = map(spelled, _UNKNOWNS)
        raise ConfigurationError(
            f"leave out exactly one of {noise}, {rate} (or {spelled('batch_size')}), {steps} (or {spelled('epochs')}), "
            f"{epsilon} and {delta}{given} ({problem})."
        )
    return missing[0]


def solved(
    setting: TrainingSetting,
    accountant: str = "rdp",
    target: MembershipTarget | None = None,
) -> TrainingSetting:
    """Complete a setting with the value that was missing: the least noise, or the largest rate or duration.

    Args:
        setting: Lacks exactly one of noise, rate, duration, ε and δ; with a target ε and one of noise, rate, duration.
        accountant: A name in `ACCOUNTANTS`.
        target: The most that membership tests may reach, in place of ε.

    Returns:
        The complete setting, with `steps`. ε is the target if given; the ε reached may be lower where the
        solution is a whole number.

    Raises:
        ConfigurationError: Not exactly one is missing, or none is within reach.

    >>> solved(TrainingSetting(noise_multiplier=1.1, sample_rate=0.01, epsilon=3.0, delta=1e-5)).steps
    3132
    """
    find_accountant(accountant)
    name = unknown_of(setting, target)
    if name == "delta":
        setting = _with_delta(setting, accountant)
    elif name != "epsilon":
        setting = _within(setting, name, accountant, target)
    setting = replace(setting, steps=setting.number_of_steps, epochs=None)
    if setting.epsilon is None:
        setting = replace(setting, epsilon=_known_epsilon(setting, accountant))
    return setting


def _known_epsilon(setting: TrainingSetting, accountant: str) -> float:
    value = setting.epsilon_by(accountant)
    if not math.isfinite(value):
        raise ConfigurationError(
            f"the {accountant} accountant shows no finite epsilon for this setting: add noise, raise delta, or use "
            "another accountant."
        )
    if value < _SMALLEST_EPSILON:
        raise ConfigurationError(f"the {accountant} accountant shows an epsilon of only {value:.2g}: lower delta.")
    return value


def _with_delta(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    assert setting.epsilon is not None
    value = delta_of(setting.events, setting.epsilon, accountant)
    if not 0 < value < 1:
        remedy = "underflows: lower" if value < 1 else "is not below 1: raise"
        raise ConfigurationError(
            f"the delta of the {accountant} accountant at epsilon={setting.epsilon} {remedy} epsilon."
        )
    return replace(setting, delta=value)


def _within(
    setting: TrainingSetting,
    name: str,
    accountant: str,
    target: MembershipTarget | None,
) -> TrainingSetting:
    """Fill in the least noise, or the largest rate or number of steps, that ε or a membership risk allows.

    Args:
        setting: The setting that lacks the value.
        name: Attribute of the value.
        accountant: Name of the accountant of ε.
        target: The membership risk; None: the setting's ε is the limit.

    Raises:
        ConfigurationError: No value is within the limit, or each is.
    """
    bands = setting.bands
    limit = setting.epsilon or 0.0
    if target is not None:
        limit = target.limit

    def at(value: float) -> TrainingSetting:
        changes: dict[str, Any] = {name: value}
        return replace(setting, **changes)

    @cache
    def cost_at(value: float) -> float:
        events = at(value).events
        if target is not None:
            return target.risk_of(events)
        return _bounded_epsilon(events, setting.delta or 0.0, accountant, limit)

    def rdp_at(value: float) -> float:
        return at(value).epsilon_by("rdp")

    smallest_rate = _SMALLEST_RATE if setting.population is None else 1 / setting.population
    private = {"noise_multiplier": LARGEST_NOISE, "sample_rate": smallest_rate, "steps": bands}[name]
    guess_at = rdp_at if target is None and find_accountant(accountant).is_slow else None
    least = cost_at(private) if guess_at is None or name != "sample_rate" else guess_at(private)  # pld takes too long
    if least > limit:
        raise ConfigurationError(
            f"{target or f'epsilon={limit}'} is out of reach: with {name}={private:.4g} it is {least:.4g}; add noise, "
            "make fewer steps, or allow more."
        )
    if name == "noise_multiplier":
        return at(_least_noise(cost_at, limit, guess_at))
    if name == "steps":
        most = MOST_STEPS // bands
        if accountant == "pld":
            most = min(most, PLD_MOST_RELEASES - sum(setting.spent.values()))
        rounds = largest_count(lambda count: cost_at(count * bands), limit, most)
        if rounds == most:
            raise ConfigurationError(
                f"{target or f'epsilon={limit}'} allows more than {most:.0e} steps, the most that are computed."
            )
        return at(rounds * bands)
    if setting.scheme.whole_lots:
        population = setting.population or 1
        size = largest_count(lambda count: cost_at(count / population), limit, population)
        return at(size / population)
    largest = 1 / bands
    if cost_at(largest) <= limit:
        return at(largest)
    return at(min(_meeting(cost_at, limit, private, largest, guess_at), largest))


_UNKNOWNS = ("noise_multiplier", "sample_rate", "steps", "epsilon", "delta")
