"""Budgets solved backwards: the noise, rate, number of steps or δ that a target leaves, an ε or a membership risk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from scipy import optimize

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import (
    ACCOUNTANTS,
    PLD_LIMIT,
    PLD_MOST_RELEASES,
    Accountant,
    RenyiAccountant,
)
from dpbench.privacy.accounting.composition import check_delta, composable, delta_of, epsilon, find_accountant
from dpbench.privacy.accounting.tradeoff import MembershipTarget, trade_off
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling, Sampling, find_scheme

_SMALLEST_NOISE = 1e-2
_LEAST_NOISE = 1e-6
"""Where the search ends for targets that the smallest usual noise does not spend."""
_LARGEST_NOISE = 1e4
_SMALLEST_RATE = 1e-12
_SMALLEST_EPSILON = 1e-10
_MOST_STEPS = 10**9
_FEW = 3  # distinct costs, whose epsilon takes milliseconds
_TRIALS = 30
_QUICK_ORDERS = (
    *map(float, range(2, 33)),
    *map(float, range(36, 65, 4)),
    *(80.0, 96.0, 128.0, 192.0, 256.0),
)
"""Of Rényi divergences, for a first guess where there are many: whole orders take milliseconds, others do not."""
_FAR = 50.0  # logarithm of a ratio of epsilons beyond which it does not matter how far


def check_target(target_epsilon: float) -> None:
    """Raise ConfigurationError unless ε is positive and finite."""
    if not 0 < target_epsilon < math.inf:
        raise ConfigurationError(
            f"target_epsilon must be a positive number, not {target_epsilon} (without privacy: strategy=none)."
        )


def _is_far_above(events: Mapping[Event, int], delta: float, target: float) -> bool:
    """Whether epsilon is so far above what is sought that it need not be known by pld, or cannot be."""
    releases = sum(events.values())
    if releases > PLD_MOST_RELEASES:
        return True
    limit = max(4 * target, 20)
    limit = min(limit, PLD_LIMIT)
    return epsilon(events, delta, "rdp") > limit


def _bounded_epsilon(
    events: Mapping[Event, int],
    delta: float,
    accountant: str,
    target: float,
) -> float:
    """Epsilon, or infinity where it is far above the target and pld would take seconds to say so."""
    if accountant == "pld" and _is_far_above(events, delta, target):
        return math.inf
    return epsilon(events, delta, accountant)


def _solve(
    epsilon_at: Callable[[float], float],
    target: float,
    low: float,
    high: float,
) -> float:
    """Solve for where a monotone epsilon meets the target between two numbers, to 1e-7, never above the target."""

    def gap(log: float) -> float:
        value = epsilon_at(math.exp(log))
        if value > 0:
            log_ratio = math.log(value / target)
            return max(-_FAR, min(_FAR, log_ratio))
        return -_FAR

    rises = epsilon_at(high) > epsilon_at(low)
    root = optimize.brentq(
        gap,
        math.log(low),
        math.log(high),
        xtol=1e-8,
    )
    solution = math.exp(root)
    step = 1e-8
    while epsilon_at(solution) > target:  # its monotony holds only up to rounding
        if rises:
            solution *= 1 - step
        else:
            solution *= 1 + step
        step *= 2
    return min(max(solution, low), high)


def _refined(
    epsilon_at: Callable[[float], float],
    target: float,
    guess: float,
    low: float,
    high: float,
) -> float:
    """Solve where each epsilon takes seconds and falls with the noise: from a good guess, by the secant of logarithms.

    Returns:
        A number whose epsilon is at most the target, and within 1e-5 of it unless that takes too many trials.
    """
    insufficient = low  # the most noise that is too little
    sufficient = high  # the least that is enough
    noise = guess
    slope = -1.5  # of log ε by log noise
    previous: tuple[float, float] | None = None
    for _ in range(_TRIALS):
        value = max(epsilon_at(noise), 1e-300)
        gap = math.log(value / target)
        if gap <= 0:
            sufficient = min(sufficient, noise)
            if gap >= -1e-5:
                return noise
        else:
            insufficient = max(insufficient, noise)
        if previous is not None and math.isfinite(gap):
            previous_noise, previous_gap = previous
            if previous_noise != noise:
                rise = gap - previous_gap
                slope = rise / math.log(noise / previous_noise)
                slope = min(slope, -0.1)
        previous = (noise, gap)
        following = 2 * noise
        if math.isfinite(gap):
            aim = gap + 3e-6  # a little below the target
            step = -aim / slope
            step = max(step, -1.0)
            step = min(step, 1.0)
            following = noise * math.exp(step)
        noise = following
        if not insufficient < following < sufficient:
            noise = math.sqrt(insufficient * sufficient)
    return sufficient


def calibrate_noise_multiplier(
    event_for: Callable[[float], Event],
    steps: int,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
    spent: Mapping[Event, int] | None = None,
) -> float:
    """Smallest noise multiplier for which `steps` releases stay within `target_epsilon`.

    To 1e-7 of its value; by pld, and where the steps have several costs, to 1e-5 of the target.

    Args:
        event_for: The release that a noise multiplier gives.
        steps: Number of releases.
        target_epsilon: ε.
        delta: δ.
        accountant: A name in `ACCOUNTANTS`.
        spent: Releases made before, part of the composition.

    Raises:
        ConfigurationError: No noise reaches the target.

    >>> from dpbench.privacy.sampling import PoissonSampling
    >>> def release(noise_multiplier: float) -> Event:
    ...     return Event(PoissonSampling(60_000, 256 / 60_000), (SumQuery("all", 1.0, noise_multiplier),))
    >>> round(calibrate_noise_multiplier(release, steps=8000, target_epsilon=3.0, delta=1e-5), 3)
    0.879
    """

    def events_for(noise_multiplier: float) -> Counter[Event]:
        event = event_for(noise_multiplier)
        return Counter({event: steps})

    return calibrate_scale(
        events_for,
        target_epsilon,
        delta,
        accountant,
        spent,
    )


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
    """
    check_delta(delta)
    check_target(target_epsilon)
    earlier = Counter(spent or {})
    example = events_for(1.0)
    composable(example + earlier, accountant)  # refuses what the accountant does not cover
    steps = example.total()

    def events_at(scale: float) -> Counter[Event]:
        return earlier + events_for(scale)

    def epsilon_at(scale: float) -> float:
        return _bounded_epsilon(events_at(scale), delta, accountant, target_epsilon)

    low = _SMALLEST_NOISE
    high = _LARGEST_NOISE
    guess = None
    # Each ε of many costs takes seconds: few trials are left where the search begins near the solution.
    if len(example) > _FEW:
        quick = RenyiAccountant("a first guess", orders=_QUICK_ORDERS)
        guess = _guess_by(quick, events_at, target_epsilon, delta)
    if guess is None:
        least_epsilon = epsilon_at(high)
        if least_epsilon > target_epsilon:
            raise ConfigurationError(
                f"no noise_multiplier up to {high:.0f} reaches target_epsilon={target_epsilon} in {steps} steps at "
                f"delta={delta} (the {accountant} accountant shows {least_epsilon:.4g} there): raise target_epsilon or "
                "delta, or train for fewer steps."
            )
        if accountant == "pld":
            guess = _guess_by(ACCOUNTANTS["rdp"], events_at, target_epsilon, delta)
    if guess is not None:
        return _refined(
            epsilon_at,
            target_epsilon,
            guess,
            low,
            high,
        )
    # The usual noise brackets nearly every target; a lavish one is looked for below it, down to `_LEAST_NOISE`.
    while epsilon_at(low) <= target_epsilon:
        if low <= _LEAST_NOISE:
            return low
        high = low
        low /= 10
    return _solve(epsilon_at, target_epsilon, low, high)


