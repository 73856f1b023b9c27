"""The plan in the header of a ledger, readable without the training code.

From it the cost of each release of a phase is computed without a single release's line, and so without trust in the
arithmetic of the program that wrote them. `privacy.mechanism.training_plan` makes it and knows the network; this
module knows only its privacy cost. `StatedPlan` has the format.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    RootModel,
    ValidationError,
    model_validator,
)

from dpbench.errors import LedgerError, UnknownNoise
from dpbench.privacy.events import (
    EARLIER,
    Event,
    SumQuery,
    effective_noise_multiplier,
    equivalent_queries,
    record_changes,
)
from dpbench.privacy.sampling import Sampling, sampling_from_dict

_SMALLEST = 1e-100  # of a number whose square is still one
ROUNDING = 1e-9  # of noise multipliers: costs are counted to ten digits
# Strict, because pydantic would take true for 1 and "3" for 3.
STRICT = ConfigDict(strict=True, extra="forbid")
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=_SMALLEST, lt=1 / _SMALLEST, allow_inf_nan=False)]
_List = Field(strict=False)  # lists of JSON as tuples


def problem_of(error: ValidationError) -> str:
    """Say in one line which value is wrong, and why."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    problem = f"{place}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{problem}, by this version of dpbench: use the version that wrote it"
    return f"{problem}, not {first['input']!r:.60}"


