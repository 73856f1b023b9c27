"""Claimed, sound and audited: everything that one run's canaries tell of its epsilon, and one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from dpbench.capabilities.auditing.declared import (
    Check,
    ReleaseGame,
    group_sizes,
    least_ratio,
    lot_sizes,
    participation,
    release_game,
    statistics_noise,
)
from dpbench.capabilities.auditing.family import Family, reached
from dpbench.capabilities.auditing.fresh import fresh_noise
from dpbench.capabilities.auditing.independent import auc_lower
from dpbench.capabilities.auditing.levels import check_level
from dpbench.capabilities.auditing.one_run import choose_guesses, count_right, one_run, one_run_fdp, one_run_p_value
from dpbench.capabilities.canaries.scores import Flags, Floats, GameSums, Scores
from dpbench.capabilities.canaries.whitening import RoundSums
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon, nominal_events
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.accounting.tradeoff import TradeOff

TOLERANCE = 0.005  # by how much noise and sensitivity may differ from the declaration without a word
KEYS = {
    "one run, DP only": "one_run_dp",
    "one run, f-DP": "one_run_fdp",
    "family": "family",
    "release game": "release_game",
}
"""Name of a bound → its key in files and logs."""
_SHOWN = ("family", "release game", "labels, family")
"""As the audited ε where there is room for one: the first that there is."""
NO_PROOF = "passing is not a proof of privacy: it rules out only violations that these canaries can detect"


class Verdict(StrEnum):
    """Verdict of an audit."""

    VIOLATED = "VIOLATED"
    NOT_AS_DECLARED = "NOT AS DECLARED"
    CONSISTENT = "CONSISTENT"


@dataclass(frozen=True)
class Bound:
    """A lower limit of ε.

    Attributes:
        name: Name of the method.
        assumes: Its assumptions, apart from fair coins.
        epsilon: The limit, with the confidence that was asked for, by itself; None where there is none.
        violated: True if the sound ε is refuted, with that confidence for all bounds and checks together.
        why_not: Why there is no limit.
        noise_scale: For a bound by the family, the least factor of the declared noise that is refuted. The run tells
            more than the releases with as much noise would; infinite where nothing is refuted.
    """

    name: str
    assumes: str
    epsilon: float | None = None
    violated: bool = False
    why_not: str | None = None
    noise_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Audit of one run.

    Each bound holds by itself with the confidence that was asked for, as papers state theirs. The verdict, and the
    limits of measured values, hold with that confidence for all bounds and checks together (Bonferroni).

    Attributes:
        claimed: ε of the ledger by RDP, as every run states it; nominal where it does not cover the batches.
        sound: The tightest ε that covers the batches; None where none does.
        sound_by: The accountant that gives it.
        delta: δ of all.
        members: Number of canaries among the records.
        releases: Number of releases.
        confidence: The given confidence.
        bounds: Lower limits of ε.
        checks: Checks of noise, sensitivity and batches.
        not_finite: Observations that were no finite numbers.
    """

    claimed: float
    sound: float | None
    sound_by: str | None
    delta: float
    members: int
    releases: int
    confidence: float
    bounds: tuple[Bound, ...]
    checks: tuple[Check, ...] = ()
    not_finite: int = 0

    @property
    def violations(self) -> tuple[Bound, ...]:
        """Bounds that refute the sound ε."""
        return tuple(bound for bound in self.bounds if bound.violated)

    @property
    def accused_by(self) -> tuple[str, ...]:
        """Names of the bounds and checks that the verdict rests on; none where it is CONSISTENT."""
        names = [bound.name for bound in self.violations]
        names += [check.name for check in self.checks if check.passed is False]
        if self.not_finite:
            names.append("not finite")
        return tuple(names)

    @property
    def verdict(self) -> Verdict:
        """VIOLATED before NOT AS DECLARED before CONSISTENT."""
        if self.violations:
            return Verdict.VIOLATED
        return Verdict.NOT_AS_DECLARED if self.accused_by else Verdict.CONSISTENT

    @property
    def shown(self) -> Bound | None:
        """The limit that stands for all where there is room for one: of the family or, where there is none, the next.

        Which one depends on the batches alone: the largest of several would not hold with the confidence of each.
        """
        by_name = {bound.name: bound for bound in self.bounds if bound.epsilon is not None}
        for name in _SHOWN:
            if name in by_name:
                return by_name[name]
        return None

    @property
    def audited(self) -> float | None:
        """The limit that is `shown`."""
        return None if self.shown is None else self.shown.epsilon

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinite values are None."""
        facts = {"verdict": str(self.verdict), "note": NO_PROOF, "audited": self.audited}
        plain: dict[str, Any] = to_jsonable_python(facts | vars(self), inf_nan_mode="null")
        return plain

    def summary(self) -> dict[str, Any]:
        """Part that a run keeps, as plain data: an infinite limit is None, and a missing one is left out."""
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
        plain: dict[str, Any] = to_jsonable_python(facts, inf_nan_mode="null")
        return plain


@dataclass(frozen=True, kw_only=True)
class AuditResult(Audit):
    """Audit of one run by its canaries.

    Attributes:
        canaries: Number of canaries.
        declared_mu: Largest declared sensitivity over noise of a release, as far as canaries reach.
        measured_mu: The same as measured; None if no canary was drawn.
        rounds: Number of rounds of a run with correlated noise, each of which shows a canary once; None: each release
            does.
    """

    canaries: int
    declared_mu: float
    measured_mu: float | None
    rounds: RoundSums | None = None


class Levels(NamedTuple):
    """Probabilities of an error: of a bound by itself, and of each of all tests together (Bonferroni)."""

    alone: float
    joint: float

    @classmethod
    def of(cls, confidence: float, tests: int) -> Levels:
        """Levels of as many tests.

        Raises:
            ConfigurationError: The confidence is out of range.
        """
        check_level(confidence, "confidence")
        return cls(1 - confidence, (1 - confidence) / tests)


# 4 bounds and 13 checks share the probability of an error. Of lots that take turns the sizes of groups are checked, and
# those of lots are not.
TESTS = 17


def audit(ledger: Ledger, scores: Scores, confidence: float = 0.95, family: Family | None = None) -> AuditResult:
    """Compare an auditor's view of a run's canaries with the claim of its ledger.

    Args:
        ledger: Ledger of the run, with as many releases as the scores.
        scores: Scores of the same run.
        confidence: Probability that a bound is none too high, and that the verdict on a correct run is no accusation,
            if their assumptions hold.
        family: The ledger's releases at any scale of their noise, where several runs of equal cost are audited; made
            here by default.

    Raises:
        ConfigurationError: The confidence is out of range, or ledger and scores do not fit.
    """
    levels = Levels.of(confidence, TESTS)
    if len(ledger.releases) != scores.releases or not scores.releases:
        raise ConfigurationError(
            f"the ledger holds {len(ledger.releases)} releases and the canaries saw {scores.releases}: they are not of "
            "one run, or the run was continued without canaries; train again with them from the start."
        )
    if not scores.observations and scores.rounds is not None:
        raise ConfigurationError(
            f"a canary is scored once in {scores.rounds.length} releases, the first time after "
            f"{scores.rounds.fewest_releases}, and the run made {scores.releases}: train longer."
        )
    if family is None:
        family = Family(ledger.events, ledger.header.delta)
    game = release_game(scores.game, levels.joint)
    return AuditResult(
        claimed=claimed_epsilon(ledger),
        sound=family.sound,
        sound_by=family.accountant,
        delta=ledger.header.delta,
        canaries=scores.canaries,
        members=int(scores.member.sum()),
        releases=scores.releases,
        confidence=confidence,
        declared_mu=scores.game.most_mu,
        measured_mu=None if game is None else game.mu,
        bounds=(
            *_one_run_bounds(scores, family, levels),
            bound_by_area("family", "the family, independent canaries", scores.llr, scores.member, family, levels),
            _game_bound(scores.game, reached(ledger, family), levels),
        ),
        checks=_checks(scores, ledger, game, levels.joint),
        not_finite=scores.not_finite,
        rounds=scores.rounds,
    )


def claimed_epsilon(ledger: Ledger) -> float:
    """ε of a ledger by RDP, as every run states it; nominal where it does not cover the batches."""
    events = nominal_events(ledger.events, "rdp", ledger.header.microbatch_size)
    return epsilon(events, ledger.header.delta, "rdp")


def _one_run_bounds(scores: Scores, family: Family, levels: Levels) -> tuple[Bound, ...]:
    """Those of which guesses may depend on each other."""
    guesses = choose_guesses(scores.canaries)
    # m, r and v as in the papers: canaries, guesses, and right ones.
    m = scores.canaries
    r = guesses.made
    v = count_right(scores.llr, scores.member, guesses)
    p_value = 1.0  # where no ε is sound, none is refuted
    if family.accountant is not None:
        p_value = one_run_p_value(m, r, v, family.claimed, family.delta)

    def refutes(curve: TradeOff, level: float) -> bool:
        return one_run_fdp(m, r, v, curve, level)

    return (
        Bound(
            name="one run, DP only",
            assumes="nothing but (ε, δ)-DP",
            epsilon=one_run(m, r, v, family.delta, levels.alone),
            violated=p_value < levels.joint,
        ),
        _bound_of_family("one run, f-DP", "the family", family, refutes, levels),
    )


def bound_by_area(name: str, assumes: str, scores: Floats, member: Flags, family: Family, levels: Levels) -> Bound:
    """The bound of the area under the ROC curve, which no score has above 1 − ∫f; see `auc_lower`.

    Args:
        name: See `Bound`.
        assumes: See `Bound`.
        scores: (m,) higher for likelier members.
        member: (m,) the truth.
        family: Family of the ledger's releases.
        levels: Probabilities of an error.
    """
    least_area = {level: auc_lower(scores, member, level) for level in levels}

    def refutes(curve: TradeOff, level: float) -> bool:
        return least_area[level] > 1 - curve.area

    return _bound_of_family(name, assumes, family, refutes, levels)


def _game_bound(sums: GameSums, family: Family, levels: Levels) -> Bound:
    """The bound of a lower limit of sensitivity over noise: releases of as much compose to an ε."""
    name = "release game"
    assumes = "the family, batches as declared, independent noise"
    if not sums.ins or not sums.outs:
        return Bound(name, assumes, why_not="no canary was drawn, or every canary")
    if family.uncovered is not None:
        return Bound(name, assumes, why_not=family.uncovered)
    ratio = least_ratio(sums, levels.alone)
    least = family.epsilon(1 / ratio) if ratio > 0 else 0.0
    return Bound(name, assumes, least, least_ratio(sums, levels.joint) > 1)


def _bound_of_family(
    name: str, assumes: str, family: Family, refutes: Callable[[TradeOff, float], bool], levels: Levels
) -> Bound:
    """The bound of a test that refutes members of a family.

    Args:
        name: See `Bound`.
        assumes: See `Bound`.
        family: Family of the ledger's releases.
        refutes: Function that returns whether a trade-off curve is refuted at a level.
        levels: Probabilities of an error.
    """
    if family.uncovered is not None:
        return Bound(name, assumes, why_not=family.uncovered)
    scale = family.smallest_refuted(lambda curve: refutes(curve, levels.alone))
    least = family.epsilon(scale) if math.isfinite(scale) else 0.0
    return Bound(name, assumes, least, refutes(family.curve(1.0), levels.joint), noise_scale=scale)


def _checks(scores: Scores, ledger: Ledger, game: ReleaseGame | None, level: float) -> tuple[Check, ...]:
    tests: dict[str, Check | None] = {
        # By intervals with a tolerance, since so many observations would find rounding, too.
        "noise over declared": game.noise if game else None,
        "sensitivity over declared": game.move if game else None,
        "rate": None,
        "dispersion": None,
    }
    if all(sampling.lots_per_draw == 1 for sampling, _ in ledger.events):
        tests |= participation(scores)
    tests |= fresh_noise(scores)
    probes = scores.probes
    if scores.rounds is not None:
        tests["sizes of groups"] = group_sizes(scores.rounds)
    tests["batch sizes"] = lot_sizes(probes)
    tests["noise of statistics"] = statistics_noise(probes)
    # These are no statistics, and never fail by chance.
    most = {"record over bound": (probes.largest, 1.0), "sum apart from records": (probes.difference, 0.0)}
    most["more than the batch"] = (float(probes.surplus), 0.0)
    for name, (value, expected) in most.items():
        tests[name] = Check(value, expected) if probes.records else None
    return tuple((check or Check()).judged(name, level, TOLERANCE) for name, check in tests.items())