def _guess_by(
    accountant: Accountant,
    events_at: Callable[[float], Counter[Event]],
    target: float,
    delta: float,
) -> float | None:
    """The scale by an accountant that takes milliseconds: a little too large, as its bound is looser.

    Args:
        accountant: RDP, perhaps at few orders.
        events_at: The composition for a scale of the noise.
        target: ε.
        delta: δ.

    Returns:
        None where it needs a scale out of the usual range.
    """

    def epsilon_at(scale: float) -> float:
        return accountant.epsilon(events_at(scale), delta)

    if not epsilon_at(_LARGEST_NOISE) <= target < epsilon_at(_SMALLEST_NOISE):
        return None
    return _solve(epsilon_at, target, _SMALLEST_NOISE, _LARGEST_NOISE)


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
        total = _bounded_epsilon(events, delta, name, target_epsilon)
        return total <= target_epsilon

    def fits_by_rdp(count: int) -> bool:
        return fits(count, "rdp")

    start = 1
    if accountant == "pld":  # slow: begin where rdp ends
        start = largest_count(fits_by_rdp, most)
    return largest_count(fits, most, max(start, 1))


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
        total = _bounded_epsilon(events, delta, accountant, target_epsilon)
        return total <= target_epsilon

    most = len(ahead)
    return largest_count(fits, most, start=max(most, 1))


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
        membership: Budget in place of ε, which then follows from the rest at δ.
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
    membership: MembershipTarget | None = None
    bands: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "noise_multiplier": (self.noise_multiplier, 1e-12, 1e12),
            "steps": (self.steps, 1, _MOST_STEPS),
            "epochs": (self.epochs, 1e-10, _MOST_STEPS),
            "epsilon": (self.epsilon, _SMALLEST_EPSILON, 1e30),
            "population": (self.population, 1, 10**15),
            "bands": (self.bands, 1, 10**6),
        }
        for name, (value, low, high) in ranges.items():
            if value is not None and not low <= value <= high:
                raise ConfigurationError(f"{name} must be a number from {low:g} to {high:g}, not {value:g}.")
        if self.sample_rate is not None and not _SMALLEST_RATE <= self.sample_rate <= 1:
            raise ConfigurationError(f"sample_rate must lie from {_SMALLEST_RATE:g} to 1, not {self.sample_rate:g}.")
        if self.delta is not None:
            check_delta(self.delta)
        if self.membership is not None and self.epsilon is not None:
            raise ConfigurationError(
                f"give epsilon={self.epsilon:g} or {self.membership}, not both: the other one follows."
            )
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
    """Which of noise, rate, duration, ε and δ are None, by the names of the attributes ("steps" for the duration).

    With a membership risk as the budget, ε and δ are none of them.
    """
    duration: float | None = setting.steps
    if duration is None:
        duration = setting.epochs
    values = {
        "noise_multiplier": setting.noise_multiplier,
        "sample_rate": setting.sample_rate,
        "steps": duration,
        "epsilon": setting.epsilon,
        "delta": setting.delta,
    }
    if setting.membership is not None:
        del values["epsilon"]
        del values["delta"]
    return [name for name, value in values.items() if value is None]


