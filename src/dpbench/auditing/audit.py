"""Claimed, sound and audited: everything that one run's canaries tell of its epsilon, and one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from dpbench.auditing.choices import choose_guesses, choose_threshold, expected_scores
from dpbench.auditing.declared import (
    Checked,
    Measured,
    ReleaseGame,
    lot_sizes,
    participation,
    release_game,
    statistics_noise,
)
from dpbench.auditing.family import Family, TradeOff, reached
from dpbench.auditing.fresh import fresh_noise
from dpbench.auditing.independent import auc_lower, two_rates
from dpbench.auditing.one_run import count_right, one_run, one_run_fdp, one_run_p_value
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon, nominal_events
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.canaries.probes import Probes
from dpbench.privacy.canaries.scores import Floats, Scores

TOLERANCE = 0.005  # by how much noise and sensitivity may differ from the declaration without a word
KEYS = {
    "one run, DP only": "one_run_dp",
    "one run, f-DP": "one_run_fdp",
    "error rates": "error_rates",
    "family": "family",
    "family, centred": "family_centred",
    "release game": "release_game",
    "release game, t": "release_game_t",
}
"""Name of a bound → its key in files and logs."""
_SHOWN = ("family", "release game")  # as the audited ε where there is room for one: the first that there is
NO_PROOF = "passing is not a proof of privacy: it rules out only violations that these canaries can detect"


class Verdict(StrEnum):
    """What an audit says of a run."""

    VIOLATED = "VIOLATED"
    NOT_AS_DECLARED = "NOT AS DECLARED"
    CONSISTENT = "CONSISTENT"


@dataclass(frozen=True)
class Bound:
    """A lower limit of ε.

    Attributes:
        name: Of the method.
        assumes: What it takes for granted, beside fair coins.
        epsilon: The limit, with the confidence that was asked for, by itself; None where there is none.
        violated: Whether the sound ε is refuted, with that confidence for all bounds and checks together.
        why_not: Why there is no limit.
    """

    name: str
    assumes: str
    epsilon: float | None = None
    violated: bool = False
    why_not: str | None = None


@dataclass(frozen=True)
class Check:
    """A test of the declaration.

    Attributes:
        name: Of what was tested.
        value: Measured.
        expected: Declared.
        passed: Whether they agree; None where there was nothing to test.
        low, high: Confidence limits of the value, where it has any.
        p_value: Where the test has one.
    """

    name: str
    value: float | None
    expected: float
    passed: bool | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class AuditResult:
    """What one run's canaries tell.

    Each bound holds by itself with the confidence that was asked for, as papers state theirs. The verdict, and the
    limits of what was measured, hold with that confidence for all bounds and checks together (Bonferroni).

    Attributes:
        claimed: ε of the ledger by RDP, as every run states it; nominal where it does not cover the lots.
        sound: The tightest ε that covers the lots; None where none does.
        sound_by: The accountant that gives it.
        delta: δ of all.
        canaries: How many.
        members: How many of them were among the records.
        releases: How many.
        confidence: As asked for.
        declared_mu: Largest declared sensitivity over noise of a release, as far as canaries reach.
        measured_mu: The same as measured, with its limits; None where nobody was drawn.
        bounds: Lower limits of ε.
        checks: Of noise, sensitivity and lots.
        not_finite: Observations that were no finite numbers.
    """

    claimed: float
    sound: float | None
    sound_by: str | None
    delta: float
    canaries: int
    members: int
    releases: int
    confidence: float
    declared_mu: float
    measured_mu: Measured | None
    bounds: tuple[Bound, ...]
    checks: tuple[Check, ...]
    not_finite: int

    @property
    def violations(self) -> tuple[Bound, ...]:
        """Bounds that refute the sound ε."""
        return tuple(bound for bound in self.bounds if bound.violated)

    @property
    def verdict(self) -> Verdict:
        """VIOLATED before NOT AS DECLARED before CONSISTENT."""
        if self.violations:
            return Verdict.VIOLATED
        return Verdict.NOT_AS_DECLARED if self.accused_by else Verdict.CONSISTENT

    @property
    def shown(self) -> Bound | None:
        """The limit that stands for all where there is room for one: family or, where there is none, release game.

        Which one depends on the lots alone: the largest of seven would not hold with the confidence of each.
        """
        by_name = {bound.name: bound for bound in self.bounds if bound.epsilon is not None}
        return next((by_name[name] for name in _SHOWN if name in by_name), None)

    @property
    def audited(self) -> float | None:
        """The limit that is `shown`."""
        return None if self.shown is None else self.shown.epsilon

    @property
    def accused_by(self) -> tuple[str, ...]:
        """Names of the bounds and checks that the verdict rests on; none where it is CONSISTENT."""
        failed = tuple(check.name for check in self.checks if check.passed is False)
        return (*(b.name for b in self.violations), *failed, *(("not finite",) if self.not_finite else ()))

    def summary(self) -> dict[str, Any]:
        """What a run keeps of it, as plain data: an infinite limit is None, and one that there is not is left out."""
        limits = {KEYS[bound.name]: bound.epsilon for bound in self.bounds if bound.epsilon is not None}
        facts = {
            "confidence": self.confidence,
            "claimed": self.claimed,
            "sound": self.sound,
            "sound_by": self.sound_by,
            "audited": limits,
            "shown": None if self.shown is None else KEYS[self.shown.name],
            "verdict": str(self.verdict),
            "accused_by": list(self.accused_by),
        }
        plain: dict[str, Any] = finite(facts)
        return plain

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is infinite is None."""
        facts = {"verdict": str(self.verdict), "note": NO_PROOF, "audited": self.audited, **asdict(self)}
        plain: dict[str, Any] = finite(facts)
        return plain


