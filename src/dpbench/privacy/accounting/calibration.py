"""Budgets solved backwards: the noise, rate, number of steps or δ that a target ε leaves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from scipy import optimize

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import (
    ACCOUNTANTS,
    PLD_LIMIT,
    PLD_MOST_RELEASES,
    RenyiAccountant,
)
from dpbench.privacy.accounting.composition import check_delta, composable, delta_of, epsilon, find_accountant
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling, Sampling, find_scheme

SMALLEST_NOISE = 1e-2
_LEAST_NOISE = 1e-6
"""Where the search ends for targets that the smallest usual noise does not spend."""
LARGEST_NOISE = 1e4
_SMALLEST_RATE = 1e-12
_SMALLEST_EPSILON = 1e-10
MOST_STEPS = 10**9
_FEW = 3  # distinct costs, whose epsilon takes milliseconds
_QUICK = RenyiAccountant("a first guess", orders=(*map(float, range(2, 65)), *(80.0, 96.0, 128.0, 192.0, 256.0)))
"""Takes milliseconds also where there are many costs: whole orders do, others do not."""
_FAR = 50.0  # logarithm of a ratio of epsilons beyond which it does not matter how far
_COARSE = 3e-6  # relative error of a solution whose ε takes seconds
_MARGINS = (1.15, 2.0)  # of a bracket, on both sides of a guess


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
    cost_at: Callable[[float], float],
    limit: float,
    low: float,
    high: float,
    tolerance: float = 1e-8,
) -> float:
    """Solve for where a monotone ε meets its limit between two numbers, never above the limit.

    Args:
        cost_at: ε of a number.
        limit: The largest ε.
        low: Where the search begins.
        high: Where it ends.
        tolerance: Relative error of the solution.

    Raises:
        ConfigurationError: It lies elsewhere.
    """

    @cache
    def gap(log: float) -> float:
        value = cost_at(math.exp(log))
        if value > 0:
            log_ratio = math.log(value / limit)
            return max(-_FAR, min(_FAR, log_ratio))
        return -_FAR

    first = math.log(low)
    last = math.log(high)
    if gap(first) * gap(last) > 0:
        raise ConfigurationError(f"no value from {low:g} to {high:g} meets {limit:g}: use the rdp accountant.")
    rises = gap(last) > gap(first)
    solution = math.exp(optimize.brentq(gap, first, last, xtol=tolerance))
    step = tolerance
    while cost_at(solution) > limit:  # its monotony holds only up to rounding
        if rises:
            solution *= 1 - step
        else:
            solution *= 1 + step
        step *= 2
    return min(max(solution, low), high)


def _meeting_near(
    cost_at: Callable[[float], float],
    limit: float,
    low: float,
    high: float,
    guess: float,
) -> float:
    """Solve like `_meeting` where each ε takes seconds, in the narrowest bracket around a guess that holds it."""
    for margin in _MARGINS:
        near_low = max(low, guess / margin)
        near_high = min(high, guess * margin)
        if (cost_at(near_low) > limit) != (cost_at(near_high) > limit):
            return _meeting(cost_at, limit, near_low, near_high, _COARSE)
    return _meeting(cost_at, limit, low, high, _COARSE)


def calibrate_scale(
    events_for: Callable[[float], Counter[Event]],
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    spent: Mapping[Event, int] | None = None,
) -> float:
    """Smallest scale of the noise for which releases stay within `target_epsilon`.

    To 1e-7 of its value; by pld, and where releases have several costs, to 1e-5 of the target.

    Args:
        events_for: The releases of a training, whose noise may differ, for a scale of it.
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
    composable(example + earlier, accountant)  # refuses what the accountant does not cover
    quick = _QUICK if len(example) > _FEW else ACCOUNTANTS["rdp"]

    @cache
    def epsilon_at(scale: float) -> float:
        return _bounded_epsilon(earlier + events_for(scale), delta, accountant, target_epsilon)

    def quick_epsilon_at(scale: float) -> float:
        return quick.epsilon(earlier + events_for(scale), delta)

    low = SMALLEST_NOISE
    high = LARGEST_NOISE
    least_epsilon = epsilon_at(high)
    if least_epsilon > target_epsilon:
        raise ConfigurationError(
            f"no noise_multiplier up to {LARGEST_NOISE:.0f} reaches target_epsilon={target_epsilon} in "
            f"{example.total()} steps at delta={delta} (the {accountant} accountant shows {least_epsilon:.4g} there): "
            "raise target_epsilon or delta, or train for fewer steps."
        )
    # The usual noise brackets nearly every target; a lavish one is looked for below it, down to `_LEAST_NOISE`.
    while epsilon_at(low) <= target_epsilon:
        if low <= _LEAST_NOISE:
            return low
        high = low
        low /= 10
    is_slow = accountant == "pld" or len(example) > _FEW
    if is_slow and quick_epsilon_at(high) <= target_epsilon < quick_epsilon_at(low):
        guess = _meeting(quick_epsilon_at, target_epsilon, low, high)
        return _meeting_near(epsilon_at, target_epsilon, low, high, guess)
    return _meeting(epsilon_at, target_epsilon, low, high)