def solved(setting: TrainingSetting, accountant: str = "rdp") -> TrainingSetting:
    """Complete a setting with the value that was missing.

    Args:
        setting: Lacks exactly one of noise, rate, duration, ε and δ; with a membership risk as the budget, of the first
            three.
        accountant: A name in `ACCOUNTANTS`; a membership risk is accounted for by `trade_off` whatever it is.

    Returns:
        All filled in, `steps` always. ε is the target where one was given: what is reached may lie below it where the
        solution is a whole number. With a membership risk as the budget it stays None (`epsilon_by` gives it).

    Raises:
        ConfigurationError: Not exactly one is missing, or none is within reach.

    >>> solved(TrainingSetting(noise_multiplier=1.1, sample_rate=0.01, epsilon=3.0, delta=1e-5)).steps
    3132
    """
    find_accountant(accountant)
    missing = missing_in(setting)
    if len(missing) != 1:
        problem = "nothing is missing"
        if missing:
            problem = f"missing are {', '.join(missing)}"
        names = "noise_multiplier, sample_rate (or batch_size), steps (or epochs), epsilon and delta"
        if setting.membership is not None:
            names = f"noise_multiplier, sample_rate (or batch_size) and steps (or epochs) beside {setting.membership}"
        raise ConfigurationError(f"leave out exactly one of {names}: {problem}.")
    if setting.membership is None:
        solution = _SOLVERS[missing[0]](setting, accountant)
    else:
        solution = _SOLVERS_WITHIN_RISK[missing[0]](setting)
    return replace(
        solution,
        steps=solution.number_of_steps,
        epochs=None,
    )


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

    def event_for(noise_multiplier: float) -> Event:
        candidate = replace(setting, noise_multiplier=noise_multiplier)
        return candidate.event

    noise_multiplier = calibrate_noise_multiplier(
        event_for,
        setting.number_of_rounds,
        setting.epsilon,
        setting.delta,
        accountant,
        setting.spent,
    )
    return replace(setting, noise_multiplier=noise_multiplier)


