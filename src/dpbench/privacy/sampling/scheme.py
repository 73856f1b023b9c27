"""The base of schemes of sampling, and their registry.

A scheme draws, describes itself for the ledger, and gives the event that accountants compose, so that the accounting is
that of the object that drew. Another scheme is another subclass of `Sampling`, anywhere: it joins the registry itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dpbench.errors import ConfigurationError, LedgerError

if TYPE_CHECKING:
    from dp_accounting import DpEvent, NeighboringRelation

Positions = NDArray[np.int64]


class Part(NamedTuple):
    """A simpler release that a release is with some probability.

    Attributes:
        probability: Probability of the part.
        sampling: How its batch is drawn.
        noise_multiplier: Noise over the sensitivity for these batches.
    """

    probability: float
    sampling: Sampling
    noise_multiplier: float


class PrivacyProfile(NamedTuple):
    """An upper bound of δ at every ε.

    Attributes:
        epsilon: δ → smallest ε.
        delta: ε → smallest δ.
    """

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]


_SCHEMES: dict[str, type[Sampling]] = {}
_FURTHER = "dpbench.stated_samplings"
"""Group of entry points: kind in ledgers → subclass of `Sampling` that reads it, imported when a ledger names it."""


@dataclass(frozen=True)
class Sampling(ABC):
    """Description of how the records of one batch are drawn from the training data.

    A subclass is one scheme: a frozen dataclass with a `kind` of its own. Schemes are not derived from one another, so
    that none draws in its own way and is accounted for, or read from a ledger, as another one.

    Attributes:
        population: Number of records that can be drawn; treated as public.
        unit: Unit of privacy, such as "example".
        kind: Name of the scheme in ledgers.
        words: Words that users type for it, the usual one first; the kind is understood, too.
        neighboring_relation: "add_or_remove_one", "replace_one", or "none" where no accountant covers the scheme.
        record_changes: Largest number of bounds by which a clipped sum over a batch moves between neighbors.
        records_affected: Largest number of records of a batch that differ between neighbors.
        whole_lots: True if all batches have the same, whole size.
        known_by_rate: True if population and rate determine it, so that a rate can be solved for.
        everybody: True if every batch holds all records, so that the batch size cannot be chosen.
        without_replacement: True if a batch is a uniform subset of fixed size, for which Theorem 5 of pyvacy_2019
            holds.
        draws_batches: False for events of a ledger that are not releases on one batch.
    """

    population: int
    unit: str = field(default="example", kw_only=True)

    kind: ClassVar[str]
    words: ClassVar[tuple[str, ...]] = ()
    neighboring_relation: ClassVar[str] = "none"
    record_changes: ClassVar[int] = 0
    records_affected: ClassVar[int] = 1
    whole_lots: ClassVar[bool] = True
    known_by_rate: ClassVar[bool] = False
    everybody: ClassVar[bool] = False
    without_replacement: ClassVar[bool] = False
    draws_batches: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if Sampling not in cls.__bases__ or "kind" not in vars(cls):
            raise TypeError(f"{cls.__name__} must subclass Sampling itself and state its own kind.")
        _check_statements(cls)
        registered = _SCHEMES.get(cls.kind, cls)
        # `dataclass(slots=True)` makes a class twice, and a module may be loaded again: these replace themselves.
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__name__} and {registered.__name__} are both of kind {cls.kind!r}.")
        cls.words = cls.words or (cls.kind,)
        for other in _SCHEMES.values():
            common = {cls.kind, *cls.words} & {other.kind, *other.words}
            # `find_scheme` would give the first that was defined, whose batches and ε are not those that are meant.
            if common and other is not registered:
                raise TypeError(f"{cls.__name__} and {other.__name__} are both called {min(common)!r}.")
        _SCHEMES[cls.kind] = cls

    @classmethod
    @abstractmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        """Make the scheme with batches of a share of the records on average, in whole numbers if batches are whole.

        Args:
            population: Number of records.
            rate: Expected batch size over the population, in (0, 1].
            unit: Unit of privacy.
        """

    def among(self, population: int) -> Self:
        """The same scheme among another number of records, with batches of the size that they have.

        A scheme with parameters that its rate does not determine chooses them here.

        Args:
            population: Number of records.

        Raises:
            ConfigurationError: `at_rate` does not know all parameters, so that other batches would be drawn.
        """
        # A scheme with more parameters than its rate would silently be drawn with their defaults.
        rebuilt = type(self).at_rate(self.population, self.rate, self.unit)
        if not _alike(self, rebuilt):
            raise ConfigurationError(
                f"the rate does not determine all parameters of {self.kind!r} batches, so they cannot be drawn from "
                f"more records, such as those of an audit: define {type(self).__name__}.among()."
            )
        rate = self.expected_batch_size / population
        return type(self).at_rate(population, rate, self.unit)

    def resized(self, factor: float) -> Self:
        """The same scheme with batches of another expected size, in whole numbers where batches are whole.

        Args:
            factor: Factor of the expected size; 1 gives the scheme itself.

        Raises:
            ConfigurationError: Batches would be larger than the population or empty, hold all records, or have
                parameters that their rate does not determine.
        """
        if factor == 1:
            return self
        rate = self.rate * factor
        rebuilt = type(self).at_rate(self.population, self.rate, self.unit)
        if self.everybody or self.lots_per_draw > 1 or not _alike(self, rebuilt):
            raise ConfigurationError(f"{self.kind!r} batches have one size: leave out expected_batch_size_schedule.")
        if not 1 <= rate * self.population <= self.population:
            raise ConfigurationError(
                f"expected_batch_size_schedule gives batches of {rate * self.population:g} {self.unit}s: they must lie "
                f"between 1 and {self.population}."
            )
        return type(self).at_rate(self.population, rate, self.unit)

    @property
    def cycle(self) -> int:
        """Number of groups that take turns; 1: no groups.

        Each record belongs to one of them for the whole training, by a uniform draw that is independent of all others,
        so that it takes part at most once in a round of so many steps; a training that begins anew must do so between
        two rounds. `draw` need not know the groups: the caller leaves out all records but those of group `turn`.
        """
        return 1

    @property
    def turn(self) -> int:
        """Group of the records in the batch."""
        return 0

    def at(self, step: int) -> Sampling:
        """Sampling of a step's batch, with the group of the step."""
        if self.cycle == 1:
            return self
        changes: dict[str, Any] = {"turn": step % self.cycle}
        return replace(self, **changes)

    @property
    def group_rate(self) -> float:
        """Probability of a record to be in a batch of its group; without groups, in any."""
        return self.rate

    @property
    def is_free(self) -> bool:
        """Return whether the batch costs nothing, since the first step of its round states the cost of the round."""
        return self.turn > 0

    @property
    def most_steps(self) -> float:
        """Largest number of steps in which no record takes part more often than promised; may be infinity."""
        return math.inf

    def in_groups(self, groups: int) -> Sampling:
        """The same scheme with records in a number of groups that take turns.

        Args:
            groups: Number of groups, that of the noise's bands; with 1 each record may be in each batch.

        Raises:
            ConfigurationError: The scheme has no groups.
        """
        if groups == 1:
            return self
        raise ConfigurationError(
            f"banded noise needs batches that contain a record at most once in {groups} steps, not {self.kind}: use "
            "data.sampling=cyclic_poisson (PrivateDataLoader.cyclic_poisson) or min_separation."
        )

    @property
    @abstractmethod
    def expected_batch_size(self) -> float:
        """Expected number of records in a batch, the only batch size a mechanism may divide by."""

    @property
    def rate(self) -> float:
        """Expected batch size over the population."""
        return self.expected_batch_size / self.population

    @property
    def lot_size_cumulants(self) -> tuple[float, float] | None:
        """Variance and fourth cumulant of the number of records in a batch; None if unknown."""
        return None

    @property
    def steps_per_epoch(self) -> int:
        """Batches that draw each record once on average; bookkeeping, without meaning for privacy."""
        return max(1, round(self.population / self.expected_batch_size))

    def steps_of(self, epochs: float) -> int:
        """Steps of a training of a number of epochs, part of an epoch rounded up to whole steps.

        >>> from dpbench.privacy.sampling import PoissonSampling
        >>> PoissonSampling(1000, 0.256).steps_of(3), PoissonSampling(1000, 0.256).steps_of(0.3)
        (12, 2)
        """
        steps = epochs * self.steps_per_epoch
        # The rounding of a product must not add a step.
        return max(1, math.ceil(steps * (1 - 1e-12)))

    @property
    def lots_per_draw(self) -> int:
        """Number of consecutive batches that are drawn together: 1 unless they depend on one another."""
        return 1

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        """Draw `lots_per_draw` batches, independently of all that other generators draw.

        Args:
            rng: Fresh for these batches.

        Returns:
            For each batch the positions of its records, each at most once, from 0 to population − 1; may be empty.
        """

    @property
    def relation(self) -> NeighboringRelation:
        """The neighboring relation as dp_accounting has it.

        Raises:
            ConfigurationError: No accountant covers the scheme.
        """
        from dp_accounting import NeighboringRelation

        if self.neighboring_relation == "none":
            raise self._uncovered()
        return NeighboringRelation[self.neighboring_relation.upper()]

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        """Event that dp_accounting composes for one Gaussian sum over a batch.

        Args:
            noise_multiplier: Noise over the most that the sum moves between neighbors (`record_changes` bounds).

        Raises:
            ConfigurationError: No accountant covers the scheme.
        """
        raise self._uncovered()

    def _uncovered(self) -> ConfigurationError:
        return ConfigurationError(
            f"no accountant covers {self.kind!r} sampling; draw batches with data.sampling=poisson or fixed_size."
        )

    def mixture(self, noise_multiplier: float) -> Sequence[Part]:
        """Simpler releases of which each release is one, where dp_accounting has no Rényi divergences of `dp_event`.

        Which of them it is must not depend on the record in which neighbors differ, and each batch of either neighbor
        must be covered by one of them; the exponentials of the divergences then mix by the probabilities.

        Args:
            noise_multiplier: Noise over sensitivity, as for `dp_event`.
        """
        return ()

    def renyi_curve(self, orders: tuple[float, ...]) -> NDArray[np.float64] | None:
        """Rényi divergences at some orders, where they do not follow from `dp_event` or `mixture`; None: they do."""
        return None

    @property
    def privacy_profile(self) -> PrivacyProfile | None:
        """Privacy profile of the event, where it does not follow from `dp_event`; None: it does."""
        return None

    @property
    def trials(self) -> tuple[Mapping[Any, int], ...]:
        """Events of each kind of trial with their counts, where the event is the best of several; (): it is one."""
        return ()

    @property
    def expected_trials(self) -> float:
        """Expected number of trials of which the event is the best."""
        return 1.0

    def second_order_divergence(self, noise_multiplier: float) -> float:
        """A lower bound of the Rényi divergence of order 2, where it is known without cancellation, else 0.

        Divergences grow with the order, so this bounds those above 2 from below. It is used where a moment near one was
        rounded.
        """
        return 0.0

    def squared_mu(self, noise_multiplier: float) -> float | None:
        """μ² of one sum by the central limit theorem of Gaussian DP; None where it is not known."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the ledger.

        >>> from dpbench.privacy.sampling import PoissonSampling
        >>> PoissonSampling(1000, 0.05).to_dict()
        {'kind': 'poisson', 'population': 1000, 'unit': 'example', 'sample_rate': 0.05}
        """
        return {"kind": self.kind, **asdict(self)}


