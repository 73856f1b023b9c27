"""Budgets solved backwards: the noise, rate, number of steps or δ that a target leaves, an ε or a membership risk."""

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
_QUICK = RenyiAccountant("a first guess", orders=(*map(float, range(2, 65)), *(80.0, 96.0, 128.0, 192.0, 256.0)))
"""Takes milliseconds also where there are many costs: whole orders do, others do not."""
_FAR = 50.0  # logarithm of a ratio of epsilons beyond which it does not matter how far
_WIDENING = 1.15  # of a bracket, on both sides of a guess


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
    cost_at: Callable[[float], float],
    limit: float,
    low: float,
    high: float,
    guess: float | None = None,
) -> float:
    """Solve for where a monotone cost meets its limit between two numbers, never above the limit.

    Args:
        cost_at: ε, or a membership risk.
        limit: The largest cost.
        low: Where the search begins.
        high: Where it ends.
        guess: A number near the solution, where each cost takes seconds: fewer are computed, and the cost is within
            1e-5 of the limit.
    """

    @cache
    def gap(log: float) -> float:
        value = cost_at(math.exp(log))
        if limit * (1 - accuracy) <= value <= limit:
            return 0.0  # ends the search
        if value > 0:
            log_ratio = math.log(value / aim)
            return max(-_FAR, min(_FAR, log_ratio))
        return -_FAR

    accuracy = 0.0
    aim = limit
    first = math.log(low)
    last = math.log(high)
    if guess is not None:
        accuracy = 1e-5
        aim = limit * (1 - accuracy / 3)
        margin = math.log(_WIDENING)
        first = max(first, math.log(guess) - margin)
        last = min(last, math.log(guess) + margin)
        while gap(first) * gap(last) > 0 and (first > math.log(low) or last < math.log(high)):
            first = max(math.log(low), first - margin)
            last = min(math.log(high), last + margin)
            margin *= 2
        if gap(first) * gap(last) > 0:
            raise ConfigurationError(f"no value from {low:g} to {high:g} meets {limit:g}: use the rdp accountant.")
    rises = gap(last) > gap(first)
    solution = math.exp(optimize.brentq(gap, first, last, xtol=1e-8))
    step = 1e-8
    while cost_at(solution) > limit:  # its monotony holds only up to rounding
        if rises:
            solution *= 1 - step
        else:
            solution *= 1 + step
        step *= 2
    return min(max(solution, low), high)


def _least_noise(
    cost_at: Callable[[float], float],
    limit: float,
    refusal: Callable[[float], str],
    guess: float | None = None,
) -> float:
    """Smallest noise whose cost is within a limit.

    Args:
        cost_at: The cost, which falls with the noise.
        limit: The largest cost.
        refusal: Message of the error, for the cost of the largest noise.
        guess: See `_solve`.

    Raises:
        ConfigurationError: The limit is out of reach.
    """
    low = _SMALLEST_NOISE
    high = _LARGEST_NOISE
    least_cost = cost_at(high)
    if least_cost > limit:
        raise ConfigurationError(refusal(least_cost))
    # The usual noise brackets nearly every target; a lavish one is looked for below it, down to `_LEAST_NOISE`.
    while cost_at(low) <= limit:
        if low <= _LEAST_NOISE:
            return low
        high = low
        low /= 10
    return _solve(cost_at, limit, low, high, guess)


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

    def epsilon_at(scale: float) -> float:
        return _bounded_epsilon(earlier + events_for(scale), delta, accountant, target_epsilon)

    quick = _QUICK if len(example) > _FEW else ACCOUNTANTS["rdp"]

    def quick_epsilon_at(scale: float) -> float:
        return quick.epsilon(earlier + events_for(scale), delta)

    def refusal(least_epsilon: float) -> str:
        return (
            f"no noise_multiplier up to {_LARGEST_NOISE:.0f} reaches target_epsilon={target_epsilon} in {steps} steps "
            f"at delta={delta} (the {accountant} accountant shows {least_epsilon:.4g} there): raise target_epsilon or "
            "delta, or train for fewer steps."
        )

    guess = None
    is_slow = accountant == "pld" or len(example) > _FEW
    if is_slow and quick_epsilon_at(_LARGEST_NOISE) <= target_epsilon < quick_epsilon_at(_SMALLEST_NOISE):
        guess = _solve(quick_epsilon_at, target_epsilon, _SMALLEST_NOISE, _LARGEST_NOISE)
    return _least_noise(epsilon_at, target_epsilon, refusal, guess)


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
            "sample_rate": (self.sample_rate, _SMALLEST_RATE, 1),
        }
        for name, (value, low, high) in ranges.items():
            if value is not None and not low <= value <= high:
                raise ConfigurationError(f"{name} must be a number from {low:g} to {high:g}, not {value:g}.")
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
    names = ["noise_multiplier", "sample_rate", "steps"]
    if setting.membership is None:
        names += ["epsilon", "delta"]
    missing = [name for name in names if getattr(setting, name) is None]
    if setting.epochs is not None and "steps" in missing:
        missing.remove("steps")
    return missing


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