def remaining_releases(
    spent: Mapping[Event, int],
    event: Event,
    target_epsilon: float,
    delta: float,
    accountant: str,
    most: int,
) -> int:
    """Count how many more releases like `event`, at most `most`, keep the whole within `target_epsilon`."""

    def fits(count: int, name: str = accountant) -> bool:
        events = Counter(spent) + Counter({event: count})
        return _bounded_epsilon(events, delta, name, target_epsilon) <= target_epsilon

    start = 1
    if accountant == "pld":  # slow: begin where rdp ends
        start = max(1, largest_count(partial(fits, name="rdp"), most))
    return largest_count(fits, most, start)


def affordable_releases(
    spent: Mapping[Event, int],
    ahead: Sequence[Event],
    target_epsilon: float,
    delta: float,
    accountant: str,
) -> int:
    """Count how many of the releases ahead, in their order, keep the whole within `target_epsilon`."""

    def fits(count: int) -> bool:
        events = Counter(spent) + Counter(ahead[:count])
        return _bounded_epsilon(events, delta, accountant, target_epsilon) <= target_epsilon

    return largest_count(fits, len(ahead), start=max(len(ahead), 1))


def largest_count(fits: Callable[[int], bool], most: int, start: int = 1) -> int:
    """Largest whole number up to `most` that fits, where smaller ones fit too; 0 if none does.

    Args:
        fits: Whether a number fits.
        most: Where to stop.
        start: A guess, from which the search doubles.

    >>> largest_count(lambda number: number**2 <= 2000, most=1000)
    44
    """
    if not fits(0):
        return 0
    low = 0
    high = min(start, most)
    while fits(high):
        if high == most:
            return most
        low = high
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class TrainingSetting:
    """Training as the accountants see it; one of noise, rate, duration, ε and δ may be None: what is sought.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the *sensitivity* of the sum: that is max_grad_norm for
            Poisson lots (one record added or removed), and twice that for lots of a fixed size (one replaced).
        sample_rate: Probability (Poisson) or share (fixed size) of a record in a lot.
        steps: Number of lots; None where `epochs` is given or sought.
        epochs: The number of steps in epochs, as a training counts them; see `Sampling.steps_of`.
        epsilon: ε.
        delta: δ.
        sampling: "poisson" or "fixed_size", or the kind of another scheme.
        population: Number of records; needed for lots of a fixed size.
        spent: Releases of an earlier run on the same data, part of ε.
        bands: Steps over which noise is correlated, on lots of as many groups of records that take turns: so many steps
            are a round, which costs what one Poisson lot at as many times the rate does. 1: it is independent.
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
        if self.delta is not None:
            check_delta(self.delta)
        if self.bands > 1:
            self._check_bands()
        elif not self.scheme.known_by_rate:
            raise ConfigurationError(
                f"{self.sampling} batches cannot be solved for: a rate does not say all of them; use poisson or fixed."
            )
        if self.scheme.whole_lots:
            self._check_lot_size()

    def _check_bands(self) -> None:
        if self.sampling not in ("poisson", "cyclic_poisson"):
            raise ConfigurationError(f"banded noise needs cyclic_poisson batches, not {self.sampling}.")
        # A rate of 1 may have been computed as a quotient.
        if self.sample_rate is not None and self.bands * self.sample_rate > 1 + 1e-9:
            raise ConfigurationError(
                f"{self.bands} bands need a sample_rate of at most {1 / self.bands:.4g}, as each band draws from a "
                f"group of its own, not {self.sample_rate:.4g}."
            )
        if self.steps is not None and self.bands > self.steps:
            raise ConfigurationError(f"{self.bands} bands are more than {self.steps} steps.")

    def _check_lot_size(self) -> None:
        if self.population is None:
            raise ConfigurationError("batches of fixed size need the population: how many records there are.")
        if self.sample_rate is not None:
            size = self.sample_rate * self.population
            rounded = round(size)
            if rounded < 1 or abs(size - rounded) > 1e-6 * size:
                raise ConfigurationError(f"batches of fixed size hold a whole number of records, not {size:g}.")

    @property
    def scheme(self) -> type[Sampling]:
        """How lots are drawn."""
        return find_scheme(self.sampling)

    @property
    def drawn(self) -> Sampling:
        """How lots are drawn at the sample rate, whatever the number of bands."""
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
    missing = []
    for name in _SOLVERS:
        if getattr(setting, name) is None and not (name == "steps" and setting.epochs is not None):
            missing.append(name)
    return missing


def solved(setting: TrainingSetting, accountant: str = "rdp") -> TrainingSetting:
    """Complete a setting with the value that was missing.

    Args:
        setting: Lacks exactly one of noise, rate, duration, ε and δ.
        accountant: A name in `ACCOUNTANTS`.

    Returns:
        All filled in, `steps` always. ε is the target where one was given: what is reached may lie below it where the
        solution is a whole number.

    Raises:
        ConfigurationError: Not exactly one is missing, or none is within reach.

    >>> solved(TrainingSetting(noise_multiplier=1.1, sample_rate=0.01, epsilon=3.0, delta=1e-5)).steps
    3132
    """
    find_accountant(accountant)
    missing = missing_in(setting)
    if len(missing) != 1:
        problem = f"missing are {', '.join(missing)}" if missing else "nothing is missing"
        raise ConfigurationError(
            "leave out exactly one of noise_multiplier, sample_rate (or batch_size), steps (or epochs), epsilon and "
            f"delta: {problem}."
        )
    solution = _SOLVERS[missing[0]](setting, accountant)
    return replace(solution, steps=solution.number_of_steps, epochs=None)


def _for_epsilon(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    value = setting.epsilon_by(accountant)
    if not math.isfinite(value):
        raise ConfigurationError(
            f"the {accountant} accountant shows no finite epsilon for this setting: add noise, raise delta, or use "
            "another accountant."
        )
    if value < _SMALLEST_EPSILON:
        raise ConfigurationError(f"the {accountant} accountant shows an epsilon of {value:.2g}: lower delta.")
    return replace(setting, epsilon=value)


def _for_delta(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    assert setting.epsilon is not None
    value = delta_of(setting.events, setting.epsilon, accountant)
    if not 0 < value < 1:
        side = "delta is smaller than a number can be"
        if value >= 1:
            side = "no delta below 1 is shown"
        raise ConfigurationError(f"at epsilon={setting.epsilon} {side} by the {accountant} accountant: change epsilon.")
    return replace(setting, delta=value)


def _for_noise(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    assert setting.epsilon is not None
    assert setting.delta is not None

    def training(noise_multiplier: float) -> Counter[Event]:
        event = replace(setting, noise_multiplier=noise_multiplier).event
        return Counter({event: setting.number_of_rounds})

    noise_multiplier = calibrate_scale(training, setting.epsilon, setting.delta, accountant, setting.spent)
    return replace(setting, noise_multiplier=noise_multiplier)


def _for_rate(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    target = setting.epsilon
    assert target is not None
    quick = _quick(accountant)
    largest = 1 / setting.bands
    smallest = _SMALLEST_RATE
    if setting.population is not None:
        smallest = 1 / setting.population

    @cache
    def epsilon_at(rate: float, name: str = accountant) -> float:
        return _cost(replace(setting, sample_rate=min(rate, largest)), name)

    def quick_epsilon_at(rate: float) -> float:
        return epsilon_at(rate, quick)

    least_epsilon = quick_epsilon_at(smallest)  # by pld it takes too long
    if least_epsilon > target:
        raise ConfigurationError(
            f"epsilon={target} is out of reach at every rate: the {quick} accountant shows {least_epsilon:.4g} at a "
            f"sample_rate of {smallest:.4g}; add noise, make fewer steps, or allow more."
        )
    if setting.scheme.whole_lots:
        population = setting.population
        assert population is not None
        size = largest_count(lambda size: size == 0 or epsilon_at(size / population) <= target, population)
        return replace(setting, sample_rate=size / population)
    if epsilon_at(largest) <= target:
        return replace(setting, sample_rate=largest)
    rate = largest
    if quick_epsilon_at(largest) > target:
        rate = _meeting(quick_epsilon_at, target, smallest, largest)
    if quick != accountant:
        rate = _meeting_near(epsilon_at, target, smallest, largest, rate)
    return replace(setting, sample_rate=rate)


def _for_steps(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    target = setting.epsilon
    assert target is not None
    quick = _quick(accountant)

    @cache
    def epsilon_of(rounds: int, name: str = accountant) -> float:
        return _cost(replace(setting, steps=rounds * setting.bands), name)

    def fits(rounds: int, name: str = accountant) -> bool:
        return rounds == 0 or epsilon_of(rounds, name) <= target

    most_releases = MOST_STEPS if quick == accountant else PLD_MOST_RELEASES
    most = min(most_releases, MOST_STEPS // setting.bands) - sum(setting.spent.values())
    start = 1
    if quick != accountant:
        start = max(1, largest_count(partial(fits, name=quick), most))
    count = largest_count(fits, most, start)
    if count == 0:
        step = "further step" if setting.spent else "step"
        raise ConfigurationError(
            f"epsilon={target} allows no {step}: with one, the {quick} accountant shows {epsilon_of(1, quick):.4g}; "
            "add noise, or allow more."
        )
    if count == most:
        raise ConfigurationError(f"epsilon={target} allows more than {most:.0e} steps: it is no limit.")
    return replace(setting, steps=count * setting.bands)


def _quick(accountant: str) -> str:
    """An accountant that takes milliseconds where this one takes seconds."""
    return "rdp" if accountant == "pld" else accountant


def _cost(setting: TrainingSetting, accountant: str) -> float:
    assert setting.epsilon is not None
    assert setting.delta is not None
    return _bounded_epsilon(setting.events, setting.delta, accountant, setting.epsilon)


_SOLVERS: dict[str, Callable[[TrainingSetting, str], TrainingSetting]] = {
    "noise_multiplier": _for_noise,
    "sample_rate": _for_rate,
    "steps": _for_steps,
    "epsilon": _for_epsilon,
    "delta": _for_delta,
}