class TakingTurns(ABC):
    """Schemes of groups that take turns: the first step of a round states the cost of the round, the others none."""

    turn: int

    @property
    @abstractmethod
    def round(self) -> Sampling:
        """Sampling of all groups at once, with a batch that costs as much as a round."""

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        """See `Sampling.draw`."""
        return self.round.draw(rng)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        """See `Sampling.dp_event`."""
        from dp_accounting import NoOpDpEvent

        return NoOpDpEvent() if self.turn else self.round.dp_event(noise_multiplier)

    def second_order_divergence(self, noise_multiplier: float) -> float:
        """See `Sampling.second_order_divergence`."""
        return 0.0 if self.turn else self.round.second_order_divergence(noise_multiplier)

    def squared_mu(self, noise_multiplier: float) -> float | None:
        """See `Sampling.squared_mu`."""
        return 0.0 if self.turn else self.round.squared_mu(noise_multiplier)


def _alike(first: Sampling, second: Sampling) -> bool:
    """Return whether two samplings have the same parameters, except for the rounding of a rate."""
    for name, value in asdict(first).items():
        counterpart = getattr(second, name)
        close = isinstance(value, float) and math.isclose(value, counterpart, rel_tol=1e-9)
        if not close and value != counterpart:
            return False
    return True


def _check_statements(scheme: type[Sampling]) -> None:
    """Raise TypeError where a scheme that is accounted for leaves out a statement, or one contradicts another."""
    relation = scheme.neighboring_relation
    changes = scheme.record_changes
    # A replaced record leaves a sum, and another one comes: twice the bound.
    fewest = {"none": 0, "add_or_remove_one": 1, "replace_one": 2}.get(relation, math.inf)
    if changes < fewest or (relation == "none" and changes):
        raise TypeError(f"{scheme.__name__}: a sum cannot move by {changes} bounds between {relation} neighbors.")
    if changes and scheme.dp_event is Sampling.dp_event:
        raise TypeError(f"{scheme.__name__} has neighbors, but no dp_event to account for them.")