@dataclass(frozen=True)
class _Budget:
    """What a setting may cost: ε by an accountant, or a risk by membership tests.

    Attributes:
        name: The limit, in words.
        limit: The largest cost.
        shown_by: Who shows the cost, in words.
        accountant: The accountant of ε; None for a risk.
        most_releases: The largest number of releases for which a cost is known.
    """

    name: str
    limit: float
    shown_by: str
    accountant: str | None
    most_releases: int

    @classmethod
    def of(cls, setting: TrainingSetting, accountant: str) -> _Budget:
        target = setting.membership
        if target is not None:
            return cls(str(target), target.limit, "a membership test reaches", None, PLD_MOST_RELEASES)
        assert setting.epsilon is not None
        most = PLD_MOST_RELEASES if accountant == "pld" else _MOST_STEPS
        return cls(
            f"epsilon={setting.epsilon}", setting.epsilon, f"the {accountant} accountant shows", accountant, most
        )

    @property
    def quick(self) -> _Budget:
        """The same by an accountant that takes milliseconds."""
        if self.accountant != "pld":
            return self
        return replace(self, accountant="rdp", shown_by="the rdp accountant shows")

    def cost(self, setting: TrainingSetting) -> float:
        if self.accountant is None:
            assert setting.membership is not None
            return setting.membership.reached(trade_off(setting.events))
        assert setting.delta is not None
        return _bounded_epsilon(setting.events, setting.delta, self.accountant, self.limit)


def _for_noise(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    if setting.membership is None:
        assert setting.epsilon is not None
        assert setting.delta is not None
        noise_multiplier = calibrate_noise_multiplier(
            lambda z: replace(setting, noise_multiplier=z).event,
            setting.number_of_rounds,
            setting.epsilon,
            setting.delta,
            accountant,
            setting.spent,
        )
        return replace(setting, noise_multiplier=noise_multiplier)
    budget = _Budget.of(setting, accountant)

    @cache
    def risk_at(noise_multiplier: float) -> float:
        return budget.cost(replace(setting, noise_multiplier=noise_multiplier))

    def refusal(least_risk: float) -> str:
        return (
            f"no noise_multiplier up to {_LARGEST_NOISE:.0f} reaches {budget.name} in {setting.number_of_steps} steps: "
            f"it is {least_risk:.4g} there; allow more, or train for fewer steps."
        )

    return replace(setting, noise_multiplier=_least_noise(risk_at, budget.limit, refusal))


def _for_rate(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    budget = _Budget.of(setting, accountant)
    quick = budget.quick
    largest = 1 / setting.bands
    smallest = _SMALLEST_RATE
    if setting.population is not None:
        smallest = 1 / setting.population

    @cache
    def cost_at(rate: float, budget: _Budget = budget) -> float:
        return budget.cost(replace(setting, sample_rate=min(rate, largest)))

    def quick_cost_at(rate: float) -> float:
        return cost_at(rate, quick)

    least_cost = quick_cost_at(smallest)  # by pld it takes too long
    if least_cost > budget.limit:
        raise ConfigurationError(
            f"{budget.name} is out of reach at every rate: {quick.shown_by} {least_cost:.4g} at a sample_rate of "
            f"{smallest:.4g}; add noise, make fewer steps, or allow more."
        )
    if setting.scheme.whole_lots:
        population = setting.population
        assert population is not None
        size = largest_count(lambda size: size == 0 or cost_at(size / population) <= budget.limit, population)
        return replace(setting, sample_rate=size / population)
    if cost_at(largest) <= budget.limit:
        return replace(setting, sample_rate=largest)
    rate = largest
    if quick_cost_at(largest) > budget.limit:
        rate = _solve(quick_cost_at, budget.limit, smallest, largest)
    if quick is not budget:
        rate = _solve(cost_at, budget.limit, smallest, largest, guess=rate)
    return replace(setting, sample_rate=rate)


def _for_steps(setting: TrainingSetting, accountant: str) -> TrainingSetting:
    budget = _Budget.of(setting, accountant)
    quick = budget.quick

    @cache
    def cost_of(rounds: int, budget: _Budget = budget) -> float:
        return budget.cost(replace(setting, steps=rounds * setting.bands))

    def fits(rounds: int, budget: _Budget = budget) -> bool:
        return rounds == 0 or cost_of(rounds, budget) <= budget.limit

    most = min(budget.most_releases, _MOST_STEPS // setting.bands) - sum(setting.spent.values())
    start = 1
    if quick is not budget:
        start = max(1, largest_count(partial(fits, budget=quick), most))
    count = largest_count(fits, most, start)
    if count == 0:
        step = "further step" if setting.spent else "step"
        raise ConfigurationError(
            f"{budget.name} allows no {step}: with one, {quick.shown_by} {cost_of(1, quick):.4g}; add noise, or allow "
            "more."
        )
    if count == most:
        raise ConfigurationError(f"{budget.name} allows more than {most:.0e} steps: it is no limit.")
    return replace(setting, steps=count * setting.bands)


_SOLVERS: dict[str, Callable[[TrainingSetting, str], TrainingSetting]] = {
    "noise_multiplier": _for_noise,
    "sample_rate": _for_rate,
    "steps": _for_steps,
    "epsilon": _for_epsilon,
    "delta": _for_delta,
}
