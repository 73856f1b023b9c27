"""The best of a random number of trials, as the line of a ledger states it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import FullParticipation, Positions, Sampling, sampling_from_dict
from dpbench.privacy.sampling.scheme import PrivacyProfile

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld import PLDAccountant

    from dpbench.privacy.accounting.composition import Selection

_AGREEMENT = 1e-6  # relative, of a stated and a recomputed divergence


class Releases(NamedTuple):
    """Releases of equal cost in one trial.

    Attributes:
        sampling: How their batches are drawn.
        noise_multiplier: Noise over the most that a release moves between neighbors.
        times: Number of releases.
    """

    sampling: Sampling
    noise_multiplier: float
    times: int

    @property
    def event(self) -> Event:
        """The event that accountants compose."""
        return Event(self.sampling, (SumQuery("equivalent", 1.0, self.noise_multiplier),))


class Setting(NamedTuple):
    """Settings of a trial, with its releases.

    Attributes:
        words: Options of `dpbench train`; one may be a list, where no cost depends on its value.
        releases: Releases of a trial.
    """

    words: tuple[str, ...]
    releases: tuple[Releases, ...]

    @property
    def events(self) -> dict[Event, int]:
        """The releases with their counts."""
        return {part.event: part.times for part in self.releases}


@dataclass(frozen=True)
class BestOfTrials(Sampling):
    """The trial with the best score among K, of which nothing else is published, K included.

    K has a Poisson or a truncated negative binomial distribution. Each trial takes one of the settings, independently
    of the data and of the others, and trains on the population. Its score is a sum of numbers from 0 to 1 over records
    that were held out of the population, one each, with Gaussian noise; or it is measured on public data.

    Guarantee: the Rényi divergences of `Selection.curve` for the largest divergence of a trial at each order (Papernot
    & Steinke 2022, theorems 2 and 6), and the privacy profile of `Selection.surcharge`. A trial's is the larger of its
    releases' and its score's, since a record is either in the population or held out. It holds for both kinds of
    records.

    Attributes:
        mean_trials: Mean of K.
        shape: Shape of K's negative binomial distribution (1: geometric, 0: logarithmic); None: Poisson.
        settings: Settings of a trial.
        score: Name of the score.
        score_noise_multiplier: Standard deviation of the noise on the sum of the scores; None: public records.
        curve: (order, largest divergence of a trial) for readers without this program; a reader with it compares.
    """

    mean_trials: float
    shape: float | None
    settings: tuple[Setting, ...]
    score: str
    score_noise_multiplier: float | None
    curve: tuple[tuple[float, float], ...] = ()

    kind: ClassVar[str] = "best_of_trials"
    neighboring_relation: ClassVar[str] = "add_or_remove_one"
    record_changes: ClassVar[int] = 1
    draws_batches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.curve and any(isinstance(setting, dict) for setting in self.settings):
            raise LedgerError("the divergences of a trial are missing")
        settings = tuple(_setting(self, setting) for setting in self.settings)
        curve = tuple((float(order), float(divergence)) for order, divergence in self.curve)
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "curve", curve)
        if not settings or not self.selection.mean_trials >= 1:
            raise LedgerError("the best of trials needs a setting")
        noise = self.score_noise_multiplier
        if noise is not None and not 0 < noise < math.inf:
            raise LedgerError(f"the noise on a score must be a positive number, not {noise}")
        orders = tuple(order for order, _ in curve)
        if curve and not np.allclose(self.trial_curve(orders), [at for _, at in curve], rtol=_AGREEMENT, atol=0):
            raise LedgerError("the divergences of a trial are not those of its releases and its score")

    @property
    def selection(self) -> Selection:
        """The distribution of the number of trials."""
        from dpbench.privacy.accounting.composition import Selection

        return Selection(math.inf if self.shape is None else self.shape, self.mean_trials)

    @property
    def trials(self) -> tuple[Mapping[Event, int], ...]:
        return tuple(setting.events for setting in self.settings)

    @property
    def _kinds(self) -> list[Mapping[Event, int]]:
        """The mechanisms of which a trial is one for any record: the training of a setting, or the score."""
        kinds = list(self.trials)
        if self.score_noise_multiplier is not None:
            everybody = FullParticipation(self.population, unit=self.unit)
            kinds.append({Releases(everybody, self.score_noise_multiplier, 1).event: 1})
        return kinds

    @property
    def expected_trials(self) -> float:
        return self.mean_trials

    def trial_curve(self, orders: tuple[float, ...]) -> NDArray[np.float64]:
        """Largest Rényi divergence of a trial at each order.

        Args:
            orders: Orders above 1.
        """
        from dpbench.privacy.accounting.accountants import RenyiAccountant

        accountant = RenyiAccountant("", orders=orders)
        return np.asarray(np.max([accountant.curve(events) for events in self._kinds], axis=0))

    def renyi_curve(self, orders: tuple[float, ...]) -> NDArray[np.float64]:
        from dpbench.privacy.accounting.accountants import DEFAULT_ORDERS

        # The bound at an order is the better for what others show.
        grid = tuple(sorted({*orders, *DEFAULT_ORDERS}))
        selected = self.selection.curve(grid, self.trial_curve(grid))
        return selected[np.searchsorted(grid, orders)]

    @cached_property
    def _losses(self) -> list[PLDAccountant]:
        """Privacy losses of a trial of each kind."""
        from dpbench.privacy.accounting.accountants import ACCOUNTANTS, PldAccountant

        accountant = ACCOUNTANTS["pld"]
        assert isinstance(accountant, PldAccountant)
        return [accountant.composed(events) for events in self._kinds]

    def _trial_delta(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.max([losses.get_delta(epsilon) for losses in self._losses], axis=0))

    @property
    def privacy_profile(self) -> PrivacyProfile:
        """By the privacy losses of a trial (`Selection.surcharge`): tighter than `renyi_curve`, and not composable."""
        mean = self.mean_trials

        def epsilon(delta: float) -> float:
            return float(max(losses.get_epsilon(delta / mean) for losses in self._losses)) + self._surcharge

        def delta(epsilon: float) -> float:
            beyond = np.array([epsilon - self._surcharge])
            return min(1.0, mean * float(self._trial_delta(beyond)[0])) if beyond[0] >= 0 else 1.0

        return PrivacyProfile(epsilon, delta)

    @cached_property
    def _surcharge(self) -> float:
        return self.selection.surcharge(self._trial_delta)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        """Event of the first setting, by which an accountant is known to cover it; `renyi_curve` has the cost."""
        import dp_accounting
        from dp_accounting.dp_event import RepeatAndSelectDpEvent

        parts = [
            dp_accounting.SelfComposedDpEvent(part.sampling.dp_event(part.noise_multiplier), part.times)
            for part in self.settings[0].releases
        ]
        return RepeatAndSelectDpEvent(
            dp_accounting.ComposedDpEvent(parts),
            self.mean_trials,
            self.selection.shape,
        )

    def with_curve(self) -> Self:
        """The same statement with the divergences of a trial, where they are finite."""
        from dpbench.privacy.accounting.accountants import DEFAULT_ORDERS

        curve = zip(DEFAULT_ORDERS, self.trial_curve(DEFAULT_ORDERS).tolist(), strict=True)
        return replace(self, curve=tuple(point for point in curve if math.isfinite(point[1])))

    def to_dict(self) -> dict[str, Any]:
        settings = []
        for setting in self.settings:
            releases = [[part.sampling.to_dict(), part.noise_multiplier, part.times] for part in setting.releases]
            settings.append({"words": list(setting.words), "releases": releases})
        return {
            "kind": self.kind,
            "population": self.population,
            "unit": self.unit,
            "mean_trials": self.mean_trials,
            "shape": self.shape,
            "settings": settings,
            "score": self.score,
            "score_noise_multiplier": self.score_noise_multiplier,
            "curve": [list(point) for point in self.curve],
        }

    @property
    def expected_batch_size(self) -> float:
        """Largest expected batch size of a trial."""
        return max(part.sampling.expected_batch_size for setting in self.settings for part in setting.releases)

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        raise ConfigurationError(f"{cls.kind} draws no batches: dpbench tune writes it into ledgers.")

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        raise ConfigurationError(f"{self.kind} draws no batches: dpbench tune writes it into ledgers.")


def _setting(best: BestOfTrials, setting: object) -> Setting:
    """Read a setting of a ledger's line; one in memory stays."""
    if isinstance(setting, Setting):
        releases = setting.releases
        words = setting.words
    elif isinstance(setting, dict):
        releases = tuple(Releases(sampling_from_dict(drawn), z, count) for drawn, z, count in setting["releases"])
        words = tuple(map(str, setting["words"]))
    else:
        raise LedgerError(f"a setting must be a JSON object, not {setting!r:.60}")
    for sampling, noise_multiplier, count in releases:
        same = (sampling.population, sampling.unit) == (best.population, best.unit)
        if sampling.neighboring_relation != best.neighboring_relation or not same:
            raise LedgerError(f"a trial draws by {sampling.to_dict()}, from other records or for other neighbors")
        if not (0 < noise_multiplier < math.inf and type(count) is int and count > 0):
            raise LedgerError(f"a trial has {count!r} releases of noise multiplier {noise_multiplier!r}")
    if not releases:
        raise LedgerError("a trial has no release")
    return Setting(words, releases)