def find_scheme(word: str) -> type[Sampling]:
    """Find the scheme of a word: its kind, or one that users type for it.

    >>> from dpbench.privacy.sampling import ShuffledEpochs
    >>> find_scheme("shuffled") is find_scheme("shuffled_epochs") is ShuffledEpochs
    True

    Raises:
        ConfigurationError: There is none.
    """
    for scheme in schemes():
        if word == scheme.kind or word in scheme.words:
            return scheme
    known = ", ".join(scheme.words[0] for scheme in schemes())
    raise ConfigurationError(f"unknown sampling {word!r}; known are {known}.")


def schemes() -> tuple[type[Sampling], ...]:
    """All schemes that draw batches, in the order of their definition."""
    return tuple(scheme for scheme in _SCHEMES.values() if scheme.draws_batches)


def sampling_from_dict(data: object) -> Sampling:
    """Inverse of `Sampling.to_dict`; without a unit, as in older ledgers, a record is an example.

    >>> sampling_from_dict({"kind": "fixed_size", "population": 1000, "batch_size": 50})
    FixedSizeSampling(population=1000, unit='example', batch_size=50)

    Raises:
        LedgerError: The kind is unknown or a field is missing.
    """
    if not isinstance(data, dict):
        raise LedgerError(f"sampling must be a JSON object, not {data!r:.60}")
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in _SCHEMES:
        for entry in entry_points(group=_FURTHER, name=str(kind)):
            entry.load()
    if kind not in _SCHEMES:
        raise LedgerError(f"unknown sampling kind {kind!r}; known are {', '.join(_SCHEMES)}")
    if not isinstance(fields.get("unit", ""), str):
        raise LedgerError(f"unit must be a word, not {fields['unit']!r}")
    try:
        return _SCHEMES[kind](**fields)
    except TypeError as error:
        raise LedgerError(f"sampling of kind {kind!r}: {error}") from None
