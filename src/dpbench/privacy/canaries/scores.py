"""Sums over releases of what an auditor sees of canaries: all that the bounds and the checks need, in O(m) memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbench.privacy.canaries.probes import Probes
from dpbench.privacy.canaries.residuals import Residuals, ResidualSums
from dpbench.privacy.canaries.whitening import Rounds, RoundSums

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LIMIT = 1e6  # in declared sensitivities; beyond it a mechanism is broken, however far
_SHARPER = 4.0  # by how much less noise than declared the centred scores expect: they look for noise that cancels
_PER_CANARY = ("llr", "centred", "mean", "residual")


def log_likelihood_ratio(
    observed: Floats,
    noise_multiplier: float,
    sample_rate: float,
    replace_one: bool = False,
    reach: float = 1.0,
) -> Floats:
    """Logarithm of how much likelier an observation is of a member than of somebody else, one release.

    Whether the canary was drawn is not known to the auditor, so this is a ratio of mixtures: with z the noise
    multiplier, q the rate and r the reach, log(1 − q + q·exp((r·x − r²/2)/z²)) where a member would be added, and the
    difference of two such terms at ±x with r/2 for r where it would be replaced.

    Args:
        observed: x, in declared sensitivities.
        noise_multiplier: Noise over sensitivity.
        sample_rate: q.
        replace_one: Whether a drawn non-member moves the sum the other way; else it is not there.
        reach: By how much of the declared sensitivity the sums with and without the member differ.

    >>> log_likelihood_ratio(np.array([0.5, 1.5]), 1.0, 1.0)
    array([0., 1.])
    """
    log_not_drawn = -math.inf
    if sample_rate < 1:
        log_not_drawn = math.log1p(-sample_rate)
    log_drawn = math.log(sample_rate)
    precision = noise_multiplier**-2
    move = reach
    if replace_one:
        move = reach / 2

    def mixture(x: Floats) -> Floats:
        """Log likelihood ratio of a sum that moves by `move` with probability q to one that does not."""
        gaussian = (move * x - move**2 / 2) * precision
        return np.logaddexp(log_not_drawn, log_drawn + gaussian)

    if replace_one:
        return mixture(observed) - mixture(-observed)
    return mixture(observed)


@dataclass(frozen=True)
class LotSums:
    """Sums over the releases of what was declared of the lots.

    Attributes:
        mean: Σ q: how often a canary is drawn on average.
        variance: Σ q(1−q): variance of that number.
        cumulant: Σ q(1−q)(1−6q(1−q)): its fourth cumulant.
    """

    mean: float = 0.0
    variance: float = 0.0
    cumulant: float = 0.0


@dataclass(frozen=True)
class GameSums:
    """Sums over releases and canaries for the game in which the auditor knows who was drawn.

    All in declared standard deviations: `move` is what a drawn member (or its replacement) should have added,
    `residual` what was seen beyond it. "In" are drawn members; "out" are all others or, with replacement, drawn
    non-members.

    Attributes:
        count: Observations.
        move, move_squared: Sums of the declared move.
        residual, residual_squared: Sums of the residual.
        product: Sum of move times residual.
        ins, misses: Observations in, and those of them on the wrong side of the middle.
        outs, alarms: Observations out, and those of them on the wrong side of the middle.
        least_mu, most_mu: Smallest and largest declared distance of in and out over the deviation.
    """

    count: int = 0
    move: float = 0.0
    move_squared: float = 0.0
    residual: float = 0.0
    residual_squared: float = 0.0
    product: float = 0.0
    ins: int = 0
    misses: int = 0
    outs: int = 0
    alarms: int = 0
    least_mu: float = LIMIT
    most_mu: float = 0.0


@dataclass(frozen=True)
class CorrelationSums:
    """Sums for correlations of the residuals.

    Attributes:
        pairs: Of consecutive releases, times canaries.
        product, earlier_squared, later_squared: Of the residuals of a pair, same canary.
        across: Sum over the releases of the squared sum over all canaries.
    """

    pairs: int = 0
    product: float = 0.0
    earlier_squared: float = 0.0
    later_squared: float = 0.0
    across: float = 0.0


@dataclass(frozen=True, eq=False)
class Scores:
    """What an auditor saw of m canaries, summed over the releases.

    Attributes:
        member: (m,) whether the canary was among the records: a fair coin each.
        llr: (m,) `log_likelihood_ratio` of what was seen, summed over the releases.
        centred: (m,) the same without what all canaries of a release have in common, without the mean of the canary's
            earlier releases, and for a quarter of the noise: it tells where shared or repeated noise cancels.
        drawn: (m,) in how many lots the canary was.
        releases: How many.
        replace_one: Whether drawn non-members move the sum the other way.
        reach: By how much of the declared sensitivity a canary moves the sum.
        not_finite: Observations that were no finite numbers.
        lots, game, correlation: Sums.
        residuals: Of the noise, whitened where it is correlated; None in files of earlier versions, and in runs that
            began with one.
        probes: What the run measured of itself beside its canaries; None there, too.
        rounds: Where lots hold records of one group each: of how many releases a canary is observed once, and all
            that is above (but `releases` and the noise) is of these observations. None: of each release.
    """

    member: Flags
    llr: Floats
    centred: Floats
    drawn: NDArray[np.int64]
    releases: int
    replace_one: bool
    reach: float
    not_finite: int
    lots: LotSums
    game: GameSums
    correlation: CorrelationSums
    residuals: Residuals | None = None
    probes: Probes | None = None
    rounds: RoundSums | None = None

    @property
    def canaries(self) -> int:
        """Number of canaries, m."""
        return len(self.member)

    @property
    def observations(self) -> int:
        """How often each canary was observed."""
        return self.releases if self.rounds is None else self.rounds.complete

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers are finite and come back bit-identical."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            elif field.name in _GROUPS:
                value = asdict(value)
            elif field.name in _LATER and value is not None:
                value = value.to_json()
            elif field.name == "rounds":
                continue  # earlier versions read what they would have written
            data[field.name] = value
        return data

    @classmethod
    def from_json(cls, data: object) -> Scores:
        """Inverse of `to_json`.

        Raises:
            ValueError: It is something else; one line says what.
        """
        names = {field.name for field in fields(cls)}
        data = _with_later_keys(data)
        values = _with_keys(data, names, "scores")
        drawn = _column(values["drawn"], int, "drawn")
        member = _column(values["member"], bool, "member")
        llr = _column(values["llr"], float, "llr")
        centred = _column(values["centred"], float, "centred")
        columns = (member, drawn, llr, centred)
        lengths = {len(column) for column in columns}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError("member, llr, centred and drawn differ in length, or are empty")
        if type(values["replace_one"]) is not bool:
            raise ValueError("replace_one is neither true nor false")
        releases = _number(values["releases"], int, "releases")
        reach = _number(values["reach"], float, "reach")
        not_finite = _number(values["not_finite"], int, "not_finite")
        lots = _sums_from(LotSums, values["lots"], "lots")
        game = _sums_from(GameSums, values["game"], "game")
        correlation = _sums_from(CorrelationSums, values["correlation"], "correlation")
        residuals = None
        if values["residuals"] is not None:
            residuals = Residuals.from_json(values["residuals"], len(member))
        probes = None
        if values["probes"] is not None:
            probes = Probes.from_json(values["probes"])
        rounds = None
        if values["rounds"] is not None:
            rounds = RoundSums.from_json(values["rounds"])
        return cls(
            member=member,
            llr=llr,
            centred=centred,
            drawn=drawn,
            releases=releases,
            replace_one=values["replace_one"],
            reach=reach,
            not_finite=not_finite,
            lots=lots,
            game=game,
            correlation=correlation,
            residuals=residuals,
            probes=probes,
            rounds=rounds,
        )


_GROUPS = ("lots", "game", "correlation")
_LATER = ("residuals", "probes", "rounds")  # which earlier versions do not write
_KINDS: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
}


def _with_later_keys(data: object) -> object:
    """Scores with what the files of earlier versions do not have."""
    if not isinstance(data, Mapping):
        return data
    return {**dict.fromkeys(_LATER), **data}


def _with_keys(data: object, keys: set[str], name: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} is no object")
    difference = keys ^ set(data)
    if difference:
        expected = ", ".join(sorted(keys))
        wrong = ", ".join(sorted(map(str, difference)))
        raise ValueError(f"{name} should have the keys {expected}: {wrong}")
    return data


def _number(value: object, kind: type, name: str) -> Any:
    if type(value) not in _KINDS[kind] or not _is_finite(value):
        adjective = "finite"
        if kind is int:
            adjective = "whole"
        beginning = str(value)[:40]
        raise ValueError(f"{name} is no {adjective} number: {beginning}")
    return kind(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _column(values: object, kind: type, name: str) -> NDArray[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list")
    if not set(map(type, values)) <= set(_KINDS[kind]):
        raise ValueError(f"{name} holds something else than {kind.__name__}")
    dtype = np.int64 if kind is int else kind
    try:
        column: NDArray[Any] = np.array(values, dtype=dtype)
    except OverflowError:
        raise ValueError(f"{name} holds a number that is too large") from None
    if kind is float and not np.isfinite(column).all():
        raise ValueError(f"{name} holds numbers that are not finite")
    return column


def _sums_from(kind: Any, data: object, name: str) -> Any:
    """The sums of one dataclass, whose fields are whole or finite numbers."""
    names = {field.name for field in fields(kind)}
    values = _with_keys(data, names, name)
    numbers = {}
    for field in fields(kind):
        number_type = int if field.type == "int" else float
        numbers[field.name] = _number(
            values[field.name],
            number_type,
            f"{name}.{field.name}",
        )
    return kind(**numbers)


class ScoreSums:
    """Adds up, release by release, what an auditor sees of m canaries; O(m) memory, about 0.1 ms for 2,000 canaries.

    Args:
        member: (m,) whether the canary is among the records.
        replace_one: Whether a non-member is there with the opposite vector (its replacement), instead of being absent.
        reach: By how much of the declared sensitivity the sums with and without the member differ; below 1 where the
            declared one covers more than a canary can do.

    Attributes:
        probes: What the run measured of itself; None in a run that began with an earlier version.
        rounds: Makes one observation of the releases of a round, where lots hold records of one group each; set before
            the first release. None: each release is one.
    """

    def __init__(
        self,
        member: Flags,
        replace_one: bool = False,
        reach: float = 1.0,
    ) -> None:
        self.member = np.array(member, dtype=np.bool_)
        if self.member.ndim != 1 or not len(self.member):
            raise ValueError(f"member must be one flag for each canary, not of shape {self.member.shape}")
        if not 0 < reach <= 1:
            raise ValueError(f"reach must lie in (0, 1], not {reach}")
        self.replace_one = bool(replace_one)
        self.reach = float(reach)
        self.releases = 0
        self.not_finite = 0
        canaries = len(self.member)
        self._arrays = {name: np.zeros(canaries) for name in _PER_CANARY}
        self._drawn = np.zeros(canaries, dtype=np.int64)
        self._expected = 0.0  # mean over the releases of what is expected of a canary of unknown membership
        self._lots = LotSums()
        self._game = GameSums()
        self._correlation = CorrelationSums()
        self._residuals: ResidualSums | None = ResidualSums(canaries)
        self.probes: Probes | None = Probes()
        self.rounds: Rounds | None = None

    @property
    def observations(self) -> int:
        """How often each canary was observed so far."""
        return self.releases if self.rounds is None else self.rounds.complete

    def add(
        self,
        observed: Floats,
        drawn: Flags,
        noise_multiplier: float,
        sample_rate: float,
    ) -> None:
        """Add one release.

        Args:
            observed: (m,) projection of the noised sum on the canary's direction, without what everybody else put
                there, over the declared sensitivity. What is not finite counts as zero, or as a million where it has a
                sign; so do larger numbers.
            drawn: (m,) whether the canary was in the lot; a non-member only with `replace_one`.
            noise_multiplier: Declared standard deviation of the noise on `observed`.
            sample_rate: Declared probability of being drawn, in lots of a canary's own group where there are groups.

        Raises:
            ValueError: A shape is wrong, or a number out of range.
        """
        x = np.asarray(observed, dtype=np.float64)
        in_lot = np.asarray(drawn, dtype=np.bool_)
        shape = self.member.shape
        if x.shape != shape or in_lot.shape != shape:
            raise ValueError(f"expected {shape} observations and flags, not {x.shape} and {in_lot.shape}")
        if not (0 < noise_multiplier < math.inf and 0 < sample_rate <= 1):
            raise ValueError(f"noise multiplier {noise_multiplier} or sample rate {sample_rate} is out of range")
        if not self.replace_one and (in_lot & ~self.member).any():
            raise ValueError("a canary that is no member was drawn")
        not_finite = ~np.isfinite(x)
        self.not_finite += int(not_finite.sum())
        x = np.nan_to_num(
            x,
            nan=0.0,
            posinf=LIMIT,
            neginf=-LIMIT,
        )
        x = np.clip(x, -LIMIT, LIMIT)
        earlier = self.observations
        if self.rounds is None:
            residual = self._add_observation(x, in_lot, noise_multiplier, sample_rate, earlier)
        else:
            shown = x / noise_multiplier - self._moves(in_lot) / noise_multiplier
            residual = self.rounds.whiten_residual(shown)
            of_round = self.rounds.add(x, in_lot)
            if of_round is not None:
                self._add_observation(*of_round, noise_multiplier, sample_rate, earlier)
        self._add_residual(residual)
        self.releases += 1

    def whiten_statistics(self, noise: Floats) -> Floats:
        """Whiten the noise on what is released beside the gradients, where it is correlated."""
        return noise if self.rounds is None else self.rounds.whiten_statistics(noise)

    def _add_observation(
        self,
        x: Floats,
        drawn: Flags,
        z: float,
        q: float,
        earlier: int,
    ) -> Floats:
        """Add one observation of each canary.

        Args:
            x: (m,) observations, in declared sensitivities.
            drawn: (m,) whether the canary took part.
            z: Noise multiplier.
            q: Sample rate.
            earlier: Number of observations before.

        Returns:
            (m,) residuals, in declared standard deviations.
        """
        self._add_scores(x, z, q, earlier)
        self._drawn += drawn
        variance = q * (1 - q)
        lot = LotSums(
            mean=q,
            variance=variance,
            cumulant=variance * (1 - 6 * variance),
        )
        self._lots = _plus(self._lots, lot)
        return self._add_game(x, drawn, z)

    def _add_scores(self, x: Floats, z: float, q: float, earlier: int) -> None:
        """Add the likelihood ratios of one observation.

        Args:
            x: (m,) observations, in declared sensitivities.
            z: Noise multiplier.
            q: Sample rate.
            earlier: Number of observations before.
        """
        sums = self._arrays
        sums["llr"] += log_likelihood_ratio(
            x,
            z,
            q,
            self.replace_one,
            self.reach,
        )
        expected = 0.0
        if not self.replace_one:
            expected = q * self.reach / 2
        centred = x - x.mean() + expected
        repeated = sums["mean"] - self._expected
        if earlier:  # without an earlier one nothing repeated would cancel
            sums["centred"] += log_likelihood_ratio(
                centred - repeated,
                z / _SHARPER,
                q,
                self.replace_one,
                self.reach,
            )
        observations = earlier + 1
        sums["mean"] += (centred - sums["mean"]) / observations
        self._expected += (expected - self._expected) / observations

    def _add_game(self, x: Floats, drawn: Flags, z: float) -> Floats:
        """Add one release to the game's sums.

        Args:
            x: (m,) observations, in declared sensitivities.
            drawn: (m,) whether the canary was in the lot.
            z: Noise multiplier.

        Returns:
            (m,) residuals, in declared standard deviations.
        """
        inside = drawn & self.member
        outside = ~inside
        middle = self.reach / 2
        if self.replace_one:
            outside = drawn & ~self.member
            middle = 0.0
        move = self._moves(drawn) / z
        residual: Floats = x / z - move
        mu = self.reach / z
        misses = inside & (x <= middle)
        alarms = outside & (x > middle)
        game = self._game
        self._game = GameSums(
            count=game.count + len(x),
            move=game.move + float(move.sum()),
            move_squared=game.move_squared + float(move @ move),
            residual=game.residual + float(residual.sum()),
            residual_squared=game.residual_squared + float(residual @ residual),
            product=game.product + float(move @ residual),
            ins=game.ins + int(inside.sum()),
            misses=game.misses + int(misses.sum()),
            outs=game.outs + int(outside.sum()),
            alarms=game.alarms + int(alarms.sum()),
            least_mu=min(game.least_mu, mu),
            most_mu=max(game.most_mu, mu),
        )
        return residual

    def _add_residual(self, residual: Floats) -> None:
        """Add one release's residuals (m,) to the sums for correlations and for the tests of the noise."""
        previous = self._arrays["residual"]
        total = float(residual.sum())
        sums = CorrelationSums(across=total**2)
        if self.releases:
            sums = replace(
                sums,
                pairs=len(residual),
                product=float(previous @ residual),
                earlier_squared=float(previous @ previous),
                later_squared=float(residual @ residual),
            )
        self._correlation = _plus(self._correlation, sums)
        self._arrays["residual"] = residual
        if self._residuals is not None:
            self._residuals.add(residual, self.releases)

    def _moves(self, drawn: Flags) -> Floats:
        """What each canary should have added to this sum, in declared sensitivities."""
        if not self.replace_one:
            return np.where(drawn, self.reach, 0.0)
        half = self.reach / 2
        move = np.where(self.member, half, -half)
        return np.where(drawn, move, 0.0)

    def scores(self) -> Scores:
        """What was added so far; later releases do not change it."""
        residuals = None
        if self._residuals is not None:
            residuals = self._residuals.residuals()
        return Scores(
            member=self.member.copy(),
            llr=self._arrays["llr"].copy(),
            centred=self._arrays["centred"].copy(),
            drawn=self._drawn.copy(),
            releases=self.releases,
            replace_one=self.replace_one,
            reach=self.reach,
            not_finite=self.not_finite,
            lots=self._lots,
            game=self._game,
            correlation=self._correlation,
            residuals=residuals,
            probes=self.probes,
            rounds=None if self.rounds is None else self.rounds.sums(self.member),
        )

    def state_dict(self) -> dict[str, Any]:
        """Lists and numbers, which any checkpoint holds; whoever loads them goes on bit-identically."""
        per_canary = {}
        for name, values in self._arrays.items():
            per_canary[name] = values.tolist()
        residuals = None
        if self._residuals is not None:
            residuals = self._residuals.residuals().to_json()
        probes = None
        if self.probes is not None:
            probes = self.probes.to_json()
        return {
            **self._identity(),
            "drawn": self._drawn.tolist(),
            "per_canary": per_canary,
            "releases": self.releases,
            "not_finite": self.not_finite,
            "expected": self._expected,
            "lots": asdict(self._lots),
            "game": asdict(self._game),
            "correlation": asdict(self._correlation),
            "residuals": residuals,
            "probes": probes,
            "rounds": None if self.rounds is None else self.rounds.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        """What tells these canaries from others."""
        return {
            "member": self.member.tolist(),
            "replace_one": self.replace_one,
            "reach": self.reach,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ScoreSums:
        """The sums whose `state_dict` was kept."""
        sums = cls(
            np.array(state["member"], dtype=np.bool_),
            state["replace_one"],
            state["reach"],
        )
        sums.load_state_dict(state)
        return sums

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: It is of other canaries.
        """
        identity = self._identity()
        saved = {key: state.get(key) for key in identity}
        if saved != identity:
            raise ValueError("the saved scores are of other canaries")
        arrays = {}
        for name in _PER_CANARY:
            values = state["per_canary"][name]
            arrays[name] = np.array(values, dtype=np.float64)
        self._arrays = arrays
        self._drawn = np.array(state["drawn"], dtype=np.int64)
        self.releases = int(state["releases"])
        self.not_finite = int(state["not_finite"])
        self._expected = float(state["expected"])
        self._lots = LotSums(**state["lots"])
        self._game = GameSums(**state["game"])
        self._correlation = CorrelationSums(**state["correlation"])
        # Checkpoints of earlier versions have neither of these.
        self._residuals = None
        if state.get("residuals") is not None:
            residuals = Residuals.from_json(state["residuals"], len(self.member))
            self._residuals = ResidualSums.of(residuals)
        self.probes = None
        if state.get("probes") is not None:
            self.probes = Probes.from_json(state["probes"])
        self.rounds = None
        if state.get("rounds") is not None:
            self.rounds = Rounds.of(state["rounds"])


def _plus(first: Any, second: Any) -> Any:
    """Sum of two groups of sums."""
    sums = {}
    for name, value in asdict(first).items():
        sums[name] = value + getattr(second, name)
    return type(first)(**sums)