class Stairs(
    RootModel[Annotated[tuple[Annotated[tuple[Positive, Count], _List], ...], _List]], strict=True, frozen=True
):
    """Factors of a value over the steps; after the last one it stays.

    In JSON [[factor, number of steps in a row that have it], ...]; []: always 1.
    """

    @cached_property
    def _ends(self) -> list[int]:
        """The step after each stair."""
        return list(accumulate(steps for _, steps in self.root))

    def at(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        if not self.root:
            return 1.0
        position = bisect_right(self._ends, step)
        last = len(self.root) - 1
        factor, _ = self.root[min(position, last)]
        return factor


_ALWAYS_ONE = Stairs(())
_FURTHER = "dpbench.stated_noises"
"""Group of entry points: name of a noise process in ledgers → subclass of `StatedNoise` that reads it."""


class StatedNoise(BaseModel, strict=True, extra="forbid", frozen=True):
    """Noise of a plan.

    Attributes:
        process: "gaussian", "scheduled" or the name of a capability's process; else the qualified name of a custom
            class.
        noise_multiplier: z, in units of the sensitivity of a release as of one added or removed record; None where only
            the class of the process knows it.
        factors: Factors of z, by step.
        described: False if the plan does not state the cost of the process.
        parameters: Process → its keys.
    """

    process: str
    noise_multiplier: Positive | None = None
    factors: Stairs = _ALWAYS_ONE
    described: Literal[False] | None = None

    parameters: ClassVar[Mapping[str, Collection[str]]] = {
        "gaussian": {"process", "noise_multiplier"},
        "scheduled": {"process", "noise_multiplier", "factors"},
    }

    @model_validator(mode="after")
    def _is_known(self) -> StatedNoise:
        expected = self.parameters.get(self.process)
        if self.described is False:
            expected = {"process", "described"}
        if self.model_fields_set != expected or (self.noise_multiplier is None) != (self.described is False):
            raise ValueError("this version of dpbench does not know the noise process")
        return self

    @property
    def bands(self) -> int:
        """Number of steps over which it is correlated; 1: it is independent."""
        return 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return self.model_dump(mode="json", exclude_unset=True)


def _noise_from_dict(data: object) -> StatedNoise:
    """Read the noise of a plan, with the class of its process.

    Raises:
        UnknownNoise: Nothing that is installed knows it.
    """
    kind = StatedNoise
    if isinstance(data, dict) and "described" not in data:
        process = data.get("process")
        if isinstance(process, str) and process not in kind.parameters:
            further = entry_points(group=_FURTHER)
            if process not in further.names:
                raise UnknownNoise(
                    f"no installed package knows the noise process {process!r} of the ledger: install the one that "
                    f"provides it (entry points {_FURTHER})."
                )
            kind = further[process].load()
    return kind.model_validate(data)


class _Summands(BaseModel, strict=True, extra="forbid", frozen=True):
    unit: str
    per_summand: Count
    total_weight: Positive | None


def _is_no_earlier_query(name: str) -> str:
    if name.startswith(EARLIER):
        raise ValueError(f"the name of group {name!r} must not begin with {EARLIER!r}: rename it")
    return name


class _Group(BaseModel, strict=True, extra="allow", frozen=True):
    name: Annotated[str, AfterValidator(_is_no_earlier_query)]
    max_grad_norm: Positive
    coordinates: Annotated[int, Field(ge=0)]


class _Statistic(BaseModel, strict=True, extra="allow", frozen=True):
    name: str
    size: Count
    bound: Positive
    noise_std: Positive
    denominator: Positive


class StatedPlan(BaseModel, strict=True, extra="forbid", frozen=True):
    """The plan of a phase, as its header states it.

    Guarantee: a release with number t that follows the plan is a Gaussian mechanism on sums over a batch of
    `sampling_of(t)` with the cost `event(t)`: z_t over the number of bounds by which one unit moves a sum,
    for any bounds, because noise is allocated in proportion to them, and additional statistics take
    their share of z_t away from these (adaptive_quantile_clipping_2021, Theorem 1).

    In JSON::

        digest        32 hexadecimal digits: names the plan, part of the key of the noise
        sampling      of a batch at size factor 1, as in a release's line
        size_factors  of the expected batch size: [[factor, steps], ...]; [] always 1; after the last one it stays
        summands      {"unit", "per_summand", "total_weight"}: terms of the sums
        noise         {"process": "gaussian", "noise_multiplier"}, or "scheduled" with "factors" like those of sizes, or
                      the statement of a capability (schema 3), or
                      {"process": qualified name, "described": false} of a custom class
        groups        [{"name", "max_grad_norm", "coordinates"}]: clipped together, with the first bound of each
        bound_factors of all bounds, like those of sizes
        allocation    of noise among the groups: "equal", "proportional" or "dimension"
        statistics    other than gradients, for release 0: [{"name", "size", "bound", "noise_std", ...}]
        recipe        for people: names and options of the treatment of records; nothing here depends on it

    Two plans that differ in `recipe` alone are equal.
    """

    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    sampling: Annotated[
        InstanceOf[Sampling],
        BeforeValidator(sampling_from_dict),
        PlainSerializer(Sampling.to_dict),
    ]
    size_factors: Stairs
    summands: _Summands
    noise: Annotated[
        InstanceOf[StatedNoise],
        BeforeValidator(_noise_from_dict),
        PlainSerializer(StatedNoise.to_dict),
    ]
    groups: Annotated[tuple[_Group, ...], _List]
    bound_factors: Stairs
    allocation: Literal["equal", "proportional", "dimension"]
    statistics: Annotated[tuple[_Statistic, ...], _List]
    recipe: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StatedPlan):
            return NotImplemented
        return self.model_dump(exclude={"recipe"}) == other.model_dump(exclude={"recipe"})

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def from_dict(cls, data: object) -> StatedPlan:
        """Read the plan of a header.

        Raises:
            LedgerError: The plan is malformed, or has entries that this version does not know.
        """
        try:
            stated = cls.model_validate(data)
        except ValidationError as error:
            raise LedgerError(problem_of(error)) from None
        stated._require_rounds()
        return stated

    def _require_rounds(self) -> None:
        """Raise LedgerError where steps of a round differ, or noise is correlated over more steps than records rest.

        The first step of a round states its cost, and each participation of a record costs as much as with independent
        noise where no other one lies within the bands.
        """
        separation = self.sampling.cycle
        if self.noise.bands > separation:
            raise LedgerError(
                f"the noise has {self.noise.bands} bands, but batches contain a record again after {separation} steps"
            )
        moves = bool(self.noise.factors.root) or bool(self.size_factors.root)
        if self.noise.noise_multiplier is None and separation > 1:
            raise LedgerError(
                f"each step states the cost of {self.noise.process}, but cyclic batches need that of a whole round in "
                f"its first step: state the process by an entry point of {_FURTHER}"
            )
        if moves and separation > 1:
            raise LedgerError("noise or batch sizes change, but cyclic batches must cost the same in each step")
        if self.noise.bands > 1 and (self.bound_factors.root or self.summands.per_summand > 1):
            raise LedgerError("correlated noise needs constant bounds, and summands of one record each")

    @property
    def has_rounds(self) -> bool:
        """True if steps depend on one another, by their noise or by the records in their batches."""
        return self.noise.bands > 1 or self.sampling.cycle > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: inverse of `from_dict`."""
        return self.model_dump(mode="json")

    def sampling_of(self, step: int) -> Sampling:
        """How the batch of a step is drawn.

        Raises:
            ConfigurationError: Batches cannot have that size.
        """
        return self.sampling.resized(self.size_factors.at(step)).at(step)

    def effective_multiplier(self, step: int) -> float:
        """Noise over sensitivity of a whole release, statistics included.

        Raises:
            LedgerError: The noise is of a custom class.
        """
        multiplier = self.noise.noise_multiplier
        if multiplier is None:
            raise LedgerError(
                f"the noise process {self.noise.process} is not one of dpbench's: each release states its cost, which "
                "cannot be computed from the plan."
            )
        sampling = self.sampling_of(step)
        changes = record_changes(sampling, self.summands.per_summand)
        scaled = multiplier * self.noise.factors.at(step)
        return scaled / max(1, changes)

    def event(self, step: int) -> Event:
        """Cost of a release on its own batch, by the plan alone; errors as for `effective_multiplier`."""
        query = SumQuery("all", 1.0, self.effective_multiplier(step))
        return Event(self.sampling_of(step), equivalent_queries((query,)))

    def events(self, releases: int) -> Counter[Event]:
        """Costs of the first releases with their counts, by the plan alone."""
        return Counter(self.event(step) for step in range(releases))

    def contradiction(self, number: int, event: Event) -> str | None:
        """Say how a release does not follow the plan; None if it does.

        Its sampling must be that of its step, and its own queries must have the planned cost together. Queries that an
        earlier phase answered on the same batch are listed with them. Bounds may move. The cost of a custom noise
        process is not compared.
        """
        sampling = self.sampling_of(number)
        if number >= sampling.most_steps:
            return f"release {number} (from 0) exceeds the {sampling.most_steps:.0f} that its plan allows"
        if event.sampling != sampling:
            return f"release {number} draws a batch by {event.sampling.to_dict()}, its plan by {sampling.to_dict()}"
        queries = [query for query in event.queries if not query.name.startswith(EARLIER)]
        if not queries:
            return f"release {number} has no query of its own"
        if self.noise.noise_multiplier is None:
            return None
        stated = effective_noise_multiplier(queries)
        planned = self.effective_multiplier(number)
        if not math.isclose(stated, planned, rel_tol=ROUNDING):
            return f"release {number} has a noise multiplier of {stated:.10g}, its plan {planned:.10g}"
        return None


def own_process(noise: Mapping[str, Any]) -> str | None:
    """Qualified name of a custom noise process; None for one of dpbench's.

    Args:
        noise: Noise of a plan.
    """
    return str(noise["process"]) if noise.get("described") is False else None