def _for_rate(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    target = setting.epsilon
    delta = setting.delta
    population = setting.population
    assert target is not None
    assert delta is not None
    quick = accountant
    if accountant == "pld":  # too slow at the smallest rates
        quick = "rdp"

    def epsilon_at(rate: float, name: str = accountant) -> float:
        candidate = replace(setting, sample_rate=min(rate, 1 / setting.bands))
        return _bounded_epsilon(candidate.events, delta, name, target)

    def quick_epsilon_at(rate: float) -> float:
        return epsilon_at(rate, quick)

    smallest = _SMALLEST_RATE
    if population is not None:
        smallest = 1 / population
    least_epsilon = quick_epsilon_at(smallest)
    if least_epsilon > target:
        raise ConfigurationError(
            f"epsilon={target} is out of reach at every rate: the {quick} accountant shows {least_epsilon:.4g} "
            f"at a sample_rate of {smallest:.4g}; add noise, make fewer steps, or raise epsilon or delta."
        )
    if setting.scheme.whole_lots:
        assert population is not None

        def fits(size: int) -> bool:
            if size == 0:
                return True
            return epsilon_at(size / population) <= target

        size = largest_count(fits, population)
        return replace(setting, sample_rate=size / population)
    largest = 1 / setting.bands
    if epsilon_at(largest) <= target:
        return replace(setting, sample_rate=largest)
    rate = largest
    if quick_epsilon_at(largest) > target:
        rate = _solve(quick_epsilon_at, target, smallest, largest)
    if accountant != quick:

        def epsilon_at_inverse(inverse: float) -> float:
            return epsilon_at(1 / inverse)

        inverse_rate = _refined(
            epsilon_at_inverse,
            target,
            guess=1 / rate,
            low=1 / largest,
            high=1 / smallest,
        )
        rate = 1 / inverse_rate
    return replace(setting, sample_rate=rate)


def _for_steps(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    target = setting.epsilon
    delta = setting.delta
    assert target is not None
    assert delta is not None
    most = _MOST_STEPS
    if accountant == "pld":
        most = PLD_MOST_RELEASES
    most -= sum(setting.spent.values())
    count = remaining_releases(
        setting.spent,
        setting.event,
        target,
        delta,
        accountant,
        most,
    )
    if count == 0:
        one_step = Counter(setting.spent) + Counter({setting.event: 1})
        least_epsilon = epsilon(one_step, delta, accountant)
        step = "step"
        if setting.spent:
            step = "further step"
        raise ConfigurationError(
            f"epsilon={target} allows no {step}: with one, the {accountant} "
            f"accountant shows {least_epsilon:.4g}; add noise, or raise epsilon or delta."
        )
    if count == most:
        raise ConfigurationError(f"epsilon={target} allows more than {most:.0e} steps: it is no limit.")
    return replace(setting, steps=count * setting.bands)


def _membership_risk(setting: TrainingSetting) -> float:
    """What membership tests reach on the whole composition, of what its budget limits."""
    assert setting.membership is not None
    return setting.membership.reached(trade_off(setting.events))


def _noise_within_risk(setting: TrainingSetting) -> TrainingSetting:
    target = setting.membership
    assert target is not None

    @cache
    def risk_at(noise_multiplier: float) -> float:
        return _membership_risk(replace(setting, noise_multiplier=noise_multiplier))

    low = _SMALLEST_NOISE
    high = _LARGEST_NOISE
    least_risk = risk_at(high)
    if least_risk > target.limit:
        raise ConfigurationError(
            f"no noise_multiplier up to {high:.0f} reaches {target} in {setting.number_of_steps} steps: it is "
            f"{least_risk:.4g} there; allow more, or train for fewer steps."
        )
    while risk_at(low) <= target.limit:
        if low <= _LEAST_NOISE:
            return replace(setting, noise_multiplier=low)
        high = low
        low /= 10
    noise_multiplier = _solve(risk_at, target.limit, low, high)
    return replace(setting, noise_multiplier=noise_multiplier)


def _rate_within_risk(setting: TrainingSetting) -> TrainingSetting:
    target = setting.membership
    population = setting.population
    assert target is not None

    @cache
    def risk_at(rate: float) -> float:
        return _membership_risk(replace(setting, sample_rate=min(rate, 1 / setting.bands)))

    smallest = _SMALLEST_RATE
    if population is not None:
        smallest = 1 / population
    least_risk = risk_at(smallest)
    if least_risk > target.limit:
        raise ConfigurationError(
            f"{target} is out of reach at every rate: it is {least_risk:.4g} at a sample_rate of {smallest:.4g}; add "
            "noise, make fewer steps, or allow more."
        )
    if setting.scheme.whole_lots:
        assert population is not None

        def fits(size: int) -> bool:
            return size == 0 or risk_at(size / population) <= target.limit

        size = largest_count(fits, population)
        return replace(setting, sample_rate=size / population)
    largest = 1 / setting.bands
    rate = largest
    if risk_at(largest) > target.limit:
        rate = _solve(risk_at, target.limit, smallest, largest)
    return replace(setting, sample_rate=rate)


def _steps_within_risk(setting: TrainingSetting) -> TrainingSetting:
    target = setting.membership
    assert target is not None

    @cache
    def risk_at(rounds: int) -> float:
        return _membership_risk(replace(setting, steps=rounds * setting.bands))

    def fits(rounds: int) -> bool:
        return rounds == 0 or risk_at(rounds) <= target.limit

    most = PLD_MOST_RELEASES - sum(setting.spent.values())
    count = largest_count(fits, most)
    if count == 0:
        step = "step"
        if setting.spent:
            step = "further step"
        raise ConfigurationError(
            f"{target} allows no {step}: with one, it is {risk_at(1):.4g}; add noise, or allow more."
        )
    if count == most:
        raise ConfigurationError(f"{target} allows more than {most:.0e} steps: it is no limit.")
    return replace(setting, steps=count * setting.bands)


_SOLVERS_WITHIN_RISK: dict[str, Callable[[TrainingSetting], TrainingSetting]] = {
    "noise_multiplier": _noise_within_risk,
    "sample_rate": _rate_within_risk,
    "steps": _steps_within_risk,
}
_SOLVERS: dict[str, Callable[[TrainingSetting, str], TrainingSetting]] = {
    "noise_multiplier": _for_noise,
    "sample_rate": _for_rate,
    "steps": _for_steps,
    "epsilon": _for_epsilon,
    "delta": _for_delta,
}
