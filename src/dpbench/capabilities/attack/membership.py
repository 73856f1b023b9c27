"""Membership inference over many runs: attacks, their ROC curves, and tests of a claim by them.

The game: M runs of one configuration, and N candidate records, each of which is a member of each run by an independent
fair coin. An attack gives a score to each record of each run. The scores of a run are a function of its
signals, and of signals and members of the other runs: never of its own members, nor of those of its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from dpbench.capabilities.attack.results import FALSE_POSITIVE_RATES, Estimate, MeasuredAttack, rounded
from dpbench.capabilities.auditing.levels import check_delta, check_level
from dpbench.capabilities.auditing.one_run import choose_guesses, count_right, one_run, one_run_fdp
from dpbench.capabilities.canaries.scores import Flags, Floats
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.roc import RATES, Roc, roc

Groups = NDArray[np.integer[Any]]
LEVEL = 0.05
"""Probability that a claim which is true is called VIOLATED."""
GROUPS = 4
"""Of runs by which a claim is tested: more have more shadow models each, and less of the level."""
_RUNS_FOR_VARIANCES = 64  # a run and its shadow models: from them on each record has its variance (Carlini et al. 2022)
_LEAST_DEVIATION = 1e-6  # of a record's signals, in standard deviations of all signals
_TINY = float(np.finfo(np.float64).tiny)
_SLOPE = 0.3  # of RMIA, offline, from out-runs to in-runs: 1 where training on a record changes nothing


@dataclass(frozen=True, eq=False)
class MembershipGame:
    """An attacker's view of several runs, and the truth.

    Attributes:
        signals: (M, N) of N candidate records under each of M runs; higher for likelier members. RMIA takes them for
            log-odds of the true label, see `log_odds`; the other attacks take any.
        members: (M, N) whether the run was trained on the record: an independent fair coin each.
        references: (M, Z) the same signals of records that no run was trained on.
        groups: (M,) the group of each run, numbers from 0 on: a run's shadow models are the runs of other groups, so
            that the runs of a group are one game, see `claim_test`. None: each run is a group of its own.

    Raises:
        ConfigurationError: Shapes differ, or there are fewer than two runs.
    """

    signals: Floats
    members: Flags
    references: Floats | None = None
    groups: Groups | None = None

    def __post_init__(self) -> None:
        if self.signals.shape != self.members.shape or len(self.signals) < 2:
            raise ConfigurationError(
                f"membership inference compares two runs or more: signals have the shape {self.signals.shape}, members "
                f"{self.members.shape}."
            )

    @property
    def group_of_run(self) -> Groups:
        """(M,) the group of each run."""
        return np.arange(self.runs) if self.groups is None else self.groups

    @property
    def shadows(self) -> NDArray[np.int64]:
        """(M, 1) number of runs of other groups."""
        groups = self.group_of_run
        return self.runs - np.bincount(groups)[groups][:, None]

    @property
    def runs(self) -> int:
        """M."""
        return len(self.signals)


def log_odds(losses: Floats) -> Floats:
    """Log-odds log(p/(1 − p)) of the true label from its cross-entropy, −log p.

    (Carlini et al. 2022: of overfitted networks they are closer to Gaussian than losses are.) Both tails
    are exact. A loss of 0 or infinity gives ±708, the limit of float64. The loss must be computed in float64: in
    float32 one below 6e-8 is rounded to 0, which then is an outlier.

    Args:
        losses: Losses of any shape, not negative.

    Raises:
        ConfigurationError: A loss is negative or NaN.

    >>> log_odds(np.array([0.1, 0.0, 50.0])).round(3)
    array([  2.252, 708.396, -50.   ])
    """
    losses = np.asarray(losses, dtype=np.float64)
    if not (losses >= 0).all():
        raise ConfigurationError(
            "log-odds are computed from cross-entropies, and a loss is negative or NaN: use losses of another kind, "
            "negated, as signals themselves."
        )
    clipped = np.clip(losses, _TINY, -math.log(_TINY))
    log_odds: Floats = -clipped - np.log(-np.expm1(-clipped))
    return log_odds


# Attacks


def loss_threshold(game: MembershipGame) -> Floats:
    """The signal itself (Yeom et al. 2018): one threshold for all records.

    Returns:
        (M, N) scores, higher for likelier members.
    """
    return game.signals


def lira_online(game: MembershipGame) -> Floats:
    """LiRA with in- and out-runs (Carlini et al. 2022, algorithm 1): log of the ratio of two Gaussians' densities.

    A record's means are those of its signals in the other runs that did and that did not train on it. With 64 runs or
    more (of a game in groups: 63 shadow models) it has variances of its own, with fewer one for members and one for
    others, pooled within records. A record that lacks one of both kinds of runs gets the mean difference of the records
    that have both.

    Returns:
        (M, N) scores, higher for likelier members.
    """
    inside, outside = _gaussians(game)
    return inside.log_density(game.signals) - outside.log_density(game.signals)


def lira_offline(game: MembershipGame) -> Floats:
    """LiRA with out-runs only (Carlini et al. 2022): deviations from the mean of out-runs.

    The paper's 1 − P[Z > signal] is an increasing function of it. Means and variances as in `lira_online`.

    Returns:
        (M, N) scores, higher for likelier members.
    """
    _, outside = _gaussians(game)
    scores: Floats = (game.signals - outside.mean) / np.sqrt(outside.variance)
    return scores


def rmia(game: MembershipGame) -> Floats:
    """RMIA, online (Zarifzadeh et al. 2024, algorithm 1): the share of references z that the record x dominates.

    x dominates z where (p(x|θ)/p(x)) / (p(z|θ)/p(z)) ≥ 1. Here p(x) is half of the mean probability in in-runs and
    half of that in out-runs, or the one that there is, and p(z) the mean of the other runs. Records that dominate the
    same references are ranked by their own ratio.

    Args:
        game: Game with references and log-odds as signals.

    Returns:
        (M, N) scores in [0, 1], higher for likelier members.

    Raises:
        ConfigurationError: There are no references.
    """
    references = _references(game)
    inside = _mean_probability_of_others(game, game.signals, game.members)
    outside = _mean_probability_of_others(game, game.signals, ~game.members)
    usual = np.where(np.isnan(inside), outside, (inside + outside) / 2)
    usual = np.where(np.isnan(outside), inside, usual)
    return _dominated(game.signals, usual, references, _mean_probability_of_others(game, references))


def rmia_offline(game: MembershipGame) -> Floats:
    """RMIA with out-runs only: p(x) = ((1 + a)·p(x)_out + 1 − a)/2 with a = 0.3, and so for z; see `rmia`.

    (Zarifzadeh et al. 2024: the mean of in-runs is taken to be a·p_out + 1 − a.) A record that all
    other runs were trained on has the mean of these.

    Args:
        game: Game with references and log-odds as signals.

    Returns:
        (M, N) scores in [0, 1], higher for likelier members.

    Raises:
        ConfigurationError: There are no references.
    """
    references = _references(game)

    def with_inside(outside: Floats) -> Floats:
        both: Floats = ((1 + _SLOPE) * outside + (1 - _SLOPE)) / 2
        return both

    outside = _mean_probability_of_others(game, game.signals, ~game.members)
    inside = _mean_probability_of_others(game, game.signals, game.members)
    usual = np.where(np.isnan(outside), inside, with_inside(outside))
    return _dominated(game.signals, usual, references, with_inside(_mean_probability_of_others(game, references)))


ATTACKS: Mapping[str, Callable[[MembershipGame], Floats]] = {
    "threshold": loss_threshold,
    "LiRA": lira_online,
    "LiRA, offline": lira_offline,
    "RMIA": rmia,
    "RMIA, offline": rmia_offline,
}
"""Name of an attack → its scores."""


def _sum_of_others(values: Floats, groups: Groups) -> Floats:
    """Sum of each column over the rows of other groups.

    From both ends, not by subtraction from the sum of all: of the row's own group nothing is left, not even by
    rounding.
    """
    of_groups = np.zeros((int(groups.max()) + 1, values.shape[1]))
    np.add.at(of_groups, groups, values)
    sums = np.zeros_like(of_groups)
    np.cumsum(of_groups[:-1], axis=0, out=sums[1:])
    sums[:-1] += np.cumsum(of_groups[:0:-1], axis=0)[::-1]
    of_others: Floats = sums[groups]
    return of_others


class _Moments(NamedTuple):
    """Of each record's signals in the runs of one kind, of other groups.

    Attributes:
        number: (M, N) runs.
        mean: (M, N) 0 where there are none.
        squares: (M, N) sum of squared deviations from the mean.
    """

    number: Floats
    mean: Floats
    squares: Floats

    @classmethod
    def of_others(cls, game: MembershipGame, kind: Flags) -> _Moments:
        # Around a record's mean over all runs, which no coin enters, squares are as small as the deviations.
        center = game.signals.mean(axis=0)
        deviations = np.where(kind, game.signals - center, 0.0)
        groups = game.group_of_run
        number = _sum_of_others(kind.astype(np.float64), groups)
        mean = _sum_of_others(deviations, groups) / np.maximum(number, 1)
        squares = _sum_of_others(deviations**2, groups) - number * mean**2
        return cls(number, np.where(number > 0, center + mean, 0.0), np.maximum(squares, 0.0))

    @property
    def pooled_variance(self) -> Floats:
        """(M, 1) within records; NaN where no record has two runs."""
        freedom = np.maximum(self.number - 1, 0).sum(axis=1, keepdims=True)
        return np.where(freedom > 0, self.squares.sum(axis=1, keepdims=True) / np.maximum(freedom, 1), np.nan)


class _Gaussian(NamedTuple):
    """A Gaussian for each record of each run: mean (M, N), variance (M, N) or (M, 1)."""

    mean: Floats
    variance: Floats

    def log_density(self, signals: Floats) -> Floats:
        """(M, N) but for a constant."""
        density: Floats = -((signals - self.mean) ** 2) / (2 * self.variance) - np.log(self.variance) / 2
        return density


def _gaussians(game: MembershipGame) -> tuple[_Gaussian, _Gaussian]:
    """Those of members and of others, see `lira_online`."""
    inside = _Moments.of_others(game, game.members)
    outside = _Moments.of_others(game, ~game.members)
    has_both = (inside.number > 0) & (outside.number > 0)
    differences = np.where(has_both, inside.mean - outside.mean, 0.0).sum(axis=1, keepdims=True)
    difference = differences / np.maximum(has_both.sum(axis=1, keepdims=True), 1)
    mean_in = np.where(inside.number > 0, inside.mean, outside.mean + difference)
    mean_out = np.where(outside.number > 0, outside.mean, inside.mean - difference)
    return _Gaussian(mean_in, _variance(game, inside)), _Gaussian(mean_out, _variance(game, outside))


def _variance(game: MembershipGame, moments: _Moments) -> Floats:
    """(M, N) with 64 runs or more, else (M, 1)."""
    of_all = game.signals.var()
    pooled = moments.pooled_variance
    variance: Floats = np.where(np.isnan(pooled), of_all, pooled)
    if game.shadows.min() + 1 >= _RUNS_FOR_VARIANCES:
        own = moments.squares / np.maximum(moments.number - 1, 1)
        variance = np.where(moments.number > 1, own, variance)
    # A signal that is the same in all other runs has no variance, and its density none either.
    least = float(of_all) * _LEAST_DEVIATION**2 + _TINY
    floored: Floats = np.maximum(variance, least)
    return floored


def _references(game: MembershipGame) -> Floats:
    if game.references is None:
        raise ConfigurationError(
            "RMIA compares records with references that no run was trained on, and there are none: pass the signals "
            "of a test set as references, or use LiRA."
        )
    return game.references


def _mean_probability_of_others(game: MembershipGame, signals: Floats, kind: Flags | None = None) -> Floats:
    """(M, N) mean of p over the runs of other groups, of one kind if given; NaN where there are none."""
    probabilities = np.maximum(special.expit(signals), _TINY)
    groups = game.group_of_run
    if kind is None:
        return _sum_of_others(probabilities, groups) / game.shadows
    count = _sum_of_others(kind.astype(np.float64), groups)
    total = _sum_of_others(np.where(kind, probabilities, 0.0), groups)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _dominated(signals: Floats, usual: Floats, references: Floats, usual_references: Floats) -> Floats:
    """Share of references that each record dominates, see `rmia`.

    Args:
        signals: (M, N) log-odds of p(x|θ).
        usual: (M, N) p(x).
        references: (M, Z) log-odds of p(z|θ).
        usual_references: (M, Z) p(z).
    """
    log_ratios = special.log_expit(signals) - np.log(usual)
    log_reference_ratios = np.sort(special.log_expit(references) - np.log(usual_references), axis=1)
    scores = np.empty_like(signals)
    for run, thresholds in enumerate(log_reference_ratios):
        dominated = np.searchsorted(thresholds, log_ratios[run], side="right")
        # Within (0, 1) between two ranks: the record's own ratio decides among those of one rank.
        within = special.expit(log_ratios[run])
        scores[run] = (dominated + within) / (len(thresholds) + 1)
    return scores


# What an attack reaches


def measure_attack(
    signal: str,
    name: str,
    scores: Floats,
    members: Flags,
    confidence: float = 0.95,
    resamples: int = 200,
    seed: int = 0,
) -> MeasuredAttack:
    """Rates of an attack over all runs together, with bootstrap intervals.

    Runs and records are both resampled (the two-way bootstrap of Owen 2007), since scores of one run, and of one
    record, depend on each other; limits are percentiles. That scores also depend on the other runs is not resampled.
    Among fewer others than 1/FPR, TPR at this FPR is that without a false positive.

    Args:
        signal: The attacker's signal.
        name: Name of the attack.
        scores: (M, N) higher for likelier members.
        members: (M, N) the truth.
        confidence: Confidence of each interval by itself.
        resamples: Number of resamples.
        seed: Seed of the resampling.

    Raises:
        ConfigurationError: Shapes differ, there is no member or no other, or the confidence is out of range.
    """
    check_level(confidence, "confidence")
    curve = roc(scores, members)
    runs, records = scores.shape
    rng = np.random.default_rng(seed)
    resampled: list[list[float]] = []
    while len(resampled) < resamples:
        run_counts = np.bincount(rng.integers(runs, size=runs), minlength=runs)
        record_counts = np.bincount(rng.integers(records, size=records), minlength=records)
        weights = np.outer(run_counts, record_counts)
        kinds = members[weights > 0]
        if kinds.any() and not kinds.all():  # a resample of very few records may lack a kind
            resampled.append(_quantities(roc(scores, members, weights)))
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    limits = zip(_quantities(curve), low.tolist(), high.tolist(), strict=True)
    auc, advantage, *tpr = [Estimate(*values) for values in limits]
    return MeasuredAttack(
        name=name,
        runs=runs,
        records=records,
        confidence=confidence,
        auc=auc,
        advantage=advantage,
        tpr=dict(zip(FALSE_POSITIVE_RATES, tpr, strict=True)),
        signal=signal,
        curve=rounded(curve.true_positive_rates_at(RATES)),
    )


def _quantities(curve: Roc) -> list[float]:
    return [curve.auc, curve.advantage, *curve.true_positive_rates_at(np.array(FALSE_POSITIVE_RATES)).tolist()]


# A claim


class GroupGuesses(NamedTuple):
    """Guesses about the runs of a group, all together.

    Attributes:
        records: Number of records, of each run.
        made: Number of guesses.
        right: How many of them are right.
    """

    records: int
    made: int
    right: int


@dataclass(frozen=True)
class ClaimTest:
    """Test of a claimed trade-off curve by an attack, and the ε that the attack shows.

    Attributes:
        level: Probability that any group refutes a true claim, and that any ε is too high.
        delta: δ of the claim.
        groups: Guesses of each group.
    """

    level: float
    delta: float
    groups: tuple[GroupGuesses, ...]

    def refutes(self, trade_off: Callable[[float], float]) -> bool:
        """Return whether any group of runs refutes a curve, at the level for all groups together.

        Args:
            trade_off: Symmetric.
        """
        level = self.level / len(self.groups)
        return any(one_run_fdp(*guesses, trade_off, level) for guesses in self.groups)

    @property
    def audited(self) -> float:
        """The largest lower limit of ε of any group."""
        level = self.level / len(self.groups)
        return max(one_run(*guesses, self.delta, level) for guesses in self.groups)


def claim_groups(runs: int) -> Groups:
    """The group of each run by which a claim is tested: every fourth run.

    Of one group all others are shadow models, and its tests have a fourth of the level. (Of twice as many groups each
    has fewer guesses; of half as many, a run has a third fewer shadow models.)

    >>> claim_groups(6)
    array([0, 1, 2, 3, 0, 1])
    """
    return np.arange(runs) % GROUPS


def claim_test(
    scores: Floats,
    members: Flags,
    groups: Groups,
    delta: float,
    level: float = LEVEL,
) -> ClaimTest:
    """Test a claim of f-DP, and bound ε from below, by the scores of an attack.

    The runs of a group are one game: a coin decides about one record of one of them, so that a claim that each run
    keeps is kept by all of them as one mechanism with a coin for each record of each run. Each of the G games is tested
    at level/G (Bonferroni), by `one_run_fdp` and `one_run`. Records of a run, and games, may depend on each other in
    any way. The curve and ε are tested at the level each.

    Assumes: each record is a member of each run by an independent fair coin, and no other coin or choice depends on it;
    runs share no noise; scores of a run are no function of members of its own group (those of a `MembershipGame` with
    the same groups are none); the claim is for one record added or removed. Of several attacks one is chosen
    beforehand, or the level is divided by their number.

    Args:
        scores: (M, N) higher for likelier members.
        members: (M, N) the truth.
        groups: (M,) as of the `MembershipGame` that gave the scores.
        delta: δ of the claim.
        level: Probability of an error of any group.

    Raises:
        ConfigurationError: δ or the level is out of range.
    """
    check_delta(delta)
    check_level(level)
    tested = []
    for group in range(int(groups.max()) + 1):
        of_group = scores[groups == group].ravel()
        records = len(of_group)
        chosen = choose_guesses(records)
        right = count_right(of_group, members[groups == group].ravel(), chosen)
        tested.append(GroupGuesses(records, chosen.made, right))
    return ClaimTest(level, delta, tuple(tested))