def finite(data: Any) -> Any:
    """Plain data with None for numbers that are not finite."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


TESTS = 22  # 7 bounds and 15 checks share the probability of an error


def audit(ledger: Ledger, scores: Scores, confidence: float = 0.95, family: Family | None = None) -> AuditResult:
    """Compare what an auditor saw of a run's canaries with what its ledger claims.

    Args:
        ledger: Of the run, with as many releases as the scores.
        scores: Of the same run.
        confidence: Probability that a bound is none too high, and that the verdict on a correct run is no accusation,
            if what they assume is true.
        family: Of the ledger's releases, where several runs of equal cost are audited; made here by default.

    Raises:
        ConfigurationError: The confidence is out of range, or ledger and scores do not fit.
    """
    if not 0 < confidence < 1:
        raise ConfigurationError(f"confidence must lie strictly between 0 and 1, not {confidence}.")
    if len(ledger.releases) != scores.releases or not scores.releases:
        raise ConfigurationError(
            f"the ledger holds {len(ledger.releases)} releases and the canaries saw {scores.releases}: they are not of "
            "one run, or the run went on without canaries; train again with them from the start."
        )
    levels = Levels(1 - confidence, (1 - confidence) / TESTS)
    header = ledger.header
    family = Family(ledger.events, header.delta) if family is None else family
    game = release_game(scores.game, levels.joint)
    declared = scores.game.most_mu
    return AuditResult(
        claimed=claimed_epsilon(ledger),
        sound=family.claimed if math.isfinite(family.claimed) else None,
        sound_by=family.accountant,
        delta=header.delta,
        canaries=scores.canaries,
        members=int(scores.member.sum()),
        releases=scores.releases,
        confidence=confidence,
        declared_mu=declared,
        measured_mu=None if game is None else game.ratio.times(declared),
        bounds=(
            *_one_run_bounds(scores, family, levels),
            *_independent_bounds(scores, family, levels),
            *_game_bounds(scores, reached(ledger, family), levels),
        ),
        checks=_checks(scores, ledger, game, levels.joint),
        not_finite=scores.not_finite,
    )


def claimed_epsilon(ledger: Ledger) -> float:
    """ε of a ledger by RDP, as every run states it; nominal where it does not cover the lots."""
    taken = nominal_events(ledger.events, "rdp", ledger.header.microbatch_size)
    return epsilon(taken, ledger.header.delta, "rdp")


class Levels(NamedTuple):
    """Probabilities of an error: of a bound by itself, and of each of all tests together."""

    alone: float
    joint: float


def _one_run_bounds(scores: Scores, family: Family, levels: Levels) -> tuple[Bound, ...]:
    """Those of which guesses may depend on each other."""
    expected = expected_scores(family.events, scores.replace_one, scores.reach)
    guesses = choose_guesses(scores.canaries, expected, levels.alone)
    m, r, delta = scores.canaries, guesses.made, family.delta
    right = count_right(scores.llr, scores.member, guesses)
    surprise = one_run_p_value(m, r, right, family.claimed, delta) if family.accountant else 1.0
    least = one_run(m, r, right, delta, levels.alone)
    return (
        Bound("one run, DP only", "nothing but (ε, δ)-DP", least, surprise < levels.joint),
        bound_of_family(
            "one run, f-DP", "the family", family, lambda f, level: one_run_fdp(m, r, right, f, level), levels
        ),
    )


def _independent_bounds(scores: Scores, family: Family, levels: Levels) -> tuple[Bound, ...]:
    """Those of which canaries have to be independent observations."""
    expected, member = expected_scores(family.events, scores.replace_one, scores.reach), scores.member
    called = scores.llr >= choose_threshold(scores.canaries, expected, family.delta, levels.alone)
    alarms, misses, inside = int((called & ~member).sum()), int((~called & member).sum()), int(member.sum())
    counts = alarms, scores.canaries - inside, misses, inside, family.delta

    def family_auc(name: str, values: Floats) -> Bound:
        least = {level: auc_lower(values, member, level) for level in levels}
        assumes = "the family, independent canaries"
        return bound_of_family(name, assumes, family, lambda f, level: least[level] > 1 - f.area, levels)

    rates, jointly = two_rates(*counts, levels.alone), two_rates(*counts, levels.joint)
    return (
        Bound("error rates", "(ε, δ)-DP, independent canaries", rates, jointly > family.claimed),
        family_auc("family", scores.llr),
        family_auc("family, centred", scores.centred),
    )


def _game_bounds(scores: Scores, family: Family, levels: Levels) -> tuple[Bound, ...]:
    """Those of which it is known who was drawn."""
    game, joint = (release_game(scores.game, 2 * level) for level in levels)
    by_errors = (None, None) if game is None or joint is None else (game.ratio_by_errors, joint.ratio_by_errors)
    by_t = (None, None) if game is None or joint is None else (game.ratio.low, joint.ratio.low)
    return (
        _of_game("release game", "the family, lots as declared, independent noise", family, *by_errors),
        _of_game("release game, t", "the family, lots as declared, independent Gaussian noise", family, *by_t),
    )


def bound_of_family(
    name: str, assumes: str, family: Family, refutes: Callable[[TradeOff, float], bool], levels: Levels
) -> Bound:
    """The bound of a test that refutes members of a family.

    Args:
        name: See `Bound`.
        assumes: See `Bound`.
        family: Of the ledger's releases.
        refutes: Whether a trade-off curve is refuted at a level.
        levels: Probabilities of an error.
    """
    if family.uncovered is not None:
        return Bound(name, assumes, why_not=family.uncovered)
    scale = family.smallest_refuted(lambda curve: refutes(curve, levels.alone))
    least = family.epsilon(scale) if math.isfinite(scale) else 0.0
    return Bound(name, assumes, least, refutes(family.curve(1.0), levels.joint))


def _of_game(name: str, assumes: str, family: Family, ratio: float | None, joint: float | None) -> Bound:
    if ratio is None or joint is None:
        return Bound(name, assumes, why_not="nobody was drawn, or everybody, or there are too few observations")
    if family.accountant is None:
        return Bound(name, assumes, why_not="no accountant covers the lots")
    return Bound(name, assumes, family.least_epsilon(1 / ratio) if ratio > 0 else 0.0, bool(joint > 1))


def _checks(scores: Scores, ledger: Ledger, game: ReleaseGame | None, level: float) -> tuple[Check, ...]:
    lots = participation(scores, all(sampling.lots_per_draw == 1 for sampling, _ in ledger.events))
    noise = fresh_noise(scores)
    return (
        _interval("noise over declared", game.noise if game else None),
        _interval("sensitivity over declared", game.move if game else None),
        _tested("rate", lots.rate, level, scores.lots.mean / scores.releases),
        _tested("dispersion", lots.dispersion, level, 1.0),
        _tested("correlation, lag 1", lots.lag, level, 0.0),
        _tested("shared noise", lots.shared, level, 1.0),
        _tested("accumulated noise", noise.accumulated, level, 1.0),
        _tested("spectrum of the noise", noise.spectrum, level, 1.0),
        _tested("closest releases", noise.releases, level, 1.0),
        _tested("closest canaries", noise.canaries, level, 1.0),
        _tested("kurtosis of the noise", noise.shape, level, 3.0),
        _tested("canary by canary", noise.canary_by_canary, level, 1.0),
        _tested("release by release", noise.release_by_release, level, 1.0),
        *_probed(scores.probes, level),
    )


def _probed(probes: Probes | None, level: float) -> tuple[Check, ...]:
    """What the run measured of itself; the last three are no statistics, and never fail by chance."""
    if probes is None:
        probes = Probes()
    looked_at = probes.records > 0
    return (
        _tested("lot sizes", lot_sizes(probes), level, 1.0),
        _tested("noise of statistics", statistics_noise(probes), level, 1.0),
        _at_most("record over bound", probes.largest if looked_at else None, 1.0),
        _at_most("sum apart from records", probes.difference if looked_at else None, 0.0),
        _at_most("more than the lot", float(probes.surplus) if looked_at else None, 0.0),
    )


def _at_most(name: str, value: float | None, expected: float) -> Check:
    return Check(name, value, expected, None if value is None else value <= expected)


def _interval(name: str, measured: Measured | None) -> Check:
    if measured is None:
        return Check(name, None, 1.0, None)
    passed = bool(measured.low <= 1 + TOLERANCE and measured.high >= 1 - TOLERANCE)
    return Check(name, measured.value, 1.0, passed, measured.low, measured.high)


def _tested(name: str, checked: Checked | None, level: float, expected: float) -> Check:
    if checked is None:
        return Check(name, None, expected, None)
    return Check(name, checked.value, checked.expected, checked.p_value >= level, p_value=checked.p_value)
