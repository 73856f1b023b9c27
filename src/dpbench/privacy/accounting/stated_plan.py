"""The plan in the header of a ledger, as those see it who have the ledger alone.

From it the cost of each release of a phase is computed without a single release's line, and so without trust in the
arithmetic of whoever wrote them. `privacy.mechanism.training_plan` makes it, and knows what is trained; here is what
costs privacy. `StatedPlan` has the format.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from dpbench.errors import LedgerError
from dpbench.privacy.events import (
    EARLIER,
    Event,
    Queries,
    SumQuery,
    effective_noise_multiplier,
    equivalent_queries,
    record_changes,
)
from dpbench.privacy.sampling import LotSamplings, Sampling, sampling_from_dict

_SMALLEST = 1e-100  # of a number whose square is still one
_ROUNDING = 1e-9  # of noise multipliers: costs are counted to ten digits
_ALLOCATIONS = ("equal", "proportional", "dimension")
_FIELDS = frozenset(
    [
        "digest",
        "sampling",
        "size_factors",
        "summands",
        "noise",
        "groups",
        "bound_factors",
        "allocation",
        "statistics",
        "recipe",
    ]
)


class Numbered(Protocol):
    """A release, as far as it can follow a plan or not."""

    @property
    def number(self) -> int:
        """Number within the run."""

    @property
    def sampling(self) -> Sampling:
        """How its lot was drawn."""

    @property
    def queries(self) -> Queries:
        """What was summed."""


@dataclass(frozen=True)
class Stairs:
    """Factors of a value over the steps; after the last one it stays.

    Attributes:
        stairs: (factor, number of steps in a row that have it); empty: always 1.
    """

    stairs: tuple[tuple[float, int], ...] = ()

    @cached_property
    def _ends(self) -> list[int]:
        """The step after each stair."""
        return list(accumulate(steps for _, steps in self.stairs))

    def at(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        if not self.stairs:
            return 1.0
        position = bisect_right(self._ends, step)
        last = len(self.stairs) - 1
        factor, _ = self.stairs[min(position, last)]
        return factor

    def to_list(self) -> list[list[float]]:
        """Plain JSON data."""
        return [list(stair) for stair in self.stairs]


@dataclass(frozen=True)
class StatedNoise:
    """What a plan says of its noise.

    Attributes:
        process: "gaussian", "scheduled" or "banded"; else the qualified name of somebody's own class.
        noise_multiplier: z, in units of the sensitivity of a release as of one added or removed record; None: nobody
            but its class knows what a process of one's own does.
        factors: Of z, by step.
        coefficients: Of noise that is correlated over as many steps: the first column of C, of norm 1 at most.
    """

    process: str
    noise_multiplier: float | None
    factors: Stairs = Stairs()
    coefficients: tuple[float, ...] = ()

    @property
    def bands(self) -> int:
        """Number of steps over which it is correlated; 1: it is independent."""
        return max(1, len(self.coefficients))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        if self.noise_multiplier is None:
            return {"process": self.process, "described": False}
        data: dict[str, Any] = {
            "process": self.process,
            "noise_multiplier": self.noise_multiplier,
        }
        if self.process == "scheduled":
            data["factors"] = self.factors.to_list()
        if self.process == "banded":
            data["coefficients"] = list(self.coefficients)
        return data


@dataclass(frozen=True)
class StatedPlan:
    """The plan of a phase, as its header states it.

    Guarantee: a release with number t that follows the plan is a Gaussian mechanism on sums over a lot of
    `sampling_of(t)`, and costs what `event(t)` says: z_t over the number of bounds by which one unit moves a sum,
    whatever the bounds are, because noise is allocated in proportion to them, and statistics beside the gradients take
    their share of z_t away from these (adaptive_quantile_clipping_2021, Theorem 1).

    In JSON::

        digest        32 hexadecimal digits: names the plan, part of the key of the noise
        sampling      of a lot at size factor 1, as in a release's line
        size_factors  of the expected lot size: [[factor, steps], ...]; [] always 1; after the last one it stays
        summands      {"unit", "per_summand", "total_weight"}: what the sums are over
        noise         {"process": "gaussian", "noise_multiplier"}, or "scheduled" with "factors" like those of sizes, or
                      "banded" with "coefficients" (schema 3), or
                      {"process": qualified name, "described": false} of somebody's own class
        groups        [{"name", "max_grad_norm", "coordinates"}]: clipped together, with the first bound of each
        bound_factors of all bounds, like those of sizes
        allocation    of noise among the groups: "equal", "proportional" or "dimension"
        statistics    released beside the gradients, for release 0: [{"name", "size", "bound", "noise_std", ...}]
        recipe        for people: names and options of what is done with the records; nothing here depends on it

    Attributes:
        digest: As above.
        sampling: As above.
        size_factors: As above.
        unit: Of the summands; "" where it is that of the sampling.
        per_summand: Units of the sampling that go into one summand.
        noise: As above.
        rest: What is stated and costs nothing: weights, groups, bounds, allocation, statistics, as JSON data.
        recipe: As above; two plans that differ in it alone are equal.
    """

    digest: str
    sampling: Sampling
    size_factors: Stairs
    unit: str
    per_summand: int
    noise: StatedNoise
    rest: Mapping[str, Any] = field(hash=False)
    recipe: Any = field(default=None, compare=False)

    @classmethod
    def from_dict(cls, data: object) -> StatedPlan:
        """Read the plan of a header.

        Raises:
            LedgerError: It is none, or holds what this version does not know.
        """
        plan = _object("plan", data)
        if set(plan) != _FIELDS:
            differing = sorted(_FIELDS.symmetric_difference(plan))
            raise LedgerError(
                f"the plan lacks fields or has others than this version of dpbench reads: {', '.join(differing)}"
            )
        summands = _object("summands", plan["summands"])
        rest = {
            "total_weight": _total_weight(summands),
            "groups": _groups(plan["groups"]),
            "bound_factors": _stairs("bound_factors", plan["bound_factors"]).to_list(),
            "allocation": _word("allocation", plan["allocation"], _ALLOCATIONS),
            "statistics": _statistics(plan["statistics"]),
        }
        stated = cls(
            digest=_digest(plan["digest"]),
            sampling=sampling_from_dict(_object("sampling", plan["sampling"])),
            size_factors=_stairs("size_factors", plan["size_factors"]),
            unit=_word("unit", summands.get("unit")),
            per_summand=_count("per_summand", summands.get("per_summand")),
            noise=_noise(_object("noise", plan["noise"])),
            rest=rest,
            recipe=_object("recipe", plan["recipe"]),
        )
        stated._require_rounds()
        return stated

    def _require_rounds(self) -> None:
        """Raise LedgerError where steps of a round differ, or noise is correlated over more steps than records rest.

        The first step of a round states its cost, and each participation of a record costs what independent noise does
        where no other one lies within the bands.
        """
        separation = self.sampling.separation
        if self.noise.bands > separation:
            raise LedgerError(
                f"the noise has {self.noise.bands} bands, and batches hold a record again after {separation} steps"
            )
        # An unknown process is asked of its lines, which state a cost in the first step of a round only.
        moves = bool(self.noise.factors.stairs) or self.noise.noise_multiplier is None
        moves = moves or bool(self.size_factors.stairs)
        if moves and self.sampling.groups > 1:
            raise LedgerError("noise or batches move, and batches of groups that take turns cost the same in each step")
        if self.noise.bands > 1 and (self.rest["bound_factors"] or self.per_summand > 1):
            raise LedgerError("banded noise needs bounds that stay, of summands that are one record each")

    @property
    def has_rounds(self) -> bool:
        """Whether steps depend on one another, by their noise or by the records in their batches."""
        return self.noise.bands > 1 or self.sampling.groups > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data: inverse of `from_dict`."""
        return {
            "digest": self.digest,
            "sampling": self.sampling.to_dict(),
            "size_factors": self.size_factors.to_list(),
            "summands": {
                "unit": self.unit,
                "per_summand": self.per_summand,
                "total_weight": self.rest["total_weight"],
            },
            "noise": self.noise.to_dict(),
            "groups": self.rest["groups"],
            "bound_factors": self.rest["bound_factors"],
            "allocation": self.rest["allocation"],
            "statistics": self.rest["statistics"],
            "recipe": self.recipe,
        }

    @cached_property
    def _samplings(self) -> LotSamplings:
        return LotSamplings(self.sampling, self.size_factors.at)

    def sampling_of(self, step: int) -> Sampling:
        """How the lot of a step is drawn.

        Raises:
            ConfigurationError: Lots cannot have that size.
        """
        return self._samplings.at(step)

    def effective_multiplier(self, step: int) -> float:
        """Noise over sensitivity of a whole release, statistics included.

        Raises:
            LedgerError: The noise is of somebody's own class.
        """
        multiplier = self.noise.noise_multiplier
        if multiplier is None:
            raise LedgerError(
                f"the noise process {self.noise.process} is not one of dpbench's: what a release costs stands in its "
                "line, and cannot be computed from the plan."
            )
        sampling = self.sampling_of(step)
        changes = record_changes(sampling, self.per_summand)
        scaled = multiplier * self.noise.factors.at(step)
        return scaled / max(1, changes)

    def event(self, step: int) -> Event:
        """What a release costs on a lot of its own, by the plan alone; errors as for `effective_multiplier`."""
        query = SumQuery("all", 1.0, self.effective_multiplier(step))
        return Event(self.sampling_of(step), equivalent_queries((query,)))

    def events(self, releases: int) -> Counter[Event]:
        """What the first releases cost, by the plan alone: how often each cost occurs."""
        return Counter(self.event(step) for step in range(releases))

    def contradiction(self, release: Numbered) -> str | None:
        """Say how a release does not follow the plan; None if it does.

        Its sampling must be that of its step, and its own queries together cost what the plan says. Queries that an
        earlier phase answered on the same lot stand beside them. Bounds may move. What a noise process of somebody's
        own costs is not compared.
        """
        number = release.number
        sampling = self.sampling_of(number)
        if number >= sampling.most_steps:
            return f"release {number} is one more than the {sampling.most_steps:.0f} that its plan allows"
        if release.sampling != sampling:
            return f"release {number} draws a batch by {release.sampling.to_dict()}, its plan by {sampling.to_dict()}"
        queries = [query for query in release.queries if not query.name.startswith(EARLIER)]
        if not queries:
            return f"release {number} has no query of its own"
        if self.noise.noise_multiplier is None:
            return None
        stated = effective_noise_multiplier(queries)
        planned = self.effective_multiplier(number)
        if not math.isclose(stated, planned, rel_tol=_ROUNDING):
            return f"release {number} has a noise multiplier of {stated:.10g}, its plan {planned:.10g}"
        return None


def own_process(noise: Mapping[str, Any]) -> str | None:
    """Qualified name of a noise process that is somebody's own class; None: one of dpbench's.

    Args:
        noise: What a plan states of its noise.
    """
    if noise.get("described") is False:
        return str(noise["process"])
    return None


# ------------------------------------------------------------------------------------- reading


def _object(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LedgerError(f"{name} must be a JSON object, not {value!r:.60}")
    return value


def _objects(name: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise LedgerError(f"{name} must be a list, not {value!r:.60}")
    return [_object(f"each of {name}", entry) for entry in value]


def _word(name: str, value: object, choices: tuple[str, ...] = ()) -> str:
    if not isinstance(value, str):
        raise LedgerError(f"{name} must be a word, not {value!r:.60}")
    if choices and value not in choices:
        raise LedgerError(f"{name} must be one of {', '.join(choices)}, not {value!r:.60}")
    return value


def _digest(value: object) -> str:
    digest = _word("digest", value)
    if len(digest) != 32 or not set(digest) <= set("0123456789abcdef"):
        raise LedgerError(f"digest must be 32 hexadecimal digits, not {digest!r:.60}")
    return digest


def _count(name: str, value: object, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise LedgerError(f"{name} must be a whole number from {least} on, not {value!r:.60}")
    return value


def _positive(name: str, value: object) -> float:
    # A bool is an int to Python, and NaN is neither above nor below anything.
    if type(value) not in (int, float) or not _SMALLEST < value < 1 / _SMALLEST:  # type: ignore[operator]
        raise LedgerError(f"{name} must be a positive and finite number, not {value!r:.60}")
    return float(value)  # type: ignore[arg-type]


def _stairs(name: str, value: object) -> Stairs:
    if not isinstance(value, list):
        raise LedgerError(f"{name} must be a list of [factor, steps], not {value!r:.60}")
    stairs = []
    for stair in value:
        if not isinstance(stair, list) or len(stair) != 2:
            raise LedgerError(f"{name} must be a list of [factor, steps], and has {stair!r:.60}")
        factor = _positive(name, stair[0])
        steps = _count(f"steps of {name}", stair[1])
        stairs.append((factor, steps))
    return Stairs(tuple(stairs))


def _noise(data: dict[str, Any]) -> StatedNoise:
    process = _word("the noise process", data.get("process"))
    if data == {"process": process, "described": False}:
        return StatedNoise(process, None)
    if process == "gaussian" and set(data) == {"process", "noise_multiplier"}:
        multiplier = _positive("noise_multiplier", data["noise_multiplier"])
        return StatedNoise(process, multiplier)
    if process == "scheduled" and set(data) == {"process", "noise_multiplier", "factors"}:
        multiplier = _positive("noise_multiplier", data["noise_multiplier"])
        factors = _stairs("factors of the noise", data["factors"])
        return StatedNoise(process, multiplier, factors)
    if process == "banded" and set(data) == {"process", "noise_multiplier", "coefficients"}:
        multiplier = _positive("noise_multiplier", data["noise_multiplier"])
        coefficients = _coefficients(data["coefficients"])
        return StatedNoise(process, multiplier, coefficients=coefficients)
    raise LedgerError(f"this version of dpbench does not know the noise process {data!r:.120}")


def _coefficients(value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise LedgerError(f"coefficients must be a list of two numbers or more, not {value!r:.60}")
    for number in value:
        if type(number) not in (int, float) or not math.isfinite(number):
            raise LedgerError(f"coefficients must be finite numbers, and one is {number!r:.60}")
    norm = math.hypot(*value)
    if not value[0] > 0 or norm > 1 + _ROUNDING:
        raise LedgerError(f"coefficients must begin above 0 and have a norm of 1 at most, not {norm:.10g}")
    return tuple(float(number) for number in value)


def _total_weight(summands: dict[str, Any]) -> float | None:
    if set(summands) != {"unit", "per_summand", "total_weight"}:
        raise LedgerError(f"summands must have unit, per_summand and total_weight, not {', '.join(summands)}")
    weight = summands["total_weight"]
    if weight is None:
        return None
    return _positive("total_weight", weight)


def _groups(value: object) -> list[dict[str, Any]]:
    groups = _objects("groups", value)
    for group in groups:
        name = _word("the name of a group", group.get("name"))
        if name.startswith(EARLIER):
            raise LedgerError(f"the group {name!r} has a name that begins with {EARLIER!r}: call it otherwise")
        _positive(f"the bound of {name}", group.get("max_grad_norm"))
        _count(f"the coordinates of {name}", group.get("coordinates"), least=0)
    return groups


def _statistics(value: object) -> list[dict[str, Any]]:
    statistics = _objects("statistics", value)
    for statistic in statistics:
        name = _word("the name of a statistic", statistic.get("name"))
        _count(f"the size of {name}", statistic.get("size"))
        for number in ("bound", "noise_std", "denominator"):
            _positive(f"{number} of {name}", statistic.get(number))
    return statistics
